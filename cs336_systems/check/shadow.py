"""Shadow memory: the type of each element of each tensor over a group's ranks, found by running one rank alone.

    R  Replicate  equal on all ranks    V  Varying  each rank has its own    P  Partial  of this rank's rows alone

Data parallelism and ZeRO reduce gradients in place, in flat buffers that gradients and weights are views of. So types
belong to memory, not to values. What an operator writes has the last type of its operands, in the order R, V, P;
memory that nobody has written to is P. Over all ranks of the group

    all-reduce, all-gather    give R
    reduce-scatter            gives V, this rank's share
    broadcast                 gives R; P stays P, since it is one rank's part of a sum

Rows are P, and weights that each rank has drawn itself are V. A weight that an optimizer has updated must not be P, as
it is after an update by a gradient that is P, and a weight that a layer uses must be R. docs/check.md#types lists what
is not seen.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cs336_systems.check.candidates import Candidate, line_of
from cs336_systems.check.cases import CASES, FIRST, Case
from cs336_systems.check.oracle import Notes
from cs336_systems.check.ranks import clean_torch, observe
from cs336_systems.check.report import ABSENT, FAILED, REFUSED, RIGHT, WRONG, Report, Verdict
from cs336_systems.check.targets import TYPED_RANKS
from cs336_systems.comm import Group, fake_ranks
from cs336_systems.errors import UserError
from cs336_systems.host.observe import tensors

R, V, P = range(3)
NAMES = {"R": "Replicate (R)", "I": "Invariant (I)", "V": "Varying (V)", "P": "Partial (P)"}
UNTYPED = ("torch:ddp", "accelerate")
TYPED = (FIRST.name, "tied weights", "unused on every rank", "accumulation in no_sync")
FRESH = ("copy_", "zero_", "fill_", "uniform_", "normal_")  # write to their first operand without reading it


class RefusedError(UserError):
    """A tensor has another type than its use needs: the place, the axis, both types, and the missing collective."""


def refusal(what: str, have: str, need: str, axis: str, why: str = "") -> RefusedError:
    """The error in words."""
    return RefusedError(f"{what} is {NAMES[have]} on axis {axis}, and must be {NAMES[need]}{why}")


class MessagesError(UserError):
    """A collective or message whose result has no type, since its purpose is not known."""


class Shadow(TorchDispatchMode):
    """Follows the types of all memory that operators inside the block write to."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.world, self.memory = group.size(), dict[int, tuple[StorageWeakRef, Tensor]]()

    def types(self, x: Tensor) -> Tensor:
        """Types of a tensor's elements: a view, of its shape, of one byte for each byte of its storage."""
        storage, size = x.untyped_storage(), x.element_size()
        known = self.memory.get(storage._cdata)
        if known is None or len(known[1]) != storage.nbytes():  # it has been freed, and allocated again
            known = StorageWeakRef(storage), torch.full((storage.nbytes(),), P if known else R, dtype=torch.uint8)
            self.memory[storage._cdata] = known
        return known[1].as_strided(x.shape, [size * each for each in x.stride()], size * x.storage_offset())

    def of(self, x: Tensor) -> int:
        """The last type of a tensor's elements."""
        with _disable_current_modes():
            return int(self.types(x).max()) if x.numel() else R

    def give(self, x: Tensor, letter: int) -> Tensor:
        """Give x's elements a type, and return x."""
        with _disable_current_modes():
            self.types(x).fill_(letter)
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            y = func(*args, **kwargs)
            self._collective(func.overloadpacket.__name__, args)
            return y
        found = self._result(func, args, {key: value for key, value in kwargs.items() if key != "out"})
        written = [x for given, x in zip(func._schema.arguments, args, strict=False) if given.is_write]
        before = {x.untyped_storage()._cdata for x in tensors(*args, *kwargs.values())}
        y = func(*args, **kwargs)
        made = (x for x in tensors(y) if x.untyped_storage()._cdata not in before)
        for each in (*tensors(written, kwargs.get("out")), *made):
            self.types(each).copy_(found)
        return y

    def _result(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Types of an operator's result: of each element, or one for all."""
        name = func.overloadpacket.__name__
        if "empty" in name:
            return torch.tensor(P, dtype=torch.uint8)
        if name in ("cat", "stack"):
            return func([self.types(x) for x in args[0]], *args[1:], **kwargs)
        found = [self.types(x) for x in tensors(*args[name in FRESH :], *kwargs.values())]
        if not (torch.Tag.pointwise in func.tags or name in (*FRESH, "clone", "_to_copy")) or "foreach" in name:
            found = [each.max() for each in found if each.numel()]
        return reduce(torch.maximum, found, torch.tensor(R, dtype=torch.uint8))

    def _collective(self, name: str, args: Any) -> None:
        boxed = next(each for each in args if isinstance(each, torch.ScriptObject) and "Group" in str(each._type()))
        if Group.unbox(boxed).size() < self.world or name in ("send", "barrier"):
            return
        if not any(each in name for each in ("reduce", "gather", "broadcast")):
            raise MessagesError(f"types do not follow {name.strip('_')}: compare the numbers")
        outputs = tensors(args[0])
        is_part = "broadcast" in name and max(map(self.of, outputs)) == P
        for each in outputs:
            self.give(each, P if is_part else V if "scatter" in name else R)


class Weights(Shadow):
    """A shadow that raises RefusedError where a layer of `module` uses a weight that is not R, or an optimizer has
    used a gradient that is P. After a step of an optimizer that has not all weights, none is R before it is sent."""

    def __init__(self, group: Group, axis: str) -> None:
        super().__init__(group)
        self.axis, self.module, self.resize = axis, nn.Module(), torch.UntypedStorage.resize_

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow types, and what layers and optimizers do, inside the block."""
        with self, ExitStack() as stack:
            stack.callback(register_module_forward_hook(self._used).remove)  # runs before a layer's own
            stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", lambda *a: self._resized(*a)))
            yield

    def _used(self, module: nn.Module, inputs: Any, output: Any) -> None:
        where = next((name for name, each in self.module.named_modules() if each is module), "")
        for name, weight in module.named_parameters(recurse=False):
            if (found := self.of(weight)) != R:
                why = ": its first values or its updates are not sent to all ranks"
                raise refusal(f"{f'{where}.{name}'.lstrip('.')}: it", "RVP"[found], "R", self.axis, why)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        for p in updated:  # its own step may reduce gradients; of a DTensor, only what is local has types
            if self.of(getattr(p.grad, "_local_tensor", p)) == P:
                name = next((name for name, each in self.module.named_parameters() if _lies_in(p, each)), "a parameter")
                why = f" or, for a share of it, {NAMES['V']}: an all-reduce or a reduce-scatter is missing"
                raise refusal(f"{name}: the gradient that {type(optimizer).__name__} uses", "P", "R", self.axis, why)
        weights = [each for each in self.module.parameters() if each.requires_grad]
        has = [any(_lies_in(weight, p) for p in updated) for weight in weights]
        own = [any(_lies_in(p, weight) for weight in weights) for p in updated]  # else a shard of some, or tried out
        varying = [weight for weight, is_whole in zip(weights, has, strict=True) if all(own) or not is_whole]
        for weight in varying if any(own) and not all(has) else ():
            self.give(weight, V)

    def _resized(self, storage: Any, size: int) -> Any:
        if storage._cdata in self.memory:
            self.memory[storage._cdata][1].fill_(P)
        return self.resize(storage, size)


def _lies_in(x: Tensor, other: Tensor) -> bool:
    """True if a tensor's memory is another's, or a part of it."""
    offset = x.data_ptr() - other.data_ptr()
    return 0 <= offset <= other.nbytes - x.nbytes


def check_reduction(candidate: Candidate, axis: str = "dp", ranks: int = TYPED_RANKS) -> Report:
    """Verdicts on the types of a candidate that reduces gradients, as rank 0 of a fake group. Raises UserError for what
    cannot run so."""
    if candidate.name in UNTYPED or candidate.kind == "tensor-parallel":
        why = "name a function that returns the split model and its inputs, as FILE.py:build"
        why = "it reduces in C++" if candidate.name in UNTYPED else why
        raise UserError(f"--types cannot follow {candidate.name}: {why}")
    report = Report(candidate.name, candidate.kind, ranks, how="types alone, on ranks that do not exist")
    for case in (each.of(candidate.kind) for each in CASES if each.name in TYPED and candidate.kind in each.kinds):
        status, says = RIGHT, ""
        try:
            with clean_torch(), fake_ranks(0, ranks) as group, (weights := Weights(group, axis)).watched():
                observe(candidate, _typed(case, weights), group, Notes())
        except RefusedError as refusal:
            status, says = WRONG, str(refusal)
        except (Exception, SystemExit) as error:
            if isinstance(error, MessagesError) and case.name == FIRST.name:
                why = "it sums by messages; leave --types out to compare numbers"
                raise UserError(f"--types cannot follow {candidate.name}: {why}") from None
            absent = "no_sync" in str(error) or isinstance(error, MessagesError)
            status, says = ABSENT if absent else FAILED if case.name == FIRST.name else REFUSED, line_of(error)
        report.verdicts.append(Verdict(case.name, status, says, "docs/check.md#types"))
        if case.name == FIRST.name and status != RIGHT:
            break
    return report


def _typed(case: Case, weights: Weights) -> Case:
    """A case whose rows are P, and whose weights are V where ranks have different seeds, else R."""

    def prepare(module: Any, rank: int) -> None:
        case.prepare(module, rank)
        for each in (*module.parameters(), *module.buffers()):
            weights.give(each, V if case.seeds and isinstance(each, nn.Parameter) else R)
        weights.module = module

    return replace(case, prepare=prepare, part=lambda *given: weights.give(case.part(*given), P))
