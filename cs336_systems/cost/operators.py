"""Operators of a model on one rank: the kernels that each runs, the bytes it keeps for backward, and what it sends.

Each of these is one fused kernel: a norm; bias with GELU or a gate; bias with dropout and the residual sum;
softmax with scale and mask (Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198, section 4.1). The
bytes that all operators keep for backward add up to the second paper's table 2. With recomputation, backward runs some
operators of a block again, so that forward need not keep their activations: of whole blocks (Chen et al.,
arXiv:1604.06174), of attention's core (the second paper, section 5), or of modules by Megatron-LM's names.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from cs336_systems.cost.flops import kept_rows
from cs336_systems.cost.plan import MODULES
from cs336_systems.cost.rank import Collective, Group, Operator, Rank, sweep
from cs336_systems.cost.shape import Latent, head_widths, latent_of, shared_width


def norm(rank: Rank, name: str) -> Operator:
    """A norm in one kernel. Backward has two: one reads the residual stream and its gradient, one sums the weight's
    gradient. Plain torch has one kernel for LayerNorm, but separate ones for RMSNorm's square, mean and scale."""
    layernorm, stream = rank.config.norm == "layernorm", rank.resting
    fused = layernorm or rank.fused
    ahead, back = (sweep(2 * stream), sweep(3 * stream, 2)) if fused else (sweep(8 * stream, 4), sweep(14 * stream, 8))
    weights = rank.config.d_model * (2 if layernorm and rank.config.bias else 1)
    return Operator(name, (ahead,), (back,), weights=weights, kept=stream)


def _entered(rank: Rank, nbytes: float = 0.0) -> dict[str, Any]:
    """Collectives of a branch's first GEMM, whose input has `nbytes`, by default as the residual stream. Backward sums
    its gradient over tp; sequence parallelism also gathers the input (arXiv:2205.05198, section 4.2.2)."""
    nbytes = nbytes or rank.stream
    reduced = {"returned": (Collective("all-reduce", "tp", nbytes),)}
    return _gathered("tp", nbytes) if rank.plan.sequence else reduced


def _gathered(axis: str, nbytes: float) -> dict[str, Any]:
    """Collectives of an input that forward gathers: backward gathers it again and reduce-scatters its gradient."""
    gather, scatter = (Collective(verb, axis, nbytes) for verb in ("all-gather", "reduce-scatter"))
    return {"sent": (gather,), "returned": (gather, scatter)}


def _summed(rank: Rank) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Collectives (forward, backward) that sum a result over tp; sequence parallelism scatters the sum."""
    if not rank.plan.sequence:
        return (Collective("all-reduce", "tp", rank.stream),), ()
    return (Collective("reduce-scatter", "tp", rank.stream),), (Collective("all-gather", "tp", rank.stream),)


def leave(rank: Rank, name: str) -> Operator:
    """End of a branch: its sum over tensor-parallel ranks, then bias, dropout, residual sum, fused or a kernel each."""
    stream, mask = rank.resting, rank.resting / rank.plan.width if rank.config.dropout else 0.0
    sent, returned = _summed(rank)
    apart = 0 if rank.fused else (2 if rank.config.bias else 0) + (2 if rank.config.dropout else 0)
    work = (sweep((3 + apart) * stream + mask, 1 + apart // 2),)
    back = (sweep(2 * stream + mask if rank.config.dropout else stream),)
    return Operator(name, work, back, kept=mask, sent=sent, returned=returned)


@lru_cache(maxsize=16384)
def operators_of(rank: Rank, group: Group) -> tuple[Operator, ...]:
    """Operators of a block, the embedding or the head, in order; the experts' router is assumed to be balanced."""
    if group in ("embedding", "head"):
        return tuple(_embedding(rank) if group == "embedding" else _head(rank))
    inside = _experts(rank) if group == "sparse" else _feed_forward(rank, "")
    last = leave(rank, "feed-forward dropout, sum")
    if group == "sparse" and rank.plan.sequence and not rank.config.mixture.shared_expert:
        last = replace(last, sent=(), returned=())  # experts have scattered their sum themselves
    return (*_attention(rank), norm(rank, "feed-forward norm"), *inside, last)


