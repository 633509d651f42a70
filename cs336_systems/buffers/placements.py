"""Placements: how the mean of the ranks' gradients comes to rest, whole on every rank or one slice on each.

    placement     collective          kept after it                          freed
    Replicated    all-reduce          the buffer; every `.grad` is a view    nothing: the next backward fills it again
    Sharded       reduce-scatter      this rank's slice, added up            the buffer, once its slice is kept

A ZeRO stage is three of them: of parameters, gradients and optimizer state (see zero.py).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cs336_systems.buffers.flat import FlatLayout
from cs336_systems.comm import Group, all_reduce, reduce_scatter


@dataclass(frozen=True)
class Replicated:
    """Every rank keeps the whole mean, in the buffer of which each parameter's `.grad` is a view."""

    reduce = staticmethod(all_reduce)
    in_flight: int = sys.maxsize  # reductions at once: any number, since no buffer is freed

    def num_shards(self, group: Group) -> int:
        """Number of slices that a buffer is divided into."""
        return 1

    def keep(self, layout: FlatLayout, flat: Tensor, rank: int, shard: Tensor | None) -> Tensor | None:
        """The sum of the rank's slices so far, of which `shard` was the last; None if the buffer is kept."""
        return None

    def free(self, parameters: Sequence[nn.Parameter], flat: Tensor | None) -> Tensor | None:
        """Free what is not kept; returns the buffer, or None if it is freed."""
        return flat

    def dropped(self, parameter: nn.Parameter) -> bool:
        """True if somebody has dropped this gradient, which lay in the buffer."""
        return parameter.grad is None


@dataclass(frozen=True)
class Sharded:
    """Each rank keeps its slice of the mean: gradients take 1/N of the memory (arXiv:1910.02054, section 5.2)."""

    reduce = staticmethod(reduce_scatter)
    in_flight: int = 1  # before one more reduction is launched, the oldest is awaited and its buffer freed

    def num_shards(self, group: Group) -> int:
        return group.size()

    def keep(self, layout: FlatLayout, flat: Tensor, rank: int, shard: Tensor | None) -> Tensor | None:
        mine = layout.shard(flat, rank)  # to be copied: a view would keep the whole buffer alive
        return mine.clone() if shard is None else shard.add_(mine)

    def free(self, parameters: Sequence[nn.Parameter], flat: Tensor | None) -> Tensor | None:
        for parameter in parameters:
            parameter.grad = None
        return None

    def dropped(self, parameter: nn.Parameter) -> bool:
        return False  # unknown: every `.grad` is freed after its reduction


Placement = Replicated | Sharded
REPLICATED, SHARDED = Replicated(), Sharded()
