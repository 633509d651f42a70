"""What the fastest possible kernel would need: RMSNorm, softmax against products, and both years' leaderboards."""

# The letters are those of the formulas.
# ruff: noqa: N803

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, given, quantity, require
from cs336_systems.cost.large.systems import system_preset

_H100, _H200, _B200 = system_preset("H100"), system_preset("H200"), system_preset("B200")


def _check_format(name: str, e: int) -> None:
    require(e in (1, 2, 4, 8), f"{name}: a number has e = 1, 2, 4 or 8 bytes, not {given(e)}")


def _check_time(name: str, t: float, least: float) -> None:
    require(t >= least, f"{name}: t must be at least {quantity(least, 's')}, what the products take at full speed")


_NORM_ROOFLINE = Question(
    "norm-roofline",
    "How fast can RMSNorm be?",
    (2024,),
    ("pytorch_layernorm", "rmsnorm_forward_benchmarking", "rmsnorm_benchmarking"),
    "RMSNorm does a few operations on each number. How long must it take, fused and as separate operators, forward "
    "and backward?",
    assumed=("Memory is all that counts, and nothing stays in a cache between operators.",),
    departures=(
        "Real kernels reach about 90% of V, and short ones pay several microseconds to start.",
        "A tensor smaller than the cache (50 MB) may be faster than this.",
    ),
)


def norm_roofline(R: int = 50_000, H: int = 8192, e: int = 4, V: float = _H200.bandwidth) -> Answer:
    """RMSNorm over R rows of H numbers of e bytes: bytes of a fused kernel and of separate operators."""
    _check_format("norm-roofline", e)
    tensor = e * R * H
    return Answer(
        _NORM_ROOFLINE,
        (
            Symbol("R", "rows", R),
            Symbol("H", "numbers in a row", H),
            Symbol("e", "bytes of a number", e),
            Symbol("V", "bytes/s of memory (default: H200)", V, "B/s"),
        ),
        (
            Step("The tensor", "e R H", "tensor", tensor, "B"),
            Step("A fused forward reads x and writes y", "2 e R H/V", "fused_forward", 2 * tensor / V, "s"),
            Step("Operator by operator: square (read, write), mean (read), times 1/rms (read, write), times g "
                 "(read, write)", "7 e R H/V", "eager_forward", 7 * tensor / V, "s"),
            Step("so fusing makes forward faster by up to", "7/2", "fusion", 7 / 2, "x"),
            Step("A fused backward reads x and dy and writes dx", "3 e R H/V", "fused_backward", 3 * tensor / V, "s"),
            Step("Operations a byte, about 4 a number forward", "4/(2 e)", "intensity", 4 / (2 * e)),
            Step("where the H200's products, at this V, could do", "C/V", "balance", _H200.matmul_flops / V),
        ),
        f"Fused, two passes over the tensor forward take {quantity(2 * tensor / V, 's')} and three backward "
        f"{quantity(3 * tensor / V, 's')}; a kernel is judged by the share of V that it reaches.",
    )  # fmt: skip


# Its data sheet, like those in `systems.py`, which have tensor cores only.
_H100_FP32 = 67e12


_SOFTMAX_SHARE = Question(
    "softmax-share",
    "Softmax and matrix products: FLOPs and time",
    (2025, 2026),
    ("nsys_profile (e)",),
    "In attention, how do the FLOPs of softmax compare with those of the two products, and how do their times?",
    assumed=("One head; softmax is one fused kernel; each product is bound by compute, softmax by memory.",),
    departures=(
        "Eager attention also scales and masks the scores, two more passes over S² numbers.",
        "With tensor cores products are over ten times as fast, and softmax takes most of the time: hence "
        "FlashAttention.",
    ),
)


def softmax_share(S: int = 1024, d: int = 64, e: int = 4, C: float = _H100_FP32, V: float = _H100.bandwidth) -> Answer:
    """Softmax against the two products of one attention head, in FLOPs and in time."""
    _check_format("softmax-share", e)
    products, softmax = 4 * S * S * d, 5 * S * S
    return Answer(
        _SOFTMAX_SHARE,
        (
            Symbol("S", "tokens in a sequence", S),
            Symbol("d", "width of a head", d),
            Symbol("e", "bytes of a number", e),
            Symbol("C", "speed of products (default: H100, fp32 without tensor cores)", C, "FLOP/s"),
            Symbol("V", "bytes/s of memory (default: H100)", V, "B/s"),
        ),
        (
            Step("Q Kᵀ and the product with V, 2 S² d each", "4 S² d", "product_flops", products, "FLOP"),
            Step("Softmax: maximum, subtract, exponential, sum, divide", "5 S²", "softmax_flops", softmax, "FLOP"),
            Step("The products' FLOPs over softmax's", "4 d/5", "flops_ratio", products / softmax),
            Step("They take", "4 S² d/C", "product_seconds", products / C, "s"),
            Step("Softmax reads and writes the scores", "2 e S²/V", "softmax_seconds", 2 * e * S * S / V, "s"),
            Step("so the products' time over softmax's is", "2 d V/(e C)", "time_ratio",
                 products / C * V / (2 * e * S * S)),
        ),
        f"The products have {quantity(products / softmax)} times softmax's FLOPs and take "
        f"{quantity(products / C * V / (2 * e * S * S))} times its time, which is that of its bytes.",
    )  # fmt: skip


_LEADERBOARD_FLASH = Question(
    "leaderboard-flash",
    "The attention leaderboard: how far from the limit?",
    (2025,),
    ("leaderboard",),
    "Causal attention forward and backward takes t seconds on an H100. Which part of its speed is that?",
    assumed=("Only products count; tiles above the diagonal are skipped, which leaves half.",),
    departures=(
        "Exponentials run on units of their own, whose limit for d = 64 is near that of the products.",
        "Power lowers the clock under steady load, so no kernel reaches C.",
    ),
)


