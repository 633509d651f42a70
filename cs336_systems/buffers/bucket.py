"""A bucket: the gradients of a few parameters in one flat buffer, reduced over the ranks by one collective.

    mark_ready      a gradient is complete: pack it into the buffer
    launch          start the collective, which is the placement's
    finish          wait for it, keep what the placement keeps, free the rest

    placement     collective          kept after it                          freed
    Replicated    all-reduce          the buffer; every `.grad` is a view    nothing: the next backward fills it again
                                                                             (a new one, if user code holds a gradient)
    Sharded       reduce-scatter      this rank's slice, added up, of        the buffer, once its slice is kept
                                      which each `.grad` stands for a piece

A ZeRO stage is three placements: of parameters, gradients and optimizer state (see zero.py).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336_systems.buffers.flat import FlatLayout
from cs336_systems.buffers.sharded_gradient import ShardedGradient
from cs336_systems.comm import Group, Work, all_reduce, fault, reduce_scatter
from cs336_systems.comm.events import mark
from cs336_systems.comm.shared_verbs import copies
from cs336_systems.optim.grad_norm import LocalGradient


@dataclass(frozen=True)
class Replicated:
    """Every rank keeps the whole mean, in the buffer of which each parameter's `.grad` is a view."""

    reduce = staticmethod(all_reduce)
    in_flight: int = sys.maxsize  # reductions at once: any number, since no buffer is freed

    def keep(self, bucket: "GradBucket") -> None:
        """Keep this rank's part of the reduced buffer."""

    def free(self, bucket: "GradBucket") -> None:
        """Free the memory that this rank does not keep."""


@dataclass(frozen=True)
class Sharded:
    """Each rank keeps its slice of the mean: gradients take 1/N of the memory (arXiv:1910.02054, section 5.2)."""

    reduce = staticmethod(reduce_scatter)
    in_flight: int = 1  # before one more reduction is launched, the oldest is awaited and its buffer freed

    def keep(self, bucket: "GradBucket") -> None:
        assert bucket.flat is not None
        mine = bucket.layout.shard(bucket.flat, bucket.group.rank())  # copied: a view would keep the whole buffer alive
        bucket.shard = mine.to(bucket.resting_dtype, copy=True) if bucket.shard is None else bucket.shard.add_(mine)
        mark("gradients", bucket.shard)

    def free(self, bucket: "GradBucket") -> None:
        bucket.flat, bucket.lies_here = None, set()
        for parameter in bucket.parameters:
            keeps = parameter in bucket.used and parameter.grad is not None  # else it was unused or dropped
            parameter.grad = bucket.stand_in(parameter) if keeps else None


Placement = Replicated | Sharded
REPLICATED, SHARDED = Replicated(), Sharded()