def _attention(rank: Rank) -> Iterator[Operator]:
    d, tokens, (query, key, value), latent = rank.config.d_model, rank.tokens, rank.widths, latent_of(rank.config)
    yield norm(rank, "attention norm")
    if latent:
        yield from _latent(rank, latent)
    else:
        yield rank.linear("query, key, value", tokens, d, query + key + value, kept=rank.resting, **_entered(rank))
    if rank.config.positions == "rotary":
        # Separate kernels work in 32 bits: cast, rotate, cast back.
        passes, kernels = (2, 2) if rank.fused else (10, 6)
        turned = sweep(passes * rank.bytes_of(query + key), kernels)
        yield Operator("rotary positions", (turned,), (turned,))
    yield from _core(rank) if rank.config.attention == "naive" else _fused_core(rank)
    yield rank.linear("attention out", tokens, rank.mixed, d, kept=rank.bytes_of(rank.mixed))
    yield leave(rank, "attention dropout, sum")


def _latent(rank: Rank, latent: Latent) -> Iterator[Operator]:
    """Queries, keys and values of multi-head latent attention (arXiv:2405.04434, section 2.1). Every tensor-parallel
    rank computes the narrow vectors, for its part of the sequence if that is split, and from them its own heads."""
    plan, d, tokens, (query, key, value) = rank.plan, rank.config.d_model, rank.tokens, rank.widths
    narrow, own = latent.query + latent.key_value + latent.rotary, tokens // (plan.tp if plan.sequence else 1)
    yield rank.linear("latents", own, d, narrow, kept=rank.resting)
    share = own / tokens
    normed = rank.bytes_of(latent.query + latent.key_value) * share
    scales = latent.query + latent.key_value
    yield Operator("norms of latents", (sweep(2 * normed, 2),), (sweep(3 * normed, 4),), scales, kept=normed)
    if latent.query:
        entered = _entered(rank, rank.bytes_of(latent.query))
        yield rank.linear("queries", tokens, latent.query, query, kept=rank.bytes_of(latent.query) * share, **entered)
    else:
        yield rank.linear("queries", tokens, d, query, kept=rank.resting, **_entered(rank))
    entered, kept = _entered(rank, rank.bytes_of(latent.key_value + latent.rotary)), rank.bytes_of(latent.key_value)
    columns = key + value - rank.config.num_heads // plan.tp * latent.rotary
    yield rank.linear("keys, values", tokens, latent.key_value, columns, kept=kept * share, **entered)


def _core(rank: Rank) -> Iterator[Operator]:
    """Attention with scores in memory: two GEMMs with softmax, and perhaps dropout, between them."""
    config, width, own = rank.config, rank.plan.width, rank.seq // rank.plan.cp
    count, (wide_key, wide_value) = rank.plan.micro_batch * config.num_heads // rank.plan.tp, head_widths(config)
    scores, (query, key, value) = float(width * count * own * rank.seq), map(rank.bytes_of, rank.widths)
    narrow, across = rank.product(own, wide_key, rank.seq, count), rank.product(rank.seq, own, wide_key, count)
    wide = rank.product(own, rank.seq, wide_key, count)
    yield Operator("scores", (narrow,), (wide, across), kept=query + key, core=True, **_context(rank))
    # Plain torch scales and masks in kernels of their own.
    ahead, back = (sweep(2 * scores), sweep(3 * scores)) if rank.fused else (sweep(7 * scores, 3), sweep(5 * scores, 2))
    yield Operator("softmax", (ahead,), (back,), kept=scores, core=True)
    if config.dropout:
        mask = scores / width
        yield Operator("softmax dropout", *2 * ((sweep(2 * scores + mask),),), kept=mask + scores, core=True)
    mixed = rank.product(own, rank.seq, wide_value, count)
    factors = rank.product(own, wide_value, rank.seq, count), rank.product(rank.seq, own, wide_value, count)
    yield Operator("weighted values", (mixed,), factors, kept=value, core=True)


