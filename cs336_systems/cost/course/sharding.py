"""Sharded optimizer state and fully sharded parameters: bytes a rank keeps, and bytes it sends."""

# The letters are those of the formulas.
# ruff: noqa: N803, N806

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, given, quantity, require
from cs336_systems.cost.parallel import TRAFFIC, zero_memory
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.presets import ModelConfig, model_preset

_EDITIONS = (2024, 2025, 2026)
_PROBLEM = "optimizer_state_sharding_accounting"


def parameters_of(size: str, year: int) -> int:
    """All parameters of a course size. Raises UserError for one that the year does not have."""
    return sum(count_parameters(model_preset(size, year)).values())


def tensors_of(config: ModelConfig) -> int:
    """Parameter tensors of a dense course model (no biases): matrices and norms of the blocks, and what is around."""
    block = 4 + (3 if config.feed_forward == "swiglu" else 2) + 2
    return config.num_layers * block + 2 + (config.positions == "learned") + (not config.tied_head)


def _check_ranks(name: str, N: int, P: int) -> None:
    require(N >= 2, f"{name}: N must be at least 2, since one rank shards nothing and sends nothing")
    require(N <= P, f"{name}: N = {given(N)} ranks share {given(P)} parameters; N must not be more")


def _symbols(size: str, year: int, N: int, P: int) -> tuple[Symbol, ...]:
    return (
        Symbol("size", "the course's size", f"{size} of {year}"),
        Symbol("N", "ranks", N),
        Symbol("P", "its parameters", P, "parameters"),
    )


_OPTIMIZER_MEMORY = Question(
    "optimizer-memory",
    "What does sharding the optimizer's state save?",
    _EDITIONS,
    (f"{_PROBLEM} (a)",),
    "How much memory is in use after the model is made, before the optimizer's step and after it, with AdamW's "
    "state on every rank and with each rank's share only?",
    assumed=("Everything is fp32; activations are gone when the optimizer steps; shards are equal.",),
    departures=(
        "The peak of a step may be in backward, where activations are alive and the state of the step before is too.",
        "Shards of whole tensors are not equal; the embedding alone may be more than a share.",
    ),
)


def optimizer_memory(size: str = "xl", year: int = 2025, N: int = 2) -> Answer:
    """Bytes at three points of a step, with whole and with sharded AdamW state."""
    P = parameters_of(size, year)
    _check_ranks("optimizer-memory", N, P)
    whole, sharded = zero_memory(P, 0, N, 0), zero_memory(P, 0, N, 1)
    kept = whole["parameters"] + whole["gradients"]
    published = sum(zero_memory(parameters_of("xl", 2024), 0, 2, 1).values())
    return Answer(
        _OPTIMIZER_MEMORY,
        _symbols(size, year, N, P),
        (
            Step("After initialization: parameters", "4 P", "initialized", whole["parameters"], "B"),
            Step("Before the step: gradients as well, sharded or not", "8 P", "before_step", kept, "B"),
            Step("AdamW's two moments", "8 P", "moments", whole["optimizer"], "B"),
            Step("After the step, not sharded", "16 P", "after_whole", sum(whole.values()), "B"),
            Step("A rank's share of the moments", "8 P/N", "moments_sharded", sharded["optimizer"], "B"),
            Step("After the step, sharded", "8 P + 8 P/N", "after_sharded", sum(sharded.values()), "B"),
            Step("Saved on each rank", "8 P (1 - 1/N)", "saved", sum(whole.values()) - sum(sharded.values()), "B"),
        ),
        f"Sharding changes what is there after the first step only: 16 P = {quantity(sum(whole.values()), 'B')} become "
        f"8 P + 8 P/N = {quantity(sum(sharded.values()), 'B')}.",
        notes=(
            "An update by whole-tensor operations makes temporaries: a published run of the 2024 xl on two ranks "
            f"measured 17.4 GiB sharded where this accounting has {published / 2**30:.1f}.",
        ),
    )  # fmt: skip


_ZERO1_TRAFFIC = Question(
    "zero1-traffic",
    "How does the assignment's sharded optimizer differ from ZeRO stage 1?",
    _EDITIONS,
    (f"{_PROBLEM} (c)",),
    "The assignment all-reduces gradients, updates each parameter on the rank that owns it, and broadcasts it. "
    "ZeRO stage 1 reduce-scatters gradients and all-gathers parameters. Which sends more, and which keeps more?",
    assumed=("fp32 parameters and gradients; collectives that send no more than they must, averaged over ranks.",),
    departures=(
        "That the volumes are equal is a common answer; it counts the assignment's all-reduce as one pass.",
        "After a reduce-scatter a rank needs its own slice of the gradients only: to free the rest is stage 2.",
        "This project's stage 1 also all-reduces (clipping wants whole gradients) and gathers in one call; stage 2 "
        "reduce-scatters.",
    ),
)