class GradBucket:
    """One flat buffer of gradients and its reduction. `dtype` is the buffer's (default: the parameters'); slices are
    multiples of `granule` elements; `names` are those of parameters whose `.grad` users see."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, label: str, placement: Placement = REPLICATED,
        dtype: torch.dtype | None = None, granule: int = 1, names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:  # fmt: skip
        self.parameters, self.group, self.label, self.placement = parameters, group, label, placement
        self.dtype, self.names = dtype or parameters[0].dtype, names or {}
        self.resting_dtype = self.dtype  # of a shard, in which several reductions are added up
        self.layout = FlatLayout.pack(parameters, group.size() if isinstance(placement, Sharded) else 1, granule)
        self.index = {parameter: i for i, parameter in enumerate(parameters)}
        self.flat: Tensor | None = None
        self.shard: Tensor | None = None
        self.work: Work | None = None
        self.launched: list[tuple[Tensor, int]] = []  # being reduced, with `_version` at launch: writes raise it
        self.waiting = set(parameters)  # parameters whose gradient has not come in this backward
        self.used: set[nn.Parameter] = set()  # parameters that have contributed to what `flat` or `shard` holds
        self.lies_here: set[nn.Parameter] = set()  # parameters whose `.grad` was a view of `flat` at the last look

    @torch.no_grad()
    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Pack a ready gradient into the buffer, unless it lies there already."""
        gradient, again = parameter.grad, parameter not in self.waiting
        if gradient is None:  # a function of the user's gave none
            return
        if gradient.layout != torch.strided:  # sparse, of an embedding: each rank has different rows
            parameter.grad = gradient = gradient.to_dense()
        self.waiting.discard(parameter)
        self.used.add(parameter)
        mark("gradients", gradient)
        self._leave_if_held(parameter)
        fits = len(self.parameters) == 1 and self.layout.numel == gradient.numel() and gradient.is_contiguous()
        if self.flat is None and fits and gradient.dtype == self.dtype and not copies(self.group, gradient):
            self.flat = gradient.data.view(-1)  # a bucket of one parameter borrows its gradient as the buffer
        view = self.view(parameter)
        if gradient.dtype != self.dtype:  # a half-precision gradient is added to the wider buffer, then freed
            view.add_(gradient) if again else view.copy_(gradient)
            parameter.grad = None
            return
        self.lies_here.add(parameter)
        if not self._contains(gradient):
            view.copy_(gradient)
            parameter.grad = view.data  # has its own version counter: the collective does not increment it

    def _contains(self, gradient: Tensor | None) -> bool:
        if gradient is None or self.flat is None:
            return False
        return gradient.untyped_storage()._cdata == self.flat.untyped_storage()._cdata

    def _leave_if_held(self, parameter: nn.Parameter) -> None:
        """Leave the buffer to user code that holds a gradient in it, and go on with a copy, before it is written to."""
        if self.flat is None or parameter not in self.lies_here or self._contains(parameter.grad):
            return
        self.lies_here = {p for p in self.parameters if self._contains(p.grad)}
        storage = self.flat.untyped_storage()
        ours = 2 + len(self.lies_here)  # of `flat`, of `storage`, and of each `.grad`
        if torch._C._storage_Use_Count(storage._cdata) > ours:
            self.flat, self.lies_here = self.flat.clone(), set()

    def view(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's piece of the buffer, which is allocated if it does not exist."""
        if self.flat is None:
            self.flat = self.layout.new_buffer(self.dtype, parameter.device, self.group)
            mark("gradients", self.flat)
        return self.layout.view(self.flat, self.index[parameter])

    def stand_in(self, parameter: nn.Parameter) -> ShardedGradient | None:
        """Stand-in for a sharded gradient in `.grad`, if users see it."""
        return ShardedGradient(parameter, self.names[parameter], self.group) if parameter in self.names else None

    def piece(self, parameter: nn.Parameter) -> Tensor:
        """This rank's piece of a parameter's gradient, which may be empty, as a view of the shard."""
        assert self.shard is not None
        start = self.layout.offsets[self.index[parameter]] - self.layout.cuts[self.group.rank()]
        return self.shard[max(0, start) : max(0, start + parameter.numel())]

    def hold_pieces(self) -> None:
        """Attach this rank's piece of the reduced shard to each stand-in in `.grad`."""
        for parameter in self.parameters if self.shard is not None else ():
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad.piece = self.piece(parameter)

    def forget_dropped(self, parameter: nn.Parameter) -> bool:
        """Forget a gradient of the buffer or the shard that user code has dropped; returns True if there was one."""
        dropped = parameter.grad is None and parameter in self.used and parameter in self.names
        if dropped:
            self.used.discard(parameter)
            if self.shard is not None:
                self.piece(parameter).zero_()
        return dropped

    def make_way(self, parameter: nn.Parameter) -> None:
        """Finish before a gradient is added to `.grad`, which may lie in the buffer or stand for a sharded gradient."""
        self.finish()
        if not self.forget_dropped(parameter) and isinstance(parameter.grad, ShardedGradient):
            parameter.grad = None

    @torch.no_grad()
    def launch(self, again: bool = False) -> None:
        """Start the collective. A parameter without a gradient contributes zeros or, if this is done `again` to a
        buffer that is kept, the mean that it has there."""
        self.finish()
        for parameter in self.parameters:
            self._leave_if_held(parameter)
        for parameter in self.parameters:
            dropped = self.forget_dropped(parameter)
            if not isinstance(parameter.grad, ShardedGradient | None):  # may be accumulated under no_sync
                self.mark_ready(parameter)
            elif dropped or (parameter in self.waiting and not (again and self.shard is None)):
                self.view(parameter).zero_()
        assert self.flat is not None
        self.work = self.placement.reduce(self.flat, self.group, self.label)
        self.launched = [(g, g._version) for p in self.parameters if (g := p.grad) is not None and self._contains(g)]

    def finish(self) -> None:
        """Wait for the collective, if one is under way. Raises UserError if the gradients were written to meanwhile."""
        if self.work is None:
            return
        if any(gradient._version != version for gradient, version in self.launched):
            raise fault(
                f"gradients ({self.label}) were changed while they were being reduced: call "
                "finish_gradient_synchronization() before anything that writes to .grad",
            )
        with torch.no_grad():
            self.work.wait()
            self.work, self.launched = None, []
            self.expect_all()
            self.placement.keep(self)
            self.placement.free(self)

    def expect_all(self) -> None:
        """Expect every gradient of another backward."""
        self.waiting = set(self.parameters)

    def local_gradients(self) -> list[LocalGradient]:
        """This rank's mean gradients after `finish`, as views: every whole `.grad`, or the pieces of the shard."""
        if self.shard is None:
            return [LocalGradient(p, p.grad, False) for p in self.parameters if p.grad is not None]
        pieces = ((p, self.piece(p)) for p in self.parameters if p.grad is not None)
        return [LocalGradient(p, piece, True) for p, piece in pieces if piece.numel()]

    def reset(self, set_to_none: bool = True) -> None:
        """Forget what was collected and reduced, or make the shard zero as `Optimizer.zero_grad` does."""
        if self.work is not None:
            self.work.wait()
        self.work, self.launched = None, []
        self.expect_all()
        if set_to_none or self.shard is None:
            self.used, self.shard = set(), None
        self.placement.free(self)
        if self.shard is not None:
            self.shard.zero_()
        self.hold_pieces()
