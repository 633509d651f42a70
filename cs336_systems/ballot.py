"""The vote that ends a synchronisation: which parameters have a gradient on any rank, and is every gradient finite?

One small all-reduce answers both. Without it a rank could not tell a parameter that nobody used, which must keep no
gradient (an optimizer then skips it, as in one process), from one that only others used; and an infinity in one rank's
shard would make that rank alone skip its step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cs336_systems.bucket import GradBucket
from cs336_systems.comm import Group, all_reduce


class Ballot:
    """Cast on construction; `read` waits for the result. `shards` are this rank's gradients that no other has."""

    def __init__(self, buckets: Sequence[GradBucket], shards: Sequence[Tensor], group: Group) -> None:
        self.shards = shards
        self.owner = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        flags = [float(parameter in bucket.used) for parameter, bucket in self.owner.items()]
        device = buckets[0].parameters[0].device if buckets else None
        self.votes = torch.tensor([*flags, 0.0], device=device)
        for shard in shards:
            # 0 x the largest element: 0, or NaN if it is infinite or NaN; the device need not be asked.
            self.votes[-1] += 0 * torch.linalg.vector_norm(shard, math.inf)
        self.work = all_reduce(self.votes, group, "ballot")

    @torch.no_grad()
    def read(self) -> list[nn.Parameter]:
        """The parameters that have a gradient on other ranks only; what is not finite is spread to every rank's shards.

        Only a rank where something is missing reads its ballot, which on a GPU would wait for the device.
        """
        self.work.wait()
        for shard in self.shards:
            shard.view(-1)[:1] += self.votes[-1]
        missing = [(i, p) for i, (p, bucket) in enumerate(self.owner.items()) if p not in bucket.used]
        votes = self.votes.tolist() if missing else []
        found = [parameter for i, parameter in missing if votes[i]]
        for parameter in found:
            self.owner[parameter].used.add(parameter)
        return found
