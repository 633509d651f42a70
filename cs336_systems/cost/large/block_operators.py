"""The operators of one block on one rank, as large runs compute it: 16-bit activations, fused element-wise kernels.

One kernel is a norm, bias with GELU or a gate, bias with dropout and the residual stream, softmax with scale and mask
(Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198, section 4.1). What they keep for backward adds
up to the second paper's table 2. `layout_activations.py` counts this project's own code instead, to the byte.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from cs336_systems.cost.experts import kept_rows
from cs336_systems.cost.large.operators import Collective, Operator, Rank, entry, leave, norm, sweep


@lru_cache(maxsize=4096)
def block_operators(rank: Rank, sparse: bool = False) -> tuple[Operator, ...]:
    """The operators of a block, in order; a `sparse` one has experts, as if its router were balanced."""
    inside = _experts(rank) if sparse else _feed_forward(rank, "")
    last = leave(rank, "feed-forward dropout, sum")
    if sparse and rank.plan.sequence and not rank.config.mixture.shared_expert:
        last = replace(last, sent=(), returned=())  # experts have scattered their sum themselves
    return (*_attention(rank), norm(rank, "feed-forward norm"), *inside, last)


def _attention(rank: Rank) -> Iterator[Operator]:
    d, part, tokens = rank.config.d_model, rank.config.d_model // rank.plan.tp, rank.tokens
    yield norm(rank, "attention norm")
    columns = part + 2 * rank.keys
    yield rank.linear("query, key, value", tokens, d, columns, kept=rank.resting, **entry(rank))
    if rank.config.positions == "rotary":
        # In 32 bits if each operation is a kernel: cast, turn, cast again.
        passes, kernels = (2, 2) if rank.fused else (10, 6)
        turned = sweep(float(passes * rank.plan.width * tokens * (part + rank.keys)), kernels)
        yield Operator("rotary positions", (turned,), (turned,))
    yield from _core(rank) if rank.config.attention == "naive" else _fused_core(rank)
    yield rank.linear("attention out", tokens, part, d, kept=rank.stream / rank.plan.tp)
    yield leave(rank, "attention dropout, sum")


def _core(rank: Rank) -> Iterator[Operator]:
    """Scores in memory: two products with softmax, and perhaps dropout, between them."""
    config, width, own = rank.config, rank.plan.width, rank.seq // rank.plan.cp
    count = rank.plan.micro_batch * config.num_heads // rank.plan.tp
    held = float(width * rank.tokens * rank.keys)
    scores, queries = float(width * count * own * rank.seq), rank.stream / rank.plan.tp
    narrow, wide = (
        rank.product(own, config.head_dim, rank.seq, count),
        rank.product(own, rank.seq, config.head_dim, count),
    )
    across = rank.product(rank.seq, own, config.head_dim, count)
    yield Operator("scores", (narrow,), (wide, across), kept=queries + held, core=True, **_context(rank))
    # Plain torch scales and masks in kernels of their own.
    ahead, back = (sweep(2 * scores), sweep(3 * scores)) if rank.fused else (sweep(7 * scores, 3), sweep(5 * scores, 2))
    yield Operator("softmax", (ahead,), (back,), kept=scores, core=True)
    if config.dropout:
        mask = scores / width
        dropped = sweep(2 * scores + mask)
        yield Operator("softmax dropout", (dropped,), (dropped,), kept=mask + scores, core=True)
    yield Operator("weighted values", (wide,), (narrow, across), kept=held, core=True)


def _fused_core(rank: Rank) -> Iterator[Operator]:
    """FlashAttention-2 (arXiv:2307.08691): no scores in memory, hidden tiles skipped, five products backward."""
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
    whole = 2.0 * rank.plan.width * rank.plan.micro_batch * rank.seq * rank.keys
    gather, scatter = (Collective(verb, "cp", whole) for verb in ("all-gather", "reduce-scatter"))
    return {"sent": (gather,), "returned": (gather, scatter)}


def _feed_forward(rank: Rank, prefix: str) -> Iterator[Operator]:
    d, hidden, gated = rank.config.d_model, rank.config.d_ff // rank.plan.tp, rank.config.feed_forward == "swiglu"
    held = float(rank.plan.width * rank.tokens * hidden)
    up = hidden * (2 if gated else 1)
    yield rank.linear(f"{prefix}up", rank.tokens, d, up, kept=rank.resting, **entry(rank))
    yield _activation(rank, f"{prefix}{'SwiGLU' if gated else 'GELU'}", held)
    yield rank.linear(f"{prefix}down", rank.tokens, hidden, d, kept=held)


def _activation(rank: Rank, name: str, held: float) -> Operator:
    """One kernel over hidden numbers of `held` bytes; a gate reads, and keeps, two of each.

    Plain torch adds a bias before GELU, and multiplies after SiLU, in a kernel of its own.
    """
    inputs = 2 if rank.config.feed_forward == "swiglu" else 1
    apart = 0 if rank.fused or (inputs == 1 and not rank.config.bias) else 1
    ahead, back = inputs + 1 + 2 * apart, 2 * inputs + 1 + (3 * apart if inputs == 2 else 0)
    return Operator(name, (sweep(ahead * held, 1 + apart),), (sweep(back * held, 1 + apart),), kept=inputs * held)


def _experts(rank: Rank) -> Iterator[Operator]:
    """Router, the way to the experts, their products with as many rows as this rank sends, and the way back."""
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
    carried = sweep(2 * own, 3)
    yield rank.linear("router", rank.tokens // parts, d, config.num_experts, kept=rank.resting)
    yield Operator("dispatch", (carried,), (carried,), sent=way, returned=way)
    up = hidden * (2 if gated else 1)
    yield rank.linear("experts' up", each, d, up, number, kept=moved, expert=True, **into)
    yield _activation(rank, f"experts' {'SwiGLU' if gated else 'GELU'}", held)
    yield rank.linear("experts' down", each, hidden, d, number, kept=held, expert=True, **out)
    combined = sweep(3 * own, 3)
    yield Operator("combine", (combined,), (combined,), kept=own, sent=way, returned=way)
    if config.mixture.shared_expert:
        yield from _feed_forward(rank, "shared expert's ")
