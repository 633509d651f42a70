"""Used parameters: which have a gradient on any rank, and is every gradient finite?

One small all-reduce at the end of a synchronisation answers both. Without it a rank could not tell a parameter that
nobody used, which must keep no gradient (an optimizer then skips it, as in one process), from one that only others
used; and an infinity in one rank's shard would make that rank alone skip its step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cs336_systems.buffers.bucket import GradBucket
from cs336_systems.buffers.placements import Sharded
from cs336_systems.comm import Group, all_reduce


class UsedParameters:
    """The all-reduce, under way from construction to `finish`. The buckets' shards, once they have come, and the
    gradients `also` are searched for numbers that are not finite."""

    @torch.no_grad()
    def __init__(self, buckets: Sequence[GradBucket], group: Group, also: Sequence[Tensor] = ()) -> None:
        for bucket in (bucket for bucket in buckets if isinstance(bucket.placement, Sharded)):
            bucket.finish()
        self.shards = [*(b.shard for b in buckets if b.shard is not None and b.shard.numel()), *also]
        self.bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        device = buckets[0].parameters[0].device if buckets else None
        flags = [float(parameter in bucket.used) for parameter, bucket in self.bucket_of.items()]
        self.sums = torch.tensor([*flags, 0.0], device=device)
        for shard in self.shards:
            # 0 x the largest element: 0, or NaN if it is infinite or NaN; the device need not be asked.
            self.sums[-1] += 0 * torch.linalg.vector_norm(shard, math.inf)
        self.work = all_reduce(self.sums, group, "used parameters")

    @torch.no_grad()
    def finish(self) -> None:
        """Give each parameter that only other ranks used its mean gradient, and all shards of every rank a NaN if some
        rank has a number that is not finite. The buckets must have finished."""
        self.work.wait()
        for shard in self.shards:
            shard.view(-1)[:1] += self.sums[-1]
        # Only a rank where some parameter is unused reads the answer, which on a GPU waits for the device.
        unused = [(i, p) for i, (p, bucket) in enumerate(self.bucket_of.items()) if p not in bucket.used]
        answers = self.sums.tolist() if unused else []
        for parameter in (parameter for i, parameter in unused if answers[i]):
            bucket = self.bucket_of[parameter]
            bucket.used.add(parameter)
            if bucket.flat is not None:  # a shard has its mean gradient already
                parameter.grad = bucket.view(parameter)
