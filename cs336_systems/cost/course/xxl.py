"""The 2025 edition's XXL model: its memory, how far it must be sharded, and the batch that hides communication."""

# The letters are those of the formulas.
# ruff: noqa: N803, N806

from math import ceil, sqrt

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, quantity, require
from cs336_systems.cost.large.systems import GIB, system_preset

_PROBLEM, _YEARS = "communication_accounting", (2025,)
_BF16, _FP32 = 2, 4
_STATE = 4 * _FP32  # weight, accumulated gradient and two moments of a parameter
_H100 = system_preset("H100").memory / GIB * 1e9  # a GB as the course has it


def _model(D: int, F: int, L: int) -> tuple[Symbol, ...]:
    return Symbol("D", "d_model", D), Symbol("F", "d_ff", F), Symbol("L", "blocks", L)


def _parameters(D: int, F: int, L: int) -> float:
    return float(2 * L * D * F)


def _saved(D: int, F: int, L: int) -> float:
    """Bytes a token keeps for backward: the inputs of both products of each block."""
    return float(_BF16 * L * (D + F))


_XXL_MEMORY = Question(
    "xxl-memory",
    "XXL: how much memory?",
    _YEARS,
    (f"{_PROBLEM} (a)",),
    "Blocks of two matrices and nothing else. How much memory do the state of training in fp32 and the activations "
    "in bf16 take, and how many H100 is that?",
    assumed=(
        "No attention, embedding, head, activation function or bias; no checkpointing.",
        "The 80 GB of an H100 are taken as 80·10⁹ bytes.",
    ),
    departures=("An activation function keeps its input too, F more numbers a token.",),
)


def xxl_memory(D: int = 16_384, F: int = 53_248, L: int = 126, H: float = _H100, T: int = 8192) -> Answer:
    """Part (a): bytes of state and of activations, and how many devices of H bytes they fill; T tokens."""
    P, a = _parameters(D, F, L), _saved(D, F, L)
    return Answer(
        _XXL_MEMORY,
        (
            *_model(D, F, L),
            Symbol("H", "memory of a device", H, "B"),
            Symbol("T", "tokens of a batch", T),
        ),
        (
            Step("Each block has a D by F and an F by D matrix", "P = 2 L D F", "parameters", P, "parameters"),
            Step("Weights, accumulated gradients, first and second moments take 4 bytes each; one of the four", "4 P",
                 "copy", _FP32 * P, "B"),
            Step("All four", "16 P", "state", _STATE * P, "B"),
            Step("which fill", "⌈16 P/H⌉", "gpus", ceil(_STATE * P / H), "devices"),
            Step("A product's weight gradient needs its input, D or F numbers a token in 2 bytes", "A = 2 L (D + F)",
                 "saved_per_token", a, "B"),
            Step("and a batch of T tokens", "A T", "saved", a * T, "B"),
            Step("State and this batch fill", "⌈(16 P + A T)/H⌉", "gpus_with_batch", ceil((_STATE * P + a * T) / H),
                 "devices"),
            Step("One device holds the activations of this many tokens, and nothing else", "H/A", "tokens_per_gpu",
                 H / a, "tokens"),
        ),
        f"State takes 16 P = {quantity(_STATE * P, 'B')}, {quantity(ceil(_STATE * P / H), 'devices')}; each token adds "
        f"{quantity(a, 'B')}.",
        notes=(
            f"If each GB of H were a GiB, it would be {quantity(ceil(_STATE * P / (H / 1e9 * 2**30)), 'devices')}; a "
            "real H100 has a little less than 80 GiB, and the driver, the allocator and NCCL want some of it.",
        ),
    )  # fmt: skip


_XXL_FSDP = Question(
    "xxl-fsdp",
    "XXL: over how many devices must it be sharded?",
    _YEARS,
    (f"{_PROBLEM} (b)",),
    "Weights, gradients, optimizer state and every second layer's activations are sharded over N devices. How "
    "large must N be for a TPU v5p?",
    assumed=("P and A are those of part (a): 16 bytes of state a parameter, A bytes kept a token.",),
    departures=(
        "Gathered weights of the layers in use come on top.",
        "The handout does not say how many tokens there are.",
    ),
)


