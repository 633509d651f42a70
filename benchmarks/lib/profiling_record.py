"""The record of a profile: time and memory of a step by use, and the analytic model's predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import noise, summarise
from benchmarks.lib.model_options import model_config
from benchmarks.lib.workload import Case
from benchmarks.records import Record
from cs336_systems.comm import Event
from cs336_systems.cost import Hardware, Mode, predict
from cs336_systems.cost.closed_forms import Link, exposed_seconds, zero_memory
from cs336_systems.cost.observed import observe_passes
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.host.table import Table
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.profiling.breakdown import share_rows
from cs336_systems.profiling.memory import memory_timeline
from cs336_systems.profiling.names import PHASES
from cs336_systems.profiling.overlap import overlaps
from cs336_systems.profiling.tables import phase_times
from cs336_systems.profiling.trace import Trace

REDUCTIONS = ("all-reduce", "reduce-scatter")
AFTER_BACKWARD = ("naive", "flat")  # wrappers that hide nothing
UNBUCKETED = ("naive", "overlapped")  # wrappers without a buffer of more than one gradient
ZERO_BUCKET = 25 * 10**6  # bytes of a bucket in stages 1 and 2
BUCKET_SIZE_MB = 1.0  # of the bucketed wrapper
USUAL = {"warmup": 2, "steps": 2, "nvtx": False}  # options that a record names where they differ


def step_times(trace: Trace) -> list[float]:
    """Milliseconds of each profiled step."""
    return [step.duration / 1e6 for step in trace.named(r"step \d+$")]


def measured(traces: Sequence[Trace]) -> dict[str, Any]:
    """Metrics from the traces: rank 0's where all ranks are alike, and every rank's where they differ."""
    first = traces[0]
    steps, phases = len(step_times(first)), phase_times(first)
    metrics: dict[str, Any] = summarise(step_times(first))
    metrics |= {f"{phase}_ms": phases[phase] / 1e6 / steps for phase in PHASES}
    metrics["peak_memory_bytes"] = max(memory_timeline(trace).peak for trace in traces)
    for row in share_rows(first):
        name = row.name.replace(" ", "_")
        metrics |= {f"share_{name}": row.share, f"share_{name}_of_forward": row.of_forward}
    if len(traces) > 1:
        found = overlaps(traces)
        metrics["overlap"] = [each.share for each in found]
        for kind in ("communication", "overlapped", "exposed"):
            metrics[f"{kind}_ms"] = [getattr(each, kind) / 1e6 / steps for each in found]
    return metrics


def predicted_peak(case: Case, wrapper: str, ranks: int) -> float:
    """Bytes of a rank at a step's fullest moment, without layers that ZeRO's stage 3 has gathered.

    Gradients in flat buffers live on through the next forward. Stages 2 and 3 shard them, but for two buckets of stage
    2 that are on their way.
    """
    config, keeps_gradients = case.config, wrapper not in ("none", *UNBUCKETED)
    device, seq = case.device.type, config.context_length
    parts = observe_passes(config, case.batch, seq, case.precision, device, keeps_gradients).memory("step")
    if not keeps_gradients or wrapper in ("flat", "bucketed"):
        return sum(parts.values())
    stage, shapes = int(wrapper[-1]), [p.shape for p in TransformerLM(config, "meta").parameters()]
    replicated = sum(shape.numel() for shape in shapes if len(shape) != 2)
    held = zero_memory(sum(shape.numel() for shape in shapes), replicated, ranks, stage)
    kept = held["parameters"] + held["optimizer"]
    if stage == 1:
        return kept + held["gradients"] + parts["activations"]
    buckets = min(parts["gradients"], 2 * ZERO_BUCKET) if stage == 2 else 0
    return kept + max(held["gradients"] + buckets, parts["activations"])


def predicted(
    case: Case, hardware: Hardware, wrapper: str, link: Link | None, events: Sequence[Event], ranks: int
) -> dict[str, Any]:
    """Predictions from the counts, under the names of the metrics.

    What communication adds to a step of zero3 or torch-ddp is not predicted, and so neither is the step; nor what
    torch-ddp holds.
    """
    modes: tuple[Mode, ...] = ("forward", "backward", "step")
    forward, backward, step = (predict(case.passes.of(mode), hardware) for mode in modes)
    if wrapper.startswith("zero"):
        step["optimizer"] /= ranks
    parts = {"forward_ms": forward, "backward_ms": backward, "mean_ms": step}
    result: dict[str, Any] = {name: 1e3 * sum(part.values()) for name, part in parts.items()}
    result["optimizer_ms"] = 1e3 * step["optimizer"]
    result["share_matrix_products"] = step["matrix products"] / sum(step.values())
    result["share_matrix_products_of_forward"] = forward["matrix products"] / sum(forward.values())
    if wrapper != "torch-ddp":
        result["peak_memory_bytes"] = predicted_peak(case, wrapper, ranks)
    if link is None:
        return result
    mean_ms = result.pop("mean_ms")
    if wrapper == "torch-ddp":  # reduces by itself, so that no event tells of it
        return result
    reductions = [event for event in events if event.verb in REDUCTIONS and event.label != "used parameters"]
    times = [link.seconds(event.nbytes, ranks, event.verb) for event in reductions]
    gathers = sum(link.seconds(e.nbytes, ranks, e.verb) for e in events if e.verb == "all-gather")
    result["communication_ms"] = 1e3 * (sum(times) + gathers)
    if wrapper != "zero3":
        hides = wrapper not in AFTER_BACKWARD
        exposed = exposed_seconds([e.nbytes for e in reductions], times, sum(backward.values()), hides) + gathers
        result |= {"exposed_ms": 1e3 * exposed, "mean_ms": mean_ms + 1e3 * exposed}
    return result


def make_record(
    options: Mapping[str, Any], wrapper: str, case: Case, traces: Sequence[Trace], beside: dict[str, Any],
    stamp: dict[str, Any],
) -> Record:  # fmt: skip
    """The record of one profile; `options` are the command's by name, `beside` is what was predicted."""
    config = {"size": options["size"], "year": options["year"], "wrapper": wrapper, "ranks": len(traces)}
    config |= {"bucket_size_mb": BUCKET_SIZE_MB} if wrapper == "bucketed" else {}
    config |= {name: options[name] for name, usual in USUAL.items() if options[name] != usual}
    config |= model_config(case)
    metrics = measured(traces)
    return Record("profiling", config, stamp, step_times(traces[0]), metrics, beside, noise(metrics))


def beside_measured(record: Record) -> Table:
    """Each figure that was predicted, beside the measured one; of ranks that differ, the slowest one's."""
    rows = []
    for name, value in record.predicted.items():
        found = record.metrics.get(name)
        found = max(found) if isinstance(found, list) else found
        rows.append([name.removesuffix("_ms").replace("_", " "), *(_shown(name, each) for each in (found, value))])
    return Table("predicted before the profile, which itself takes time", ("", "measured", "predicted"), rows)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_ms"):
        return format_seconds(value / 1e3)
    return format_bytes(value) if name.endswith("_bytes") else f"{value:.1%}"
