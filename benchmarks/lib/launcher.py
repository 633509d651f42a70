"""Ranks for a piece of work: their answer comes back as JSON, their records are kept and shown."""

import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.options import Recorder, RecordOptions
from benchmarks.records import Record
from cs336_systems.comm import CommError, Place, find_place
from cs336_systems.comm.launch import run_ranks
from cs336_systems.errors import UserError

Answer = dict[str, Any]  # values that JSON can hold


def _into_file(place: Place, path: Path, work: Callable[..., Answer], arguments: Any) -> None:
    answer = work(place, *arguments)
    if place.rank == 0:
        path.write_text(json.dumps(answer, allow_nan=False))


def on_ranks(here: Place, device: str, ranks: int, work: Callable[..., Answer], *arguments: Any) -> Answer:
    """`work(place, *arguments)` on as many ranks: the answer of rank 0. Raises UserError, also for ranks that part.

    Under torchrun the ranks are there already: `here` is this one's place, and work for one rank is done by each of
    them alone. Otherwise CPU ranks are forked, even a single one, so that this process runs no tensor code.
    """
    try:
        if here.world_size > 1 or (device == "cuda" and ranks == 1):
            return work(here if ranks > 1 else Place(local_rank=here.local_rank), *arguments)
        with tempfile.TemporaryDirectory(prefix="answer-") as folder:
            path = Path(folder, "answer.json")
            run_ranks(_into_file, ranks, device, path, work, arguments)
            answer: Answer = json.loads(path.read_text())
            return answer
    except CommError as error:
        raise UserError(str(error)) from None


def rank_counts(nproc: Sequence[int], default: Sequence[int], experts: Sequence[int] = ()) -> Sequence[int]:
    """The numbers of ranks to measure: those that torchrun started, else as many as were asked for. Raises UserError
    for ranks that cannot be, or over which the experts do not divide."""
    started = find_place().world_size
    if started > 1 and nproc:
        raise UserError(f"--nproc {nproc[0]} would start ranks, but {started} were started already: drop it")
    found = [started] if started > 1 else nproc or default
    for number, count in product(experts, found):
        if number % count:
            raise UserError(f"{number} experts do not divide over {count} ranks: choose ranks that divide {number}")
    return found


def run(
    settings: RecordOptions, benchmark: str, counts: Sequence[int], show: Callable[[list[Record]], None],
    work: Callable[..., Answer],
) -> list[Record]:  # fmt: skip
    """Measure on each number of CPU ranks: `work(place, settings)` answers with `records`. Show them, also those until
    an error. The new records, on rank 0 alone. Raises UserError, before anything is measured where it cannot be
    recorded."""
    here, device = find_place(), torch.device("cpu")
    recorder = settings.recorder(benchmark, device) if here.rank == 0 else Recorder(None)
    try:
        for count in counts:
            answer = on_ranks(here, device.type, count, work, settings)
            recorder.keep(*(Record(**fields) for fields in answer["records"]))
    finally:
        if recorder.records:
            show(recorder.records)
    recorder.tell()
    return recorder.records
