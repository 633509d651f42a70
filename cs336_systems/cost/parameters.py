"""Number of parameters of a configuration, part by part, in closed form."""

from cs336_systems.cost.shape import latent_of, projection_sizes, shared_width
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
