"""Capture: profile a worker on every rank. Each writes `rank<r>.trace.json.gz`: torch.profiler's own trace, without the
warm-up, and under the key "cs336" what that lacks: the rank, and the storages in memory by category."""

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from cs336_systems.comm import Group, agree, all_reduce, current_place
from cs336_systems.comm.events import is_profiling, mark
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.profiling.fields import OURS
from cs336_systems.profiling.labels import clean, describe, held_by, live_storages, tag_modules
from cs336_systems.profiling.names import LINE_UP
from cs336_systems.profiling.trace import DEVICE, read_json, trace_name, write_json

NO_WORK = (
    "note: Capture saw no work in this process, and sees none of processes that start inside of it: put it into the "
    "function that mp.spawn starts"
)
RUNS_ALREADY = "a profiler runs already, and there can be only one"
ENDED = "another profiler, started inside of Capture, has ended Capture's: there can be only one"


class Capture:
    """Profiles `steps` steps of a worker after `warmup` steps that it only counts, and writes this rank's trace.

        with Capture(folder, group, model, optimizer, warmup=2, steps=1) as capture:
            for batch in batches[: capture.total]:
                with capture.step():
                    with capture.phase("forward"): ...  # and backward, synchronise, optimizer

    A worker without these calls is profiled whole: `with Capture(folder): worker()`. With a `group`, whose ranks must
    all do the same, the ranks begin the first step together, which also measures the offsets of their clocks. `device`
    is where the model computes, by default its own device, or a GPU if there is one. `tags` names modules; a compiled
    model allows no hooks. `nvtx` makes ranges of the same names for nsys, which then records the GPU's kernels. Raises
    UserError, with a group on every rank, for a folder that cannot be written, a running profiler, and too few steps.
    """

    def __init__(
        self,
        folder: Path | str,
        group: Group | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        warmup: int = 0,
        steps: int = 1,
        device: torch.device | str | None = None,
        tags: bool = True,
        nvtx: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        if warmup < 0 or steps < 1:
            raise UserError(f"warmup {warmup} must not be negative, and steps {steps} be one at least")
        self.folder, self.group, self.model, self.meta = Path(folder), group, model, meta or {}
        self.warmup, self.steps, self.total, self.tags, self.nvtx = warmup, steps, warmup + steps, tags, nvtx
        self.held = lambda: describe(held_by(model, optimizer))
        first = next(model.parameters(), None) if model is not None else None
        default = first.device if first is not None else "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device or default)

    def __enter__(self) -> "Capture":
        self.place = current_place(self.group)
        with ExitStack() as cleanup:  # if this fails, __exit__ is not called
            self._prepare()
            self.taken, self.stepwise, self.running = 0, False, False
            if self.tags:
                cleanup.enter_context(tag_modules(self.annotate, self.model))
            if not self.warmup:
                self._start()
            self.cleanup = cleanup.pop_all()
        return self

    def _prepare(self) -> None:
        problem = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / trace_name(self.place.rank)).unlink(missing_ok=True)
        except OSError as error:
            problem = f"cannot write to {self.folder}: {error.strerror}; choose another folder"
        if is_profiling():
            problem = RUNS_ALREADY
        said = agree("profiling", problem or str(time.time_ns()), self.group) if self.group is not None else [problem]
        if problem := problem or next((each for each in said if each and not each.isdigit()), ""):
            raise UserError(problem)
        if self.group is not None:
            self.meta = {"run": said[0]} | self.meta  # the same on all ranks of a run

    def _start(self) -> None:
        if is_profiling():  # since the warm-up; torch would crash
            raise UserError(RUNS_ALREADY)
        # The first annotation imports a module whose frames would be garbage in the trace (pytorch issue 113564).
        with record_function("warm-up"):
            pass
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self.device.type == "cuda" and not self.nvtx)]
        self.profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self.before = [*self.held(), *live_storages(self.held())]
        self.known = set(self.before)
        self._synchronise()
        with quiet_profiler():
            self.profiler.start()
        self.running = True

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _stop(self) -> None:
        self._synchronise()
        self.running, self.ended = False, not is_profiling()
        with quiet_profiler():
            self.profiler.stop()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.cleanup.close()
        unwritten = self.running
        if self.running:
            self._stop()
        if error is None and (self.stepwise or self.warmup) and self.taken < self.total:
            said = f"{self.taken} steps were taken of {self.total} ({self.warmup} to warm up): nothing written"
            raise UserError(said)
        if error is None and unwritten:
            self._write()

    def _require_block(self) -> None:
        if not hasattr(self, "taken"):
            raise UserError("steps, phases and annotations are captured inside `with Capture(...) as capture:`")

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        """A span of this name in the trace, and with `nvtx` in nsys."""
        self._require_block()
        if self.place.world_size == 1:  # a process group may exist by now
            self.place = current_place(self.group)
        with torch.cuda.nvtx.range(name) if self.nvtx else nullcontext(), record_function(name):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; the profiler runs from the last of the warm-up on, and the trace of that step is dropped."""
        self._require_block()
        self.stepwise = True
        if self.taken == self.warmup - 1:
            self._start()
        if self.taken == self.warmup:
            self.known.update(self.held())
            # All ranks begin together: else the slowest start of the profiler would look like a wait. At the second
            # meeting no rank waits for another, so that its annotation is short: it aligns the clocks (`align.py`).
            for annotation in (nullcontext(), self.annotate(LINE_UP)):
                if self.group is not None:
                    with annotation:
                        all_reduce(torch.zeros(1, device=self.device), self.group, LINE_UP).wait()
                        self._synchronise()
        counts = self.warmup <= self.taken < self.total
        try:
            with self.annotate(f"step {self.taken - self.warmup}") if counts else nullcontext():
                yield
        finally:
            self.taken += 1
        if self.taken == self.total:
            self._stop()
            self._write()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a step: forward, backward, synchronise or optimizer."""
        with self.annotate(name):
            yield
        if self.running:
            for held in self.held():
                if held not in self.known:
                    mark(held.category, held.address)

    def _write(self) -> None:
        if self.ended:  # it has no events; torch would crash
            raise UserError(ENDED)
        path = self.folder / trace_name(self.place.rank)
        with os_errors(f"write {path}"):
            with TemporaryDirectory() as scratch:
                raw = Path(scratch, "raw.json")
                self.profiler.export_chrome_trace(str(raw))
                chrome = {"host_name": os.uname().nodename} | read_json(raw)  # torch 2.11 leaves it out
            if not any(event.get("cat") in ("cpu_op", "user_annotation", *DEVICE) for event in chrome["traceEvents"]):
                print(NO_WORK, file=sys.stderr)
            held, labels = clean(chrome, self.before, self.stepwise)
            about = {"rank": self.place.rank, "world_size": self.place.world_size, "steps": self.steps}
            chrome[OURS] = about | {"held": held, "marks": labels} | self.meta
            write_json(chrome, path)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep back lines that begin with USDT, of all that is written to stderr, and torch 2.11's warning about cycles."""
    stderr = os.dup(2)
    sys.stderr.flush()
    with TemporaryFile() as caught, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