def xxl_fsdp(D: int = 16_384, F: int = 53_248, L: int = 126, M: float = 95e9, T: int = 1024) -> Answer:
    """Part (b): devices over which state and half of the activations are sharded, so that each needs less than M."""
    P, a = _parameters(D, F, L), _saved(D, F, L)
    half, state = a * T / 2, _STATE * P
    apart: tuple[Step, ...] = ()
    if half < M:
        apart = (
            Step("If the other half is whole on every device, (16 P + A T/2)/N + A T/2 < M, so N is at least",
                 "(16 P + A T/2)/(M - A "
                 "T/2)", "devices_other_half_whole", _least((state + half) / (M - half)), "devices"),
        )  # fmt: skip
    return Answer(
        _XXL_FSDP,
        (
            *_model(D, F, L),
            Symbol("M", "memory of a device", M, "B"),
            Symbol("T", "tokens", T),
        ),
        (
            Step("Sharded state", "16 P", "state", state, "B"),
            Step("With state alone, N must be more than", "16 P/M", "state_over_memory", state / M),
            Step("so it is at least", "", "devices_state", _least(state / M), "devices"),
            Step("Half of the activations of T tokens", "A T/2", "half", half, "B"),
            Step("If only that half counts, (16 P + A T/2)/N < M, so N is at least", "(16 P + A T/2)/M",
                 "devices_half", _least((state + half) / M), "devices"),
            *apart,
            Step("In that reading no N is enough from this many tokens on: the whole half alone fills the device",
                 "2 M/A", "tokens_most", 2 * M / a, "tokens"),
        ),
        f"N must be at least {_least(state / M)} for the state alone, {_least((state + half) / M)} if the half that is "
        f"sharded counts too, and {_with_whole_half(state, half, M)} if the other half is whole on every device.",
    )  # fmt: skip


def _with_whole_half(state: float, half: float, M: float) -> str:
    """How many devices are enough if each has half of the activations to itself."""
    if half >= M:
        return f"no N is enough (that half is {quantity(half, 'B')}, the device {quantity(M, 'B')})"
    return str(_least((state + half) / (M - half)))


def _least(bound: float) -> int:
    """The smallest whole number above a bound."""
    return int(bound) + 1


_XXL_BATCH = Question(
    "xxl-batch",
    "XXL: which batch hides communication?",
    _YEARS,
    (f"{_PROBLEM} (c)", f"{_PROBLEM} (d)"),
    "Forward pass on TPUs, weights sharded over X devices (FSDP) times Y (TP). How many tokens must each device "
    "have for compute to take longer than communication? What lowers that number?",
    assumed=(
        "One block; 2-byte numbers; b tokens a device, so b X Y in all.",
        "Rings are long: (X - 1)/X counts as 1, as in the book that the handout follows (Austin et al., How to "
        "Scale Your Model, 2025).",
    ),
    departures=(
        "The question does not say whether the mesh is given or free, nor whether the two axes overlap: published "
        "answers differ for that reason, not by mistakes.",
        "Fewer tokens suffice with the best X, with both axes overlapped, with fewer bytes a number, and with "
        "pipeline stages, which let X be smaller for the same number of devices (and cost a bubble).",
        "Latency is left out; short messages between 64 chips do not reach W.",
    ),
)


