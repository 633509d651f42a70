"""A bucket: the gradients of a few parameters in one flat buffer, reduced over the ranks by one collective.

mark_ready      a gradient is complete: pack it into the buffer
launch          start the collective, which is the placement's: all-reduce or reduce-scatter
finish          wait for it, keep what the placement keeps, free the rest
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cs336_systems.buffers.flat import FlatLayout
from cs336_systems.buffers.placements import REPLICATED, Placement
from cs336_systems.comm import Group, Work, fault
from cs336_systems.comm.events import mark
from cs336_systems.optim.grad_norm import LocalGradient


class GradBucket:
    """One flat buffer of gradients and its reduction. If `placement` is Replicated, every `.grad` becomes a view of
    the buffer, so that nothing is copied back; if Sharded, this rank's slices are added up in `shard`.

    `dtype` is the buffer's (default: the parameters'); slices are multiples of `granule` elements.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        label: str,
        placement: Placement = REPLICATED,
        dtype: torch.dtype | None = None,
        granule: int = 1,
    ) -> None:
        self.parameters, self.group, self.label, self.placement = parameters, group, label, placement
        self.dtype = dtype or parameters[0].dtype
        self.layout = FlatLayout.pack(parameters, placement.num_shards(group), granule)
        self.index = {parameter: i for i, parameter in enumerate(parameters)}
        self.flat: Tensor | None = None
        self.shard: Tensor | None = None
        self.work: Work | None = None
        self.launched: list[tuple[Tensor, int]] = []  # being reduced, with `_version` at launch: writes raise it
        self.waiting = set(parameters)  # parameters whose gradient has not come in this backward
        self.used: set[nn.Parameter] = set()  # parameters that have contributed to what `flat` or `shard` holds

    @property
    def complete(self) -> bool:
        return not self.waiting

    @torch.no_grad()
    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Pack a ready gradient into the buffer, unless it lies there already. Raises TypeError for a sparse one."""
        gradient, again = parameter.grad, parameter not in self.waiting
        assert gradient is not None
        if gradient.is_sparse:
            raise TypeError("a sparse gradient cannot lie in a flat buffer; use an embedding with sparse=False")
        self.waiting.discard(parameter)
        self.used.add(parameter)
        mark("gradients", gradient)
        fits = len(self.parameters) == 1 and self.layout.numel == gradient.numel() and gradient.is_contiguous()
        if self.flat is None and fits and gradient.dtype == self.dtype:
            self.flat = gradient.data.view(-1)  # a bucket of one parameter borrows its gradient as the buffer
        view = self.view(parameter)
        if gradient.dtype != self.dtype:  # a half-precision gradient is added to the wider buffer, then freed
            view.add_(gradient) if again else view.copy_(gradient)
            parameter.grad = None
        elif view.untyped_storage()._cdata != gradient.untyped_storage()._cdata:
            view.copy_(gradient)
            parameter.grad = view.data  # has its own version counter: the collective does not increment it

    def view(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's piece of the buffer, which is made if need be."""
        if self.flat is None:
            self.flat = self.layout.new_buffer(self.dtype, parameter.device)
            mark("gradients", self.flat)
        return self.layout.view(self.flat, self.index[parameter])

    @torch.no_grad()
    def launch(self, again: bool = False) -> None:
        """Start the collective. A parameter without a gradient contributes zeros or, if this is done `again` to a
        buffer that is kept, the mean that it has there."""
        self.finish()
        keeps = again and self.shard is None
        for parameter in self.parameters:
            dropped = parameter in self.used and self.placement.dropped(parameter)
            if parameter.grad is not None:  # may be accumulated under no_sync
                self.mark_ready(parameter)
            elif dropped or (parameter in self.waiting and not keeps):
                self.view(parameter).zero_()
            if dropped:
                self.used.discard(parameter)
        assert self.flat is not None
        self.work = self.placement.reduce(self.flat, self.group, self.label)
        self.launched = [(p.grad, p.grad._version) for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the collective, if one is under way. Raises UserError if the gradients were written to meanwhile."""
        if self.work is None:
            return
        if any(gradient._version != version for gradient, version in self.launched):
            raise fault(
                f"gradients ({self.label}) were changed while they were being reduced: call "
                "finish_gradient_synchronization() before anything that writes to .grad",
            )
        self.work.wait()
        self.work, self.launched = None, []
        self.expect_all()
        assert self.flat is not None
        self.shard = self.placement.keep(self.layout, self.flat, self.group.rank(), self.shard)
        if self.shard is not None:
            mark("gradients", self.shard)
        self.flat = self.placement.free(self.parameters, self.flat)

    def expect_all(self) -> None:
        """Expect every gradient of another backward."""
        self.waiting = set(self.parameters)

    def local_gradients(self) -> list[LocalGradient]:
        """This rank's mean gradients after `finish`, as views: every whole `.grad`, or the pieces of `shard`."""
        if self.shard is None:
            return [LocalGradient(p, p.grad, False) for p in self.parameters if p.grad is not None]
        pieces = self.layout.pieces(self.group.rank())
        parts = self.shard[: sum(piece.numel for piece in pieces)].split([piece.numel for piece in pieces])
        owners = (self.parameters[piece.index] for piece in pieces)
        return [LocalGradient(p, part, True) for p, part in zip(owners, parts, strict=True) if p in self.used]

    def close(self) -> None:
        """End the step. A buffer that is one parameter's gradient is given up, so that zero_grad frees it."""
        if self.shard is None:
            self.used = set()
            if len(self.parameters) == 1:
                self.flat = None

    def reset(self, set_to_none: bool = True) -> None:
        """Forget what was collected and reduced, or make the shard zero as `Optimizer.zero_grad` does."""
        if self.work is not None:
            self.work.wait()
        self.work, self.launched = None, []
        self.expect_all()
        self.flat = self.placement.free(self.parameters, self.flat)
        if set_to_none or self.shard is None:
            self.used, self.shard = set(), None
        else:
            self.shard.zero_()
