"""Exercises that are functions, not wrappers: the conditions that each must meet, asserted on forked ranks."""

import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.check.candidates import Candidate
from cs336_systems.check.cases import Case
from cs336_systems.check.foreign import count_collectives, exchange
from cs336_systems.check.ranks import run_cases
from cs336_systems.check.report import FAILED, RIGHT, WRONG, Report, Verdict, is_lost
from cs336_systems.check.tolerances import bound
from cs336_systems.comm import Group
from cs336_systems.schedule import Action, simulate
from cs336_systems.schedule.lists import bubble_fraction
from cs336_systems.schedule.simulation import ScheduleError

PIPELINES = ((1, 3), (2, 4), (4, 8), (4, 2), (3, 7), (8, 9))  # stages and microbatches
Probe = Callable[[ModuleType, Group], None]


class BrokenPromiseError(AssertionError):
    """A condition of an exercise is not met."""


def hold(is_true: bool, says: str) -> None:
    """Raise BrokenPromiseError with what is wrong, unless it is true."""
    if not is_true:
        raise BrokenPromiseError(says)


def probe(name: str, module: ModuleType, ranks: int, timeout: float, page: str) -> Report:
    """The report on the functions of a file: a verdict for each property, in one process where it needs no more."""
    ranks = 1 if name in ("one-f-one-b", "checkpoint") else ranks
    report = Report(name, "function", ranks)
    probes = {each: partial(function, module) for each, function in PROBES[name].items()}
    for case, error in first_errors(name, probes, ranks, timeout).items():
        kind, _, says = error.partition(": ")
        broken = kind == BrokenPromiseError.__name__
        status = WRONG if broken else FAILED if error else RIGHT
        report.verdicts.append(Verdict(case, status, says if broken else error, page))
    return report


def first_errors(
    name: str, probes: Mapping[str, Callable[[Group], None]], ranks: int, timeout: float
) -> dict[str, str]:
    """Call each function on forked ranks; returns the most informative error of each, or an empty text."""
    function = Candidate(name, "function", lambda case, group: probes[case](group))
    found = run_cases(function, [Case(each, kinds=("function",)) for each in probes], ranks, timeout)
    errors = {case: [each.error for each in notes if each.error] for case, notes in found.items()}
    return {
        case: next((each for each in said if not is_lost(each)), "".join(said[:1])) for case, said in errors.items()
    }


