"""Overlap by Holistic Trace Analysis, beside ours."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cs336_systems.profiling.overlap import overlap
from cs336_systems.profiling.trace import read_trace, trace_files
from tests.support.hta_bridge import bridge


class Compared(NamedTuple):
    """One rank's overlapped share of communication in percent, ours and HTA's; None (HTA: NaN) without any."""

    rank: int
    ours: float | None
    hta: float | None


def compare_with_hta(folder: Path) -> list[Compared]:
    """Our overlap of every trace in a folder beside HTA's, CPU traces through the bridge; by rank."""
    traces = [read_trace(path) for path in trace_files(folder)]
    with TemporaryDirectory() as scratch:
        theirs = hta_overlap(bridge(traces, Path(scratch)))
    shares = {trace.rank: overlap(trace).share for trace in traces}
    return [
        Compared(rank, None if share is None else 100 * share, theirs.get(rank))
        for rank, share in sorted(shares.items())
    ]


def hta_overlap(files: dict[int, Path]) -> dict[int, float | None]:
    """HTA's `get_comm_comp_overlap` by rank, of trace files by rank, in percent to 0.01; None where it says NaN."""
    with quiet_hta():
        from hta.configs.env_options import HTAEnvOptions
        from hta.trace_analysis import TraceAnalysis

        options = HTAEnvOptions.instance()
        before = options.disable_ns_rounding()
        options.set_disable_ns_rounding(True)  # else every span shrinks to whole microseconds
        try:
            analysis = TraceAnalysis({rank: str(path) for rank, path in files.items()}, include_last_profiler_step=True)
            table = analysis.get_comm_comp_overlap(visualize=False)
        finally:
            options.set_disable_ns_rounding(before)
    found = zip(table["rank"], table["comp_comm_overlap_pctg"], strict=True)
    return {int(rank): None if value != value else float(value) for rank, value in found}


@contextlib.contextmanager
def quiet_hta() -> Iterator[None]:
    """Without HTA's notes, and without the warnings of the libraries below it, which are not about the trace."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
