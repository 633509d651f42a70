"""One run of a scaling study, and derived quantities: throughput, efficiency, pipeline bubble, FLOPs, lost time."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cs336_systems.errors import UserError

MEBIBYTE = 2**20
MOST = 1e18  # no count or time is larger
Recompute = Literal["none", "selective", "full"]
# Megatron-LM's names for this project's ways of recomputation.
RECOMPUTED: dict[str, Recompute] = {"none": "none", "segments": "full", "nested": "full", "attention": "selective"}

SCHEDULE = ("forward-compute", "forward-recv", "forward-send", "backward-compute", "backward-recv", "backward-send")
BUBBLE = ("forward-recv", "backward-embedding-all-reduce", "embedding-grads-all-reduce")
# How timers begin that run inside another one, if that is there: to add both would count the time twice. The first two
# are of version 2.5, the others of later ones.
INSIDE = (
    (("batch-generator",), "forward-compute"),
    (("optimizer-",), "optimizer"),
    (("grads-", "layernorm-grads-", "embedding-grads-"), "backward-reduce-model-grads"),
    ((*SCHEDULE, "batch-generator", "all-grads-sync", "layernorm-grads-", "embedding-grads-"), "forward-backward"),
)


@dataclass(frozen=True)
class ScalingRun:
    """One run, as measured or as printed elsewhere. What a source does not say is None.

    `timers` are milliseconds of an iteration: those of the last rank, whose line Megatron-LM prints, or, if
    `over_ranks`, each the most over the ranks. `iterations` and `samples` are what the source says was timed, right or
    wrong. `vocab_size` includes padding. `gpu_util` is nvidia-smi's percentage, `gpu_memory` MiB, least and most over
    the GPUs, of `gpu_memory_total`. `peak_flops` is one device's FLOP/s in the precision of the run.

    Raises UserError for sizes below 1, a batch that does not divide, and times that are not positive and finite; a
    timer may be 0.
    """

    name: str
    tp: int
    pp: int
    dp: int
    micro_batch_size: int
    global_batch_size: int
    ms_per_sample: float
    timers: dict[str, float]
    num_layers: int | None = None
    hidden_size: int | None = None
    seq_length: int | None = None
    vocab_size: int | None = None
    recompute: Recompute = "none"
    iterations: int | None = None
    samples: int | None = None
    gpu_util: float | None = None
    gpu_memory: Sequence[float] | None = None
    gpu_memory_total: float | None = None
    peak_flops: float | None = None
    over_ranks: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "micro_batch_size", "global_batch_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < MOST:
                raise UserError(f"{self.name!s:.60}: {name} must be a whole number of at least 1, not {value!r:.60}")
        together = self.micro_batch_size * self.dp
        if self.global_batch_size % together:
            raise UserError(
                f"{self.name}: global batch {self.global_batch_size} is not a multiple of micro-batch "
                f"{self.micro_batch_size} x dp {self.dp} = {together}"
            )
        for name, value in {"sample": self.ms_per_sample, **self.timers}.items():
            if type(value) not in (int, float) or not 0 <= value < MOST or (name == "sample" and not value):
                raise UserError(f"{self.name!s:.60}: the time of {name!s:.60} must be positive, not {value!r:.60} ms")

    @property
    def label(self) -> str:
        """`W = 16 (2/2/4)`: ranks, and how they are laid out."""
        return f"W = {self.world} ({self.layout})"

    @property
    def world(self) -> int:
        """Ranks: tp x pp x dp."""
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> str:
        """`2/2/8`: tensor, pipeline and data parallel."""
        return f"{self.tp}/{self.pp}/{self.dp}"

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each replica works through in an iteration, m."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def iteration_ms(self) -> float:
        """Milliseconds of an iteration."""
        return self.ms_per_sample * self.global_batch_size

    @property
    def samples_per_s(self) -> float:
        """Sequences a second, of all ranks together."""
        return 1e3 / self.ms_per_sample


def own_shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a run of this project, by its model's configuration. Without num_layers if its FLOPs are not those of
    the formula, which has an MLP of 4 h and every block once more, where nested segments repeat some twice."""
    plain = model["d_ff"] == 4 * model["d_model"] and model["recompute"] != "nested"
    plain = plain and model.get("feed_forward") != "swiglu" and not model.get("num_experts")
    plain = plain and model.get("num_kv_heads") in (None, 0, model.get("num_heads"))
    names = {"hidden_size": "d_model", "vocab_size": "vocab_size", **({"num_layers": "num_layers"} if plain else {})}
    return {"recompute": RECOMPUTED[model["recompute"]]} | {name: model[theirs] for name, theirs in names.items()}


