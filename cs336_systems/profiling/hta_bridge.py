"""A bridge to Holistic Trace Analysis (`traceinsight`, import name `hta`), which reads nothing but GPU traces.

Its answer to a CPU trace is NaN. So what gloo did is written as NCCL's kernels on stream 20 and what was computed as
kernels on stream 7, each with the launch that HTA wants to see before it; then all of HTA works on two processes of a
laptop, and its overlap can be held against ours. Durations and order stay true, but the device is made up.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cs336_systems.errors import UserError
from cs336_systems.profiling.names import step_number
from cs336_systems.profiling.overlap import activity, overlap
from cs336_systems.profiling.trace import COMMUNICATION, HOST, Span, Trace, read_trace, trace_files, write_json

COMPUTE_STREAM, FIRST_STREAM = 7, 20  # as PyTorch numbers them on a GPU: its own default, and NCCL's
EXTRA_STEP = 1000  # nanoseconds of the step after the last
FIRST_CORRELATION = 100_000  # HTA 0.6.1 with pandas 3 keeps smaller ones in a type too short for what it adds


@dataclass(frozen=True)
class Compared:
    """One rank's overlapped share of communication in percent, ours and HTA's; None (HTA: NaN) without any."""

    rank: int
    ours: float | None
    hta: float | None


def has_kernels(trace: Trace) -> bool:
    """Whether HTA can read the trace as it is."""
    return any(span.category == "kernel" for span in trace.spans)


def bridge(traces: Sequence[Trace], folder: Path) -> dict[int, Path]:
    """Write every rank's trace as HTA reads it, `hta_rank<r>.json`; returns the absolute paths by rank.

    Load it with `hta.trace_analysis.TraceAnalysis(trace_files={0: ...})`. HTA leaves out the last step, so there is an
    empty one more. Raises UserError for a folder that cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = {trace.rank: (folder / f"hta_rank{trace.rank}.json").resolve() for trace in traces}
        for trace in traces:
            write_json(project(trace), found[trace.rank])
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    return found


def project(trace: Trace) -> dict[str, Any]:
    """The Chrome-trace JSON of a CPU trace with its work as kernels. A GPU's trace stays what it is, but for the steps
    and the rank."""
    first = min((span.start for span in trace.spans), default=trace.base)
    chrome = {key: value for key, value in trace.chrome.items() if key != "traceEvents"}
    chrome["distributedInfo"] = {"backend": "nccl", "rank": trace.rank, "world_size": trace.world_size}
    if has_kernels(trace):
        return chrome | {"traceEvents": [*trace.chrome["traceEvents"], *_steps(trace, trace.base)]}
    hidden = COMMUNICATION.match
    events = [_event(span, first) for span in trace.spans if span.category in HOST and not hidden(span.name)]
    return chrome | {
        "baseTimeNanoseconds": first,
        # HTA takes a trace without a GPU's properties for another maker's.
        "deviceProperties": [{"id": 0, "name": "a CPU, projected"}],
        "traceEvents": [*events, *_kernels(trace, first), *_steps(trace, first)],
    }


def _event(span: Span, first: int, **changed: Any) -> dict[str, Any]:
    event = {
        "ph": "X",
        "cat": span.category,
        "name": span.name,
        "pid": span.lane[0],
        "tid": span.lane[1],
        "ts": (span.start - first) / 1000,
        "dur": span.duration / 1000,
        "args": dict(span.args),
    }
    return event | changed


def _kernels(trace: Trace, first: int) -> Iterator[dict[str, Any]]:
    what = activity(trace)
    lanes: dict[Any, int] = {}
    works = [(span, COMPUTE_STREAM, span.name) for span in what.compute]
    for span in what.communication:
        stream = FIRST_STREAM + lanes.setdefault(span.lane, len(lanes))
        works.append((span, stream, "ncclDevKernel_" + span.name.split(":", 1)[1]))
    for number, (span, stream, name) in enumerate(sorted(works, key=lambda work: work[0].start), FIRST_CORRELATION):
        args = {"device": 0, "context": 1, "stream": stream, "correlation": number}
        yield _event(span, first, cat="kernel", name=name, pid=0, tid=stream, args=args)
        launch = {"cbid": 211, "correlation": number}
        yield _event(span, first, cat="cuda_runtime", name="cudaLaunchKernel", dur=0.001, args=launch)


def _steps(trace: Trace, first: int) -> Iterator[dict[str, Any]]:
    """The steps by the name that HTA looks for, and one after the last."""
    if trace.named("ProfilerStep#") or not trace.spans:
        return
    lane = next((span.lane for span in trace.spans if span.category in HOST), trace.spans[0].lane)
    begin, end = trace.spans[0].start, max(span.end for span in trace.spans)
    annotated = [span for span in trace.spans if span.category == "user_annotation"]
    steps = [(s.start, s.end) for s in annotated if step_number(s.name) is not None] or [(begin, end)]
    steps.append((end, end + EXTRA_STEP))
    for number, (start, stop) in enumerate(steps):
        yield _event(Span(f"ProfilerStep#{number}", "user_annotation", start, stop, lane), first)


def compare_with_hta(folder: Path) -> list[Compared]:
    """Our overlap of every trace in a folder beside HTA's, CPU traces through the bridge; by rank.

    Raises UserError if HTA is not installed or the folder holds no traces.
    """
    if find_spec("hta") is None:
        raise UserError("Holistic Trace Analysis is not installed: pip install -e '.[hta]'")
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
    with _quiet():
        from hta.configs.env_options import HTAEnvOptions  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found, import-untyped, unused-ignore]

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
def _quiet() -> Iterator[None]:
    """Without HTA's notes, and without the warnings of the libraries below it, which are not about the trace."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
