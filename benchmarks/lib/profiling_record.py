"""The record of a profile with predictions beside it, and what is kept with it for the write-up: its pictures, and its
tables as JSON. Also a GPU's memory snapshot."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import noise, summarise
from benchmarks.lib.workload import Case, model_config
from benchmarks.records import Record
from cs336_systems.comm import Event, Group, agree, broadcast
from cs336_systems.cost import Hardware, Mode, predict
from cs336_systems.cost.closed_forms import Link, exposed_seconds, zero_memory
from cs336_systems.cost.observed import observe_passes
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes, format_seconds, os_errors
from cs336_systems.host.table import Table
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.profiling.breakdown import attention_rows, module_rows, part_rows, share_rows
from cs336_systems.profiling.memory import memory_timeline
from cs336_systems.profiling.names import PHASES
from cs336_systems.profiling.operators import collective_rows, kernel_rows, op_rows
from cs336_systems.profiling.overlap import overlaps
from cs336_systems.profiling.tables import phase_times
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace, trace_name, uncollected

REDUCTIONS = ("all-reduce", "reduce-scatter")
UNBUCKETED = ("naive", "overlapped")  # wrappers without a buffer of more than one gradient
ZERO_BUCKET = 25 * 10**6  # bytes of a bucket in stages 1 and 2
BUCKET_SIZE_MB = 1.0  # of the bucketed wrapper
USUAL = {"warmup": 2, "steps": 2, "nvtx": False}  # options that a record names where they differ
PICTURES = ("timeline.svg", "flame.svg", "memory.svg")
TABLES = "tables.json"
LONGEST = 12  # operators of a phase by total time, and as many by self time


def collect_files(folder: Path, group: Group, device: torch.device) -> None:
    """Rank 0 writes every other rank's trace into its own `folder`; every rank must call this. Files travel as tensors
    of `device`, on which the group communicates. Raises UserError, on rank 0, if it cannot."""
    me = group.rank()
    mine = (folder / trace_name(me)).read_bytes() if (folder / trace_name(me)).exists() else b""
    sizes = [int(size) for size in agree("sizes of the traces", str(len(mine)), group)]
    for rank in range(1, group.size()):
        content = torch.zeros(sizes[rank], dtype=torch.uint8, device=device)
        if rank == me and mine:
            content = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        broadcast(content, rank, group, f"trace of rank {rank}").wait()
        if me == 0 and sizes[rank]:
            try:
                (folder / trace_name(rank)).write_bytes(bytes(content.cpu().numpy()))
            except OSError as error:
                raise UserError(f"cannot write rank {rank}'s trace to {folder}: {error.strerror}") from None


def step_times(trace: Trace) -> list[float]:
    """Milliseconds of each profiled step."""
    return [step.duration / 1e6 for step in timeline(trace).steps if step.name.startswith("step ")]


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
        hides = wrapper not in ("naive", "flat")  # which reduce after backward
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
        figures = max(found) if isinstance(found, list) else found, value
        words = name.removesuffix("_ms").removesuffix("_bytes").replace("_", " ").replace("mean", "whole step")
        rows.append([words, *(_shown(name, each) for each in figures)])
    note = "The profiler slows the step down. Of ranks that differ the largest is shown; communication includes waits."
    return Table("Measured, and predicted before", ("of a step", "measured", "predicted"), rows, note)


def _shown(name: str, value: float | None) -> str:
    if value is None or name.endswith("_ms"):
        return "-" if value is None else format_seconds(value / 1e3)
    return format_bytes(value) if name.endswith("_bytes") else f"{value:.1%}"


def folder_name(config: Mapping[str, Any]) -> str:
    """The folder of a profile below that of the records: `profiling/tiny-bucketed`, `profiling/small-none-naive`.

    It does not name every setting, so that a folder of records does not grow with every batch size that is tried; a
    later profile of that name replaces an earlier one, and `tables_beside` tells.
    """
    naive = ["naive"] if config["attention"] == "naive" else []
    return f"profiling/{'-'.join([config['size'], config['wrapper'], *naive])}"


@uncollected()
def as_json(trace: Trace, limit: int | None = None) -> dict[str, Any]:
    """The rows of a rank's tables, unrounded; times are nanoseconds over all steps. Operators are listed for the step
    and for each phase: the `limit` longest by total and as many by self time."""
    sort, operators = timeline(trace).clock, dict[str, list[dict[str, Any]]]()
    for name, phase in {"step": None, **{phase: phase for phase in PHASES}}.items():
        rows = op_rows(trace, sort, phase=phase)
        most = {row.name for row in (*rows[:limit], *op_rows(trace, sort, "self", limit, phase))}
        operators[name] = [asdict(row) | {"flops_per_second": row.flops_per_second} for row in rows if row.name in most]
    plain: dict[str, list[Any]] = {
        "kernels": kernel_rows(trace, limit), "collectives": collective_rows(trace)[:limit], "parts": part_rows(trace),
        "modules": module_rows(trace, limit), "attention": attention_rows(trace),
    }  # fmt: skip
    return {
        "rank": trace.rank, "world_size": trace.world_size, "steps": trace.ours.get("steps"), "clock": sort,
        "operators": operators, "phases": phase_times(trace),
        "shares": [asdict(row) | {"total": row.total, "of_step": row.share} for row in share_rows(trace)],
        **{name: [asdict(row) for row in rows] for name, rows in plain.items()},
    }  # fmt: skip


def leave_pictures(record: Record, traces: Sequence[Trace], report: Path, results: Path) -> str:
    """Copy the pictures of a `report` to below the folder of records `results`, with rank 0's tables; the folder's name
    there. Raises UserError where it cannot be written."""
    name = folder_name(record.config)
    tables = as_json(traces[0], LONGEST)
    tables |= {"config": record.config, "samples_ms": record.samples_ms}
    with os_errors(f"write to {results / name}", "name another with --results DIR"):
        (results / name).mkdir(parents=True, exist_ok=True)
        for picture in PICTURES:
            if (report / picture).is_file():
                shutil.copyfile(report / picture, results / name / picture)
        (results / name / TABLES).write_text(json.dumps(tables, indent=1, allow_nan=False) + "\n")
    return name


def tables_beside(results: Path, record: Record) -> dict[str, Any] | None:
    """The tables that a record's own run left, as `as_json` has them for rank 0.

    None for a record without, and where a later run of the same name has replaced them. Raises UserError for a file
    that is none of these tables.
    """
    name = record.metrics.get("pictures")
    path = results / str(name) / TABLES
    if name is None or not path.is_file():
        return None
    try:
        tables = json.loads(path.read_text())
        own = tables["config"] == record.config and tables["samples_ms"] == record.samples_ms
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} has no tables of a profile: {error}; profile again") from None
    return dict(tables) if own else None


def picture_beside(results: Path, record: Record, picture: str) -> Path | None:
    """The file of one of a record's `PICTURES`; None where its own run left none."""
    path = results / str(record.metrics.get("pictures")) / picture
    return path if tables_beside(results, record) is not None and path.is_file() else None


@contextmanager
def memory_snapshot(path: Path, entries: int = 100_000) -> Iterator[None]:
    """Record the block's allocations on the GPU, and write them to `path` even if the block runs out of memory.

    The file is for pytorch.org/memory_viz, which uploads nothing; it keeps the newest `entries` events, as the viewer
    gets slow beyond.
    """
    torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
