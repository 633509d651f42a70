"""Operators of a model on one rank: the kernels that each runs, the bytes it keeps for backward, and what it sends.

An operator is one step of a layer on one rank for one microbatch, as large runs compute it: 16-bit activations, and
fused element-wise kernels. One kernel is a norm, bias with GELU or a gate, bias with dropout and the residual stream,
softmax with scale and mask (Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198, section 4.1). What
they keep for backward adds up to the second paper's table 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from cs336_systems.cost.experts import kept_rows
from cs336_systems.cost.plan import Plan
from cs336_systems.presets import ModelConfig

Group = Literal["dense", "sparse", "embedding", "head"]  # a block without or with experts, or an end of the model


class Kernel(NamedTuple):
    """One kernel, or `kernels` alike: `number` GEMMs (rows inner) x (inner columns), or element-wise work."""

    flops: float
    nbytes: float  # read and written, each tensor once
    rows: int = 0
    columns: int = 0
    inner: int = 0
    number: int = 1  # of GEMMs in it
    kernels: int = 1
    width: int = 2  # bytes of a number
    fused: bool = False  # attention in one kernel


class Collective(NamedTuple):
    """A collective along an axis of ranks ("tp", "cp", "ep"); bytes of the whole tensor."""

    verb: str
    axis: str
    nbytes: float


@dataclass(frozen=True)
class Operator:
    """One step of a layer on one rank, for one microbatch."""

    name: str
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    weights: int = 0  # elements on this rank
    kept: float = 0.0  # bytes for backward
    sent: tuple[Collective, ...] = ()  # in forward
    returned: tuple[Collective, ...] = ()  # in backward
    core: bool = False  # selective recomputation runs it again (arXiv:2205.05198, section 5)
    expert: bool = False  # its weights differ from rank to rank of ep


@dataclass(frozen=True)
class Rank:
    """One rank of a plan, with its part of a microbatch of sequences of `seq` tokens."""

    config: ModelConfig
    plan: Plan
    seq: int

    @property
    def tokens(self) -> int:
        return self.plan.micro_batch * self.seq // self.plan.cp

    @property
    def stream(self) -> float:
        """Bytes of (tokens d_model)."""
        return float(self.plan.width * self.tokens * self.config.d_model)

    @property
    def resting(self) -> float:
        """Bytes of the same between tensor-parallel layers, where sequence parallelism splits it."""
        return self.stream / self.plan.tp if self.plan.sequence else self.stream

    @property
    def keys(self) -> int:
        """Width of the keys, or of the values. With fewer such heads than ranks each rank has one whole head."""
        return max(self.config.kv_heads // self.plan.tp, 1) * self.config.head_dim

    @property
    def fused(self) -> bool:
        """True if neighbouring element-wise operations are one kernel; in plain torch each is a kernel of its own."""
        return self.config.kernels == "triton"

    def product(self, rows: int, inner: int, columns: int, count: int = 1) -> Kernel:
        """`count` GEMMs (rows inner) x (inner columns) in one kernel."""
        moved = float(self.plan.width * count * (rows * inner + inner * columns + rows * columns))
        return Kernel(2.0 * count * rows * inner * columns, moved, rows, columns, inner, count, width=self.plan.width)

    def linear(self, name: str, rows: int, inner: int, columns: int, count: int = 1, **rest: Any) -> Operator:
        """GEMM (rows inner) x (inner columns), and in backward the gradients of both factors."""
        back = self.product(rows, columns, inner, count), self.product(inner, rows, columns, count)
        return Operator(name, (self.product(rows, inner, columns, count),), back, count * inner * columns, **rest)


def sweep(nbytes: float, kernels: int = 1) -> Kernel:
    """Element-wise kernels that move `nbytes`."""
    return Kernel(0.0, nbytes, kernels=kernels)


def norm(rank: Rank, name: str) -> Operator:
    """A norm in one kernel; backward reads the stream and its gradient, and adds up that of the weight in another.
    Plain torch has LayerNorm in one kernel, but squares, averages and scales for RMSNorm one after another."""
    layernorm, stream = rank.config.norm == "layernorm", rank.resting
    fused = layernorm or rank.fused
    ahead, back = (sweep(2 * stream), sweep(3 * stream, 2)) if fused else (sweep(8 * stream, 4), sweep(14 * stream, 8))
    weights = rank.config.d_model * (2 if layernorm and rank.config.bias else 1)
    return Operator(name, (ahead,), (back,), weights=weights, kept=stream)


def entry(rank: Rank) -> dict[str, Any]:
    """Collectives of the first GEMM of a branch: the gradient of its input is a sum over tensor-parallel ranks. Under
    sequence parallelism the input is gathered (arXiv:2205.05198, section 4.2.2)."""
    reduced = {"returned": (Collective("all-reduce", "tp", rank.stream),)}
    return _gathered("tp", rank.stream) if rank.plan.sequence else reduced


def _gathered(axis: str, nbytes: float) -> dict[str, Any]:
    """Collectives of an input that is gathered, in backward once more, and whose gradient is scattered."""
    gather, scatter = (Collective(verb, axis, nbytes) for verb in ("all-gather", "reduce-scatter"))
    return {"sent": (gather,), "returned": (gather, scatter)}


def _summed(rank: Rank) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Collectives (forward, backward) of a sum over tensor-parallel ranks, which sequence parallelism scatters."""
    if not rank.plan.sequence:
        return (Collective("all-reduce", "tp", rank.stream),), ()
    return (Collective("reduce-scatter", "tp", rank.stream),), (Collective("all-gather", "tp", rank.stream),)


