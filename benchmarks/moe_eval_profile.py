"""Calls and times by name that the profiler counts during an evaluation, on every rank.

`count_calls` counts what `torch.profiler.profile.key_averages` does, but without making a Python object of each of
hundreds of thousands of events. With a folder every rank leaves its trace there as well.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.moe_eval_model import RUN, tagged
from benchmarks.moe_eval_rank import Scorer
from benchmarks.moe_words import How
from cs336_systems.comm import agree
from cs336_systems.presets import Dispatch
from cs336_systems.profiling import Capture
from cs336_systems.profiling.capture import quiet_profiler
from cs336_systems.profiling.names import parse_collective, parse_tag, step_number

Calls = dict[str, list[int]]  # by name: how many, and nanoseconds in all, 0 for operators


def count_calls(
    scorer: Scorer,
    dispatch: Dispatch,
    batches: int,
    how: How,
    folder: Path | None = None,
    about: dict[str, Any] | None = None,
) -> list[Calls]:
    """Score some batches under the profiler: each rank's calls, the same on every rank, all of which must call this."""
    tally = scorer.new_tally(dispatch, how)
    with _profiler(scorer, folder, batches, about or {}) as run:
        scorer.line_up()
        with tagged(scorer.evaluated.model), record_function(RUN):
            for number in range(batches):
                with record_function(f"step {number}"), record_function("forward"):
                    scorer.take(number, tally)
    return [
        json.loads(said) for said in agree("calls", json.dumps(calls_of(run[0]), allow_nan=False), scorer.mesh.world)
    ]


@contextmanager
def _profiler(scorer: Scorer, folder: Path | None, batches: int, about: dict[str, Any]) -> Iterator[list[profile]]:
    """A profiler that runs inside the block and is in the list after it; with a folder it writes this rank's trace."""
    found: list[profile] = []
    if folder is not None:
        model = scorer.evaluated.model
        capture = Capture(folder, scorer.mesh.world, model, steps=batches, device=scorer.device, meta=about)
        with capture:
            yield found
        found.append(capture.profiler)
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if scorer.device.type == "cuda" else [])]
    running = profile(activities=activities)
    with ExitStack() as stack:
        with quiet_profiler():
            running.start()
        stack.callback(_stop, running)
        yield found
    found.append(running)


def _stop(running: profile) -> None:
    with quiet_profiler():
        running.stop()


def calls_of(run: profile) -> Calls:
    """Calls by name on the host, and the nanoseconds of what is no operator. Numbered collectives count by verb; steps
    and modules, which only the merged trace shows, do not count."""
    assert run.profiler is not None
    assert run.profiler.kineto_results is not None
    operators, found = Counter[str](), Calls()
    for event in run.profiler.kineto_results.events():
        name = event.name()
        if name.startswith("aten::"):
            operators[name] += 1
            continue
        if collective := parse_collective(name):
            name = f"{collective.action} {collective.verb}"
        if event.device_type() == DeviceType.CPU and not parse_tag(name) and step_number(name) is None:
            entry = found.setdefault(name, [0, 0])
            entry[0] += 1
            entry[1] += event.duration_ns()
    return found | {name: [count, 0] for name, count in operators.items()}


def calls(ranks: list[Calls], name: str) -> list[int]:
    """How often each rank called an operator."""
    return [each.get(name, [0, 0])[0] for each in ranks]


def seconds(ranks: list[Calls], name: str) -> list[float]:
    """How long each rank was in a span that is no operator."""
    return [each.get(name, [0, 0])[1] / 1e9 for each in ranks]


def waiting(ranks: list[Calls]) -> list[float]:
    """The share of the evaluation that each rank stood in an all-to-all's wait."""
    waits, runs = seconds(ranks, "wait all-to-all"), seconds(ranks, RUN)
    return [wait / run if run else 0.0 for wait, run in zip(waits, runs, strict=True)]
