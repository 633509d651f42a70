"""Every benchmark that the chapters cite: the command that measures it, about how long it takes, and what it needs."""

import shlex
from dataclasses import dataclass

from writeup.errors import CitationError


@dataclass(frozen=True)
class Benchmark:
    """The module that measures, its options, and the minutes that these take on two cores of a CPU."""

    name: str
    options: tuple[str, ...] = ()
    minutes: float = 1.0
    root: bool = False  # it makes network namespaces
    gpu: bool = False
    module: str = ""  # if that is not benchmarks.NAME

    @property
    def source(self) -> str:
        """The dotted name of the module whose imports are what the benchmark exercises."""
        return self.module or f"benchmarks.{self.name}"

    @property
    def command(self) -> str:
        """The command to type."""
        return shlex.join(("python", "-m", self.source, *self.options))


SLOW_LINK = ("--d-model", "256", "--layers", "4", "--context", "64", "--bucket-sizes", "1 5 25")
GPU_SUITE = Benchmark("gpu_suite", minutes=6, gpu=True)  # many benchmarks, with the options that a GPU wants

# What a reader waits for least comes first.
RUNS = (
    Benchmark("mixed_precision", minutes=0.3),
    Benchmark("norms", minutes=3),
    Benchmark("attention", ("--grid", "course"), minutes=2),
    Benchmark("attention", ("--grid", "flash"), minutes=2),
    Benchmark("fused", minutes=4),
    *(
        Benchmark("profiling", ("--nproc", "2", "--wrapper", wrapper), 0.3, module="benchmarks.profiling_run")
        for wrapper in ("bucketed", "naive", "flat", "overlapped", "zero1", "zero2", "zero3", "torch-ddp")
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
    Benchmark("ddp", ("--d-model", "512", "--layers", "8", "--batch-size", "1", "--context", "32"), minutes=3),
    Benchmark("zero", ("--d-model", "512", "--layers", "8", "--batch-size", "1", "--context", "32"), minutes=5),
    Benchmark("allreduce", minutes=3),
    *(
        Benchmark(
            "allreduce",
            ("--nproc", str(nproc), "--", "benchmarks/allreduce.py", "--sizes", "1MB 10MB 50MB"),
            minutes=2,
            root=True,
            module="benchmarks.two_nodes",
        )
        for nproc in (1, 2, 3)
    ),
    Benchmark(
        "ddp",
        ("--one-node", "--nproc", "2", "--", "-m", "benchmarks.ddp", *SLOW_LINK),
        minutes=3,
        root=True,
        module="benchmarks.two_nodes",
    ),
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
    Benchmark("e2e", ("--size", "tiny", "--warmup", "0"), minutes=0.3),
    Benchmark("e2e", ("--size", "tiny", "--norm", "layernorm"), minutes=0.3),
    Benchmark("e2e", ("--size", "tiny", "--compile"), minutes=0.5),
    Benchmark("e2e", ("--size", "small", "--warmup", "0"), minutes=2),
    Benchmark("e2e", ("--size", "small", "--norm", "layernorm"), minutes=3),
    Benchmark("e2e", ("--size", "small", "--compile"), minutes=4),
    Benchmark("e2e", ("--size", "small", "--precision", "bf16"), minutes=1),
    Benchmark("e2e", ("--all-sizes",), minutes=60),
)


def benchmark(name: str) -> Benchmark:
    """The first run of that name. Raises CitationError for a name that no benchmark has."""
    for each in RUNS:
        if each.name == name:
            return each
    raise CitationError(f"no benchmark is called {name!r}; there are {', '.join(sorted({run.name for run in RUNS}))}")
