"""Grading of a student's own tests, which must pass on their file and fail on broken variants of it.

Variants are made around the student's own code. A test runs on every rank; it is given what it has parameters for.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from cs336_systems.check.candidates import accepted, load_file
from cs336_systems.check.foreign import exchange
from cs336_systems.check.functions import probe
from cs336_systems.check.ranks import BrokenPromiseError
from cs336_systems.check.report import FAILED, RIGHT, WRONG, Report
from cs336_systems.comm import Group, current_place
from cs336_systems.errors import UserError

OWN = "your own file"


def grade_tests(name: str, function: str, module: ModuleType, path: Path, ranks: int, timeout: float) -> Report:
    """The report on tests. `function`: name of what the exercise asks for, in the student's `module`."""
    if name not in VARIANTS:
        raise UserError(f"--tests: {name} has no broken variants; {', '.join(VARIANTS)} have")
    found = {key: value for key, value in vars(load_file(path)).items() if key.startswith("test_") and callable(value)}
    if not found:
        raise UserError(f"{path} has no function test_...")
    right = getattr(module, function)

    def run(subject: Any, group: Group) -> None:
        offered = {function: subject, "exchange": exchange, "rank": group.rank(), "world": group.size()}
        for key, test in found.items():
            try:
                test(**accepted(test, offered))
            except Exception as error:
                raise BrokenPromiseError(f"{key} fails: {type(error).__name__} {error}") from error

    subjects = {OWN: right} | {each: make(right) for each, make in VARIANTS[name].items()}
    report = Report(path.name, f"tests of {name}", ranks, how="run on your file and on broken variants of it")
    probe(report, {each: partial(run, subject) for each, subject in subjects.items()}, timeout)
    for i, each in enumerate(report.verdicts):
        fails = each.status != RIGHT
        if each.name == OWN:
            report.verdicts[i] = replace(each, status=FAILED if fails else RIGHT)
        else:
            says = each.says.partition(": ")[0] if fails else "all tests pass, although it is broken"
            report.verdicts[i] = replace(each, status=RIGHT if fails else WRONG, says=says)
    return report


def _ring(change: Callable[..., object], all_reduce: Callable[..., Any]) -> Callable[..., None]:
    """An all-reduce whose result is changed, by a function of it, of what the rank had, of rank and world."""

    def broken(flat: Tensor, exchange: Any, rank: int, world: int) -> None:
        own = flat.clone()
        all_reduce(flat, exchange, rank, world)
        change(flat, own, rank, world)

    return broken


def _sent_twice(all_reduce: Callable[..., Any]) -> Callable[..., None]:
    """An all-reduce that is right and sends every piece once more than it needs."""

    def broken(flat: Tensor, exchange: Any, rank: int, world: int) -> None:
        def twice(piece: Tensor, into: Tensor) -> None:
            exchange(piece.clone(), into.clone())
            exchange(piece, into)

        all_reduce(flat, twice, rank, world)

    return broken


def _keep(flat: Tensor, own: Tensor, where: slice) -> None:
    flat[where] = own[where]


def _ddp(change: Callable[..., object], first: int, cls: Any) -> Any:
    """A wrapper whose reduced gradients are changed, from the one with this number on."""

    class Broken(cls):  # type: ignore[misc]
        def finish_gradient_synchronization(self) -> None:
            having = [p for p in self.module.parameters() if p.grad is not None]
            own = [p.grad.clone() for p in having]
            super().finish_gradient_synchronization()
            pairs = list(zip(having, own, strict=True))
            for p, before in pairs[first:]:
                change(p.grad, before, p)

    return Broken


def _stale(gradient: Tensor, own: Tensor, parameter: Any) -> None:
    mean = gradient.clone()
    gradient.copy_(getattr(parameter, "mean_before", mean))
    parameter.mean_before = mean


def _unsent(what: str, cls: Any) -> Any:
    """A wrapper that leaves parameters or buffers as each rank had them."""

    class Broken(cls):  # type: ignore[misc]
        def __init__(self, module: Any) -> None:
            before = [each.detach().clone() for each in getattr(module, what)()]
            super().__init__(module)
            for each, old in zip(getattr(module, what)(), before, strict=True):
                each.detach().copy_(old)

    return Broken


VARIANTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "ring": {
        "the mean, not the sum": partial(_ring, lambda flat, own, rank, world: flat.div_(world)),
        "rank 1 keeps its own": partial(_ring, lambda flat, own, rank, world: rank == 1 and flat.copy_(own)),
        "what does not divide evenly is left out": partial(
            _ring, lambda flat, own, rank, world: _keep(flat, own, slice(len(flat) // world * world, None))),
        "every piece is sent twice": _sent_twice,
    },
    "naive-ddp": {
        "gradients are summed": partial(_ddp, lambda new, own, p: new.mul_(current_place().world_size), 0),
        "nothing is reduced": partial(_ddp, lambda new, own, p: new.copy_(own), 0),
        "one gradient is forgotten": partial(_ddp, lambda new, own, p: new.copy_(own), -1),
        "gradients are those of the step before": partial(_ddp, _stale, 0),
        "weights are not sent": partial(_unsent, "parameters"),
        "buffers are not sent": partial(_unsent, "buffers"),
    },
}  # fmt: skip
