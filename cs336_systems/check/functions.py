"""Exercises that are functions, not wrappers: the conditions that each must meet, asserted on forked ranks."""

import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.check.candidates import Candidate
from cs336_systems.check.cases import Case, bound, factor_of, largest
from cs336_systems.check.ranks import BrokenPromiseError, run_cases
from cs336_systems.check.report import BROKEN, FAILED, RIGHT, WRONG, Report, Verdict, first_error
from cs336_systems.check.targets import count_collectives, exchange
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


Split = Callable[[Tensor], Tensor]  # this rank's part of a whole tensor


def split(group: Group, dim: int, sizes: Sequence[int] = ()) -> Split:
    """This rank's part along an axis, equal to the others' or of the given sizes."""
    return lambda x: (x.split(sizes, dim) if sizes else x.chunk(group.size(), dim))[group.rank()]


def compare(
    what: str, want: Callable[..., Tensor], got: Callable[..., Any], inputs: dict[str, tuple[Tensor, Split]],
    part: Split = lambda x: x, factor: Tensor | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Compare a student's function of this rank's parts of some inputs with the right one of the whole: this rank's
    part of the result, and the inputs' gradients where that of the result is `factor`."""
    whole = [x.requires_grad_() for x, _ in inputs.values()]
    own = [part_of(x).detach().clone().requires_grad_() for x, part_of in inputs.values()]
    right = want(*whole)
    factor = _random(*right.shape, seed=3) if factor is None else factor
    (right * factor).sum().backward()
    result = got(*own)
    near(what, result, part(right), scale)
    (result * part(factor)).sum().backward()
    for (name, (x, part_of)), mine in zip(inputs.items(), own, strict=True):
        assert x.grad is not None
        near(f"the gradient of the {name}", mine.grad, part_of(x.grad), scale)


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
    targets = torch.randint(local * world, (tokens,), generator=torch.Generator().manual_seed(1))
    targets = targets % local + (world - 1) * local if last else targets
    counts, logits = count_collectives(), (scale * _random(tokens, local * world), split(group, 1))
    right, own = (lambda x, loss=loss: loss(x, targets) for loss in (F.cross_entropy, module.vocabulary_loss))
    compare("the loss", right, own, {"logits": logits}, factor=torch.tensor(3.0), scale=scale)
    sent, most = counts["elements"], 8 * tokens
    few = not counted or sent <= most
    hold(few, f"collectives were given {sent} elements for {tokens} tokens; {most} or fewer should do")


def _attention(module: ModuleType, group: Group, scale: float = 1.0, counted: bool = False) -> None:
    """Compare output and gradients with torch's of the whole sequence; `counted`: the traffic, too."""
    heads, dim, world = 2, 3, group.size()
    part, counts = split(group, 1), count_collectives()
    sizes = {"queries": scale, "keys": 1.0, "values": 1.0}
    inputs = {name: (size * _random(heads, 4 * world, dim, seed=ord(name[0])), part) for name, size in sizes.items()}
    right = partial(F.scaled_dot_product_attention, is_causal=True)
    own = lambda *qkv: module.ring_attention(*qkv, exchange, group.rank(), world)  # noqa: E731
    compare("the output", right, own, inputs, part, scale=scale)
    # Keys and values in forward and again in backward, and their gradients all the way round; sent and received.
    most, moved = 2 * (2 * (world - 1) + world) * 2 * heads * 4 * dim, counts["elements"]
    hold(not counted or moved <= most, f"messages had {moved} elements, sent and received; a ring needs {most}")


def _experts(module: ModuleType, group: Group, crowd: bool = False, absent: bool = False) -> None:
    """Compare results and gradients with those of one process. `crowd`: every row goes to expert 1;
    `absent`: the last rank has no rows."""
    rank, world, local, dim = group.rank(), group.size(), 2, 3
    sizes = [0 if absent and each == world - 1 else 5 + 3 * each for each in range(world)]
    of_rows, computed = split(group, 0, sizes), [0] * local
    chosen = torch.randint(local * world, (sum(sizes),), generator=torch.Generator().manual_seed(2))
    chosen = torch.ones_like(chosen) if crowd else chosen

    def own(rows: Tensor, weights: Tensor) -> Any:
        def expert(number: int, given: Tensor) -> Tensor:
            computed[number] += len(given)
            return torch.tanh(given @ weights[number])

        return module.run_experts(rows, of_rows(chosen), [partial(expert, number) for number in range(local)])

    rows, weights = _random(sum(sizes), dim), _random(local * world, dim, dim, seed=1)
    inputs = {"rows": (rows, of_rows), "experts": (weights, split(group, 0))}
    right = lambda rows, weights: torch.tanh(torch.einsum("nd,nde->ne", rows, weights[chosen]))  # noqa: E731
    compare("the result", right, own, inputs, of_rows)
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


def _forked(act: Callable[[], object]) -> int:
    """Exit code of another process that calls a function: 1 if that raises, negative if it is killed."""
    process = get_context("fork").Process(target=act)
    process.start()
    process.join()
    return process.exitcode or 0


def _reload(module: ModuleType, group: Group, killed: bool = False) -> None:
    """Save and load states one after another; or, `killed`, kill a forked process before some of the lines that a save
    runs, drawn from the student's file and from all."""
    with tempfile.TemporaryDirectory(prefix="check-") as name:
        folder = Path(name)
        if not killed:
            hold(module.load(folder) is None, "load of an empty folder is not None")
            module.save(_state(0), folder)  # in this process, which reports its error
            for step in (1, 2, 3):
                code = _forked(partial(module.save, _state(step), folder))  # so that the folder alone has the state
                hold(code == 0, f"the save of step {step} fails")
                hold(_is(module.load(folder), step), f"load after the save of step {step} gives something else")
            return
        for _ in range(2):  # the first one also imports
            module.save(_state(1), folder)
            lines = _traced(module, folder)
    own, draw = [number for number, (name, _) in enumerate(lines) if name == module.__file__], random.Random(0)
    for number in sorted({*draw.sample(own, min(len(own), 60)), *draw.sample(range(len(lines)), min(len(lines), 20))}):
        with tempfile.TemporaryDirectory(prefix="check-") as name:
            module.save(_state(1), Path(name))
            _forked(partial(_traced, module, Path(name), last=number))
            file, line = lines[number]
            _hold_whole(module, Path(name), f"killed before line {line} of {Path(file).name}")


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


def _hold_whole(module: ModuleType, folder: Path, where: str) -> None:
    """The last whole state is loaded, and another save works in spite of what the killed one left."""
    for save, steps, raises, otherwise in (
        (lambda: None, (1, 2), "load raises", "what is loaded is the state of no step"),
        (lambda: module.save(_state(3), folder), (3,), "the next save and load raise",
         "after the next save an older state is loaded"),
    ):  # fmt: skip
        try:
            save()
            state = module.load(folder)
        except Exception as error:
            raise BrokenPromiseError(f"{where}: {raises} {type(error).__name__}") from None
        hold(any(_is(state, step) for step in steps), f"{where}: {otherwise}")


PROBES: dict[str, Callable[..., None]] = {  # called with each row of `probes` in exercises.toml
    "one-f-one-b": _steps, "vocabulary-loss": _loss, "ring-attention": _attention, "expert-dispatch": _experts,
    "checkpoint": _reload,
}  # fmt: skip
