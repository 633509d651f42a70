"""Parameters of a configuration, and floating-point operations of a pass: matrix products only, a multiply and an add
counted as two. Both are in closed form, part by part.

Attention is counted in full for decoders too, as the naive formulation computes it and as PaLM's definition of model
FLOPs utilisation does (arXiv:2204.02311, appendix B); attention that skips masked tiles needs as little as half.
Element-wise work is left out here: it costs bytes, not FLOPs.

Experts are counted as if their router were balanced. T tokens choose k experts each: k T rows, of which E experts with
C slots take E C at most. Sorted, only rows taken are computed and sent. In the one-hot formulation all E C slots
are, and two products with a tensor of tokens x experts x slots move tokens in and out, 4 T E C D FLOPs at width D
(Lepikhin et al., GShard, arXiv:2006.16668, section 3.2). An unbalanced router fills some experts and drops more rows:
counts with a capacity are then upper bounds.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from cs336_systems.cost.plan import Plan
from cs336_systems.cost.shape import head_widths, latent_of, projection_sizes, shared_width
from cs336_systems.presets import ModelConfig


def feed_forward_parameters(config: ModelConfig, hidden: int) -> int:
    """Parameters of a dense feed-forward layer, or an expert, of a hidden width: two matrices, three if gated."""
    d, ups = config.d_model, 2 if config.feed_forward == "swiglu" else 1
    return (ups + 1) * d * hidden + (ups * hidden + d if config.bias else 0)


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; the sum of the values is what `TransformerLM(config).parameters()` holds."""
    d, vocab, layers, sparse = config.d_model, config.vocab_size, config.num_layers, config.expert_layers
    norm, latent = 2 * d if config.norm == "layernorm" and config.bias else d, latent_of(config)
    projections = sum(inner * columns + (columns if config.bias else 0) for inner, columns in projection_sizes(config))
    projections += latent.query + latent.key_value if latent else 0  # their norms
    # A layer of experts has these, a router without a bias, and perhaps a shared expert.
    experts = config.num_experts * (feed_forward_parameters(config, config.expert_d_ff) + d) if sparse else 0
    shared = feed_forward_parameters(config, shared_width(config)) if config.mixture.shared_expert else 0
    # BERT's transform, norm, bias, pooler and classifier of sentence pairs.
    bert = (d * d + d) + 2 * d + vocab + (d * d + d) + (2 * d + 2)
    return {
        "embedding": d * (vocab + config.token_types),
        "positions": d * config.context_length if config.positions == "learned" else 0,
        "attention": layers * projections,
        "feed-forward": (layers - sparse) * feed_forward_parameters(config, config.d_ff),
        "experts": sparse * (experts + shared),
        "norms": (2 * layers + 1) * norm,
        "head": bert if config.bert_heads else 0 if config.tied_head else d * vocab,
    }


def forward_flops(config: ModelConfig, batch: int, seq: int, training: bool = True) -> dict[str, int]:
    """FLOPs of one forward pass over (batch seq) tokens, by part; `training` decides the capacity of experts."""
    parts, tokens, d = Counter[str](), batch * seq, config.d_model
    for layer in range(config.num_layers):
        parts.update(block_flops(config, batch, seq, layer, training))
    bert = 2 * tokens * d * d + 2 * batch * d * (d + 2) if config.bert_heads else 0  # transform, pooler, classifier
    return {**parts, "head": 2 * tokens * d * config.vocab_size + bert}


@lru_cache(maxsize=256)
def model_flops(config: ModelConfig, micro_batch: int, seq: int) -> int:
    """FLOPs that the model itself needs for a microbatch (micro_batch seq), forward and backward, however computed:
    without recomputation, and for experts without empty slots and one-hot products."""
    config = replace(config, mixture=replace(config.mixture, dispatch="sort"))
    return sum(forward_flops(config, micro_batch, seq).values()) + backward_flops(config, micro_batch, seq)


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


def block_flops(config: ModelConfig, batch: int, seq: int, layer: int, training: bool = True) -> dict[str, int]:
    """FLOPs of one block forward, by part: a dense block has a feed-forward, others a router and experts."""
    tokens, d, matrices = batch * seq, config.d_model, 3 if config.feed_forward == "swiglu" else 2
    parts = {
        "projections": 2 * tokens * sum(inner * columns for inner, columns in projection_sizes(config)),
        "scores": 2 * tokens * seq * config.num_heads * sum(head_widths(config)),  # q k^T and weights v
    }
    if not config.has_experts(layer):
        return parts | {"feed-forward": 2 * tokens * matrices * d * config.d_ff}
    parts["router"] = router_flops(config, tokens)
    parts["experts"] = expert_flops(config, computed_rows(config, tokens, training))
    if config.mixture.shared_expert:
        parts["shared expert"] = 2 * tokens * matrices * d * shared_width(config)
    if config.mixture.dispatch == "einsum":
        parts["one-hot products"] = one_hot_flops(config, tokens, training)[0]
    return parts


def least_forward_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """FLOPs of the fastest implementation of the same model: fused causal attention skips half of the scores."""
    parts = forward_flops(config, batch, seq)
    skipped = parts["scores"] // 2 if config.causal and config.attention != "naive" else 0
    return sum(parts.values()) - skipped


def backward_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """FLOPs of one backward pass, without recomputation: a product for the gradient of each factor that has one."""
    parts = forward_flops(config, batch, seq)
    one_hot = config.expert_layers * one_hot_flops(config, batch * seq)[1] if "one-hot products" in parts else 0
    return 2 * sum(count for name, count in parts.items() if name != "one-hot products") + one_hot


def recompute_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """FLOPs that activation checkpointing repeats in backward (arXiv:1604.06174; arXiv:2205.05198, section 5). An upper
    bound: torch stops a recomputation once the last kept tensor is back, which saves a segment's last product."""
    if config.recompute == "attention":
        return config.num_layers * block_flops(config, batch, seq, 0)["scores"]
    again = repeated_blocks(config, range(config.num_layers))
    return sum(times * sum(block_flops(config, batch, seq, layer).values()) for layer, times in again.items())


def repeated_flops(config: ModelConfig, plan: Plan, batch: int, seq: int) -> float:
    """`recompute_flops` of a plan, which may name every n-th block, or modules; norms and activations have none."""
    if config.recompute != "attention" or not plan.recompute_modules:
        return recompute_flops(config, batch, seq) / plan.recompute_nth
    inside = {"core_attn": ("scores",), "mlp": ("feed-forward",), "moe": ("router", "experts", "shared expert")}
    names = [name for module in set(plan.recompute_modules) for name in inside.get(module, ())]
    blocks = [block_flops(config, batch, seq, layer) for layer in range(config.num_layers)]
    return sum(each.get(name, 0) for each in blocks for name in names) / plan.recompute_nth


def repeated_blocks(config: ModelConfig, layers: range) -> Counter[int]:
    """Number of times that backward runs each block again; if nested, halves are recomputed recursively."""
    if config.recompute == "segments":
        return Counter(layers)
    if config.recompute != "nested" or len(layers) == 1:
        return Counter()
    half = len(layers) // 2
    return Counter(layers) + repeated_blocks(config, layers[:half]) + repeated_blocks(config, layers[half:])