def leaderboard_flash(
    h: int = 16, S: int = 16_384, d: int = 64, t: float = 5.364e-3, C: float = _H100.matmul_flops
) -> Answer:
    """The 2025 leaderboard: causal attention of h heads forward and backward, t seconds measured."""
    _check_time("leaderboard-flash", t, 7 * h * S * S * d / C)
    product = h * S * S * d  # 2 S² d FLOPs, of which the mask leaves half
    return Answer(
        _LEADERBOARD_FLASH,
        (
            Symbol("h", "heads", h),
            Symbol("S", "tokens", S),
            Symbol("d", "width of a head", d),
            Symbol("t", "time (default: the best published)", t, "s"),
            Symbol("C", "speed of products, bf16", C, "FLOP/s"),
        ),
        (
            Step("One product of S by d and d by S, half of it hidden", "h S² d", "product", product, "FLOP"),
            Step("Forward has two", "2 h S² d", "forward", 2 * product, "FLOP"),
            Step("Backward five: the scores anew, dV, dP, dQ, dK", "5 h S² d", "backward", 5 * product, "FLOP"),
            Step("Together", "7 h S² d", "total", 7 * product, "FLOP"),
            Step("At full speed", "7 h S² d/C", "least", 7 * product / C, "s"),
            Step("At t", "7 h S² d/t", "reached", 7 * product / t, "FLOP/s"),
            Step("which is", "", "share", 7 * product / t / C, "%"),
        ),
        f"{quantity(7 * product / t, 'FLOP/s')}, {quantity(7 * product / t / C, '%')} of C.",
    )  # fmt: skip


_LEADERBOARD_STEP = Question(
    "leaderboard-step",
    "The training-step leaderboard: how far from the limit, and does it fit?",
    (2026,),
    ("leaderboard",),
    "A training step on long sequences takes t seconds on N B200. Which part of their speed is that, and how much "
    "memory does the state take?",
    assumed=(
        "Gated feed-forward, separate head; only products count; the mask leaves half of attention, computed as "
        "FlashAttention does.",
    ),
    departures=("Recompute adds up to a third more products, which are not counted as reached.",),
)


def leaderboard_step(
    L: int = 34,
    D: int = 4096,
    F: int = 11_008,
    V: int = 151_936,
    S: int = 32_768,
    B: int = 2,
    N: int = 2,
    t: float = 3.837,
    C: float = _B200.matmul_flops,
    H: float = _B200.memory,
) -> Answer:
    """The 2026 leaderboard: a training step of an 8 B model on N devices, t seconds measured."""
    tokens, blocks, table = B * S, L * (4 * D * D + 3 * D * F), V * D
    parameters = blocks + 2 * table + (2 * L + 1) * D
    products, attention = 6 * (blocks + table) * tokens, 7 * B * L * S * S * D
    total, state = products + attention, 16 * parameters
    _check_time("leaderboard-step", t, total / (N * C))
    return Answer(
        _LEADERBOARD_STEP,
        (
            *_sizes(L, D, F, V),
            *_run(S, B, N, t, C),
            Symbol("H", "memory of a device (default: B200)", H, "B"),
        ),
        (
            Step("Parameters", "L (4 D² + 3 D F) + 2 V D + (2 L + 1) D", "parameters", parameters, "parameters"),
            Step("fp32 weights, gradients and two moments", "16 P", "state", state, "B"),
            Step("Products with weights, two FLOPs a token and weight forward and four backward; the embedding is "
                 "no product", "6 (L (4 D² + 3 D F) + V D) B S", "products", products, "FLOP"),
            Step("Attention: two products forward and five backward of 2 S² D, half of each hidden", "7 B L S² D",
                 "attention", attention, "FLOP"),
            Step("Together", "", "total", total, "FLOP"),
            Step("On all devices at full speed", "total/(N C)", "least", total / (N * C), "s"),
            Step("At t each device does", "total/(N t)", "reached", total / (N * t), "FLOP/s"),
            Step("which is", "", "share", total / (N * t * C), "%"),
        ),
        f"{quantity(total / (N * t), 'FLOP/s')} a device, {quantity(total / (N * t * C), '%')} of C; "
        f"{_room(state, N, H)}.",
        notes=(
            f"The logits alone are {quantity(2 * tokens * V, 'B')} in bf16; a head that is fused with its loss never "
            "has them whole.",
        ),
    )  # fmt: skip


def _room(state: float, N: int, H: float) -> str:
    """How much of the devices' memory the state of training fills."""
    shares = (
        f"{quantity(state / H, '%')} of a device's memory, or {quantity(state / (N * H), '%')} sharded over N = {N}"
    )
    fits = "it must be sharded" if state > H else "it fits, if activations fit beside it"
    if state > N * H:
        fits = f"{quantity(N, 'devices')} cannot hold it"
    return f"the fp32 state is {shares}: {fits}"


def _sizes(L: int, D: int, F: int, V: int) -> tuple[Symbol, ...]:
    return Symbol("L", "layers", L), Symbol("D", "d_model", D), Symbol("F", "d_ff", F), Symbol("V", "vocabulary", V)


def _run(S: int, B: int, N: int, t: float, C: float) -> tuple[Symbol, ...]:
    return (
        Symbol("S", "tokens in a sequence", S),
        Symbol("B", "sequences", B),
        Symbol("N", "devices", N),
        Symbol("t", "time (default: the best published)", t, "s"),
        Symbol("C", "speed of products, bf16", C, "FLOP/s"),
    )
