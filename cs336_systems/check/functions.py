"""Exercises that are functions, not wrappers: the conditions that each must meet, asserted on forked ranks."""

import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.check.candidates import Candidate
from cs336_systems.check.cases import Case
from cs336_systems.check.foreign import count_collectives, exchange
from cs336_systems.check.ranks import BrokenPromiseError, run_cases
from cs336_systems.check.report import BROKEN, FAILED, RIGHT, WRONG, Report, Verdict, first_error
from cs336_systems.check.tolerances import bound, factor_of, largest
from cs336_systems.comm import Group
from cs336_systems.schedule import Action, simulate
from cs336_systems.schedule.lists import bubble_fraction
from cs336_systems.schedule.simulation import ScheduleError

PIPELINES = ((1, 3), (2, 4), (4, 8), (4, 2), (3, 7), (8, 9))  # stages and microbatches


def hold(is_true: bool, says: str) -> None:
    """Raise BrokenPromiseError with what is wrong, unless it is true."""
    if not is_true:
        raise BrokenPromiseError(says)


def probe(report: Report, probes: Mapping[str, Callable[[Group], None]], timeout: float, page: str = "") -> Report:
    """Call each function on forked ranks, and add a verdict on it to the report: right, wrong where a promise is
    broken, failed at any other error."""
    function = Candidate(report.candidate, "function", lambda case, group: probes[case](group))
    for case, notes in run_cases(function, [Case(each) for each in probes], report.ranks, timeout):
        error = first_error([each.error for each in notes])
        status = WRONG if error.startswith(BROKEN) else FAILED if error else RIGHT
        report.verdicts.append(Verdict(case.name, status, error.removeprefix(BROKEN), page))
    return report


def near(what: str, got: Any, want: Tensor, scale: float = 1.0) -> None:
    """Require that a tensor equals the expected one up to rounding in float64, which exp multiplies by the size of its
    argument; no gradient is zero."""
    got = torch.zeros_like(want) if got is None else got
    hold(isinstance(got, Tensor), f"{what} is no tensor")
    hold(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    off, factor = largest(got - want), factor_of(got, want)
    times = "" if factor is None else f", {factor:.4g} times what it must be"
    hold(off <= scale * bound(torch.float64, 64, 64) * (1 + largest(want)), f"{what} is off by {off:.2g}{times}")


@dataclass
class Part:
    """This rank's part of a tensor along an axis, equal to the others' or of the given sizes: a leaf of its own."""

    whole: Tensor
    group: Group
    dim: int = 0
    sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.whole.requires_grad_()
        self.own = self.of(self.whole).detach().clone().requires_grad_()

    def of(self, x: Tensor) -> Tensor:
        """The same part of another tensor."""
        parts = x.split(self.sizes, self.dim) if self.sizes else x.chunk(self.group.size(), self.dim)
        return parts[self.group.rank()]

    def near(self, name: str, scale: float = 1.0) -> None:
        """Require that its gradient is the same part of the whole's."""
        assert self.whole.grad is not None
        near(f"the gradient of the {name}", self.own.grad, self.of(self.whole.grad), scale)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _steps(module: ModuleType, group: Group, live: bool = False, idle: bool = False) -> None:
    """Simulate the lists: no deadlock; `live`: few live microbatches; `idle`: no more idle time than 1F1B."""
    for stages, microbatches in PIPELINES:
        lists = [[Action(*each) for each in module.steps(r, stages, microbatches)] for r in range(stages)]
        where, most = f"{stages} stages, {microbatches} microbatches", max(len(each) for each in lists)
        hold(most == 2 * microbatches, f"{where}: the longest list has {most} steps, not {2 * microbatches}")
        try:
            played = simulate(lists)
        except ScheduleError as error:
            raise BrokenPromiseError(f"{where}: {error}") from None
        for stage, found in enumerate(played.peak_live if live else ()):
            most = min(stages - stage, microbatches)
            hold(found <= most, f"{where}: stage {stage} has {found} live microbatches, at most {most} should be")
        want = bubble_fraction("1f1b", stages, microbatches)
        right = not idle or math.isclose(played.bubble, want, abs_tol=1e-9)
        hold(right, f"{where}: idle for {played.bubble:.4f} of the time, not {want:.4f}")


def _loss(module: ModuleType, group: Group, scale: float = 1.0, last: bool = False, counted: bool = False) -> None:
    """Compare loss and gradient with torch's of all logits; `last`: targets on the last rank only; `counted`: bytes."""
    tokens, local, world = 12, 32, group.size()
    logits = Part(scale * _random(tokens, local * world), group, 1)
    targets = torch.randint(local * world, (tokens,), generator=torch.Generator().manual_seed(1))
    targets = targets % local + (world - 1) * local if last else targets
    want = F.cross_entropy(logits.whole, targets)
    (3 * want).backward()
    counts = count_collectives()
    loss = module.vocabulary_loss(logits.own, targets)
    (3 * loss).backward()
    near("the loss", loss, want, scale)
    logits.near("logits", scale)
    sent, most = counts["elements"], 8 * tokens
    few = not counted or sent <= most
    hold(few, f"collectives were given {sent} elements for {tokens} tokens; {most} or fewer should do")


def _attention(module: ModuleType, group: Group, scale: float = 1.0, counted: bool = False) -> None:
    """Compare output and gradients with torch's of the whole sequence; `counted`: the traffic, too."""
    heads, dim, world = 2, 3, group.size()
    q, k, v, weight = _random(4, heads, 4 * world, dim).unbind()
    parts = [Part(each.detach(), group, 1) for each in (scale * q, k, v)]
    want = F.scaled_dot_product_attention(parts[0].whole, parts[1].whole, parts[2].whole, is_causal=True)
    (want * weight).sum().backward()
    counts = count_collectives()
    y = module.ring_attention(*(each.own for each in parts), exchange, group.rank(), world)
    near("the output", y, parts[0].of(want), scale)
    (y * parts[0].of(weight)).sum().backward()
    for name, part in zip(("queries", "keys", "values"), parts, strict=True):
        part.near(name, scale)
    # Keys and values in forward and again in backward, and their gradients all the way round; sent and received.
    most, moved = 2 * (2 * (world - 1) + world) * 2 * parts[0].own.numel(), counts["elements"]
    hold(not counted or moved <= most, f"messages had {moved} elements, sent and received; a ring needs {most}")


def _experts(module: ModuleType, group: Group, crowd: bool = False, absent: bool = False) -> None:
    """Compare results and gradients with those of one process. `crowd`: every row goes to expert 1;
    `absent`: the last rank has no rows."""
    rank, world, local, dim = group.rank(), group.size(), 2, 3
    sizes = [0 if absent and each == world - 1 else 5 + 3 * each for each in range(world)]
    rows = Part(_random(sum(sizes), dim), group, sizes=sizes)
    weights = Part(_random(local * world, dim, dim, seed=1), group)
    chosen = torch.randint(local * world, (sum(sizes),), generator=torch.Generator().manual_seed(2))
    chosen = torch.ones_like(chosen) if crowd else chosen
    factors = _random(sum(sizes), dim, seed=3)
    want = torch.tanh(torch.einsum("nd,nde->ne", rows.whole, weights.whole[chosen]))
    (want * factors).sum().backward()
    computed = [0] * local

    def expert(number: int, given: Tensor) -> Tensor:
        computed[number] += len(given)
        return torch.tanh(given @ weights.own[number])

    y = module.run_experts(rows.own, rows.of(chosen), [partial(expert, number) for number in range(local)])
    near("the result", y, rows.of(want))
    (y * rows.of(factors)).sum().backward()
    rows.near("rows")
    weights.near("experts")
    for number, count in enumerate(computed):
        due = int((chosen == rank * local + number).sum())
        hold(count == due, f"expert {rank * local + number} computed {count} rows, and {due} were sent to it")


def _state(step: int) -> dict[str, Any]:
    return {"step": step, "weight": torch.full((20_000,), float(step)), "bias": torch.arange(3) + step}


def _is(state: Any, step: int) -> bool:
    want = _state(step)
    return isinstance(state, dict) and state.keys() == want.keys() and all(
        torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)) for name, value in want.items()
    )  # fmt: skip


