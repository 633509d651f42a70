"""Memory of a forward pass and of a training step, by use: `python -m benchmarks.memory --size small`.

The figures are bytes of tensors: on a CPU added up from every allocation of one profiled pass, on a GPU the allocator's
own maximum. Instead of peaks, `--residuals` lists tensors kept for backward, `--segments` the best way to recompute.
"""

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.lib.memory_tables import sheets
from benchmarks.lib.options import command, refuse_ignored
from benchmarks.lib.residuals import Strategy, best, model_residuals, neighbours, square_root_rule, strategy, sweep
from benchmarks.lib.sheets import show
from benchmarks.lib.workload import Bench, Case, ModelOptions, PassSettings, Workload, make_bench, model_config
from benchmarks.records import Record
from cs336_systems.cost import Mode
from cs336_systems.cost.capacity import describe_parts
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_seconds, setting
from cs336_systems.host.machine import out_of_memory, usable_memory
from cs336_systems.presets import ModelConfig, Precision, Recompute, course_sizes
from cs336_systems.profiling import Capture, read_trace, trace_files
from cs336_systems.profiling.memory import CATEGORIES, MemoryTimeline, memory_timeline

CLASHES = {
    "residuals": ("counts every way of recomputing, for forward alone", ("segments", "recompute", "recompute_every")),
    "segments": ("measures the ways of recomputing that may be best", ("recompute", "recompute_every")),
    "all_sizes": ("measures all of them", ("size",)),
}


@dataclass(frozen=True)
class MemorySettings(ModelOptions):
    """Options of the command line, one field each."""

    all_sizes: bool = setting(False, "Measure every size of the year's edition; with fp32, the largest in bf16, too.")
    residuals: bool = setting(False, "Instead list the tensors kept for backward, block by block.")
    segments: bool = setting(False, "Instead find the best length of recomputed segments.")

    def cases(self, device: torch.device) -> list[tuple[str, Case]]:
        """The sizes and shapes to measure. Raises UserError for a size or a choice that does not exist."""
        if self.compile:
            raise UserError("what a compiled model needs is not known beforehand; measure without --compile")
        sizes = course_sizes(self.year) if self.all_sizes else (self.size,)
        found = [(size, self.case(size, device)) for size in sizes]
        largest = found[-1:] if self.all_sizes and self.precision == "fp32" else []
        return found + [(size, replace(case, precision="bf16")) for size, case in largest]


@dataclass(frozen=True)
class Peak:
    """One measurement that is to be made: a pass, or (activations) a pass that recomputes in some way."""

    size: str
    year: int
    case: Case
    mode: str
    bench: Bench
    way: Strategy | None = None

    @property
    def passes(self) -> Mode:
        """Passes to run."""
        return "forward-backward" if self.way else "forward" if self.mode == "forward" else "step"

    @property
    def fits(self) -> bool:
        """True if the pass fits into this machine's memory."""
        return self.bench.fits(self.case, self.passes)

    @property
    def seconds(self) -> float:
        """Predicted seconds: a step is run twice, since the first makes the optimizer's state."""
        return self.bench.seconds(self.case, self.passes) * (2 if self.mode == "step" else 1)

    def predicted(self) -> dict[str, Any]:
        """The memory model's figures under the names of the metrics, and what they are made of."""
        if self.way is None:
            figures = self.bench.predicted(self.case, self.passes)
            return {key: figures[key] for key in ("peak_memory_bytes", "memory_by_part")}
        shape = shape_of(self.case)
        return {
            "kept_bytes": self.way.kept, "recomputed_bytes": self.way.recomputed, "peak_bytes": self.way.peak,
            "peak_by_length": [each.peak for each in sweep(*shape)], "square_root_rule": square_root_rule(*shape),
        }  # fmt: skip

    def measure(self) -> Record:
        """Measure it, or record that it does not fit, with the prediction."""
        config = record_config(self.size, self.year, self.mode, self.case)
        missing = Record("memory", config, self.bench.environment, predicted=self.predicted(), status="out-of-memory")
        if not self.fits:
            return missing
        try:
            metrics = measure_peak(self.case, self.passes, self.mode == "activations")
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            print(f"{self.size} {self.mode}: out of memory although it was counted to fit", file=sys.stderr)
            return missing
        finally:
            gc.collect()  # hooks and graphs hold each other, and with them the model
            if self.case.device.type == "cuda":
                torch.cuda.empty_cache()
        return replace(missing, metrics=metrics, status="ok")


def shape_of(case: Case) -> tuple[ModelConfig, int, int, Precision]:
    """The arguments of the functions on segments."""
    return case.config, case.batch, case.config.context_length, case.precision


def profiled(case: Case, mode: Mode) -> MemoryTimeline:
    """The memory of one pass over time; of a step the second."""
    load = Workload(case)
    losses = [load.loss]  # held: torch complains of what was there before and is freed while it looks
    with TemporaryDirectory() as folder:
        with Capture(Path(folder), None, load.weights, load.optimizer, warmup=1 if mode == "step" else 0) as capture:
            for _ in range(capture.total):
                with capture.step():
                    for name, run in load.phases(mode).items():
                        with capture.phase(name):
                            run()
                losses.append(load.loss)
        return memory_timeline(read_trace(trace_files(Path(folder))[0]))


