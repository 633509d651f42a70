"""Every benchmark that the write-up cites: the command that measures it, how long it takes, and what it needs.

An edition is measured on one kind of machine: `CPU` on two cores, `GPU` on one GPU or several. The GPU edition begins
with the records that are needed most, because time may run out before the last ones.
"""

import shlex
from dataclasses import dataclass
from typing import Literal

Edition = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Benchmark:
    """The module that measures, its options, and the minutes that it takes, on a GPU at most."""

    name: str
    options: tuple[str, ...] = ()
    minutes: float = 1.0
    root: bool = False  # it makes network namespaces
    gpus: int = 0
    module: str = ""  # if that is not benchmarks.NAME
    takes_budget: bool = False  # stops by itself, given --budget
    leaves: str = ""  # a folder beside the records, for pictures and traces, or a file
    records: bool = True  # it leaves records; else only what `leaves` names

    @property
    def source(self) -> str:
        """The dotted name of the module whose imports are what the benchmark exercises."""
        return self.module or f"benchmarks.{self.name}"

    @property
    def command(self) -> str:
        """The command to type."""
        return shlex.join(("python", "-m", self.source, *self.options))


def choices(option: str, *values: str) -> tuple[str, ...]:
    """An option that is given several times."""
    return tuple(word for value in values for word in (f"--{option}", value))


def on_gpu(name: str, *options: str, seconds: float, gpus: int = 1, **kinds: bool | str) -> Benchmark:
    """A benchmark of the GPU edition, which is stopped after these seconds."""
    return Benchmark(name, options, seconds / 60, gpus=gpus, **kinds)  # type: ignore[arg-type]


def through_two_nodes(name: str, options: tuple[str, ...], *command: str, minutes: float) -> Benchmark:
    """A command whose ranks a slow link joins: of two nodes, or with --one-node of one."""
    return Benchmark(name, (*options, "--", *command), minutes, root=True, module="benchmarks.two_nodes")


WRAPPERS = ("bucketed", "naive", "flat", "overlapped", "zero1", "zero2", "zero3", "torch-ddp")
NARROW = ("--d-model", "512", "--layers", "8", "--batch-size", "1", "--context", "32")
SLOW_LINK = ("--d-model", "256", "--layers", "4", "--context", "64", "--bucket-sizes", "1 5 25")
# 92.7 M parameters on two ranks: gradients of 371 MB, so that buckets of 1 MB are hundreds and those of 1000 MB one.
SMALL = ("--size", "small", "--batch-size", "1", "--context", "128", "--rounds", "3", "--steps", "1")
SWEEP = ("--bucket-sizes", "1 10 100 1000")
BACKENDS = ("gloo", "shm")

CPU = (
    Benchmark("mixed_precision", minutes=0.3),
    Benchmark("norms", minutes=3),
    Benchmark("attention", ("--grid", "course"), minutes=2),
    Benchmark("attention", ("--grid", "flash"), minutes=2),
    Benchmark("fused", minutes=4),
    *(
        Benchmark("profiling", ("--nproc", "2", "--wrapper", wrapper), 0.3, module="benchmarks.profiling_run")
        for wrapper in WRAPPERS
    ),
    *(
        Benchmark(
            "profiling",
            ("--size", size, "--wrapper", "none", "--attention", "naive"),
            1,
            module="benchmarks.profiling_run",
        )
        for size in ("tiny", "small")
    ),
    *(
        Benchmark(name, (*NARROW, "--backend", backend), minutes=minutes)
        for name, minutes in (("ddp", 3), ("zero", 5))
        for backend in BACKENDS
    ),
    Benchmark("allreduce", minutes=3),
    *(
        through_two_nodes(
            "allreduce", ("--nproc", nproc), "benchmarks/allreduce.py", "--sizes", "1MB 10MB 50MB", minutes=2
        )
        for nproc in ("1", "2", "3")
    ),
    through_two_nodes("ddp", ("--one-node", "--nproc", "2"), "-m", "benchmarks.ddp", *SLOW_LINK, minutes=3),
    Benchmark("scaling", minutes=4),
    Benchmark("long_context", minutes=6),
    Benchmark("checkpoints", minutes=3),
    *(
        Benchmark("compare", ("--size", size, "norm=rmsnorm", "norm=layernorm", "compile", "precision=bf16"), minutes)
        for size, minutes in (("tiny", 0.5), ("small", 4))
    ),
    Benchmark("moe_layer", ("--nproc", "2"), minutes=1),
    Benchmark("moe_sweep", minutes=5),
    Benchmark("moe_eval", ("--nproc", "4", "--moe", "both", "--profile"), minutes=12),
    Benchmark("memory", ("--all-sizes",), minutes=10),
    Benchmark("memory", ("--size", "2.7B", "--residuals"), minutes=0.5),
    Benchmark("memory", ("--size", "medium", "--batch-size", "4", "--segments"), minutes=1),
    Benchmark("leaderboard", minutes=5),
    Benchmark("e2e", ("--size", "tiny"), minutes=0.3),
    *(Benchmark("e2e", ("--size", "tiny", "--warmup", warmup), minutes=0.3) for warmup in ("0", "1", "5")),
    Benchmark("e2e", ("--size", "tiny", "--norm", "layernorm"), minutes=0.3),
    Benchmark("e2e", ("--size", "tiny", "--compile"), minutes=0.5),
    *(Benchmark("e2e", ("--size", "small", "--warmup", warmup), minutes=2) for warmup in ("0", "1", "5")),
    Benchmark("e2e", ("--size", "small", "--norm", "layernorm"), minutes=3),
    Benchmark("e2e", ("--size", "small", "--compile"), minutes=4),
    Benchmark("e2e", ("--size", "small", "--precision", "bf16"), minutes=1),
    # Long sequences by themselves, with the patience that they need: those that do not fit are recorded as such.
    Benchmark(
        "attention", ("--grid", "course", *choices("sequence", "8192", "16384"), "--patience", "120"), minutes=12
    ),
    *(Benchmark("ddp", (*SMALL, *SWEEP, "--backend", backend), minutes=6) for backend in BACKENDS),
    *(Benchmark("zero", (*SMALL, "--backend", backend), minutes=6) for backend in BACKENDS),
    through_two_nodes("ddp", ("--nproc", "1"), "-m", "benchmarks.ddp", *SMALL, *SWEEP, minutes=15),
    through_two_nodes("zero", ("--nproc", "1"), "-m", "benchmarks.zero", *SMALL, minutes=15),
    Benchmark("e2e", ("--all-sizes",), minutes=60),
)

