"""Steps of `gpu_suite` on a GPU, the most important first, and how long each may take."""

from dataclasses import dataclass

TESTS = (
    "rmsnorm", "flash_attention", "cross_entropy", "swiglu", "fused_adamw", "fused_adamw_state", "weighted_sum", "gpu",
)  # fmt: skip


@dataclass(frozen=True)
class GPUStep:
    """A command: a module with its options, and the seconds after which it is stopped."""

    name: str
    command: tuple[str, ...]
    seconds: float
    takes_budget: bool = False  # stops by itself, given --budget
    gpus: int = 1
    leaves: str = ""  # a folder beside the records, for pictures and traces, or a file
    records: bool = True  # it leaves records; else only what `leaves` names


def choices(option: str, *values: str) -> tuple[str, ...]:
    """An option that is given several times."""
    return tuple(word for value in values for word in (f"--{option}", value))


# torch.compile takes seconds for every shape. So only the course's normalisations are compiled; elsewhere the time goes
# into more shapes. What matters most comes first, since what comes last may find no time left.
STEPS = (
    GPUStep("correctness", ("pytest", "-q", "--maxfail", "5", *(f"tests/kernels/test_{t}.py" for t in TESTS)), 90),
    GPUStep("norms fp32", ("benchmarks.norms", "--dtype", "fp32"), 40, takes_budget=True),
    GPUStep(
        "norms bf16",
        ("benchmarks.norms", "--dtype", "bf16", *choices("candidate", "ours", "torch", "layernorm", "liger", "quack")),
        35,
        takes_budget=True,
    ),
    GPUStep("attention", ("benchmarks.attention", "--grid", "leaderboard"), 30, takes_budget=True),
    GPUStep("leaderboard 2025", ("benchmarks.leaderboard", "--task", "attention-2025", "--seconds", "3"), 30),
    GPUStep(
        "fused",
        (
            "benchmarks.fused",
            *choices("candidate", "ours", "torch", "liger", "torch-fused", "torch-foreach", "eager"),
        ),
        35,
        takes_budget=True,
    ),
    GPUStep("machine", ("cs336_systems.cost.probe_system", "--budget", "10"), 20, leaves="machine.json", records=False),
    GPUStep("leaderboard 2026", ("benchmarks.leaderboard", "--task", "step-2026", "--layers", "8", "--steps", "2"), 35),
    GPUStep(
        "model",
        (
            "benchmarks.compare", "--size", "xl", "--precision", "bf16", "norm=rmsnorm", "norm=layernorm",
            "attention=sdpa", "kernels=triton", "kernels=triton,attention=flash",
        ),
        30,
    ),
    GPUStep(
        "flash grid",
        (
            "benchmarks.attention", "--grid", "flash", "--dtype", "bf16", "--rounds", "8", *choices("dim", "64", "128"),
            *choices("candidate", "ours", "sdpa-flash", "sdpa-cudnn"),
        ),
        25,
        takes_budget=True,
    ),
    GPUStep(
        "course grid",
        ("benchmarks.attention", "--grid", "course", "--rounds", "8", *choices("candidate", "ours", "eager")),
        25,
        takes_budget=True,
    ),
    GPUStep("profile", ("benchmarks.profiling_run", "--size", "small", "--attention", "naive"), 25, leaves="profile"),
    GPUStep("mixed precision", ("benchmarks.mixed_precision",), 10),
    GPUStep("end to end", ("benchmarks.e2e", "--size", "small", "--kernels", "triton", "--attention", "flash"), 30),
    GPUStep(
        "layouts on one GPU",
        (
            "benchmarks.scaling", "--grid", "1x1x1", "--size", "bert-345m", "--global-batch-per-dp", "8", "--rounds",
            "2", *choices("precision", "fp32", "bf16", "fp16"),
        ),
        20,
    ),
    GPUStep("all-reduce", ("benchmarks.allreduce", "--nproc", "2"), 60, gpus=2),
    GPUStep("data parallel", ("benchmarks.ddp", "--nproc", "2"), 60, gpus=2),
    GPUStep("ZeRO", ("benchmarks.zero", "--nproc", "2"), 60, gpus=2),
    GPUStep(
        "layouts",
        (
            "benchmarks.scaling", "--grid", "1x1x1,2x1x1,1x2x1,1x1x2", "--size", "bert-345m", "--global-batch-per-dp",
            "16", "--precision", "fp16", "--rounds", "2",
        ),
        90,
        gpus=2,
    ),
)  # fmt: skip
