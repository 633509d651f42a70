"""What a published time means: the share of a GPU's bandwidth or peak that it takes, by counted bytes and FLOPs."""

from benchmarks.attention_candidates import BOTH, FORWARD, Task, flops
from benchmarks.norm_candidates import Shape, bytes_moved
from cs336_systems.cost.large.systems import System, system_preset
from writeup.cells import NONE
from writeup.publications import Key, Published

PARTIAL_ROWS = 2  # of a weight's gradient for each multiprocessor, as `benchmarks.norm_candidates` counts them
COURSE_ROWS = 50_000  # of the course's problems on norms


def norm_bytes(columns: int, what: str, system: System, rows: int = COURSE_ROWS) -> int:
    """The least bytes that a norm of (rows columns) float32 numbers reads and writes in a pass on a GPU."""
    return bytes_moved(Shape(rows, columns, "fp32", what), PARTIAL_ROWS * system.processors)


def norm_floor(columns: int, what: str, system: System, rows: int = COURSE_ROWS) -> float:
    """The least seconds of a norm of (rows columns) float32 numbers: bytes over the data sheet's bandwidth."""
    return norm_bytes(columns, what, system, rows) / system.bandwidth


def attention_flops(keys: dict[str, Key]) -> float:
    """FLOPs of a published pass of attention, by its keys `batch`, `seq`, `dim`, `causal` and `pass`."""
    task = Task("published", int(keys["batch"]), int(keys["seq"]), int(keys["dim"]), "bf16", bool(keys["causal"]))
    return flops(task, FORWARD if keys["pass"] == "forward" else BOTH)


def peak_share(found: Published, work: float, system: str, processors: int = 1) -> float:
    """The share of so many GPUs' peak in 16-bit products that `work` FLOPs in a published time take."""
    return work / found.value / (processors * system_preset(system).matmul_flops)


def floored(found: Published | None, floor: float) -> str:
    """`0.796 ms (15%)`: a published time, and the least time over it."""
    return f"{found.shown('ms')} ms ({floor / found.value:.0%})" if found else NONE
