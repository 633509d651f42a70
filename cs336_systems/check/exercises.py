"""Exercises: files to fill in, without solutions, graded by the checks and by what else must be true of each."""

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
from cs336_systems.check.report import FAILED, REFUSED, WRONG, Report, check
from cs336_systems.check.targets import exercise
from cs336_systems.check.variants import grade_tests
from cs336_systems.comm import broadcast
from cs336_systems.errors import UserError

FIRST_ONLY = ("training",)
RING = ("training", "a layer used twice", "frozen parameters")  # properties that an all-reduce alone can have


def grade(
    name: str,
    path: Path,
    ranks: int = 2,
    timeout: float = 5.0,
    only: tuple[str, ...] = (),
    tests: Path | None = None,
) -> Report:
    """The report on a file that was filled in, or if that is right on a file of its tests. Raises UserError for a file
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
        chosen = replace(chosen, build=partial(_with_optimizer, found), has_gradients=False)
    if name in ("zero-1", "zero-2"):
        chosen = replace(chosen, build=partial(_with_small_state, chosen.build, ranks))
    if "keeps" in asked:
        chosen = _keeping_a_share(chosen, asked["keeps"], ranks)
    if "early" in asked:
        chosen = _launched_early(chosen, asked["early"], asked.get("most"))
    return chosen


class _Ring(nn.Module):
    """Data parallelism over a student's all-reduce, which is held to the bytes that a ring needs."""

    def __init__(self, all_reduce: Callable[..., Any], module: nn.Module, group: Any) -> None:
        super().__init__()
        self.module, self.all_reduce, self.group, self.sent = module, all_reduce, group, 0
        for parameter in module.parameters():
            broadcast(parameter.detach(), 0, group).wait()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The module's own result."""
        return self.module(*inputs, **options)

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


def _with_optimizer(make: Callable[..., Any], module: nn.Module, cls: Any, options: dict[str, Any], group: Any) -> Any:
    return make(module, cls, **options)


def _with_small_state(build: Callable[..., Any], ranks: int, module: nn.Module, cls: Any, *rest: Any) -> Any:
    """Hold the class that a sharded optimizer is given to its share of the elements."""
    sizes = [p.numel() for p in module.parameters()]

    class Counted(cls):  # type: ignore[misc]
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            has = sum(p.numel() for group in self.param_groups for p in group["params"])
            if has > (most := sum(sizes) // ranks + max(sizes)):
                raise BrokenPromiseError(
                    f"a rank keeps state for {has} of {sum(sizes)} elements, at most {most} are its"
                )

    return build(module, Counted, *rest)


def _keeping_a_share(chosen: Candidate, what: str, ranks: int) -> Candidate:
    """Hold a wrapper to its share of the memory of `what` each parameter has, .data or .grad, between steps. Views
    count as much as what they are views of."""
    most = [0, 0]

    def hold(model: Any, optimizer: Any) -> None:
        own = {*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])}
        tensors = [each for each in (getattr(p, what) for p in own) if each is not None]
        stores = {each.untyped_storage().data_ptr(): len(each.untyped_storage()) // each.itemsize for each in tensors}
        if (kept := sum(stores.values())) > most[0]:
            raise BrokenPromiseError(f"a rank keeps .{what} of {kept} of {most[1]} elements, at most {most[0]} are its")

    def build(module: nn.Module, *rest: Any) -> Any:
        sizes = [p.numel() for p in module.parameters()]
        most[:] = sum(sizes) // ranks + max(sizes), sum(sizes)
        built = chosen.build(module, *rest)
        hold(*built)
        return built

    def finish(model: Any, optimizer: Any) -> None:
        chosen.finish(model, optimizer)
        hold(model, optimizer)

    return replace(chosen, build=build, finish=finish)


def _launched_early(chosen: Candidate, early: int, most: int | None) -> Candidate:
    """Hold a wrapper to a number of collectives before the end of backward, and to one for the whole step."""
    counts = [0]

    def build(*arguments: Any) -> Any:
        built = chosen.build(*arguments)
        count_collectives(counts)
        return built

    def finish(model: Any, optimizer: Any) -> None:
        launched = counts[0]
        chosen.finish(model, optimizer)
        total, counts[0] = counts[0], 0
        if launched < early:
            raise BrokenPromiseError(f"{launched} collectives were launched during backward; {early} or more should be")
        if most and total > most:
            raise BrokenPromiseError(f"a step took {total} collectives; {most} or fewer should do")

    return replace(chosen, build=build, finish=finish)
