"""Capture: profile a worker on every rank, `with Capture(folder) as capture:` around its steps.

Each rank writes `rank<r>.trace.json.gz`: torch.profiler's own trace, mended so that every reader takes it, and under
the key "cs336" what it lacks: the rank, its clock against rank 0's, and which tensors were held in which memory.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from cs336_systems.comm import Group, Place, find_place
from cs336_systems.comm.clock import Offset, clock_offset
from cs336_systems.errors import UserError
from cs336_systems.marks import MARK, mark_address
from cs336_systems.profiling.held import Held, describe, held_by, live_storages
from cs336_systems.profiling.nesting import nest_host
from cs336_systems.profiling.quiet import quiet_profiler
from cs336_systems.profiling.tags import tag_modules
from cs336_systems.profiling.trace import HOST, OURS, parse, read_json, trace_name, write_json


class Capture:
    """Profiles `steps` steps of a worker after `warmup` steps that it only counts, and writes this rank's trace.

        with Capture(folder, group, model, optimizer, warmup=2, steps=1) as capture:
            for batch in batches[: capture.total]:
                with capture.step():
                    with capture.phase("forward"): ...
                    with capture.phase("backward"): ...
                    with capture.phase("optimizer"): ...

    A worker that knows nothing of it is profiled whole: `with Capture(folder): worker()`. Modules are tagged anyway.
    `held` lists (category, tensor) of what is to be told apart in memory, by default the model's and the optimizer's.
    `stack` adds Python's frames, `nvtx` ranges of the same names for nsys.

    Raises UserError for a folder that cannot be written, and if fewer steps were taken than there are to be.
    """

    def __init__(
        self,
        folder: Path,
        group: Group | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        warmup: int = 0,
        steps: int = 1,
        stack: bool = False,
        nvtx: bool = False,
        held: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.group, self.warmup, self.steps, self.nvtx = folder, group, warmup, steps, nvtx
        self.held = held or (lambda: held_by(model, optimizer))
        self.meta = meta or {}
        self.taken, self.started, self.stepwise = 0, False, False
        self.clock = Offset(0, 0)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=stack)
        self.cleanup = ExitStack()
        self.before: dict[Held, None] = {}  # in order

    @property
    def total(self) -> int:
        """Steps in all."""
        return self.warmup + self.steps

    def place(self) -> Place:
        """This rank among all."""
        if self.group is None:
            return find_place()
        return Place(self.group.rank(), self.group.size())

    def __enter__(self) -> "Capture":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / trace_name(self.place().rank)).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror}; name another with --out DIR") from None
        # The first annotation imports a module whose frames would be garbage in the trace (pytorch issue 113564).
        with record_function("warm-up"):
            pass
        if self.group is not None:
            self.clock = clock_offset(self.group)
        self.cleanup.enter_context(tag_modules(self.annotate))
        if not self.warmup:
            self._start()
        return self

    def _start(self) -> None:
        self.before = dict.fromkeys([*describe(self.held()), *live_storages(self.held())])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with quiet_profiler():
            self.profiler.start()
        self.started = True

    def _stop(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with quiet_profiler():
            self.profiler.stop()
        self.started = False
        self._write()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.cleanup.close()
        if error is not None:
            if self.started:
                with quiet_profiler():
                    self.profiler.stop()
            return
        if self.stepwise and self.taken < self.total:
            raise UserError(
                f"{self.taken} steps were taken of {self.total} ({self.warmup} to warm up): nothing written"
            )
        if self.started:
            self._stop()

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        """A span of this name in the trace, and with `nvtx` in nsys."""
        if self.nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            with record_function(name):
                yield
        finally:
            if self.nvtx:
                torch.cuda.nvtx.range_pop()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; the profiler runs from the first after the warm-up to the last."""
        self.stepwise = True
        if self.taken == self.warmup and not self.started:
            self._start()
        with self.annotate(f"step {self.taken - self.warmup}") if self.started else ExitStack():
            yield
        self.taken += 1
        if self.taken == self.total and self.started:
            self._stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a step: forward, backward, synchronise or optimizer."""
        with self.annotate(name):
            yield
        if self.started:
            for held in describe(self.held()):
                if held not in self.before:
                    mark_address(held.category, held.address)

    def _write(self) -> None:
        place = self.place()
        with TemporaryDirectory() as scratch:
            raw = Path(scratch, "raw.json")
            self.profiler.export_chrome_trace(str(raw))
            chrome = read_json(raw)
        chrome[OURS] = {
            "rank": place.rank,
            "world_size": place.world_size,
            "clock_offset_ns": self.clock.nanoseconds,
            "clock_bound_ns": self.clock.bound,
            "steps": self.steps,
            "held": [[each.category, each.address, each.nbytes, each.device] for each in self.before],
            "marks": _take_marks(chrome),
            **self.meta,
        }
        chrome["traceEvents"] = _without_crossings(chrome)
        write_json(chrome, self.folder / trace_name(place.rank))


def _take_marks(chrome: dict[str, Any]) -> list[list[Any]]:
    """The memory marks (nanoseconds since the epoch, category, address), taken out of the trace's events."""
    marks, kept = [], []
    base = int(chrome.get("baseTimeNanoseconds", 0))
    for event in chrome["traceEvents"]:
        if str(event.get("name", "")).startswith(MARK):
            category, _, address = event["name"][len(MARK) :].rpartition(" ")
            marks.append([base + round(1000 * event["ts"]), category, int(address)])
        else:
            kept.append(event)
    chrome["traceEvents"] = kept
    return marks


def _without_crossings(chrome: dict[str, Any]) -> list[dict[str, Any]]:
    """The events less those Python frames that cross an annotation, which viewers would drop with all inside, and cut
    where a child outlasts its parent by the rounding of a clock."""
    trace = parse(chrome)
    if not any(span.category == "python_function" for span in trace.spans):
        return list(chrome["traceEvents"])
    ends = {
        (node.span.lane, node.span.start, node.span.name, node.span.end): node.end
        for roots in nest_host(trace).values()
        for root in roots
        for node in root.walk()
    }
    kept = []
    for event in chrome["traceEvents"]:
        if event.get("cat") in HOST and event["ph"] == "X":
            start = trace.base + round(1000 * event["ts"])
            key = ((event["pid"], event["tid"]), start, event["name"], start + round(1000 * event["dur"]))
            if key not in ends and event["cat"] == "python_function":
                continue
            event["dur"] = (ends.get(key, key[3]) - start) / 1000
        kept.append(event)
    return kept