def leave(rank: Rank, name: str) -> Operator:
    """Sum a branch over tensor-parallel ranks; then bias, dropout and residual stream, fused or a kernel each."""
    stream, mask = rank.resting, rank.resting / rank.plan.width if rank.config.dropout else 0.0
    sent, returned = _summed(rank)
    apart = 0 if rank.fused else (2 if rank.config.bias else 0) + (2 if rank.config.dropout else 0)
    work = (sweep((3 + apart) * stream + mask, 1 + apart // 2),)
    back = (sweep(2 * stream + mask if rank.config.dropout else stream),)
    return Operator(name, work, back, kept=mask, sent=sent, returned=returned)


@lru_cache(maxsize=16384)
def operators_of(rank: Rank, group: Group) -> tuple[Operator, ...]:
    """Operators of a block or of an end of the model, in order; the router of experts is taken to be balanced."""
    if group in ("embedding", "head"):
        return tuple(_embedding(rank) if group == "embedding" else _head(rank))
    inside = _experts(rank) if group == "sparse" else _feed_forward(rank, "")
    last = leave(rank, "feed-forward dropout, sum")
    if group == "sparse" and rank.plan.sequence and not rank.config.mixture.shared_expert:
        last = replace(last, sent=(), returned=())  # experts have scattered their sum themselves
    return (*_attention(rank), norm(rank, "feed-forward norm"), *inside, last)


def _attention(rank: Rank) -> Iterator[Operator]:
    d, part, tokens = rank.config.d_model, rank.config.d_model // rank.plan.tp, rank.tokens
    yield norm(rank, "attention norm")
    yield rank.linear("query, key, value", tokens, d, part + 2 * rank.keys, kept=rank.resting, **entry(rank))
    if rank.config.positions == "rotary":
        # In 32 bits if each operation is a kernel: cast, turn, cast again.
        passes, kernels = (2, 2) if rank.fused else (10, 6)
        turned = sweep(float(passes * rank.plan.width * tokens * (part + rank.keys)), kernels)
        yield Operator("rotary positions", (turned,), (turned,))
    yield from _core(rank) if rank.config.attention == "naive" else _fused_core(rank)
    yield rank.linear("attention out", tokens, part, d, kept=rank.stream / rank.plan.tp)
    yield leave(rank, "attention dropout, sum")


def _core(rank: Rank) -> Iterator[Operator]:
    """Attention with scores in memory: two GEMMs with softmax, and perhaps dropout, between them."""
    config, width, own = rank.config, rank.plan.width, rank.seq // rank.plan.cp
    count = rank.plan.micro_batch * config.num_heads // rank.plan.tp
    held = float(width * rank.tokens * rank.keys)
    scores, queries = float(width * count * own * rank.seq), rank.stream / rank.plan.tp
    narrow = rank.product(own, config.head_dim, rank.seq, count)
    wide = rank.product(own, rank.seq, config.head_dim, count)
    across = rank.product(rank.seq, own, config.head_dim, count)
    yield Operator("scores", (narrow,), (wide, across), kept=queries + held, core=True, **_context(rank))
    # Plain torch scales and masks in kernels of their own.
    ahead, back = (sweep(2 * scores), sweep(3 * scores)) if rank.fused else (sweep(7 * scores, 3), sweep(5 * scores, 2))
    yield Operator("softmax", (ahead,), (back,), kept=scores, core=True)
    if config.dropout:
        mask = scores / width
        yield Operator("softmax dropout", *2 * ((sweep(2 * scores + mask),),), kept=mask + scores, core=True)
    yield Operator("weighted values", (wide,), (narrow, across), kept=held, core=True)


def _fused_core(rank: Rank) -> Iterator[Operator]:
    """FlashAttention-2 (arXiv:2307.08691): no scores in memory, masked tiles skipped, five GEMMs backward."""
    config, plan = rank.config, rank.plan
    count, own = plan.micro_batch * config.num_heads // plan.tp, rank.seq // plan.cp
    seen = 0.5 if config.causal else 1.0
    one = rank.product(own, config.head_dim, rank.seq, count)
    moved = 2 * rank.stream / plan.tp + 2 * plan.width * plan.micro_batch * rank.seq * rank.keys
    ahead = one._replace(flops=2 * seen * one.flops, nbytes=moved, fused=True)
    back = one._replace(flops=5 * seen * one.flops, nbytes=2.5 * moved, fused=True)
    kept = rank.stream / plan.tp + 2 * plan.width * rank.tokens * rank.keys + 4 * count * own
    yield Operator("attention", (ahead,), (back,), kept=kept, core=True, **_context(rank))


def _context(rank: Rank) -> dict[str, Any]:
    """Context parallelism gathers keys and values, and scatters their gradients (arXiv:2407.21783, section 3.3.2)."""
    return _gathered("cp", 2.0 * rank.plan.width * rank.plan.micro_batch * rank.seq * rank.keys)


def _feed_forward(rank: Rank, prefix: str) -> Iterator[Operator]:
    d, hidden, gated = rank.config.d_model, rank.config.d_ff // rank.plan.tp, rank.config.feed_forward == "swiglu"
    held = float(rank.plan.width * rank.tokens * hidden)
    yield rank.linear(f"{prefix}up", rank.tokens, d, hidden * (1 + gated), kept=rank.resting, **entry(rank))
    yield _activation(rank, prefix, held)
    yield rank.linear(f"{prefix}down", rank.tokens, hidden, d, kept=held)


def _activation(rank: Rank, prefix: str, held: float) -> Operator:
    """One kernel over hidden activations of `held` bytes; a gate reads, and keeps, two of each. Plain torch adds a bias
    before GELU, and multiplies after SiLU, in a kernel of its own."""
    inputs, name = (2, f"{prefix}SwiGLU") if rank.config.feed_forward == "swiglu" else (1, f"{prefix}GELU")
    apart = 0 if rank.fused or (inputs == 1 and not rank.config.bias) else 1
    ahead, back = inputs + 1 + 2 * apart, 2 * inputs + 1 + (3 * apart if inputs == 2 else 0)
    return Operator(name, (sweep(ahead * held, 1 + apart),), (sweep(back * held, 1 + apart),), kept=inputs * held)


def _experts(rank: Rank) -> Iterator[Operator]:
    """Router, dispatch, the experts' GEMMs with as many rows as this rank sends, and combine."""
    config, plan, d = rank.config, rank.plan, rank.config.d_model
    rows, number, gated = kept_rows(config, rank.tokens), config.num_experts // plan.ep, config.feed_forward == "swiglu"
    hidden, each = config.expert_d_ff // plan.tp, max(1, rows // number)
    moved, held = float(plan.width * rows * d), float(plan.width * rows * hidden)
    # Under sequence parallelism each tp rank routes its own tokens and sends their rows, which are gathered where
    # experts are split, kept so for backward, and summed and scattered before they go back.
    parts = plan.tp if plan.sequence else 1
    own = moved / parts
    way = (Collective("all-to-all", "ep", own),)
    gather, scatter = ((Collective(verb, "tp", moved),) for verb in ("all-gather", "reduce-scatter"))
    into = {"sent": gather, "returned": scatter} if plan.sequence else entry(rank)
    out = {"sent": scatter, "returned": gather} if plan.sequence else {}
    yield rank.linear("router", rank.tokens // parts, d, config.num_experts, kept=rank.resting)
    yield Operator("dispatch", (sweep(2 * own, 3),), (sweep(2 * own, 3),), sent=way, returned=way)
    yield rank.linear("experts' up", each, d, hidden * (1 + gated), number, kept=moved, expert=True, **into)
    yield _activation(rank, "experts' ", held)
    yield rank.linear("experts' down", each, hidden, d, number, kept=held, expert=True, **out)
    yield Operator("combine", (sweep(3 * own, 3),), (sweep(3 * own, 3),), kept=own, sent=way, returned=way)
    if config.mixture.shared_expert:
        yield from _feed_forward(rank, "shared expert's ")


def _embedding(rank: Rank) -> Iterator[Operator]:
    """From token ids to the residual stream: a table whose rows are split over tp, positions, dropout."""
    config = rank.config
    extra = (config.context_length if config.positions == "learned" else 0) + config.token_types
    mask = rank.resting / rank.plan.width if config.dropout else 0.0
    passes = 2 + (2 if extra else 0) + (2 if config.dropout else 0)
    work = (sweep(passes * rank.stream + mask, passes),)
    yield Operator("embedding", work, work, (vocabulary_rows(rank) + extra) * config.d_model, mask, *_summed(rank))


def _head(rank: Rank) -> Iterator[Operator]:
    """The last norm, BERT's transform, logits over a split vocabulary, and the loss in 32 bits."""
    d, tokens, columns = rank.config.d_model, rank.tokens, vocabulary_rows(rank)
    logits = float(tokens * columns)
    yield norm(rank, "last norm")
    if rank.config.bert_heads:
        yield rank.linear("transform", tokens, d, d, kept=2 * rank.stream)
    yield rank.linear("logits", tokens, d, columns, kept=rank.resting, **entry(rank))
    # Cast, largest, subtract, exponentiate, sum and divide; backward makes the gradient, and casts it.
    # The largest logit of all ranks; then the sum, and the target's logit, which one rank has.
    sent = Collective("all-reduce", "tp", 4.0 * tokens), Collective("all-reduce", "tp", 8.0 * tokens)
    swept = (sweep(24 * logits, 6),), (sweep(14 * logits, 2),)
    yield Operator("loss", *swept, kept=4 * logits, sent=sent)


def vocabulary_rows(rank: Rank) -> int:
    """Rows of the vocabulary on a rank, padded until they divide."""
    return -(-rank.config.vocab_size // rank.plan.tp)
