"""Memory of passes: the residual stream, forward and step by precision, attention's scores, checkpointing."""

# The letters are those of the formulas.
# ruff: noqa: N803, N806

from math import ceil, log2, sqrt

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, given, quantity, require
from cs336_systems.cost.large.systems import GIB, system_preset
from cs336_systems.cost.memory import Sizes, block_activations
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.peak import memory
from cs336_systems.presets import model_preset

_H100 = system_preset("H100").memory / GIB * 1e9  # a GB as the course has it


def _symbols(size: str, year: int, B: int, S: int) -> tuple[Symbol, ...]:
    return (
        Symbol("size", "the course's size", f"{size} of {year}"),
        Symbol("B", "sequences in a batch", B),
        Symbol("S", "tokens in a sequence", S),
    )


_PASS_MEMORY = Question(
    "pass-memory",
    "Peak memory of a pass, and why mixed precision can need more",
    (2024, 2025, 2026),
    ("memory_profiling (b), (c), (d), (e)",),
    "How much memory do a forward pass without gradients and a whole step take at their peaks, in fp32 and in "
    "mixed precision? How large is the residual stream, and what are the largest tensors?",
    assumed=("Attention as the course writes it, with all scores in memory; AdamW in fp32; peaks by `cost.memory`.",),
    departures=(
        "For the 2.7B of 2024 a published run measured 10.07 GiB forward, 14.63 GiB in mixed precision, and 38.56 "
        "and 43.30 GiB for a step: the surprise that it reports is the cast weights.",
        "The allocator's own blocks, cuBLAS's workspace and the CUDA context come on top.",
    ),
)


def pass_memory(size: str = "2.7B", year: int = 2024, B: int = 16, S: int = 128) -> Answer:
    """Peaks of forward and of a step, in fp32 and under autocast, and the residual stream."""
    config = model_preset(size, year).override(context_length=S)
    counts = count_parameters(config)
    P, d, h = sum(counts.values()), config.d_model, config.num_heads
    peaks = {
        (mode, precision): sum(memory(config, B, S, mode, precision).values())
        for mode in ("forward", "step")
        for precision in ("fp32", "bf16")
    }
    products = counts["attention"] + counts["feed-forward"] + config.vocab_size * d
    return Answer(
        _PASS_MEMORY,
        (
            *_symbols(size, year, B, S),
            Symbol("P", "its parameters", P, "parameters"),
            Symbol("d", "d_model", d),
            Symbol("h", "heads", h),
        ),
        (
            Step("Parameters", "4 P", "parameters", 4 * P, "B"),
            Step("A forward pass adds what one block, or the loss, has alive; in all", "", "forward_fp32",
                 peaks["forward", "fp32"], "B"),
            Step("Under autocast it takes", "", "forward_bf16", peaks["forward", "bf16"], "B"),
            Step("Of that, each weight of a product is cast, and the copies stay until the region ends", "2 bytes each",
                 "casts", 2 * products, "B"),
            Step("A step holds 16 P of state", "16 P", "state", 16 * P, "B"),
            Step("and with activations or an update's temporary, whichever is more at the peak", "", "step_fp32",
                 peaks["step", "fp32"], "B"),
            Step("A step under autocast", "", "step_bf16", peaks["step", "bf16"], "B"),
            Step("The residual stream in fp32", "4 B S d", "stream", 4 * B * S * d, "B"),
            Step("A feed-forward matrix", "4 d · d_ff", "matrix", 4 * d * config.d_ff, "B"),
            Step("The scores of one layer", "4 B h S²", "scores", 4 * B * h * S * S, "B"),
            Step("which are more than that matrix from this length on", "√(d · d_ff/(B h))", "scores_from",
                 sqrt(d * config.d_ff / (B * h)), "tokens"),
        ),
        f"{_compared('forward', peaks)}, and {_compared('step', peaks)}: it adds {quantity(2 * products, 'B')} of cast "
        f"weights, and saves on activations only. Parameters are {quantity(4 * P / peaks['forward', 'fp32'], '%')} of "
        "forward's peak.",
    )  # fmt: skip


