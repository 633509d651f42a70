"""Types of tensors over the ranks of a group: a missing collective is refused before anything is sent.

    R  Replicate  equal on all ranks, gradients are parts of a sum    V  Varying  each rank has its own
    I  Invariant  equal on all ranks, and so are gradients            P  Partial  a part of a sum that is not taken yet

The rules are those of spmd_types (PyPI). A module runs as rank 0 of a fake group; its conjugate pairs change types
(PAIRS), and so do Exchange and the ring, V -> V, and the vocabulary-parallel loss, V -> I, whose sums are seen in its
memory. A weight with a `partition_dim` is V. In a linear layer, one that is split by outputs (0) needs an input of type
R; one that is split by inputs (1) gives P.

What is reduced after backward is typed in check/shadow.py. docs/check.md#types lists what is not seen.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cs336_systems.check.candidates import called
from cs336_systems.check.report import RIGHT, WRONG, Report, Verdict
from cs336_systems.check.shadow import P, R, RefusedError, Shadow, refusal
from cs336_systems.check.targets import TYPED_RANKS
from cs336_systems.comm import Exchange, Group, fake_ranks, pairs
from cs336_systems.context_parallel import _Ring
from cs336_systems.errors import UserError
from cs336_systems.tensor_parallel import vocabulary
from cs336_systems.tensor_parallel.plan import TensorParallel

PAIRS = {  # forward and backward of a conjugate pair: its name, the types that its input may have, and of its output
    (pairs._same, pairs._sum): ("copy", "I", "R"),
    (pairs._sum, pairs._same): ("reduce", "PV", "I"),
    (pairs._part, pairs._whole): ("scatter", "I", "V"),
    (pairs._whole, pairs._part): ("gather", "V", "I"),
    (pairs._whole, pairs._part_of_sum): ("gather_sequence", "V", "R"),
    (pairs._part_of_sum, pairs._whole): ("reduce_sequence", "PV", "V"),
}
REMEDIES = {have[0] + into: f"pairs.{name}" for name, have, into in PAIRS.values()} | {"VI": "pairs.reduce"}


class _Watch(TorchFunctionMode):
    """Adds what layers know to spmd_types' rules, and turns its refusals into sentences."""

    def __init__(self, spmd: Any, group: Group, axis: str, names: Mapping[Tensor, str]) -> None:
        super().__init__()
        self.spmd, self.group, self.axis, self.names = spmd, group, axis, names
        self.where = ["the model"]  # modules that run, the innermost last

    def of(self, x: Any) -> str:
        """Type of a tensor on the axis: a letter, or nothing if it has none."""
        found = self.spmd.maybe_get_axis_local_type(x, self.group) if isinstance(x, Tensor) else None
        return "" if found is None else found.name

    def refusal(self, what: str, have: str, need: str) -> RefusedError:
        remedy = f": {REMEDIES[have + need]} is missing before it" if have + need in REMEDIES else ""
        return refusal(f"{self.where[-1]}: {what}", have, need, self.axis, remedy)

    def need(self, x: Tensor, types: str, what: str) -> None:
        """Raises RefusedError unless x has one of the types. Without a gradient R and I are one."""
        free = types[0] in "RI" and not (x.requires_grad and torch.is_grad_enabled())
        if (have := self.of(x)) and have not in (types + "RI" if free else types):
            raise self.refusal(what, have, types[0])

    def stamp(self, x: Tensor, letter: str) -> Tensor:
        """Give x a type, and return x. Raises SpmdTypeError if it has another."""
        return self.spmd.assert_type(x, {self.group: getattr(self.spmd, letter)})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        linear = func is F.linear and len(args) > 1
        dim = getattr(args[1], "partition_dim", None) if linear else None
        if dim == 0:
            self.need(args[0], "R", f"the input of the columns {self.names.get(args[1], 'of a weight')}")
        owner = getattr(func, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and torch.is_grad_enabled():
            operands = {self.of(x) for x in args if isinstance(x, Tensor) and x.requires_grad}
            if "I" in operands and operands & {"R", "V"}:  # inside, where no gradients are recorded, these may mix
                raise self.refusal(f"an operand of {owner.__name__}", "I", "R")
        try:
            y = func(*args, **(kwargs or {}))
        except self.spmd.SpmdTypeError as error:
            raise self.explain(error, func.__name__, [*args, *(kwargs or {}).values()]) from error
        return self.spmd.mutate_type(y, self.group, src=self.spmd.V, dst=self.spmd.P) if dim == 1 else y

    def summed(self, loss: Any, logits: Tensor, *args: Any) -> Tensor:
        """The loss, whose sums over all words are in-place collectives inside one autograd function."""
        with Shadow(self.group) as shadow:
            y: Tensor = loss(shadow.give(logits, P), *args)
        if shadow.of(y) != R:
            why = ": a sum over all ranks' words is missing inside it"
            raise refusal(f"{self.where[-1]}: the loss", "P", "I", self.axis, why)
        return y

    def follow(self, module: nn.Module, stack: ExitStack) -> None:
        """Note which module runs."""
        for name, each in module.named_modules():
            if name:
                before = each.register_forward_pre_hook(lambda *_, name=name: self.where.append(name), prepend=True)
                stack.callback(before.remove)
                stack.callback(each.register_forward_hook(lambda *_: self.where.pop() and None).remove)

    def explain(self, error: Exception, operator: str, operands: list[Any]) -> RefusedError:
        """The sentence for an operator that refuses its operands' types."""
        flat = [x for each in operands for x in (each if isinstance(each, list | tuple) else [each])]
        typed = {self.of(x): x for x in flat if self.of(x)}
        named = [self.names[x] for x in typed.values() if x in self.names]
        what = f"an operand of {operator}" + (f" with {named[0]}" if named else "")
        if "P" in typed:
            return self.refusal(what, "P", "V" if "V" in typed else "I")
        if typed.keys() == {"I", "V"}:
            meant_alike = "add" in operator or typed["I"] in self.names  # a stream's sum, a bias, a gain
            return self.refusal(what, *(("V", "I") if meant_alike and typed["V"] not in self.names else ("I", "R")))
        if typed.keys() == {"I", "R"}:
            return self.refusal(what, "I", "V" if typed["R"] in self.names else "R")
        return RefusedError(f"{self.where[-1]}: {what}, axis {self.axis}: {str(error).splitlines()[0]}")


@contextmanager
def typed(group: Group, axis: str, module: nn.Module) -> Iterator[_Watch]:
    """Check types inside the block, where conjugate pairs, Exchange and the vocabulary-parallel loss are typed."""
    try:
        import spmd_types.checker
    except ImportError as error:
        raise UserError("types need the package spmd_types: pip install 'cs336-systems[types]'") from error
    spmd: Any = spmd_types
    watch = _Watch(spmd, group, axis, {parameter: name for name, parameter in module.named_parameters()})

    def run(function: Any, types: str, letter: str, what: str, x: Any, *args: Any, **options: Any) -> Any:
        if types:
            watch.need(x, types, f"the input of {what}")
        letter = letter or watch.of(x)
        with spmd.no_typecheck():
            y = function(x, *args, **options)
        return watch.stamp(y, letter) if letter else y

    apply, start, wait = pairs._apply, Exchange.__init__, Exchange.wait
    loss, ring = vocabulary._CrossEntropy.apply, _Ring.apply

    def move(x: Tensor, ahead: Any, back: Any, group: Group, dim: int, label: str) -> Tensor:
        name, types, letter = PAIRS.get((ahead, back), ("no pair", "", ""))  # without its conjugate it is no collective
        return run(apply, types, letter, f"pairs.{name} '{label}'", x, ahead, back, group, dim, label)

    def begin(exchange: Exchange, x: Tensor, *rest: Any) -> None:
        watch.need(x, "V", f"the input of Exchange '{rest[-1]}'")
        with spmd.no_typecheck():
            start(exchange, x, *rest)

    with ExitStack() as stack:
        enter = stack.enter_context
        for owner, name, new in (
            (pairs, "_apply", move), (Exchange, "__init__", begin),
            (Exchange, "wait", lambda exchange: run(wait, "", "V", "", exchange)),
            (_Ring, "apply", partial(run, ring, "V", "V", "the ring")),
            (vocabulary._CrossEntropy, "apply", partial(run, partial(watch.summed, loss), "V", "I", "the loss")),
        ):  # fmt: skip
            enter(mock.patch.object(owner, name, new))
        watch.follow(module, stack)
        enter(spmd.set_current_mesh({axis: spmd.MeshAxis.of(group)}))
        enter(spmd.checker.typecheck(local=True))
        yield enter(watch)


def type_check(build: Callable[[], tuple[Any, ...]], axis: str = "tp", ranks: int = TYPED_RANKS) -> list[RefusedError]:
    """Run a module forward and backward with types, as rank 0 of a fake group; returns the refusal, or nothing. The
    first ends the run, since what follows from it would be refused as well.

    build(), called in the group, returns a module or a TensorParallel and its inputs, a tuple. Weights that are not
    split, and inputs, are I unless their `spmd_type` says otherwise; a scalar result is a loss.
    Raises UserError without spmd_types."""
    with fake_ranks(0, ranks) as group:
        returned = build()
        kinds = (nn.Module | TensorParallel, tuple)
        if not isinstance(returned, tuple) or len(returned) != 2 or not all(map(isinstance, returned, kinds)):
            raise UserError(f"build() returns (split module, tuple of inputs), not {returned!r:.80}")
        built, inputs = returned
        module, partial_sums = (built.model, built.partial) if isinstance(built, TensorParallel) else (built, ())
        with typed(group, axis, module) as watch:
            for parameter, name in watch.names.items():
                usual = "R" if name in partial_sums else "V" if hasattr(parameter, "partition_dim") else "I"
                watch.stamp(parameter, getattr(parameter, "spmd_type", usual))
            for x in (*inputs, *module.buffers()):
                if isinstance(x, Tensor):
                    watch.stamp(x, getattr(x, "spmd_type", "I"))
            try:
                loss = module(*inputs)
                if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
                    watch.need(loss, "IPV", "the loss")
                    if watch.of(loss) == "V":
                        watch.spmd.mutate_type(loss, group, src=watch.spmd.V, dst=watch.spmd.P)
                    loss.backward()
            except RefusedError as refusal:
                return [refusal]
    return []


def check_model(build: Callable[[], tuple[Any, ...]], name: str) -> Report:
    """The report on the types of a model that `build` returns (see type_check)."""
    report = Report(name, "a model", TYPED_RANKS, how="types alone, on ranks that do not exist")
    with called(name):
        status, says = next(((WRONG, str(each)) for each in type_check(build)), (RIGHT, "accepted"))
    report.verdicts.append(Verdict("types", status, says, "docs/check.md#types"))
    return report
