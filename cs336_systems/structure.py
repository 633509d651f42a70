"""What data-parallel wrappers demand of their modules: the same structure on every rank, unchanged while wrapped, and
no optimizer step on gradients that were never synchronised."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cs336_systems.comm import Group, agree, broadcast, fault
from cs336_systems.errors import UserError


class Structure:
    """A module's parameters by name when it was wrapped. Raises UserError for one that has no values yet."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self.module, self.group = module, group
        self.names: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
                raise fault(f"{name} has no values yet: materialise the module before it is wrapped", group)
            self.names[parameter] = name
        self.dtypes = [parameter.dtype for parameter in self.names]
        self.trainable = [parameter for parameter in self.names if parameter.requires_grad]
        self._trainable = set(self.trainable)

    def check_unchanged(self) -> None:
        """Raises UserError if a parameter was replaced, cast or unfrozen after wrapping: it would silently go its own
        way. (Freezing is fine: a frozen parameter gets no gradient.)"""
        for (name, parameter), dtype in zip(self.module.named_parameters(), self._dtypes(), strict=False):
            known, change = self.names.get(parameter), None
            if known is None:
                change = "is not the parameter that was wrapped"
            elif parameter.dtype != dtype:
                change = f"was {dtype} when wrapped and is {parameter.dtype} now"
            elif parameter.requires_grad and parameter not in self._trainable:
                change = "was frozen when wrapped and wants a gradient now"
            if change:
                raise fault(f"{name} {change}; change the module first, then wrap it anew (see `unwrap`)", self.group)

    def _dtypes(self) -> Iterable[torch.dtype | None]:
        yield from self.dtypes
        while True:
            yield None


def describe(module: nn.Module) -> list[str]:
    """One line a parameter (tied ones again under each name) and a buffer, in order."""
    first: dict[Tensor, str] = {}
    lines = []
    for name, p in module.named_parameters(remove_duplicate=False):
        tied = first.setdefault(p, name)
        kind = "trainable" if p.requires_grad else "frozen"
        lines.append(
            f"parameter {name} {tuple(p.shape)} {p.dtype} {kind}" + (f" tied to {tied}" if tied != name else "")
        )
    lines += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]
    return lines


def compare_structures(lines: list[str], group: Group) -> None:
    """Raises UserError on every rank, with the first difference, unless all ranks have the same lines.

    They are compared through the store: a collective over tensors that differ in size aborts the process on gloo.
    """
    digests = agree("structure", hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(text) for text in agree("structure in full", json.dumps(lines), group)]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    mine, theirs = everyone[0], everyone[other]
    longest = max(len(mine), len(theirs))
    pad = ["nothing more"] * longest
    pairs = zip((mine + pad)[:longest], (theirs + pad)[:longest], strict=True)
    number, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise UserError(f"the ranks' modules differ, first in entry {number}: rank 0 has {a}, rank {other} has {b}")


@torch.no_grad()
def broadcast_module(module: nn.Module, group: Group) -> None:
    """Give every rank the parameters and buffers of the group's rank 0."""
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast(tensor.data, 0, group, "initial value").wait()


class Guarded(Protocol):
    """A wrapper whose gradients an optimizer must not use before they are synchronised."""

    synchronised: bool

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether the wrapper synchronises the parameter's gradient."""


_guarded: WeakSet[Any] = WeakSet()


def guard_step(wrapper: Guarded) -> None:
    """From now on every optimizer refuses to step on a parameter of the wrapper that is not synchronised."""
    if not _guarded:
        register_optimizer_step_pre_hook(_refuse)
    _guarded.add(wrapper)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    require_synchronised(optimizer)


def require_synchronised(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError if a step would use gradients that are still this rank's own."""
    for wrapper in list(_guarded):
        if wrapper.synchronised:
            continue
        if any(wrapper.owns(p) for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                f"{type(optimizer).__name__}.step() before {type(wrapper).__name__}.finish_gradient_synchronization(): "
                "the gradients are still this rank's own; call it after the last backward of a step"
            )
