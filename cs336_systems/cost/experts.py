"""Rows, FLOPs and bytes of an expert layer for a group of tokens, counted as if its router were balanced.

T tokens choose k experts each: k T rows, of which E experts with C slots each take E C at most. Sorted, only rows that
are taken are computed and sent. In the one-hot formulation all E C slots are, full or empty, and two products with a
tensor of tokens x experts x slots move tokens in and out, 4 T E C D FLOPs at width D (Lepikhin et al., GShard,
arXiv:2006.16668, section 3.2). An unbalanced router fills some experts and drops more rows: counts with a capacity are
then upper bounds.
"""

from cs336_systems.presets import ModelConfig


def slots(config: ModelConfig, tokens: int, training: bool = True) -> int:
    """Slots of one expert. Without a capacity there is one for every token, which is always enough."""
    capacity = config.mixture.capacity(tokens, config.num_experts, training)
    return tokens if capacity is None else capacity


def kept_rows(config: ModelConfig, tokens: int, training: bool = True) -> int:
    """Choices that find a slot: top_k a token, unless the experts have fewer slots together."""
    return min(config.mixture.top_k * tokens, config.num_experts * slots(config, tokens, training))


def padded_rows(config: ModelConfig, tokens: int, training: bool = True) -> int:
    """Slots of all experts, full or empty: the rows of the one-hot formulation, which sends them all."""
    return config.num_experts * slots(config, tokens, training)


def computed_rows(config: ModelConfig, tokens: int, training: bool = True) -> int:
    """Rows that the experts compute, and that are sent to them, with the layer's way of dispatch."""
    count = padded_rows if config.mixture.dispatch == "einsum" else kept_rows
    return count(config, tokens, training)


def row_bytes(config: ModelConfig, rows: int, width: int = 2) -> int:
    """Bytes of one all-to-all, all that a rank gives: rows of d_model numbers of `width` bytes."""
    return rows * config.d_model * width


def expert_flops(config: ModelConfig, rows: int) -> int:
    """FLOPs of the experts of one layer, forward, for a number of rows."""
    matrices = 3 if config.feed_forward == "swiglu" else 2
    return 2 * rows * matrices * config.d_model * config.expert_d_ff


def router_flops(config: ModelConfig, tokens: int) -> int:
    """FLOPs of one layer's router, forward."""
    return 2 * tokens * config.d_model * config.num_experts


def dispatch_flops(config: ModelConfig, tokens: int, training: bool = True) -> int:
    """FLOPs of the two products with the one-hot tensor, forward: tokens to slots, and back."""
    return 4 * tokens * padded_rows(config, tokens, training) * config.d_model


def one_hot_flops(config: ModelConfig, tokens: int, training: bool = True) -> tuple[int, int]:
    """(forward, backward) FLOPs of one layer that the one-hot formulation adds to router and experts: those of
    `dispatch_flops`, and an outer product over experts and slots for each choice. A token's slot has no gradient, so
    backward has one product for the way in and for each outer product, and two for the way back."""
    products = dispatch_flops(config, tokens, training)
    outer = 2 * config.mixture.top_k * tokens * padded_rows(config, tokens, training)
    return products + outer, products // 2 * 3 + outer