def _compared(mode: str, peaks: dict[tuple[str, str], int]) -> str:
    """What autocast does to a peak."""
    more = peaks[mode, "bf16"] - peaks[mode, "fp32"]
    what = f"{quantity(abs(more), 'B')} {'more' if more >= 0 else 'less'}"
    return f"{'Under autocast a' if mode == 'forward' else 'a'} {mode}{' pass' * (mode == 'forward')} takes {what}"


_ATTENTION_MEMORY = Question(
    "attention-memory",
    "Attention before and after FlashAttention: what is kept",
    (2025, 2026),
    ("pytorch_attention", "flash_forward", "flash_benchmarking"),
    "Attention of one head over B sequences of S tokens. How much is kept for backward, how does it grow with S, "
    "and what removes it?",
    assumed=(
        "Each operator keeps what its backward reads, and no more.",
        "The causal mask is left out.",
    ),
    departures=(
        "A mask of booleans (B or 1 times S² bytes), a scaled copy of the scores, or a softmax written as three "
        "operators each keep another S² tensor.",
        "More work can be less time: the S² tensors also had to be written and read.",
    ),
)


def attention_memory(B: int = 8, S: int = 16_384, d: int = 64, e: int = 4, H: float = _H100) -> Answer:
    """Bytes that a single head of attention keeps, written out and as FlashAttention-2."""
    require(e in (1, 2, 4, 8), f"attention-memory: a number has e = 1, 2, 4 or 8 bytes, not {given(e)}")
    flat, scores, row = e * B * S * d, e * B * S * S, 4 * B * S
    naive, flash = 3 * flat + scores, 4 * flat + row
    return Answer(
        _ATTENTION_MEMORY,
        (
            Symbol("B", "sequences", B),
            Symbol("S", "tokens in a sequence", S),
            Symbol("d", "width of the head", d),
            Symbol("e", "bytes of a number", e),
            Symbol("H", "memory of a device", H, "B"),
        ),
        (
            Step("Q, K and V", "3 e B S d", "inputs", 3 * flat, "B"),
            Step("The scores Q Kᵀ, and the softmax of them, have S² numbers a sequence; each", "e B S²", "scores",
                 scores, "B"),
            Step("Softmax's backward reads its result, and so does the product with V: it is kept once, with Q, K, "
                 "V", "3 e B S d + e B S²", "kept_naive", naive, "B"),
            Step("Forward's peak: scores and softmax", "3 e B S d + 2 e B S²", "forward_naive", naive + scores, "B"),
            Step("Backward's: softmax, its gradient, the scores' gradient; and dO, dV", "5 e B S d + 3 e B S²",
                 "backward_naive", 5 * flat + 3 * scores, "B"),
            Step("The longest S for which three such tensors fill a device", "√(H/(3 e B))", "longest",
                 sqrt(H / (3 * e * B)), "tokens"),
            Step("FlashAttention-2 keeps Q, K, V, O and one log-sum-exp in fp32 a query, and computes tiles of "
                 "scores anew", "4 e B S d + 4 B S", "kept_flash", flash, "B"),
            Step("What was kept over that", "", "ratio", naive / flash),
            Step("FlashAttention keeps less from this length on", "d + 4/e", "shorter_from", d + 4 / e, "tokens"),
            Step("The price is one more product in backward, five for forward's two; forward and backward together "
                 "do, of what they did", "7/6", "work", 7 / 6, "x"),
        ),
        f"Written out, {quantity(naive, 'B')} are kept, and grow with S²; FlashAttention keeps {quantity(flash, 'B')}, "
        f"{_than(naive, flash)}, which grow with S.",
    )  # fmt: skip


