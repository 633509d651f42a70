"""The operators at both ends of a model on one rank: embedding, head and loss."""

from functools import lru_cache

from cs336_systems.cost.large.operators import Collective, Operator, Rank, entry, norm, sweep


@lru_cache(maxsize=4096)
def embedding_operators(rank: Rank) -> tuple[Operator, ...]:
    """From token ids to the stream: a table whose rows are split over tp, positions, dropout."""
    config, stream, tensor = rank.config, rank.stream, rank.plan.sequence
    extra = (config.context_length if config.positions == "learned" else 0) + config.token_types
    mask = rank.resting / rank.plan.width if config.dropout else 0.0
    passes = 2 + (2 if extra else 0) + (2 if config.dropout else 0)
    work = (sweep(passes * stream + mask, passes),)
    sent = (Collective("reduce-scatter" if tensor else "all-reduce", "tp", stream),)
    returned = (Collective("all-gather", "tp", stream),) if tensor else ()
    return (Operator("embedding", work, work, (words(rank) + extra) * config.d_model, mask, sent, returned),)


@lru_cache(maxsize=4096)
def head_operators(rank: Rank) -> tuple[Operator, ...]:
    """The last norm, BERT's transform, logits over a split vocabulary, and the loss in 32 bits."""
    d, tokens, columns = rank.config.d_model, rank.tokens, words(rank)
    logits = float(tokens * columns)
    found = [norm(rank, "last norm")]
    if rank.config.bert_heads:
        found.append(rank.linear("transform", tokens, d, d, kept=2 * rank.stream))
    found.append(rank.linear("logits", tokens, d, columns, kept=rank.resting, **entry(rank)))
    # Cast, largest, subtract, exponentiate, sum and divide; backward makes the gradient, and casts it.
    # The largest logit of all ranks; then the sum, and the target's logit, which one rank has.
    sent = Collective("all-reduce", "tp", 4.0 * tokens), Collective("all-reduce", "tp", 8.0 * tokens)
    swept = (sweep(24 * logits, 6),), (sweep(14 * logits, 2),)
    return (*found, Operator("loss", *swept, kept=4 * logits, sent=sent))


def words(rank: Rank) -> int:
    """Rows of the vocabulary on a rank, padded until it divides."""
    return -(-rank.config.vocab_size // rank.plan.tp)