def _fused_core(rank: Rank) -> Iterator[Operator]:
    """FlashAttention-2 (arXiv:2307.08691): no scores in memory, masked tiles skipped, five GEMMs backward."""
    config, plan = rank.config, rank.plan
    count, own = plan.micro_batch * config.num_heads // plan.tp, rank.seq // plan.cp
    seen, (query, key, value), (wide, mixed) = 0.5 if config.causal else 1.0, rank.widths, head_widths(config)
    one = rank.product(own, wide, rank.seq, count)
    moved = rank.bytes_of(query + rank.mixed) + plan.width * plan.micro_batch * rank.seq * (key + value)
    # Of the five products of backward three are as wide as a key: scores, and the gradients of queries and keys.
    ahead = one._replace(flops=(1 + mixed / wide) * seen * one.flops, nbytes=moved, fused=True)
    back = one._replace(flops=(3 + 2 * mixed / wide) * seen * one.flops, nbytes=2.5 * moved, fused=True)
    kept = rank.bytes_of(query + key + value) + 4 * count * own
    yield Operator("attention", (ahead,), (back,), kept=kept, core=True, **_context(rank))


def _context(rank: Rank) -> dict[str, Any]:
    """Context parallelism gathers keys and values, and scatters their gradients (arXiv:2407.21783, section 3.3.2)."""
    return _gathered("cp", float(rank.plan.width * rank.plan.micro_batch * rank.seq * sum(rank.widths[1:])))


def _feed_forward(rank: Rank, prefix: str) -> Iterator[Operator]:
    d, width, gated = rank.config.d_model, rank.config.d_ff, rank.config.feed_forward == "swiglu"
    hidden = (shared_width(rank.config) if prefix else width) // rank.plan.tp
    held = rank.bytes_of(hidden)
    yield rank.linear(f"{prefix}up", rank.tokens, d, hidden * (1 + gated), kept=rank.resting, **_entered(rank))
    yield _activation(rank, prefix, held)
    yield rank.linear(f"{prefix}down", rank.tokens, hidden, d, kept=held)


