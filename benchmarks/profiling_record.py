"""The record of a profile: where time and memory of a step went, and what the analytic model says beside it."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import noise, summarise
from benchmarks.model_options import model_config
from benchmarks.records import Record
from benchmarks.workload import Case
from cs336_systems.comm import Event
from cs336_systems.cost import Hardware, Mode, memory, predict
from cs336_systems.cost.parallel import Link, exposed_seconds
from cs336_systems.profiling.allocations import timeline
from cs336_systems.profiling.attribution import PHASES, attribute
from cs336_systems.profiling.overlap import overlaps
from cs336_systems.profiling.shares import share_rows
from cs336_systems.profiling.trace import Trace

REDUCTIONS = ("all-reduce", "reduce-scatter")
AFTER_BACKWARD = ("naive", "flat")  # wrappers that hide nothing


def step_times(trace: Trace) -> list[float]:
    """Milliseconds of each profiled step."""
    return [step.duration / 1e6 for step in trace.named(r"step \d+$")]


def phase_times(trace: Trace) -> dict[str, float]:
    """Mean milliseconds of each phase over the profiled steps."""
    steps = max(1, len(step_times(trace)))
    return {f"{phase}_ms": sum(s.duration for s in trace.named(f"{phase}$")) / 1e6 / steps for phase in PHASES}


def measured(traces: Sequence[Trace]) -> dict[str, Any]:
    """What the traces say, of rank 0 where one rank stands for all, and of every rank where they differ."""
    first = traces[0]
    metrics: dict[str, Any] = summarise(step_times(first)) | phase_times(first)
    metrics["peak_memory_bytes"] = max(timeline(trace).peak for trace in traces)
    for row in share_rows(attribute(first)):
        name = row.name.replace(" ", "_")
        metrics |= {f"share_{name}": row.of_step, f"share_{name}_of_forward": row.of_forward}
    steps = len(step_times(first))
    if len(traces) > 1:
        found = overlaps(traces)
        metrics["overlap"] = [each.share for each in found]
        for kind in ("communication", "overlapped", "exposed"):
            metrics[f"{kind}_ms"] = [getattr(each, kind) / 1e6 / steps for each in found]
    return metrics


def predicted(
    case: Case, hardware: Hardware, wrapper: str, link: Link | None, events: Sequence[Event], ranks: int
) -> dict[str, Any]:
    """The analytic model's figures under the names of the metrics."""
    seq = case.config.context_length

    def seconds(mode: Mode) -> dict[str, float]:
        return predict(case.config, case.batch, seq, mode, case.precision, hardware)

    forward, backward, step = (seconds(mode) for mode in ("forward", "backward", "step"))
    parts = {"forward_ms": forward, "backward_ms": backward, "mean_ms": step}
    result: dict[str, Any] = {name: 1e3 * sum(part.values()) for name, part in parts.items()}
    result["optimizer_ms"] = 1e3 * step["optimizer"]
    result["share_matrix_products"] = step["matrix products"] / sum(step.values())
    result["share_matrix_products_of_forward"] = forward["matrix products"] / sum(forward.values())
    result["peak_memory_bytes"] = sum(memory(case.config, case.batch, seq, "step", case.precision).values())
    if link is not None:
        reductions = [event for event in events if event.verb in REDUCTIONS and event.label != "ballot"]
        times = [link.seconds(event.nbytes, ranks, event.verb) for event in reductions]
        gathers = sum(link.seconds(e.nbytes, ranks, e.verb) for e in events if e.verb == "all-gather")
        result["communication_ms"] = 1e3 * (sum(times) + gathers)
        if wrapper not in ("zero3", "torch-ddp"):
            hides = wrapper not in AFTER_BACKWARD
            exposed = exposed_seconds([e.nbytes for e in reductions], times, sum(backward.values()), hides) + gathers
            result["exposed_ms"] = 1e3 * exposed
            result["mean_ms"] += 1e3 * exposed
    return result


def make_record(
    size: str,
    year: int,
    wrapper: str,
    case: Case,
    traces: Sequence[Trace],
    beside: dict[str, Any],
    stamp: dict[str, Any],
) -> Record:
    """The record of one profile; `beside` is what was predicted."""
    config = {"size": size, "year": year, "wrapper": wrapper, "ranks": len(traces)} | model_config(case)
    metrics = measured(traces)
    return Record("profiling", config, stamp, step_times(traces[0]), metrics, beside, noise(metrics))
