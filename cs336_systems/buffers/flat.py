"""Layout of tensors in one flat buffer, of which each rank owns a slice, and grouping of parameters into buckets."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from cs336_systems.comm import Group, fault, shared_empty

T = TypeVar("T", bound=Tensor)


@dataclass(frozen=True)
class FlatPiece:
    """The elements [start, stop) of a flattened tensor, number `index` of its layout."""

    index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor: (numel,), or the tensor itself if they are all."""
        return tensor if self.numel == tensor.numel() else tensor.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class FlatLayout:
    """Tensors one after another in a flat buffer; rank r owns the elements [cuts[r], cuts[r + 1]).

    two ranks, tensors of 5 and 2 elements:   a a a a | a b b .      equal slices, the last padded
    the same, cut between tensors:            a a a a a | b b
    """

    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]

    @classmethod
    def pack(cls, tensors: Sequence[Tensor], num_shards: int = 1, granule: int = 1) -> "FlatLayout":
        """Layout in the given order, cut into equal slices, multiples of `granule` elements; the end is padded."""
        *offsets, end = accumulate((tensor.numel() for tensor in tensors), initial=0)
        slice_ = math.ceil(end / num_shards / granule) * granule
        cuts = tuple(slice_ * rank for rank in range(num_shards + 1))
        return cls(tuple(tensor.shape for tensor in tensors), tuple(offsets), cuts)

    @classmethod
    def whole(cls, tensors: Sequence[Tensor], num_shards: int) -> "FlatLayout":
        """Layout cut between tensors: each, the largest first, goes to the rank with the fewest elements so far."""
        load, owners = [0] * num_shards, [(0, 0)] * len(tensors)
        for index in sorted(range(len(tensors)), key=lambda i: (-tensors[i].numel(), i)):
            rank = load.index(min(load))
            owners[index], load[rank] = (rank, index), load[rank] + tensors[index].numel()
        order = [index for _, index in sorted(owners)]
        starts = dict(zip(order, accumulate((tensors[i].numel() for i in order), initial=0), strict=False))
        cuts = tuple(accumulate(load, initial=0))
        return cls(tuple(tensor.shape for tensor in tensors), tuple(starts[i] for i in range(len(tensors))), cuts)

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.cuts[-1]

    def new_buffer(self, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
        """A buffer (numel,) of tensors to be filled in, padded with zeros, in memory that ranks share if they do."""
        flat = shared_empty(self.numel, dtype, device, group)
        flat[sum(shape.numel() for shape in self.shapes) :].zero_()
        return flat

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Tensor number `index` as a view of the buffer."""
        shape, start = self.shapes[index], self.offsets[index]
        return flat[start : start + shape.numel()].view(shape)

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The slice that a rank owns, as a view of the buffer."""
        return flat[self.cuts[rank] : self.cuts[rank + 1]]

    def pieces(self, rank: int) -> list[FlatPiece]:
        """The piece of each tensor that a rank owns; empty ones are left out."""
        first, last = self.cuts[rank], self.cuts[rank + 1]
        tensors = enumerate(zip(self.shapes, self.offsets, strict=True))
        found = [FlatPiece(i, max(0, first - at), min(shape.numel(), last - at)) for i, (shape, at) in tensors]
        return [piece for piece in found if piece.start < piece.stop]


def plan_buckets(parameters: Sequence[T], cap_bytes: float, apart: Collection[T] = ()) -> list[list[T]]:
    """Groups of one dtype and device in the order in which backward should finish them: last parameter first, up to
    `cap_bytes` a group (0: each by itself, infinity: all in one), then those that are to lie `apart`, one by one."""
    done: list[list[T]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    sizes = Counter[tuple[torch.dtype, torch.device]]()
    alone = set(apart)
    for p in reversed([p for p in parameters if p not in alone]):
        kind = p.dtype, p.device
        group = open_.setdefault(kind, [])
        sizes[kind] += p.nbytes
        if group and sizes[kind] > cap_bytes:
            done.append(group[:])
            group.clear()
            sizes[kind] = p.nbytes
        group.append(p)
    return done + list(open_.values()) + [[p] for p in reversed(parameters) if p in alone]


def refuse_shared_memory(named: Iterable[tuple[Tensor, str]]) -> None:
    """Raises UserError if two tensors share memory: sharding would make two independent copies."""
    ends: dict[int, tuple[int, str]] = {}  # by storage, the largest end so far, and whose it is
    for tensor, name in sorted(named, key=lambda each: each[0].storage_offset()):
        storage, start = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
        if tensor.numel():
            end, other = ends.get(storage, (0, name))
            if start < end:
                both = f"{other} and {name} lie in one memory, of which sharding makes two"
                raise fault(f"{both}: make them one Parameter, or clone() one")
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            ends[storage] = max((end, other), (start + extent, name))
