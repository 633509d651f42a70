"""Traces of several ranks made by hand, in the words of torch.profiler. Times are microseconds."""

from cs336_systems.profiling.names import LINE_UP
from cs336_systems.profiling.trace import OURS, Trace, parse
from tests.support.chrome_events import event

BASE, SECOND = 1_790_000_000 * 10**9, 10**9
PID, MAIN, GLOO = 77, 77, 80  # the same process on every rank, as in containers


def slice_(name: str, start: float, end: float, tid: int = MAIN, cat: str = "cpu_op", **args) -> dict:
    """Times in microseconds."""
    return event(name, float(start), float(end - start), (PID, tid), cat, **args)


def note(name: str, start: float, end: float) -> dict:
    return slice_(name, start, end, cat="user_annotation")


def gloo(start: float, end: float, name: str = "gloo:all_reduce", dims=((8,),), tid: int = GLOO) -> dict:
    return slice_(name, start, end, tid, "user_annotation", **{"Input Dims": [list(each) for each in dims]})


def own(verb: str, number: int, launch: float, wait: float, end: float, dims=((8,),), group: str = "0") -> list[dict]:
    """Our annotations of a collective that is launched and waited for, and torch's operator inside."""
    operator = slice_("c10d::op", launch + 1, launch + 2, **{"Input Dims": [list(each) for each in dims]})
    name = f"{verb} {group}#{number} bucket"
    return [note(f"launch {name}", launch, launch + 3), operator, note(f"wait {name}", wait, end)]


def flow(number: int, start: float, end: float, kind: str = "fwdbwd") -> list[dict]:
    both = {"cat": kind, "name": kind, "id": number, "pid": PID, "tid": MAIN}
    return [{"ph": "s", "ts": float(start), **both}, {"ph": "f", "bp": "e", "ts": float(end), **both}]


def memory(time: float, nbytes: int) -> dict:
    args = {"Device Type": 0, "Device Id": -1, "Addr": 5, "Bytes": nbytes, "Total Allocated": 0}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": PID, "tid": MAIN, "ts": time, "args": args}


def trace(rank: int, *events, world: int = 2, host: str = "", groups=(), base: int = BASE, **ours) -> Trace:
    info = {"rank": rank, "world_size": world, "pg_config": [{"ranks": each} for each in groups]}
    chrome = {"baseTimeNanoseconds": base, "host_name": host or f"host{rank}", "distributedInfo": info}
    if ours:
        chrome[OURS] = {"rank": rank, "world_size": world} | ours
    return parse(chrome | {"traceEvents": list(events)})


def lined_up(start: float, end: float) -> dict:
    """The ranks met before the first step: if from the same start to the same end, their clocks agree."""
    return slice_(LINE_UP, start, end, cat=LINE_UP)


def kernel(start: float, end: float, **args) -> dict:
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    group = {"Process Group Name": "0", "In msg nelems": 8, "dtype": "Float", "stream": 20}
    return slice_(name, start, end, 20, "kernel", **(group | args)) | {"pid": 0}


def two_ranks(ahead: int = 0) -> list[Trace]:
    """Rank 1 joins last, and its clock is ahead."""
    step = [
        lined_up(0, 1),
        slice_("step 0", 1, 1000, cat="user_annotation"),
        slice_("aten::mm", 10, 20),
        slice_("Backward", 30, 40),
    ]
    mine = [*step, *flow(1, 10, 30), *own("all-reduce", 1, 100, 150, 300.5), gloo(105, 300), memory(12.0, 2**20)]
    child = slice_("aten::div_", 250, 290, GLOO)
    yours = [*step, *flow(1, 10, 30), *own("all-reduce", 1, 200, 230, 299), gloo(201, 298), child, memory(12.0, 2**21)]
    facts = {"held": [["parameters", 5, 2**20, "cpu"]], "steps": 1}
    return [trace(0, *mine, **facts), trace(1, *yours, base=BASE + ahead, **facts)]
