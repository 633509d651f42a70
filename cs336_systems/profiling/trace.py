"""Reads one rank's trace from the Chrome-trace JSON that torch.profiler writes, with or without `Capture`.

Times are integer nanoseconds since the epoch, so that sums are exact and ranks can be compared. Reading corrects three
faults of torch.profiler: bytes that are no UTF-8 (pytorch issue 113564), negative durations, which become 0, and spans
of gloo's sends and receives on the thread that posted them, although they last until the end of the wait; they get
lanes of their own. Python's frames (`with_stack=True`) are left out: they cross the annotations that they open.
"""

import gc
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.text import regular
from cs336_systems.profiling.fields import ARGS, EVENT, NAME, OURS, about_rank, check, slim
from cs336_systems.profiling.intervals import pack
from cs336_systems.profiling.names import Collective, parse_collective

T = TypeVar("T", "Trace", list["Trace"])
U = TypeVar("U")
K = TypeVar("K")
P = ParamSpec("P")
Lane = tuple[Any, Any]  # (pid, tid); kineto uses words for some
Place = tuple[Lane, int]  # a moment, in nanoseconds, of a lane
Flow = tuple[str, str, Any]  # an arrow's category, name and number
Ends = list[list[Place]]  # where it begins, and where it ends
KERNEL = re.compile(r"^nccl|ncclDevKernel|ncclKernel")  # NCCL's kernels on a GPU
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what ran on a GPU
EARLIER = "launched before the profile"  # category of such kernels, which no table counts
ON_GPU = (*DEVICE, EARLIER, "gpu_user_annotation", "cuda_sync")
RUNTIME = ("cuda_runtime", "cuda_driver")  # categories of calls that launch kernels, HIP's as well
HOST = ("cpu_op", "user_annotation", *RUNTIME)
LEFT_OUT = ("Trace", "python_function")
AT_ONCE = 100  # events that are written together, few enough for the processor's cache
POSTED = ("gloo:send", "gloo:recv")


class Span(NamedTuple):
    """A span of time: [start, end) in nanoseconds since the epoch, on one lane of one process."""

    name: str
    category: str
    start: int
    end: int
    lane: Lane
    args: Mapping[str, Any] = {}

    @property
    def duration(self) -> int:
        return self.end - self.start


class Allocation(NamedTuple):
    """One event of an allocator: `nbytes` is negative when memory is freed. `total` is its own sum, of GPU `number`."""

    time: int
    address: int
    nbytes: int
    device: str  # cpu or cuda
    total: int
    lane: Lane
    number: Any


@dataclass(frozen=True)
class Trace:
    """One rank's trace."""

    spans: list[Span]  # in order of start, the longer first
    allocations: list[Allocation]
    flows: dict[Flow, Ends]  # arrows: from a call to its kernel, from an operator of forward to backward's
    threads: dict[Lane, str]
    rank: int
    world_size: int
    host: str
    ours: dict[str, Any]  # data that `Capture` added
    chrome: dict[str, Any]  # the rest of the file's JSON; `read_trace` drops its events, which are all in the above
    base: int  # nanoseconds since the epoch at which the JSON's clock starts
    cache: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # see `once`

    @cached_property
    def annotated(self) -> list[Span]:
        """The annotations: spans that a program named, ours among them."""
        return [span for span in self.spans if span.category == "user_annotation"]

    @cached_property
    def collectives(self) -> list[tuple[Collective, Span]]:
        """Our annotations of launches and waits."""
        return [(found, span) for span in self.annotated if (found := parse_collective(span.name))]

    @cached_property
    def links(self) -> dict[Place, Place]:
        """From an operator of backward to the operator of forward that it belongs to."""
        ends = [both for (category, *_), both in self.flows.items() if category == "fwdbwd" and all(both)]
        return {targets[-1]: sources[-1] for sources, targets in ends}

    @property
    def memory_device(self) -> str:
        """The device whose memory is shown: cuda if anything was allocated there, or else cpu."""
        return "cuda" if any(each.device == "cuda" for each in self.allocations) else "cpu"

    @cached_property
    def calls(self) -> dict[Any, Span]:
        """The runtime calls that launched something, by correlation number, which their kernels share."""
        return {s.args["correlation"]: s for s in self.spans if s.category in RUNTIME and "correlation" in s.args}

    def lanes(self, *categories: str) -> dict[Lane, list[Span]]:
        """The spans of some categories by lane, in order."""
        return grouped((span for span in self.spans if span.category in categories), lambda span: span.lane)


def grouped(items: Iterable[U], key: Callable[[U], K]) -> dict[K, list[U]]:
    """Items by a key of each, in order."""
    result = defaultdict[K, list[U]](list)
    for item in items:
        result[key(item)].append(item)
    return dict(result)


def once(make: Callable[Concatenate[T, P], U]) -> Callable[Concatenate[T, P], U]:
    """Decorate a function of a trace, or of a list of traces: it runs once for each, and all callers share its result,
    which must not be changed and lives as long as the (first) trace."""

    @wraps(make)
    def kept(given: T, /, *args: P.args, **options: P.kwargs) -> U:
        traces: list[Trace] = [given] if isinstance(given, Trace) else list(given)
        cache, key = traces[0].cache if traces else {}, (make, *map(id, traces), args, *options.items())
        if key not in cache:
            with uncollected():
                cache[key] = make(given, *args, **options), traces  # kept alive, so that their ids stay valid
        made: U = cache[key][0]
        return made

    return kept


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection: with a million objects that all stay, it takes longer than making them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_json(path: Path, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """The JSON of a trace file, plain or gzipped; `hook` may change every object. Raises UserError for others."""

    def no_number(name: str) -> float:
        raise ValueError(f"a number in it is {name}")  # JSON has neither NaN nor infinities, though Python reads them

    with os_errors(f"read the trace {path}"):
        data = regular(path).read_bytes()
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8", "replace")
        found = json.loads(text, strict=False, parse_constant=no_number, object_hook=hook)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path} is cut short: its {len(data)} bytes are no whole gzip; profile again") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is cut short, or no JSON of a trace: {error}; profile again") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise UserError(f"{path} is JSON, but no Chrome trace: it has no list traceEvents")
    return found


