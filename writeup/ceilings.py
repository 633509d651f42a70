"""Published times put in relation: their share of a GPU's bandwidth or peak, and the expected time."""

from benchmarks.attention import AttentionTask, flops
from benchmarks.lib.kernel import BOTH, DTYPES, FORWARD
from benchmarks.lib.row_kernels import norm_bytes
from cs336_systems.cost.machines import System, system_preset
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.step_time import step_time
from cs336_systems.presets import ModelConfig, Norm, model_preset
from writeup.book import Book
from writeup.cells import NONE, quoted
from writeup.publications import Key, Published

PARTIAL_ROWS = 2  # of a weight's gradient for each multiprocessor, as `benchmarks.lib.row_kernels` counts them
COURSE_ROWS = 50_000  # of the course's problems on norms


def norm_floor(columns: int, what: str, system: System, rows: int = COURSE_ROWS) -> float:
    """The least seconds of a pass of a norm of (rows columns) float32 numbers on a GPU: the bytes that it reads and
    writes over the data sheet's bandwidth."""
    return norm_bytes(rows, columns, DTYPES["fp32"].itemsize, what, PARTIAL_ROWS * system.processors) / system.bandwidth


def attention_flops(keys: dict[str, Key]) -> float:
    """FLOPs of a published pass of attention, by its keys `batch`, `seq`, `dim`, `causal` and `pass`."""
    task = AttentionTask(
        "published", int(keys["batch"]), int(keys["seq"]), int(keys["dim"]), "bf16", bool(keys["causal"])
    )
    return flops(task, FORWARD if keys["pass"] == "forward" else BOTH)


def peak_share(found: Published, work: float, system: str, processors: int = 1) -> float:
    """The share of the 16-bit peak of a number of GPUs that `work` FLOPs in a published time are."""
    return work / found.value / (processors * system_preset(system).matmul_flops)


def floored(book: Book, found: Published | None, floor: float) -> str:
    """`0.796 ms (15%)`: a published time, with a mark if it is implausible, and the least time over it."""
    return f"{quoted(book, found, 'ms')} ({floor / found.value:.0%})" if found else NONE


def pass_seconds(config: ModelConfig, batch: int, seq: int, precision: str, what: str, system: System) -> float:
    """Seconds of one pass over (batch seq) tokens that the model of large systems predicts for a single GPU.

    float32 is taken to be TF32, which the kernels of the original's profile are. Waiting for the host is predicted for
    forward and backward together, so that a single pass has half of it. Raises UserError for sizes that do not divide.
    """
    plan = Plan(micro_batch=batch, global_batch=batch, width=4 if precision == "fp32" else 2)
    parts = step_time(config, plan, seq, system).parts
    passes = {name: parts[name] + parts["host"] / 2 for name in ("forward", "backward")}
    both = sum(passes.values())
    return (passes | {"forward-backward": both, "step": both + parts["optimizer"]})[what]


def original_seconds(size: str, what: str, precision: str = "fp32", norm: Norm = "rmsnorm") -> float:
    """Predicted seconds of a cell of the original: batch 16 and context 128 on the GPU that its kernels point to."""
    config = model_preset(size, 2024).override(norm=norm)
    return pass_seconds(config, 16, 128, precision, what, system_preset("H100"))
