"""Pictures of a profile, and its tables as JSON, kept beside its record for the write-up; a GPU's memory snapshot."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import Record
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.profiling.breakdown import attention_rows, module_rows, part_rows, share_rows
from cs336_systems.profiling.names import PHASES
from cs336_systems.profiling.operators import collective_rows, kernel_rows, op_rows
from cs336_systems.profiling.tables import phase_times
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace, uncollected

PICTURES = ("timeline.svg", "flame.svg", "memory.svg")
TABLES = "tables.json"
FOLDER = "profiling"
LONGEST = 12  # operators of a phase by total time, and as many by self time


def folder_name(config: Mapping[str, Any]) -> str:
    """The folder of a profile below that of the records: `profiling/tiny-bucketed`, `profiling/small-none-naive`.

    It does not name every setting, so that a folder of records does not grow with every batch size that is tried; a
    later profile of that name replaces an earlier one, and `tables_beside` tells.
    """
    naive = ["naive"] if config["attention"] == "naive" else []
    return "/".join([FOLDER, "-".join([config["size"], config["wrapper"], *naive])])


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