def _than(naive: float, flash: float) -> str:
    if naive == flash:
        return "as many"
    return f"{quantity(max(naive, flash) / min(naive, flash))} times {'less' if naive > flash else 'more'}"


_CHECKPOINTING = Question(
    "checkpointing",
    "Activation checkpointing: how long should a segment be?",
    (2026,),
    ("gradient_checkpointing (a), (b)",),
    "Only the input of every k-th block is kept, and backward runs a segment again. Which k is best? And how "
    "little is enough if a block may be run as often as one likes?",
    assumed=("fp32, attention with all scores in memory; embedding, head and gradients are left out.",),
    departures=(
        "With FlashAttention b shrinks, and the best k grows.",
        "A published sweep of the 2026 xl, S = 2048, on one 80 GB GPU: k = 1 needed least, and k >= 4 did not fit.",
    ),
)


def checkpointing(size: str = "xl", year: int = 2026, B: int = 4, S: int = 2048, k: int = 4) -> Answer:
    """Activations kept with segments of k blocks, the best k, and segments nested in halves."""
    config = model_preset(size, year).override(context_length=S)
    require(
        k <= config.num_layers, f"checkpointing: k must be at most {config.num_layers}, the blocks of {size}, not {k}"
    )
    sizes = Sizes.of(config, B, S, "fp32")
    s, b, L = sizes.stream, block_activations(config, sizes), config.num_layers
    real = sqrt(L * s / b)
    best = min(range(1, L + 1), key=lambda each: segments_peak(L, each, s, b))
    halvings = ceil(log2(L))
    return Answer(
        _CHECKPOINTING,
        (
            *_symbols(size, year, B, S),
            Symbol("L", "blocks", L),
            Symbol("s", "the stream between two blocks", s, "B"),
            Symbol("b", "what a block keeps without checkpointing", b, "B"),
            Symbol("k", "blocks in a segment", k),
        ),
        (
            Step("Without checkpointing", "L b", "whole", L * b, "B"),
            Step("With it, the inputs of all segments and the blocks of the one that is run again; its first block "
                 "keeps its input anyway", "M(k) = (⌈L/k⌉ - 1) s + k b", "segments", segments_peak(L, k, s, b), "B"),
            Step("The derivative -L s/k² + b is zero at", "k* = √(L s/b)", "best_real", real),
            Step("so the best whole k is", "", "best", best, "blocks"),
            Step("with", "", "best_bytes", segments_peak(L, best, s, b), "B"),
            Step("The textbook's √L holds where a block keeps no more than its input", "√L", "textbook", sqrt(L)),
            Step("A block here keeps more, by", "b/s", "block_over_stream", b / s, "x"),
            Step("Nested: checkpoint each half, within it each half, and so on. One input a level and one block "
                 "are alive", "⌈log₂ L⌉ s + b", "nested", halvings * s + b, "B"),
            Step("and each level runs all blocks once more; forward passes in all", "1 + ⌈log₂ L⌉", "nested_forwards",
                 1 + halvings),
            Step("Segments run them once more, whatever k is; a step of 1 + 2 units of compute becomes 4, longer by",
                 "1/3", "segments_extra", 1 / 3, "%"),
        ),
        f"Segments of {quantity(k, 'blocks')} need {quantity(segments_peak(L, k, s, b), 'B')}, the best, of "
        f"{quantity(best, 'blocks')}, {quantity(segments_peak(L, best, s, b), 'B')}, no checkpointing "
        f"{quantity(L * b, 'B')}: k* is √(L s/b) = {quantity(real)}, not √L = {quantity(sqrt(L))}, because a block "
        f"keeps {quantity(b / s)} times its input.",
    )  # fmt: skip


def segments_peak(L: int, k: int, s: float, b: float) -> float:
    """Bytes at the fullest moment of backward with segments of k of L blocks."""
    return (ceil(L / k) - 1) * s + k * b
