"""How many parameters a configuration has, part by part, in closed form."""

from cs336_systems.presets import ModelConfig


def attention_parameters(config: ModelConfig) -> int:
    """Query, key, value and output projections of one layer."""
    d, kv = config.d_model, config.kv_heads * config.head_dim
    return 2 * d * d + 2 * d * kv + (2 * d + 2 * kv if config.bias else 0)


def feed_forward_parameters(config: ModelConfig) -> int:
    """One dense feed-forward layer, or one expert: two matrices, three if gated."""
    d, f = config.d_model, config.d_ff
    ups = 2 if config.feed_forward == "swiglu" else 1
    return (ups + 1) * d * f + (ups * f + d if config.bias else 0)


def head_parameters(config: ModelConfig) -> int:
    """What turns the last hidden state into logits and is not the token embedding."""
    d, vocab = config.d_model, config.vocab_size
    if config.bert_heads:
        transform, norm, bias, pooler, pair = d * d + d, 2 * d, vocab, d * d + d, 2 * d + 2
        return transform + norm + bias + pooler + pair
    return 0 if config.tied_head else d * vocab


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; the sum of the values is what `TransformerLM(config).parameters()` holds.

    A layer with experts has num_experts feed-forwards and a router (num_experts d_model) without a bias.
    """
    d, layers, sparse = config.d_model, config.num_layers, config.expert_layers
    norm = 2 * d if config.norm == "layernorm" and config.bias else d
    return {
        "embedding": d * (config.vocab_size + config.token_types),
        "positions": d * config.context_length if config.positions == "learned" else 0,
        "attention": layers * attention_parameters(config),
        "feed-forward": (layers - sparse) * feed_forward_parameters(config),
        "experts": sparse * config.num_experts * (feed_forward_parameters(config) + d),
        "norms": (2 * layers + 1) * norm,
        "head": head_parameters(config),
    }
