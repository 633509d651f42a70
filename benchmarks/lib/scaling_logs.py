"""Runs of a scaling study, quantities derived from them, and the files that hold them: logs of Megatron-LM or of
cs336_systems.train, and JSON."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.records import shown
from cs336_systems.cost.logs import LoggedRun, megatron_runs, read_train_log
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.text import regular, strict_json

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


def bubble(run: ScalingRun) -> float | None:
    """Share of the pipeline's time in which the last stage waits: for the first activation and, in the all-reduce of
    the tied embedding's gradient, for the first stage's last backward. None without its timers."""
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


DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "world_size")
# Arguments of models that the formula for FLOPs does not describe.
OTHER_SHAPES = ("swiglu", "group_query_attention", "num_experts")


def read_runs(paths: Iterable[Path]) -> list[ScalingRun]:
    """Read the runs of some files, in order, each by its suffix: .json, .jsonl, or else a log of Megatron-LM.

    Raises UserError for a file that cannot be read or holds no run.
    """
    found: list[ScalingRun] = []
    for path in paths:
        with os_errors(f"read {path}"):
            text = regular(path).read_text(errors="replace")
        found += {".json": parse_published, ".jsonl": parse_train_log}.get(path.suffix, parse_log)(text, path.name)
    return found


def parse_published(text: str, name: str) -> list[ScalingRun]:
    """Read runs kept as JSON: `{"source": "...", "common": {fields that all share}, "runs": [{fields of a run}, ...]}`.

    Raises UserError if it is not that.
    """
    with shown(name, "{} does not hold runs as benchmarks/published/ does"):
        content = strict_json(text)
        shared = {"source": content["source"], **content.get("common", {})}
        if not content["runs"]:
            raise UserError(f"{name} has no run")
        return [ScalingRun(**shared | row) for row in content["runs"]]


def parse_log(text: str, name: str = "log") -> list[ScalingRun]:
    """Read a Megatron-LM log, or notes that quote such logs: one run per block of arguments.

    The time of an iteration and each timer are the median over the reports without a skipped iteration. Raises
    UserError if there are no timers, saying what was looked for, or if the arguments lack the layout or contradict
    themselves.
    """
    timed = [run for run in megatron_runs(text, name) if run.timers(first=True)]
    if not timed:
        raise UserError(
            f"{name} has no timers of a training step: looked for lines `time (ms) | forward-compute: 43.42 | ...`, "
            "and for `forward-backward ...: (41.07, 43.42)` below `time across ranks (ms):`; newer Megatron-LM "
            "prints them with --timing-log-level 2"
        )
    return [_megatron_run(logged, name) for logged in timed]


def _megatron_run(logged: LoggedRun, file: str) -> ScalingRun:
    tp, pp, dp, world = (_number(logged, each, file) for each in DEGREES)
    if tp * pp * dp != world:
        raise UserError(
            f"{file}: world_size {world} is not tensor {tp} x pipeline {pp} x data {dp} = {tp * pp * dp} parallel; "
            "other kinds of parallelism have no place in this table"
        )
    batch = logged.batch or _number(logged, "global_batch_size", file)
    iteration_ms = median([each.milliseconds for each in logged.steady(first=True)]) if logged.reports else None
    if iteration_ms is None and logged.sample_ms is None:
        raise UserError(
            f"{file} has timers, but not the time of an iteration: looked for `elapsed time per iteration (ms): ...` "
            "and `... ms per sample`"
        )
    counts: dict[str, int] = {}
    if same := logged.at_last_batch:
        first, last = same[0], same[-1]
        if last.iteration > first.iteration and first.consumed is not None and last.consumed is not None:
            counts = {"iterations": last.iteration - first.iteration, "samples": last.consumed - first.consumed}
    arguments, hidden = logged.arguments, logged.number("hidden_size")
    full = arguments.get("checkpoint_activations") == "True" or arguments.get("recompute_granularity") == "full"
    other = logged.number("ffn_hidden_size") not in (None, 4 * (hidden or 0)) or any(map(logged.says, OTHER_SHAPES))
    return ScalingRun(
        name=logged.name, tp=tp, pp=pp, dp=dp, micro_batch_size=_number(logged, "micro_batch_size", file),
        global_batch_size=batch, ms_per_sample=iteration_ms / batch if iteration_ms else logged.sample_ms or 0.0,
        timers=logged.timers(first=True), num_layers=None if other else logged.number("num_layers"), hidden_size=hidden,
        seq_length=logged.number("seq_length"), vocab_size=logged.vocabulary(), over_ranks=logged.over_ranks,
        recompute="full" if full else "selective" if logged.says("recompute_granularity") else "none", source=file,
        **logged.notes | counts,
    )  # fmt: skip


def _number(logged: LoggedRun, name: str, file: str) -> int:
    number, said = logged.number(name), logged.arguments
    if number is None:
        seen = f"says {said[name]!r}" if name in said else "is not there"
        # This project prints lines like Megatron-LM's, too, but the layout only into its log.
        ours = "" if said else "; of this project's own runs give the log file (--log-file), not what is printed"
        raise UserError(
            f"{file} has timers, but no layout for them: {name} {seen} in the block between `--- arguments ---` and "
            f"`--- end of arguments ---` that Megatron-LM prints first{ours}"
        )
    return number


def parse_train_log(text: str, file: str) -> list[ScalingRun]:
    """Read the one run of a log of cs336_systems.train. Raises UserError as `read_train_log` does."""
    with shown(file, "{} is not as python -m cs336_systems.train writes its log"):
        logged = read_train_log(text, file)
        header, memory = logged.header, logged.notes["peak_memory"]
        mesh, batch = header["mesh"], header["batch_size"]
        if mesh.get("ep", 1) != 1:
            raise UserError(
                f"{file}: {mesh['ep']} expert-parallel ranks have no place in a table of tensor x pipeline x data"
            )
        iteration_ms = median(each.milliseconds for each in logged.steady(first=True))
        return [ScalingRun(
            name=file, tp=mesh["tp"], pp=mesh["pp"], dp=mesh["dp"], micro_batch_size=header["micro_batch_size"],
            global_batch_size=batch, ms_per_sample=iteration_ms / batch, timers=logged.timers(first=True),
            seq_length=header["seq"],
            gpu_memory=(memory[0] / MEBIBYTE, memory[1] / MEBIBYTE) if memory and memory[1] else None,
            source=f"{file}, {header['recipe']['precision']} on {header['environment']['device']}",
            **own_shape(header["model"]),
        )]  # fmt: skip