def _activation(rank: Rank, prefix: str, held: float) -> Operator:
    """One kernel over hidden activations of `held` bytes; SwiGLU reads and keeps two such tensors. Plain torch
    has a second kernel: for the bias before GELU, or for the product after SiLU."""
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
    # Under sequence parallelism each tp rank routes and sends its own tokens. Where the experts are, rows are gathered
    # over tp and kept so for backward; results are summed and scattered over tp before they go back.
    parts = plan.tp if plan.sequence else 1
    own = moved / parts
    way = (Collective("all-to-all", "ep", own),)
    gather, scatter = ((Collective(verb, "tp", moved),) for verb in ("all-gather", "reduce-scatter"))
    into: dict[str, Any] = {"sent": gather, "returned": scatter} if plan.sequence else _entered(rank)
    out: dict[str, Any] = {"sent": scatter, "returned": gather} if plan.sequence else {}
    yield rank.linear("router", rank.tokens // parts, d, config.num_experts, wide=True, kept=rank.resting)
    yield Operator("dispatch", (sweep(2 * own, 3),), (sweep(2 * own, 3),), sent=way, returned=way)
    yield rank.linear("experts' up", each, d, hidden * (1 + gated), number, kept=moved, expert=True, **into)
    yield _activation(rank, "experts' ", held)
    yield rank.linear("experts' down", each, hidden, d, number, kept=held, expert=True, **out)
    yield Operator("combine", (sweep(3 * own, 3),), (sweep(3 * own, 3),), kept=own, sent=way, returned=way)
    if config.mixture.shared_expert:
        yield from _feed_forward(rank, "shared expert's ")


def _embedding(rank: Rank) -> Iterator[Operator]:
    """Embedding of tokens: a table whose rows are split over tp, then positions and dropout."""
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
        yield rank.linear("transform", tokens, d, d, wide=True, kept=2 * rank.stream)
    yield rank.linear("logits", tokens, d, columns, wide=True, kept=rank.resting, **_entered(rank))
    # Kernels of forward: cast, maximum, subtract, exponential, sum, divide; of backward: the gradient, and its cast.
    # All-reduces: the largest logit; then the sum, and the target's logit, which only one rank has.
    sent = Collective("all-reduce", "tp", 4.0 * tokens), Collective("all-reduce", "tp", 8.0 * tokens)
    swept = (sweep(24 * logits, 6),), (sweep(14 * logits, 2),)
    yield Operator("loss", *swept, kept=4 * logits, sent=sent)


def vocabulary_rows(rank: Rank) -> int:
    """Rows of the vocabulary on a rank; it is padded until it divides over tp."""
    return -(-rank.config.vocab_size // rank.plan.tp)


class Repeated(NamedTuple):
    """Operators of a block that backward runs again, the bytes that are then not kept, and collectives sent again."""

    operators: tuple[Operator, ...] = ()
    dropped: float = 0.0
    sent: tuple[Collective, ...] = ()


@lru_cache(maxsize=16384)
def repeated(rank: Rank, group: Group, recompute: str) -> Repeated:
    """Recomputation in a block: from its input on ("nested" counts as "segments", an upper bound), or of modules.

    Attention's core starts from queries, keys and values (arXiv:2205.05198, section 5); feed-forward and experts start
    from their input, and send again; a norm, and an expert's activation, run again for the operator that they feed,
    which then does not keep its input.
    """
    operators = operators_of(rank, group)
    if recompute == "none" or group in ("embedding", "head"):
        return Repeated()
    if recompute != "attention":
        sent = tuple(one for each in operators for one in each.sent)
        return Repeated(operators, sum(each.kept for each in operators) - rank.resting, sent)
    modules = set(rank.plan.recompute_modules or ("core_attn",))
    modules -= {"moe_act"} if "moe" in modules else set()  # a part of "moe"
    found = [_module(rank, operators, module) for module in MODULES if module in modules]
    return Repeated(
        tuple(one for each in found for one in each.operators),
        sum(each.dropped for each in found),
        tuple(one for each in found for one in each.sent),
    )


def _module(rank: Rank, operators: tuple[Operator, ...], module: str) -> Repeated:
    """Recomputation of one of `plan.MODULES`; of nothing if the block does not have it."""
    named = {each.name: each for each in operators}
    if module == "core_attn":
        core = tuple(each for each in operators if each.core)
        return Repeated(core, sum(each.kept for each in core) - rank.bytes_of(sum(rank.widths)))
    if module == "layernorm":
        norms = tuple(named[name] for name in ("attention norm", "feed-forward norm"))
        return Repeated(norms, len(norms) * rank.resting / (rank.plan.width if rank.plan.fp8 else 1))
    if module == "moe_act":
        acts = tuple(each for each in operators if each.name.startswith("experts' ") and not each.weights)
        return Repeated(acts, sum(named["experts' down"].kept for _ in acts))
    first, last = ("router", "feed-forward dropout, sum") if module == "moe" else ("up", "feed-forward dropout, sum")
    if first not in named:
        return Repeated()
    names = [each.name for each in operators]
    inside = operators[names.index(first) : names.index(last)]
    sent = tuple(one for each in (*inside, named[last]) for one in each.sent)
    return Repeated(inside, sum(each.kept for each in inside) - inside[0].kept, sent)