def write_json(chrome: dict[str, Any], path: Path) -> None:
    """Write a trace, gzipped if the name ends in .gz."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
    events, parts = iter(chrome["traceEvents"]), list[str]()
    try:
        head = encode({key: value for key, value in chrome.items() if key != "traceEvents"} | {"traceEvents": []})
        while some := [*islice(events, AT_ONCE)]:
            parts.append(encode(some)[1:-1])
    except (ValueError, RecursionError) as error:  # in parts that no reader of events has checked
        raise UserError(f"cannot write {path}: a field of some event is out of range ({error})") from None
    data = f"{head[:-2]}{','.join(parts)}]}}".encode()
    path.write_bytes(gzip.compress(data, 5, mtime=0) if path.suffix == ".gz" else data)


@uncollected()
def read_trace(path: Path | str) -> Trace:
    """Read one rank's trace. Raises UserError for a file that is no trace."""
    trace = parse(read_json(Path(path), slim()), Path(path))
    trace.chrome["traceEvents"].clear()
    return trace


def parse(chrome: dict[str, Any], path: Path = Path("trace")) -> Trace:
    """The trace in a Chrome-trace JSON. Raises UserError for fields that are missing or of another type."""
    spans, allocations, threads, flows = [], [], {}, dict[Flow, Ends]()
    lanes: dict[Lane, Lane] = {}
    number = 0  # of the event that an error is about
    try:
        info, base = about_rank(chrome), chrome.get("baseTimeNanoseconds", 0)
        for number, event in enumerate(chrome["traceEvents"], 1):  # noqa: B007
            check(event, EVENT)
            check(args := event.get("args", {}), ARGS)
            phase, name, category = event["ph"], event.get("name"), event.get("cat", "")
            lane = lanes.setdefault(lane := (event.get("pid"), event.get("tid")), lane)
            time = base + round(1000 * event["ts"]) if phase != "M" else base
            if phase == "X" and category not in LEFT_OUT:
                end = time + max(0, round(1000 * event["dur"]))
                spans.append(Span(event["name"], category, time, end, lane, args))
            elif phase == "i" and name == "[memory]" and "Addr" in args:  # torch before 1.13 gives none
                address, nbytes, total = (args[key] for key in ("Addr", "Bytes", "Total Allocated"))
                device = "cpu" if args["Device Type"] == 0 else "cuda"
                allocations.append(Allocation(time, address, nbytes, device, total, lane, args.get("Device Id")))
            elif phase == "M" and name == "thread_name":
                check(args, {"name": NAME})
                threads[lane] = args["name"]
            elif phase in ("s", "t", "f"):
                flows.setdefault((category, name, event.get("id")), [[], []])[phase != "s"].append((lane, time))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        what = f"event {number} lacks or garbles a field" if number else "a field of its head is garbled"
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is no trace of torch.profiler: {what} ({why})") from None
    # Sends and receives get lanes of their own, as few as are needed so that none cross.
    tracks = enumerate(pack(span for span in spans if span.name in POSTED))
    posted = {id(span): (span.lane[0], f"in flight {number}") for number, track in tracks for span in track}
    spans = [span._replace(lane=posted[id(span)]) if id(span) in posted else span for span in spans]
    spans = sorted(_earlier_apart(spans), key=lambda span: (span.start, -span.end))
    allocations.sort(key=lambda each: each.time)
    rank, host = info.get("rank", 0), chrome.get("host_name", "")
    world = info.get("world_size", rank + 1)
    return Trace(spans, allocations, flows, threads, rank, world, host, chrome.get(OURS, {}), chrome, base)


def _earlier_apart(spans: list[Span]) -> list[Span]:
    """Move kernels that were launched before the profile began to a category of their own. Their correlation is lower
    than the first call's, or they begin before any CPU thread did anything. (Not every call is recorded.)"""
    first = min((span.start for span in spans if span.category in HOST), default=0)
    known = {span.args.get("correlation") for span in spans if span.category in RUNTIME}
    lowest = min((each for each in known if isinstance(each, int) and each > 0), default=0)

    def earlier(span: Span) -> bool:
        number = span.args.get("correlation")
        return number not in known and (span.start < first or (isinstance(number, int) and 0 < number < lowest))

    return [s._replace(category=EARLIER) if s.category in DEVICE and earlier(s) else s for s in spans]


def trace_name(rank: int) -> str:
    """The file of a rank's trace."""
    return f"rank{rank}.trace.json.gz"


def trace_files(folder: Path | str) -> list[Path]:
    """The traces of `Capture` in a folder, by rank, or else those of torch's TensorBoard handler."""
    name, inside = re.compile(r"rank(\d+)\.trace\.json(\.gz)?"), sorted(Path(folder).glob("*.trace.json*"))
    ours = sorted((int(match[1]), path) for path in inside if (match := name.fullmatch(path.name)))
    found = [path for _, path in ours] or [path for path in inside if ".pt.trace.json" in path.name]
    if not found:
        how = "make some with benchmarks/profiling_run.py --out"
        raise UserError(f"{folder} holds no trace rank*.trace.json.gz; {how}")
    return found
