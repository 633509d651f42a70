"""What data-parallel wrappers demand of their modules: the same structure on every rank, unchanged while wrapped, and
no optimizer step on gradients that were never synchronised."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from cs336_systems.comm import Group, agree, broadcast, fault, global_rank
from cs336_systems.errors import UserError


class Structure:
    """A module's parameters by name when it was wrapped, but for those that are another wrapper's business. Raises
    UserError for one that has no values yet."""

    def __init__(self, module: nn.Module, group: Group, ignored: Collection[nn.Parameter] = ()) -> None:
        self.module, self.group, self.ignored = module, group, set(ignored)
        self.names: dict[nn.Parameter, str] = {}
        for name, parameter in self._named():
            if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
                raise fault(f"{name} has no values yet: materialise the module before it is wrapped")
            self.names[parameter] = name
        self.dtypes = {parameter: parameter.dtype for parameter in self.names}
        self.trainable = [parameter for parameter in self.names if parameter.requires_grad]
        self._trainable = set(self.trainable)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (named for named in self.module.named_parameters() if named[1] not in self.ignored)

    def stand_in(self, parameter: nn.Parameter, name: str) -> None:
        """Accept a parameter that takes the place of a wrapped one for a while."""
        self.names[parameter], self.dtypes[parameter] = name, parameter.dtype
        if parameter.requires_grad:
            self._trainable.add(parameter)

    def check_unchanged(self) -> None:
        """Raises UserError if a parameter was replaced, cast or unfrozen after wrapping: it would silently go its own
        way. (Freezing is fine: a frozen parameter gets no gradient.)"""
        for name, parameter in self._named():
            change = None
            if parameter not in self.names:
                change = "is not the parameter that was wrapped"
            elif parameter.dtype != self.dtypes[parameter]:
                change = f"was {self.dtypes[parameter]} when wrapped and is {parameter.dtype} now"
            elif parameter.requires_grad and parameter not in self._trainable:
                change = "was frozen when wrapped and wants a gradient now"
            if change:
                raise fault(f"{name} {change}; change the module first, then wrap it anew (see `unwrap`)")


def describe(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> list[str]:
    """One line a parameter (tied ones again under each name) and a buffer, in order."""
    left_out = set(ignored)
    first: dict[Tensor, str] = {}
    lines = []
    for name, p in module.named_parameters(remove_duplicate=False):
        if p in left_out:
            continue
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
    everyone = [json.loads(text) for text in agree("structure in full", json.dumps(lines, allow_nan=False), group)]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    mine, theirs = everyone[0], everyone[other]
    longest = max(len(mine), len(theirs))
    pad = ["nothing more"] * longest
    pairs = zip((mine + pad)[:longest], (theirs + pad)[:longest], strict=True)
    number, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    ranks = global_rank(0, group), global_rank(other, group)
    raise UserError(
        f"the ranks' modules differ, first in entry {number}: rank {ranks[0]} has {a}, rank {ranks[1]} has {b}"
    )


@torch.no_grad()
def broadcast_module(module: nn.Module, group: Group, ignored: Collection[nn.Parameter] = ()) -> None:
    """Give every rank the parameters and buffers of the group's rank 0."""
    left_out = set(ignored)
    for tensor in (*(p for p in module.parameters() if p not in left_out), *module.buffers()):
        broadcast(tensor.data, 0, group, "initial value").wait()


def make_alike(module: nn.Module, kind: str, group: Group, ignored: Collection[nn.Parameter] = ()) -> None:
    """Every rank of the group gets rank 0's values. Raises UserError on every rank unless they have the same parameters
    and the same `kind` of wrapper."""
    compare_structures([*describe(module, ignored), kind], group)
    broadcast_module(module, group, ignored)


class Guarded(Protocol):
    """A wrapper whose gradients an optimizer must not use before they are synchronised."""

    synchronised: bool

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether the wrapper synchronises the parameter's gradient."""


_guarded: WeakSet[Any] = WeakSet()
_hooks: list[RemovableHandle] = []
_wrappers = WeakTensorKeyDictionary()  # parameters, and references to what synchronises them
_replaced = WeakTensorKeyDictionary()  # parameters that shards have taken the place of, and their names


def replaced(parameter: nn.Parameter, name: str) -> None:
    """From now on every optimizer refuses to step on the parameter."""
    _replaced[parameter] = name


def guard_step(wrapper: Guarded, parameters: Iterable[nn.Parameter]) -> None:
    """From now on every optimizer refuses to step on a parameter of the wrapper that is not synchronised, or that
    nobody synchronises since the wrapper is gone."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse))
    _guarded.add(wrapper)
    for parameter in parameters:
        _wrappers[parameter] = ref(wrapper)


def let_go(parameters: Iterable[nn.Parameter]) -> None:
    """From now on the parameters may be trained on one rank alone."""
    for parameter in parameters:
        _wrappers.pop(parameter, None)


def require_finished(wrapper: Guarded, what: str) -> None:
    """Raises UserError if `what` would look at gradients that are not synchronised."""
    if not wrapper.synchronised:
        raise UserError(
            f"{what} before {type(wrapper).__name__}.finish_gradient_synchronization(): the gradients are still this "
            "rank's own; call it after the last backward of a step"
        )


def weak_hook(method: Callable[..., None], *first: object) -> Callable[..., None]:
    """A hook that calls the method, for as long as its object lives: torch's gradient hooks would keep it, and what is
    in `first`, alive for ever, since the garbage collector does not see them."""
    reference, references = WeakMethod(method), [ref(each) for each in first]

    def hook(*rest: Any) -> None:
        if (bound := reference()) is not None:
            bound(*(each() for each in references), *rest)

    return hook


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Before every step of every optimizer: look at its gradients, and once more after a closure has made new ones."""
    _require_synchronised(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    def checked() -> Any:
        loss = closure()
        _require_synchronised(optimizer)
        return loss

    return (args[0], checked, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}


def _require_synchronised(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError if a step would use gradients that are still this rank's own, or update what nobody uses."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter in _replaced:
            raise UserError(
                f"{type(optimizer).__name__} was made before {_replaced[parameter]} was sharded and would never move "
                "it; make it from the wrapped module's parameters"
            )
        if parameter in _wrappers and _wrappers[parameter]() is None:
            raise UserError(
                "the wrapper of these parameters is gone, so nothing has synchronised their gradients: keep it, or "
                "unwrap() it to train on this rank alone"
            )
    for wrapper in list(_guarded):
        if wrapper.synchronised:
            continue
        if any(wrapper.owns(p) for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                f"{type(optimizer).__name__}.step() before {type(wrapper).__name__}.finish_gradient_synchronization(): "
                "the gradients are still this rank's own; call it after the last backward of a step"
            )
