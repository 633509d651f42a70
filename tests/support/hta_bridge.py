"""A bridge to Holistic Trace Analysis (`traceinsight`, import name `hta`), which reads nothing but GPU traces.

Its answer to a CPU trace is NaN. So what gloo did is written as NCCL's kernels on stream 20 and what was computed as
kernels on stream 7, each with the launch that HTA wants to see before it; then all of HTA works on two processes of a
laptop, and its overlap can be held against ours. Durations and order stay true, but the device is made up.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.errors import UserError
from cs336_systems.profiling.names import COMMUNICATION, step_number
from cs336_systems.profiling.overlap import activity
from cs336_systems.profiling.trace import HOST, Span, Trace, write_json

COMPUTE_STREAM, FIRST_STREAM = 7, 20  # as PyTorch numbers them on a GPU: its own default, and NCCL's
EXTRA_STEP = 1000  # nanoseconds of the step after the last
FIRST_CORRELATION = 100_000  # HTA 0.6.1 with pandas 3 keeps smaller ones in a type too short for what it adds


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
    """The Chrome-trace JSON of a CPU trace with its work as kernels. A GPU's spans stay what they are, but for the
    steps."""
    first = min((span.start for span in trace.spans), default=trace.base)
    chrome = {key: value for key, value in trace.chrome.items() if key != "traceEvents"}
    chrome["distributedInfo"] = {"backend": "nccl", "rank": trace.rank, "world_size": trace.world_size}
    if any(span.category == "kernel" for span in trace.spans):  # HTA can read it as it is
        spans = [_event(span, trace.base) for span in trace.spans]
        return chrome | {"traceEvents": [*spans, *_steps(trace, trace.base)]}
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
    if any(span.name.startswith("ProfilerStep#") for span in trace.spans) or not trace.spans:
        return
    lane = next((span.lane for span in trace.spans if span.category in HOST), trace.spans[0].lane)
    begin, end = trace.spans[0].start, max(span.end for span in trace.spans)
    annotated = [span for span in trace.spans if span.category == "user_annotation"]
    steps = [(s.start, s.end) for s in annotated if step_number(s.name) is not None] or [(begin, end)]
    steps.append((end, end + EXTRA_STEP))
    for number, (start, stop) in enumerate(steps):
        yield _event(Span(f"ProfilerStep#{number}", "user_annotation", start, stop, lane), first)