def near(what: str, got: Any, want: Tensor, scale: float = 1.0) -> None:
    """Require that a tensor equals the expected one up to rounding in float64, which exp multiplies by the size of its
    argument; no gradient is zero."""
    got = torch.zeros_like(want) if got is None else got
    hold(isinstance(got, Tensor), f"{what} is no tensor")
    hold(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    off = (got - want).abs().max().item() if want.numel() else 0.0
    limit = scale * bound(torch.float64, 64, 64) * (1 + (want.abs().max().item() if want.numel() else 0.0))
    if not off <= limit:
        factor = (got * want).sum().item() / max((want * want).sum().item(), 1e-300)
        is_multiple = want.numel() > 1 and (got - factor * want).abs().max().item() <= (1 + abs(factor)) * limit
        times = f", {factor:.4g} times what it must be" if is_multiple else ""
        raise BrokenPromiseError(f"{what} is off by {off:.2g}{times}")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _steps(module: ModuleType, group: Group, live: bool = False, idle: bool = False) -> None:
    """Lists that can be played to their end; `live`: with few live microbatches; `idle`: with no needless waiting."""
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
    """Loss and gradient against torch's on the whole; `last`: all targets are the last rank's; `counted`: traffic."""
    tokens, local, rank, world = 12, 32, group.rank(), group.size()
    logits = (scale * _random(tokens, local * world)).requires_grad_()
    targets = torch.randint(local * world, (tokens,), generator=torch.Generator().manual_seed(1))
    targets = targets % local + (world - 1) * local if last else targets
    want = F.cross_entropy(logits, targets)
    (3 * want).backward()
    assert logits.grad is not None
    mine = logits.detach().chunk(world, 1)[rank].clone().requires_grad_()
    counts = count_collectives(elements=True) if counted else [0]
    loss = module.vocabulary_loss(mine, targets)
    (3 * loss).backward()
    near("the loss", loss, want, scale)
    near("the gradient of the logits", mine.grad, logits.grad.chunk(world, 1)[rank], scale)
    most = 8 * tokens
    hold(
        counts[0] <= most, f"collectives were given {counts[0]} elements for {tokens} tokens; {most} or fewer should do"
    )


def _attention(module: ModuleType, group: Group, scale: float = 1.0, counted: bool = False) -> None:
    """Output and gradients against torch's on the whole sequence, or the traffic."""
    heads, dim, rank, world = 2, 3, group.rank(), group.size()
    q, k, v, weight = _random(4, heads, 4 * world, dim).unbind()
    whole = [(scale * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    want = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True)
    (want * weight).sum().backward()
    mine = [each.detach().chunk(world, 1)[rank].clone().requires_grad_() for each in whole]
    counts = count_collectives(elements=True) if counted else [0]
    y = module.ring_attention(*mine, exchange, rank, world)
    near("the output", y, want.chunk(world, 1)[rank], scale)
    (y * weight.chunk(world, 1)[rank]).sum().backward()
    for name, own, full in zip(("queries", "keys", "values"), mine, whole, strict=True):
        assert full.grad is not None
        near(f"the gradient of the {name}", own.grad, full.grad.chunk(world, 1)[rank], scale)
    # Keys and values in forward and again in backward, and their gradients all the way round; sent and received.
    most = 2 * (2 * (world - 1) + world) * 2 * mine[0].numel()
    hold(counts[0] <= most, f"messages had {counts[0]} elements, sent and received; a ring needs {most}")


def _experts(module: ModuleType, group: Group, crowd: bool = False, absent: bool = False) -> None:
    """Results and gradients against all rows and experts in one process. `crowd`: every row goes to expert 1;
    `absent`: the last rank has no rows."""
    rank, world, local, dim = group.rank(), group.size(), 2, 3
    sizes = [0 if absent and each == world - 1 else 5 + 3 * each for each in range(world)]
    rows = _random(sum(sizes), dim).requires_grad_()
    weights = _random(local * world, dim, dim, seed=1).requires_grad_()
    chosen = torch.randint(local * world, (sum(sizes),), generator=torch.Generator().manual_seed(2))
    chosen = torch.ones_like(chosen) if crowd else chosen
    factors = _random(sum(sizes), dim, seed=3)
    want = torch.tanh(torch.einsum("nd,nde->ne", rows, weights[chosen]))
    (want * factors).sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    mine = rows.detach().split(sizes)[rank].clone().requires_grad_()
    own = weights.detach().chunk(world)[rank].clone().requires_grad_()
    computed = [0] * local

    def expert(number: int, given: Tensor) -> Tensor:
        computed[number] += len(given)
        return torch.tanh(given @ own[number])

    y = module.run_experts(mine, chosen.split(sizes)[rank], [partial(expert, number) for number in range(local)])
    near("the result", y, want.split(sizes)[rank])
    (y * factors.split(sizes)[rank]).sum().backward()
    near("the gradient of the rows", mine.grad, rows.grad.split(sizes)[rank])
    near("the gradient of the experts", own.grad, weights.grad.chunk(world)[rank])
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


def _reload(module: ModuleType, group: Group) -> None:
    with tempfile.TemporaryDirectory(prefix="check-") as name:
        hold(module.load(Path(name)) is None, "load of an empty folder is not None")
        for step in (1, 2, 3):
            module.save(_state(step), Path(name))
            hold(_is(module.load(Path(name)), step), f"load after the save of step {step} gives something else")


def _traced(module: ModuleType, folder: Path, seen: Callable[[str, int], None]) -> None:
    """Save step 2, and call `seen` with file and number before each line of Python that runs for it."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            seen(frame.f_code.co_filename, frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        module.save(_state(2), folder)
    finally:
        sys.settrace(None)


def _killed(module: ModuleType, group: Group) -> None:
    """Kill a forked process before some of the lines that a save runs, all in the student's file and others drawn."""
    lines: list[tuple[str, int]] = []
    with tempfile.TemporaryDirectory(prefix="check-") as name:
        for _ in range(2):  # the first one also imports
            lines.clear()
            module.save(_state(1), Path(name))
            _traced(module, Path(name), lambda *line: lines.append(line))
    own = [number for number, (name, _) in enumerate(lines) if name == module.__file__]
    draw = random.Random(0)
    for number in sorted({*draw.sample(own, min(len(own), 60)), *draw.sample(range(len(lines)), min(len(lines), 20))}):
        with tempfile.TemporaryDirectory(prefix="check-") as name:
            module.save(_state(1), Path(name))
            _killed_before(number, module, Path(name))
            file, line = lines[number]
            _hold_whole(module, Path(name), f"killed before line {line} of {Path(file).name}")


def _killed_before(number: int, module: ModuleType, folder: Path) -> None:
    """Save step 2 in a forked process that is killed before the line of this number in the order of execution."""
    if process := os.fork():
        os.waitpid(process, 0)
        return
    left = [number]

    def seen(name: str, line: int) -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    try:
        _traced(module, folder, seen)
    finally:
        os._exit(0)


def _hold_whole(module: ModuleType, folder: Path, where: str) -> None:
    """The last whole state is loaded, and another save works in spite of what the killed one left."""
    try:
        state = module.load(folder)
    except Exception as error:
        raise BrokenPromiseError(f"{where}: load raises {type(error).__name__}") from None
    hold(_is(state, 1) or _is(state, 2), f"{where}: what is loaded is the state of no step")
    try:
        module.save(_state(3), folder)
        state = module.load(folder)
    except Exception as error:
        raise BrokenPromiseError(f"{where}: the next save and load raise {type(error).__name__}") from None
    hold(_is(state, 3), f"{where}: after the next save an older state is loaded")


PROBES: dict[str, dict[str, Probe]] = {
    "one-f-one-b": {
        "order, and no deadlock": _steps, "live microbatches": partial(_steps, live=True),
        "idle time": partial(_steps, idle=True),
    },
    "vocabulary-loss": {
        "loss and gradient": _loss, "large logits": partial(_loss, scale=2000.0),
        "targets of one rank only": partial(_loss, last=True), "traffic": partial(_loss, counted=True),
    },
    "ring-attention": {
        "output and gradients": _attention, "large scores": partial(_attention, scale=2000.0),
        "traffic": partial(_attention, counted=True),
    },
    "expert-dispatch": {
        "results and gradients": _experts, "empty experts": partial(_experts, crowd=True),
        "a rank without rows": partial(_experts, absent=True),
    },
    "checkpoint": {"saved and loaded": _reload, "killed at any moment": _killed},
}  # fmt: skip
