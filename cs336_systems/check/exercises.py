"""Exercises: files to fill in, without solutions, graded by the checks and by further conditions of each."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.check.candidates import Candidate, candidate, load_file
from cs336_systems.check.foreign import count_collectives, exchange
from cs336_systems.check.functions import PROBES, BrokenPromiseError, probe
from cs336_systems.check.models import Replica
from cs336_systems.check.report import FAILED, REFUSED, WRONG, Report, check
from cs336_systems.check.targets import exercise
from cs336_systems.check.variants import grade_tests
from cs336_systems.comm import broadcast
from cs336_systems.errors import UserError

FIRST_ONLY = ("training",)
RING = ("training", "a layer used twice", "frozen parameters")  # properties that an all-reduce alone can have


def grade(
    name: str, path: Path, ranks: int = 2, timeout: float = 5.0, only: tuple[str, ...] = (), tests: Path | None = None
) -> Report:
    """Report on a file that was filled in, or, if that is right, on a file of its tests. Raises UserError for a file
    without what is asked."""
    if tests is not None:
        report = grade(name, path, ranks, timeout, only=FIRST_ONLY)
        asked = exercise(name)["name"]
        return report if report.exit_code() else grade_tests(name, asked, _found(name, path), tests, ranks, timeout)
    if name in PROBES:
        return probe(name, _found(name, path), ranks, timeout, exercise(name)["page"])
    report = check(_asked(name, path, ranks), ranks=ranks, timeout=timeout, only=only or RING * (name == "ring"))
    for i, each in enumerate(report.verdicts):  # what runs and does not do what is asked is wrong
        if each.status in (FAILED, REFUSED) and each.says.startswith(BrokenPromiseError.__name__):
            report.verdicts[i] = replace(each, status=WRONG, says=each.says.partition(": ")[2], page="")
    return report


def _found(name: str, path: Path) -> ModuleType:
    """A file that has the names which an exercise asks for."""
    module = load_file(path)
    for each in exercise(name)["name"].split():
        if not callable(getattr(module, each, None)):
            raise UserError(f"{path} has no {each}, which the exercise {name} asks for")
    return module


def _asked(name: str, path: Path, ranks: int) -> Candidate:
    found, asked = getattr(_found(name, path), exercise(name)["name"]), exercise(name)
    if name == "ring":
        return candidate(partial(_Ring, found), "ddp", "all_reduce")
    chosen = candidate(found, asked["kind"], asked["name"])
    if name == "zero-2":  # it makes both, as its gradients and its optimizer's state are divided alike
        chosen = replace(chosen, build=lambda m, cls, options, group: found(m, cls, **options), has_gradients=False)
    return _held(chosen, asked, ranks)


class _Ring(Replica):
    """Data parallelism over a student's all-reduce, which may send no more bytes than a ring needs."""

    def __init__(self, all_reduce: Callable[..., Any], module: nn.Module, group: Any) -> None:
        super().__init__(module)
        self.all_reduce, self.group, self.sent = all_reduce, group, 0
        for parameter in module.parameters():
            broadcast(parameter.detach(), 0, group).wait()

    def _exchange(self, piece: Tensor, into: Tensor) -> None:
        self.sent += piece.numel()
        exchange(piece, into)

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients by one all-reduce. Raises BrokenPromiseError if it sends more than a ring needs."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        world, self.sent = self.group.size(), 0
        self.all_reduce(flat, self._exchange, self.group.rank(), world)
        if self.sent > (most := 2 * (world - 1) * -(-len(flat) // world)):
            raise BrokenPromiseError(f"a rank sent {self.sent} elements, and a ring needs {most}")
        for g, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(piece.view_as(g) / world)


def _held(chosen: Candidate, asked: dict[str, Any], ranks: int) -> Candidate:
    """Hold a candidate to its share of the optimizer's state (`state`) and of the memory of what each parameter has
    between steps (`keeps`, .data or .grad; a view counts as much as what it is a view of), and to numbers of
    collectives: before the end of backward (`early`) and in the whole step (`most`)."""
    share, total, counts = 0, 0, list[int]()

    def hold(what: str, elements: int) -> None:
        if elements > share:
            raise BrokenPromiseError(f"a rank keeps {what} of {elements} of {total} elements, at most {share} are its")

    def hold_memory(model: Any, optimizer: Any) -> None:
        own = {*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])}
        tensors = [each for each in (getattr(p, asked["keeps"]) for p in own) if each is not None]
        stores = {each.untyped_storage().data_ptr(): len(each.untyped_storage()) // each.itemsize for each in tensors}
        hold(f".{asked['keeps']}", sum(stores.values()))

    def build(module: nn.Module, cls: Any, *rest: Any) -> Any:
        nonlocal share, total, counts
        sizes = [p.numel() for p in module.parameters()]
        share, total = sum(sizes) // ranks + max(sizes), sum(sizes)

        class Counted(cls):  # type: ignore[misc]
            def __init__(self, params: Any, **options: Any) -> None:
                super().__init__(params, **options)
                hold("state", sum(p.numel() for group in self.param_groups for p in group["params"]))

        built = chosen.build(module, Counted if "state" in asked else cls, *rest)
        if "keeps" in asked:
            hold_memory(*built)
        counts = count_collectives()
        return built

    def finish(model: Any, optimizer: Any) -> None:
        launched = counts[0]
        chosen.finish(model, optimizer)
        if "keeps" in asked:
            hold_memory(model, optimizer)
        taken, counts[0] = counts[0], 0
        if launched < asked.get("early", 0):
            least = asked["early"]
            raise BrokenPromiseError(f"{launched} collectives were launched during backward; {least} or more should be")
        if taken > asked.get("most", taken):
            raise BrokenPromiseError(f"a step took {taken} collectives; {asked['most']} or fewer should do")

    return replace(chosen, build=build, finish=finish)
