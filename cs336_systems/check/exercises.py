"""Exercises: files to fill in, without solutions, graded by the checks and by further conditions of each.

A student's own tests are graded, too: they must pass on their file and fail on broken variants of it, which are made
around the student's own code. A test runs on every rank; it is given what it has parameters for.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from cs336_systems.check.candidates import Candidate, accepted, candidate, load_file
from cs336_systems.check.functions import PROBES, hold, probe
from cs336_systems.check.models import Replica
from cs336_systems.check.ranks import BrokenPromiseError
from cs336_systems.check.report import ABSENT, FAILED, REFUSED, RIGHT, WRONG, Report, check
from cs336_systems.check.targets import EXERCISES, count_collectives, exchange
from cs336_systems.comm import Group, broadcast, current_place
from cs336_systems.errors import UserError

OWN = "your own file"
ASKED = {  # properties that exercises of a kind ask for, so that an error in them is wrong
    "ddp": ("tied weights", "frozen parameters", "unused on every rank", "unused on one rank", "buffers",
            "accumulation in no_sync", "accumulation without no_sync"),
    "fsdp": ("tied weights", "frozen parameters", "a parameter without axes"),
}  # fmt: skip


def grade(
    name: str, path: Path, ranks: int = 2, timeout: float = 5.0, only: tuple[str, ...] = (), tests: Path | None = None
) -> Report:
    """Report on a file that was filled in, or, if that is right, on a file of its tests. Raises UserError for a file
    without what is asked."""
    asked, module = EXERCISES[name], load_file(path)
    for each in asked["name"].split():
        if not callable(getattr(module, each, None)):
            raise UserError(f"{path} has no {each}, which the exercise {name} asks for")
    if tests is not None:
        return grade_tests(name, path, module, tests, ranks, timeout)
    if name in PROBES:
        report = Report(name, "function", asked.get("ranks", ranks))
        probes = {each: partial(PROBES[name], module, **options) for each, options in asked["probes"].items()}
        return probe(report, probes, timeout, asked["page"])
    found = getattr(module, asked["name"])
    chosen = candidate(partial(_Ring, found) if name == "ring" else found, asked["kind"], asked["name"])
    if name == "zero-2":  # it makes model and optimizer, which divide gradients and state alike
        chosen = replace(chosen, build=lambda m, cls, options, group: found(m, cls, **options), has_gradients=False)
    report = check(_held(chosen, asked, ranks), ranks=ranks, timeout=timeout, only=only or asked.get("only", ()))
    for i, each in enumerate(report.verdicts):
        if each.status in (REFUSED, ABSENT) and each.name in ASKED.get(asked["kind"], ()):
            report.verdicts[i] = replace(each, status=WRONG)
    return report


class _Ring(Replica):
    """Data parallelism over a student's all-reduce, which may send no more bytes than a ring needs."""

    def __init__(self, all_reduce: Callable[..., Any], module: nn.Module, group: Any) -> None:
        super().__init__(module)
        self.all_reduce, self.group, self.sent = all_reduce, group, 0
        for parameter in module.parameters():
            broadcast(parameter.detach(), 0, group).wait()
        self.moved, self.counts = 0, count_collectives()

    def _exchange(self, piece: Tensor, into: Tensor) -> None:
        self.sent += piece.numel()
        self.moved += piece.numel() + into.numel()
        exchange(piece, into)

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients by one all-reduce. Raises BrokenPromiseError if it sends more than a ring needs."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        world, self.sent, self.moved, before = self.group.size(), 0, 0, self.counts["elements"]
        self.all_reduce(flat, self._exchange, self.group.rank(), world)
        most = 2 * (world - 1) * -(-len(flat) // world)
        hold(self.counts["elements"] - before == self.moved, "something else than exchange moves data")
        hold(self.sent <= most, f"a rank sent {self.sent} elements, and a ring needs {most}")
        vector_to_parameters(flat / world, gradients)


def _held(chosen: Candidate, asked: dict[str, Any], ranks: int) -> Candidate:
    """Require at most a share of the optimizer's state (`state`) and of .data or .grad between steps (`keeps`; storages
    count whole), parameters split along axes (`split`), `early` reductions or more in backward, `most` in a step."""
    share, total, counts, seen, keeps = 0, 0, Counter[str](), Counter[str](), asked.get("keeps")

    def hold_share(what: str, elements: int) -> None:
        hold(elements <= share, f"a rank keeps {what} of {elements} of {total} elements, at most {share} are its")

    def build(module: nn.Module, cls: Any, *rest: Any) -> Any:
        nonlocal share, total, counts, seen
        shapes = {name: p.shape for name, p in module.named_parameters()}
        sizes = [shape.numel() for shape in shapes.values()]
        share, total = sum(sizes) // ranks + max(sizes), sum(sizes)
        seen = Counter(free="state" not in asked or len(sizes) < 2 * ranks)  # of an optimizer on every rank

        class Counted(cls):  # type: ignore[misc]
            def __init__(self, params: Any, **options: Any) -> None:
                super().__init__(params, **options)
                seen["optimizers"] += 1
                hold_share("state", sum(p.numel() for group in self.param_groups for p in group["params"]))

        built = chosen.build(module, Counted if "state" in asked else cls, *rest)
        for name, dim in asked.get("split", {}).items():
            has, most = dict(built[0].named_parameters())[name].shape[dim], -(-shapes[name][dim] // ranks)
            hold(has <= most, f"axis {dim} of {name} has {has} elements; {most} are this rank's")
        hold_share(f".{keeps}", _kept(keeps, *built))
        counts = count_collectives()
        return built

    def before(model: Any, optimizer: Any) -> None:
        seen["batches"] += 1
        is_used = bool(seen["free"] or seen["optimizers"] or seen["batches"] < 3)
        hold(is_used, "optimizer_cls is given no parameters, although steps were taken")
        chosen.before(model, optimizer)

    def finish(model: Any, optimizer: Any) -> None:
        launched = counts["reductions"]
        chosen.finish(model, optimizer)
        taken, counts["reductions"] = counts["reductions"], 0
        hold_share(f".{keeps}", _kept(keeps, model, optimizer))
        early, most = asked.get("early", 0), asked.get("most", math.inf)
        hold(launched >= early, f"{launched} collectives were launched during backward; {early} or more should be")
        hold(taken <= most, f"a step took {taken} collectives; {most} or fewer should do")

    return replace(chosen, build=build, finish=finish, before=before)


def _kept(name: str | None, model: Any, optimizer: Any) -> int:
    """Elements of the storages of all parameters' .data or .grad."""
    own = {*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])}
    tensors = [each for each in (getattr(p, name) for p in own) if each is not None] if name else []
    stores = {each.untyped_storage().data_ptr(): len(each.untyped_storage()) // each.itemsize for each in tensors}
    return sum(stores.values())


def grade_tests(name: str, file: Path, module: ModuleType, path: Path, ranks: int, timeout: float) -> Report:
    """The report on tests, or on the file that they are of (`module`) if that is wrong itself."""
    if name not in VARIANTS:
        raise UserError(f"--tests: {name} has no broken variants; {', '.join(VARIANTS)} have")
    found = {key: value for key, value in vars(load_file(path)).items() if key.startswith("test_") and callable(value)}
    if not found:
        raise UserError(f"{path} has no function test_...")
    if (report := grade(name, file, ranks, timeout, only=("training",))).exit_code():
        return report
    right = getattr(module, function := EXERCISES[name]["name"])

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
            says = each.says.partition(": ")[0] if fails else "your tests accept this broken variant: all of them pass"
            report.verdicts[i] = replace(each, status=RIGHT if fails else WRONG, says=says)
    return report


def _ring(change: Callable[..., object], all_reduce: Callable[..., Any], times: int = 1) -> Callable[..., None]:
    """Broken variant of an all-reduce: `change(result, own, rank, world)` alters the result, and every piece is sent
    `times` times."""

    def broken(flat: Tensor, exchange: Any, rank: int, world: int) -> None:
        def send(piece: Tensor, into: Tensor) -> None:
            for _ in range(times - 1):
                exchange(piece.clone(), into.clone())
            exchange(piece, into)

        own = flat.clone()
        all_reduce(flat, send, rank, world)
        change(flat, own, rank, world)

    return broken


def _ddp(change: Callable[..., object], first: int, cls: Any, unsent: str = "") -> Any:
    """Broken variant of a wrapper: `change` alters its reduced gradients, from number `first` on; it leaves parameters
    or buffers (`unsent`) as each rank had them."""

    class Broken(cls):  # type: ignore[misc]
        def __init__(self, module: Any, *rest: Any, **options: Any) -> None:
            tensors = [each.detach() for each in getattr(module, unsent)()] if unsent else []
            before = [each.clone() for each in tensors]
            super().__init__(module, *rest, **options)
            for each, old in zip(tensors, before, strict=True):
                each.copy_(old)

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


VARIANTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "ring": {
        "the mean, not the sum": partial(_ring, lambda flat, own, rank, world: flat.div_(world)),
        "rank 1 keeps its own": partial(_ring, lambda flat, own, rank, world: rank == 1 and flat.copy_(own)),
        "what does not divide evenly is left out": partial(
            _ring, lambda flat, own, rank, world: flat[(cut := len(flat) // world * world):].copy_(own[cut:])),
        "every piece is sent twice": partial(_ring, lambda *_: None, times=2),
    },
    "naive-ddp": {
        "gradients are summed": partial(_ddp, lambda new, own, p: new.mul_(current_place().world_size), 0),
        "nothing is reduced": partial(_ddp, lambda new, own, p: new.copy_(own), 0),
        "one gradient is forgotten": partial(_ddp, lambda new, own, p: new.copy_(own), -1),
        "gradients are those of the step before": partial(_ddp, _stale, 0),
        "weights are not sent": partial(_ddp, lambda new, own, p: None, 0, unsent="parameters"),
        "buffers are not sent": partial(_ddp, lambda new, own, p: None, 0, unsent="buffers"),
    },
}  # fmt: skip
