"""A bucket: some gradients in one flat buffer, reduced over the ranks by one collective."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, Work, fault
from cs336_systems.flat import FlatLayout
from cs336_systems.marks import mark

Verb = Callable[[Tensor, Group, str], Work]


class ScattersGradients(Protocol):
    """What a sharded optimizer needs of a wrapper whose ranks keep slices of the gradients."""

    buckets: list["GradBucket"]
    bucket_of: dict[nn.Parameter, "GradBucket"]
    synchronised: bool
    after_synchronisation: list[Callable[[], None]]  # called when the slices are complete

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""


class GradBucket:
    """Collects the gradients of a few parameters, and launches `verb` on them all at once.

    After an all-reduce every gradient is a view of `flat`, which lives on, so nothing is copied back. After a
    reduce-scatter `flat` is freed and this rank's slice is added to `shard`: the gradients are sharded, not only their
    traffic (ZeRO stage 2, arXiv:1910.02054, section 5.2).

    `dtype` is that of buffer and sum (default: the parameters'); `granule` the elements that a slice is a multiple of.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        verb: Verb,
        label: str,
        scatters: bool = False,
        dtype: torch.dtype | None = None,
        granule: int = 1,
    ) -> None:
        self.parameters, self.group, self.verb, self.label, self.scatters = parameters, group, verb, label, scatters
        self.dtype = dtype or parameters[0].dtype
        self.layout = FlatLayout.pack(parameters, group.size() if scatters else 1, granule)
        self.index = {parameter: i for i, parameter in enumerate(parameters)}
        self.flat: Tensor | None = None
        self.shard: Tensor | None = None  # the sum of this rank's slices since the last `reset`
        self.work: Work | None = None
        self.launched: list[tuple[Tensor, int]] = []  # the gradients under way, and their versions: writing raises them
        self.waiting = set(parameters)
        self.used: set[nn.Parameter] = set()  # parameters that have contributed to what `flat` or `shard` holds

    @torch.no_grad()
    def collect(self, parameter: nn.Parameter) -> None:
        """Move a gradient that is ready into the buffer, unless it already lies there.

        Raises TypeError for a sparse gradient.
        """
        gradient, again = parameter.grad, parameter not in self.waiting
        assert gradient is not None
        if gradient.is_sparse:
            raise TypeError("a sparse gradient cannot lie in a flat buffer; use an embedding with sparse=False")
        self.waiting.discard(parameter)
        self.used.add(parameter)
        mark("gradients", gradient)
        fits = len(self.parameters) == 1 and self.layout.numel == gradient.numel() and gradient.is_contiguous()
        if self.flat is None and fits and gradient.dtype == self.dtype:
            self.flat = gradient.data.view(-1)  # a bucket of one needs no buffer of its own
        view = self._view(parameter)
        if gradient.dtype != self.dtype:  # it cannot lie in the buffer, so what was there is its forerunner's
            view.add_(gradient) if again else view.copy_(gradient)
            parameter.grad = None
        elif view.data_ptr() != gradient.data_ptr():
            view.copy_(gradient)
            parameter.grad = view.data  # has a version of its own, which the collective does not raise

    def _view(self, parameter: nn.Parameter) -> Tensor:
        if self.flat is None:
            self.flat = torch.empty(self.layout.numel, dtype=self.dtype, device=parameter.device)
            mark("gradients", self.flat)
            self.flat[sum(p.numel() for p in self.parameters) :].zero_()
        return self.layout.view(self.flat, self.index[parameter])

    @torch.no_grad()
    def launch(self, keep: bool = False) -> None:
        """Start the collective. A parameter without a gradient contributes zeros; with `keep`, for a second reduction,
        what the first has left."""
        for parameter in self.parameters:
            forgotten = parameter.grad is None and parameter in self.used and not self.scatters
            if parameter.grad is not None:
                self.collect(parameter)
            elif forgotten or (parameter in self.waiting and not keep):
                self._view(parameter).zero_()
            if forgotten:
                self.used.discard(parameter)
        assert self.flat is not None
        self.work = self.verb(self.flat, self.group, self.label)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.launched = [(gradient, gradient._version) for gradient in gradients]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the collective. What had no gradient holds the other ranks' mean, for the caller to use or not.

        Raises UserError if somebody has written to the gradients meanwhile.
        """
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
        if self.scatters:
            assert self.flat is not None
            mine = self.layout.shard(self.flat, self.group.rank())
            # A copy, since a view would keep the whole buffer alive.
            self.shard = mine.clone() if self.shard is None else self.shard.add_(mine)
            mark("gradients", self.shard)
            self._free()

    def expect_all(self) -> None:
        """A backward begins anew: what has been collected was of an earlier one."""
        self.waiting = set(self.parameters)

    def reset(self, set_to_none: bool = True) -> None:
        """Forget what was collected and reduced, or make the sharded gradients zero as `Optimizer.zero_grad` does.

        Gradients that are views of the buffer stay what they are.
        """
        if self.work is not None:
            self.work.wait()
        self.work, self.launched = None, []
        self.expect_all()
        if self.scatters:
            self._free()
        if set_to_none or self.shard is None:
            self.used, self.shard = set(), None
        else:
            self.shard.zero_()

    def _free(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.flat = None

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The reduced gradient of one parameter, as a view of the buffer."""
        assert self.flat is not None
        return self.layout.view(self.flat, self.index[parameter])

    def close(self) -> None:
        """The round is over. A bucket of one lets go of the gradient that it borrowed, so that zero_grad frees it."""
        if not self.scatters:
            self.used = set()
            if len(self.parameters) == 1:
                self.flat = None