def zero1_traffic(size: str = "xl", year: int = 2025, N: int = 2, o: float = 20e-6) -> Answer:
    """Bytes a rank sends in a step with the assignment's sharded optimizer and with ZeRO stage 1; o seconds a call."""
    P, tensors = parameters_of(size, year), tensors_of(model_preset(size, year))
    _check_ranks("zero1-traffic", N, P)
    share = (N - 1) / N * 4 * P
    reduce, ours = TRAFFIC["all-reduce"] * share, (TRAFFIC["all-reduce"] + TRAFFIC["broadcast"]) * share
    zero = (TRAFFIC["reduce-scatter"] + TRAFFIC["all-gather"]) * share
    return Answer(
        _ZERO1_TRAFFIC,
        (
            *_symbols(size, year, N, P),
            Symbol("o", "overhead of one call", o, "s"),
        ),
        (
            Step("All-reduce of the gradients", "2 (N - 1)/N · 4 P", "all_reduce", reduce, "B"),
            Step("Broadcasts of all parameters from their owners; a relayed broadcast sends what an all-gather "
                 "sends", "(N - 1)/N · 4 P", "broadcasts", TRAFFIC["broadcast"] * share, "B"),
            Step("The assignment in all", "3 (N - 1)/N · 4 P", "assignment", ours, "B"),
            Step("ZeRO stage 1: reduce-scatter, then all-gather", "2 (N - 1)/N · 4 P", "zero1", zero, "B"),
            Step("The assignment's bytes over those", "3/2", "ratio", ours / zero),
            Step("ZeRO stage 1 sends what plain data parallelism does: an all-reduce is its two collectives, and "
                 "the update happens between them", "2 (N - 1)/N · 4 P", "data_parallel", reduce, "B"),
            Step("One broadcast for each tensor", "", "calls", tensors, "tensors"),
            Step("costs in calls alone, if they do not overlap", "", "call_seconds", tensors * o, "s"),
            Step("Both keep", "8 P + 8 P/N", "kept", sum(zero_memory(P, 0, N, 1).values()), "B"),
        ),
        f"The assignment sends {quantity(ours, 'B')}, half as many bytes again as ZeRO's {quantity(zero, 'B')}, in "
        f"{tensors} broadcasts instead of one gather, and with shares as unequal as tensors are.",
    )  # fmt: skip


_FSDP_MEMORY = Question(
    "fsdp-memory",
    "What does FSDP save beyond a sharded optimizer?",
    (2026,),
    ("fsdp_accounting (a)",),
    "Parameters and gradients are sharded too, and a layer's weight is whole only around its use. How much less is "
    "kept, and what is sent for it?",
    assumed=("fp32 throughout; the few replicated parameters (norms) count as sharded; layers are single matrices.",),
    departures=(
        "The peak falls by less: it lies in backward, where activations, a whole gradient before its "
        "reduce-scatter, and the window of gathered weights are alive together. Published runs on two GPUs found "
        "between nothing and half of it.",
        "A model that is first built whole and then sharded has its peak at the start; build it on the meta device.",
    ),
)


def fsdp_memory(size: str = "xl", year: int = 2026, N: int = 2, k: int = 2) -> Answer:
    """What full sharding saves beyond sharded optimizer state, with k layers gathered ahead."""
    P, config = parameters_of(size, year), model_preset(size, year)
    _check_ranks("fsdp-memory", N, P)
    layers = config.num_layers * (4 + (3 if config.feed_forward == "swiglu" else 2)) + 1
    require(
        k < layers,
        f"fsdp-memory: k = {given(k)} layers ahead are too many: {size} has {layers} matrices to multiply by",
    )
    sharded, full = zero_memory(P, 0, N, 1), zero_memory(P, 0, N, 3)
    matrix = 4 * config.d_model * config.d_ff
    window = (k + 1) * matrix
    saved = sum(sharded.values()) - sum(full.values())
    sent = (N - 1) / N * 4 * P
    return Answer(
        _FSDP_MEMORY,
        (
            *_symbols(size, year, N, P),
            Symbol("k", "layers gathered ahead of the one in use", k),
        ),
        (
            Step("Sharded optimizer alone", "8 P + 8 P/N", "sharded_optimizer", sum(sharded.values()), "B"),
            Step("Everything sharded", "16 P/N", "fsdp", sum(full.values()), "B"),
            Step("The difference", "8 P (1 - 1/N)", "saved", saved, "B"),
            Step("of which, in gradients", "4 P (1 - 1/N)", "saved_gradients",
                 sharded["gradients"] - full["gradients"], "B"),
            Step("The layer in use and those ahead of it are whole, at most", "(k + 1) · 4 D F", "gathered", window,
                 "B"),
            Step("so the saving is at least", "8 P (1 - 1/N) - (k + 1) · 4 D F", "net", saved - window, "B"),
            Step("A step sends three times (N - 1)/N of the parameters: two gathers and a reduce-scatter",
                 "3 (N - 1)/N · 4 P", "sent", 3 * sent, "B"),
            Step("where plain data parallelism sends", "2 (N - 1)/N · 4 P", "data_parallel", 2 * sent, "B"),
        ),
        f"8 P (1 - 1/N) = {quantity(saved, 'B')} less at rest, "
        + (f"at least {quantity(saved - window, 'B')} with layers gathered" if saved > window else "which the gathered "
           "layers can use up") + ", for half as many bytes again on the link.",
    )  # fmt: skip