def efficiency(run: ScalingRun, base: ScalingRun) -> float:
    """Throughput of a rank, relative to that in the base: 1 is ideal scaling."""
    return (run.samples_per_s / run.world) / (base.samples_per_s / base.world)


def default_base(runs: Sequence[ScalingRun]) -> ScalingRun:
    """The smallest run that is laid out like the largest: the same tp and pp, and as many samples for each rank."""

    def kind(run: ScalingRun) -> tuple[int, int, float]:
        return run.tp, run.pp, run.global_batch_size / run.world

    largest = max(runs, key=lambda run: run.world)
    return min((run for run in runs if kind(run) == kind(largest)), key=lambda run: run.world)


def sample_flops(run: ScalingRun, model_only: bool = False) -> float | None:
    """FLOPs of one sequence; None if the shape is not known. Matrix products only, of layers with an MLP of 4 h.

    A layer's forward pass takes 24 s h^2 for its weights and 4 s^2 h for its attention, the head's 2 s h V; backward
    takes twice as much, and recompute repeats the layers' forward, but not the head's. With full recompute that makes
    96 s l h^2 (1 + s / 6h + V / 16lh) (arXiv:2104.04473, equation 3 and appendix), without it
    72 s l h^2 (1 + s / 6h + V / 12lh) (arXiv:2205.05198, appendix A), which `model_only` returns in any case. Selective
    recompute repeats the attention's 4 s^2 h only.
    """
    if run.num_layers is None or run.hidden_size is None or run.seq_length is None or run.vocab_size is None:
        return None
    s, h, v = float(run.seq_length), float(run.hidden_size), float(run.vocab_size)
    attention, head = 4 * s * s * h, 2 * s * h * v
    layer = 24 * s * h * h + attention
    repeated = 0 if model_only else {"none": 0, "selective": attention, "full": layer}[run.recompute]
    return run.num_layers * (3 * layer + repeated) + 3 * head


def utilisation(run: ScalingRun, model_only: bool = False) -> float | None:
    """FLOP/s of the hardware (HFU), or of the model's own arithmetic (MFU), over the devices' peak; None if unknown."""
    flops = sample_flops(run, model_only)
    if flops is None or run.peak_flops is None:
        return None
    return flops * run.samples_per_s / (run.world * run.peak_flops)


def bubble(run: ScalingRun) -> float | None:
    """Share of the pipeline's time in which the last stage waits; None without its timers.

    The last stage waits twice: for the first activation (`forward-recv`), and in the all-reduce of the tied embedding's
    gradient for the first stage, which ends its last backward later (`backward-embedding-all-reduce`). What was sent
    there takes little of the time: a whole stage's micro-batch passes meanwhile.
    """
    if run.pp == 1:
        return 0.0
    # A collective that was timed apart from the wait for it is one thing here: both are the bubble.
    times = [(name.removesuffix("-wait"), value) for name, value in run.timers.items()]
    waiting = [value for name, value in times if name in BUBBLE]
    rest = [value for name, value in times if name.startswith(SCHEDULE) and name not in BUBBLE]
    return sum(waiting) / (sum(waiting) + sum(rest)) if waiting and rest else None


def ideal_bubble(run: ScalingRun) -> float:
    """(p - 1) / (m + p - 1): the share of 1F1B's and GPipe's time with no work, if all stages are equally fast."""
    return (run.pp - 1) / (run.micro_batches + run.pp - 1)


def parent(name: str, names: Container[str]) -> str | None:
    """The timer among `names` that a timer runs in, None if it stands at the top."""
    return next((outer for begin, outer in INSIDE if name.startswith(begin) and outer in names and outer != name), None)


def top_level(run: ScalingRun) -> dict[str, float]:
    """The timers that run in no other one."""
    return {name: value for name, value in run.timers.items() if parent(name, run.timers) is None}


def top_level_ms(run: ScalingRun) -> float:
    """The sum of the timers that run in no other one, milliseconds of an iteration."""
    return sum(top_level(run).values())