def xxl_batch(
    X: int = 16,
    Y: int = 4,
    W: float = 18e10,
    C: float = 4.6e14,
    Mx: int = 2,
    My: int = 1,
    D: int = 16_384,
    F: int = 53_248,
) -> Answer:
    """Part (c) and (d): the fewest tokens a device for which the forward pass is bound by compute, in each reading."""
    require(
        min(X, Y) >= 2, f"xxl-batch: X = {X} and Y = {Y} must be at least 2: one device sends nothing along its axis"
    )
    alpha, N, tp = C / W, X * Y, C * Y / (W * My * F)
    free, given = 4 * alpha**2 / (Mx * My * F), alpha / (Mx * Y)
    best_x = N * sqrt(free * Mx / (F * My))
    bound = tp < 1  # otherwise TP alone is too slow
    return Answer(
        _XXL_BATCH,
        (
            *_mesh(X, Y, Mx, My),
            Symbol("W", "bytes/s of one mesh axis, both directions", W, "B/s"),
            Symbol("C", "speed of a device", C, "FLOP/s"),
            Symbol("D", "d_model", D),
            Symbol("F", "d_ff", F),
        ),
        (
            Step("Compute: two products of 2 D F FLOPs a token, over all devices", "Tc = 4 b D F/C"),
            Step("FSDP gathers both matrices' columns of this TP rank, 4 D F/Y bytes", "Tf = 4 D F/(Y W Mx)"),
            Step("TP gathers the input of X's share of the tokens and scatters the output", "Tt = 4 b Y D/(W My)"),
            Step("The chip does this many FLOPs in the time of a byte", "alpha = C/W", "alpha", alpha),
            Step("FSDP over compute falls with b", "Tf/Tc = alpha/(Mx Y b)"),
            Step("TP over compute does not depend on b", "Tt/Tc = alpha Y/(My F)", "tp_share", tp, "%"),
            *_readings(free, given, tp, bound),
            Step("The best X of reading 1" + ("" if 1 <= best_x <= N else ", which no mesh of N devices has"),
                 "N √(4 alpha²/(Mx My F) · Mx/(F My)), N = X Y", "best_x", best_x),
            *_as_given(given, X, N, bound),
            Step("Fewer bytes: with 8-bit gathers alpha halves, and the first reading falls to a quarter",
                 "alpha²/(Mx My F)", "eight_bit", free / 4, "tokens"),
        ),
        _concluded(given, tp, N),
    )  # fmt: skip


def _mesh(X: int, Y: int, Mx: int, My: int) -> tuple[Symbol, ...]:
    return (
        Symbol("X", "devices along the FSDP axis", X),
        Symbol("Y", "devices along the TP axis", Y),
        Symbol("Mx", "mesh axes that FSDP uses", Mx),
        Symbol("My", "mesh axes that TP uses", My),
    )


def _readings(free: float, given: float, tp: float, bound: bool) -> list[Step]:
    """The fewest tokens, in four readings of the question."""
    steps = [
        Step("Reading 1, X and Y free, axes one after another: Tf = Tt at the best X, each half of Tc",
             "4 alpha²/(Mx My F)", "free_apart", free, "tokens"),
        Step("Reading 2, the mesh as given, both axes at once: max(Tf, Tt) <= Tc", "alpha/(Mx Y)",
             "given_overlapped", given, "tokens"),
        Step("Reading 3, the mesh as given, axes one after another: Tf + Tt <= Tc",
             "alpha/(Mx Y)/(1 - alpha Y/(My F))", "given_apart", given / (1 - tp), "tokens"),
        Step("Reading 4, X and Y free and both axes at once", "alpha²/(Mx My F)", "free_overlapped", free / 4,
             "tokens"),
    ]  # fmt: skip
    return steps if bound else [steps[0], steps[3]]


def _as_given(given: float, X: int, N: int, bound: bool) -> list[Step]:
    """What follows from the second reading, where it has an answer."""
    if not bound:
        return []
    return [
        Step("With the ring's exact (X - 1)/X the second reading becomes", "alpha (X - 1)/(Mx Y X)", "exact",
             given * (X - 1) / X, "tokens"),
        Step("Its batch over all devices", "alpha X/Mx", "batch", given * N, "tokens"),
    ]  # fmt: skip


def _concluded(given: float, tp: float, N: int) -> str:
    """The fewest tokens on the mesh as given, or that there is no such number."""
    if tp >= 1:
        return (
            f"TP alone takes {quantity(tp, '%')} of compute's time on this mesh, whatever the batch, so none hides "
            "both axes: take a smaller Y."
        )
    return (
        f"With the mesh as given and both axes at once, {quantity(given, 'tokens')} a device, "
        f"{quantity(given * N, 'tokens')} in all; one after another, {quantity(given / (1 - tp), 'tokens')} a device."
    )