TESTS = (
    "rmsnorm", "flash_attention", "cross_entropy", "swiglu", "fused_adamw", "fused_adamw_state", "weighted_sum", "gpu",
)  # fmt: skip
FUSED = ("ours", "torch", "liger", "torch-fused", "torch-foreach", "eager")
COMPARED = ("norm=rmsnorm", "norm=layernorm", "attention=sdpa", "kernels=triton", "kernels=triton,attention=flash")
BERT = ("--size", "bert-345m")

# torch.compile takes seconds for every shape. So only the course's normalisations are compiled; elsewhere the time goes
# into more shapes.
GPU = (
    on_gpu(
        "correctness", "-q", "--maxfail", "5", *(f"tests/kernels/test_{name}.py" for name in TESTS), seconds=90,
        module="pytest", records=False,
    ),
    on_gpu("norms", "--dtype", "fp32", seconds=40, takes_budget=True),
    on_gpu(
        "norms", "--dtype", "bf16", *choices("candidate", "ours", "torch", "layernorm", "liger", "quack"), seconds=35,
        takes_budget=True,
    ),
    on_gpu("attention", "--grid", "leaderboard", seconds=30, takes_budget=True),
    on_gpu("leaderboard", "--task", "attention-2025", "--seconds", "3", seconds=30),
    on_gpu("fused", *choices("candidate", *FUSED), seconds=35, takes_budget=True),
    on_gpu(
        "machine", "--budget", "10", seconds=20, module="cs336_systems.cost.commands.probe", leaves="machine.json",
        records=False,
    ),
    on_gpu("leaderboard", "--task", "step-2026", "--layers", "8", "--steps", "2", seconds=35),
    on_gpu("compare", "--size", "xl", "--precision", "bf16", *COMPARED, seconds=30),
    on_gpu(
        "attention", "--grid", "flash", "--dtype", "bf16", "--rounds", "8", *choices("dim", "64", "128"),
        *choices("candidate", "ours", "sdpa-flash", "sdpa-cudnn"), seconds=25, takes_budget=True,
    ),
    on_gpu(
        "attention", "--grid", "course", "--rounds", "8", *choices("candidate", "ours", "eager"), seconds=25,
        takes_budget=True,
    ),
    on_gpu(
        "profiling", "--size", "small", "--attention", "naive", seconds=25, leaves="profile",
        module="benchmarks.profiling_run",
    ),
    on_gpu("mixed_precision", seconds=10),
    on_gpu("e2e", "--size", "small", "--kernels", "triton", "--attention", "flash", seconds=30),
    on_gpu(
        "scaling", "--grid", "1x1x1", *BERT, "--global-batch-per-dp", "8", "--rounds", "2",
        *choices("precision", "fp32", "bf16", "fp16"), seconds=20,
    ),
    *(on_gpu(name, "--nproc", "2", seconds=60, gpus=2) for name in ("allreduce", "ddp", "zero")),
    on_gpu(
        "scaling", "--grid", "1x1x1,2x1x1,1x2x1,1x1x2", *BERT, "--global-batch-per-dp", "16", "--precision", "fp16",
        "--rounds", "2", seconds=90, gpus=2,
    ),
)  # fmt: skip

EDITIONS: dict[Edition, tuple[Benchmark, ...]] = {"cpu": CPU, "gpu": GPU}