def _reload(module: ModuleType, group: Group, killed: bool = False) -> None:
    """Save and load states one after another, or `killed` saves."""
    if killed:
        _killed(module)
        return
    with tempfile.TemporaryDirectory(prefix="check-") as name:
        hold(module.load(Path(name)) is None, "load of an empty folder is not None")
        module.save(_state(0), Path(name))  # in this process, which reports its error
        for step in (1, 2, 3):
            code = _forked(partial(module.save, _state(step), Path(name)))  # so that the folder alone has the state
            hold(code == 0, f"the save of step {step} fails")
            hold(_is(module.load(Path(name)), step), f"load after the save of step {step} gives something else")


def _forked(act: Callable[[], object]) -> int:
    """Exit code of another process that calls a function: 1 if that raises, negative if it is killed."""
    process = get_context("fork").Process(target=act)
    process.start()
    process.join()
    return process.exitcode or 0


def _traced(module: ModuleType, folder: Path, last: int | None = None) -> list[tuple[str, int]]:
    """Save step 2; returns file and number of each line of Python that runs, in order. With `last`, kill the process
    before the line at this index."""
    lines: list[tuple[str, int]] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            if len(lines) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        module.save(_state(2), folder)
    finally:
        sys.settrace(None)
    return lines


def _killed(module: ModuleType) -> None:
    """Kill a forked process before some of the lines that a save runs, drawn from the student's file and from all."""
    with tempfile.TemporaryDirectory(prefix="check-") as name:
        for _ in range(2):  # the first one also imports
            module.save(_state(1), Path(name))
            lines = _traced(module, Path(name))
    own = [number for number, (name, _) in enumerate(lines) if name == module.__file__]
    draw = random.Random(0)
    for number in sorted({*draw.sample(own, min(len(own), 60)), *draw.sample(range(len(lines)), min(len(lines), 20))}):
        with tempfile.TemporaryDirectory(prefix="check-") as name:
            module.save(_state(1), Path(name))
            _forked(partial(_traced, module, Path(name), last=number))
            file, line = lines[number]
            _hold_whole(module, Path(name), f"killed before line {line} of {Path(file).name}")


def _hold_whole(module: ModuleType, folder: Path, where: str) -> None:
    """The last whole state is loaded, and another save works in spite of what the killed one left."""
    for saves, steps, raises, otherwise in (
        (False, (1, 2), "load raises", "what is loaded is the state of no step"),
        (True, (3,), "the next save and load raise", "after the next save an older state is loaded"),
    ):
        try:
            if saves:
                module.save(_state(3), folder)
            state = module.load(folder)
        except Exception as error:
            raise BrokenPromiseError(f"{where}: {raises} {type(error).__name__}") from None
        hold(any(_is(state, step) for step in steps), f"{where}: {otherwise}")


PROBES: dict[str, Callable[..., None]] = {  # called with each row of `probes` in exercises.toml
    "one-f-one-b": _steps, "vocabulary-loss": _loss, "ring-attention": _attention, "expert-dispatch": _experts,
    "checkpoint": _reload,
}  # fmt: skip