def measure_peak(case: Case, mode: Mode, activations: bool) -> dict[str, Any]:
    """The metrics of one pass: its peak in bytes and, where every allocation is seen, the parts of the peak. Or the
    most bytes of `activations` at once: what forward made, also when backward runs it again."""
    if activations or case.device.type != "cuda":
        found = profiled(case, mode)
        if activations:
            return {"peak_bytes": max(amounts[CATEGORIES.index("activations")] for amounts in found.amounts)}
        return {"peak_memory_bytes": found.peak, "memory_by_part": found.at_peak}
    load = Workload(case)
    for _ in range(2 if mode == "step" else 1):
        torch.cuda.reset_peak_memory_stats(case.device)
        for run in load.phases(mode).values():
            run()
    torch.cuda.synchronize(case.device)
    return {"peak_memory_bytes": torch.cuda.max_memory_allocated(case.device)}


def record_config(size: str, year: int, mode: str, case: Case) -> dict[str, Any]:
    """Settings that identify a measurement."""
    return {"size": size, "year": year, "mode": mode} | model_config(case)


def count_residuals(size: str, year: int, case: Case, environment: dict[str, Any]) -> Iterator[Record]:
    """Bytes that one shape keeps for backward, for each way of recomputing; counted without running it."""
    config, shape = case.config, shape_of(case)
    block = f"blocks.{min(1, config.num_layers - 1)}"  # the first keeps also what all share
    ways: dict[Recompute, int] = {"none": 1, "attention": 1, "segments": best(sweep(*shape)).every, "nested": 1}
    for recompute, every in ways.items():
        chosen = replace(config, recompute=recompute, recompute_every=every)
        found = model_residuals(chosen, *shape[1:])
        inside = block if recompute == "none" else None  # blocks that are run again keep their inputs only
        metrics = {
            "kept_bytes": found.nbytes, "weight_casts_bytes": found.weight_casts, "blocks": found.by_block(),
            "block": block, "modules": found.by_module(block), "largest_of": inside or "model",
            "largest": [[r.module, list(r.shape), r.dtype, r.nbytes, r.made_by] for r in found.largest(5, inside)],
        }  # fmt: skip
        figures = {"kept_bytes": strategy(*shape[:3], recompute, every, case.precision).kept}
        about = record_config(size, year, "residuals", replace(case, config=chosen))
        yield Record("memory", about, environment, metrics=metrics, predicted=figures)


def make_runs(settings: MemorySettings, cases: list[tuple[str, Case]], benches: dict[Precision, Bench]) -> list[Peak]:
    """Everything that is to be measured."""
    runs = list[Peak]()
    for size, case in cases:
        about: dict[str, Any] = {"size": size, "year": settings.year, "bench": benches[case.precision]}
        for way in neighbours(*shape_of(case)) if settings.segments else ():
            runs.append(Peak(case=replace(case, config=way.apply(case.config)), mode="activations", way=way, **about))
        for mode in ("forward", "step") if not settings.segments else ():
            runs.append(Peak(case=case, mode=mode, **about))
    return runs


def show_plan(runs: list[Peak], usable: int) -> None:
    """Print which runs fit, which do not, and how long they should take, without building models."""
    out = console.console()
    for run in runs:
        parts = run.bench.predicted(run.case, run.passes)["memory_by_part"]
        need, name = sum(parts.values()), f"{run.size} {run.case.precision} {run.way.name if run.way else run.mode}"
        verdict = f"about {format_seconds(run.seconds)}" if run.fits else "does not fit: computed"
        out.print(f"{name}: needs {format_bytes(need)} ({describe_parts(parts)}); {verdict}", soft_wrap=True)
    seconds = sum(run.seconds for run in runs if run.fits)
    out.print(f"{format_bytes(usable)} usable; about {format_seconds(seconds)} to measure, building apart\n")


@command(MemorySettings)
def main(settings: MemorySettings) -> None:
    """Measure the peak memory of a transformer's forward pass and training step, beside predictions."""
    refuse_ignored(CLASHES)
    device = settings.on
    usable, cases = usable_memory(device), settings.cases(device)
    if settings.smoke:
        settings = replace(settings, size="tiny", all_sizes=False, batch_size=1, context=32)
        cases = settings.cases(device)
    recorder = settings.recorder("memory", device)
    benches: dict[Precision, Bench] = {}
    for precision in dict.fromkeys(case.precision for _, case in cases):
        plan = PassSettings(precision=precision, smoke=settings.smoke, commit=settings.commit)
        benches[precision] = make_bench(plan, device, usable)
    if settings.residuals:
        for size, case in cases:
            recorder.keep(*count_residuals(size, settings.year, case, benches[case.precision].environment))
    else:
        runs = make_runs(settings, cases, benches)
        show_plan(runs, usable)
        with console.progress("memory", len(runs), sum(each.seconds for each in runs if each.fits)) as advance:
            for each in runs:
                recorder.keep(each.measure())
                advance(f"{each.size} {each.mode}")
    show(sheets(recorder.records))
    recorder.tell()


if __name__ == "__main__":
    sys.exit(console.run_command(main))
