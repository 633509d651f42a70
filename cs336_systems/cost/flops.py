"""How many floating-point operations a pass takes: matrix products only, a multiply and an add counted as two.

Attention is counted in full for decoders too, as the naive formulation computes it and as PaLM's definition of model
FLOPs utilisation does (arXiv:2204.02311, appendix B); attention that skips hidden tiles does up to half of its part.
Element-wise work is left out here: it costs bytes, not FLOPs.
"""

from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig


def forward_flops(config: ModelConfig, batch: int, seq: int) -> dict[str, int]:
    """FLOPs of one forward pass over (batch seq) tokens, by part. Raises UserError for a model with experts."""
    if config.num_experts:
        raise UserError(f"the FLOPs of a model with {config.num_experts} experts are not counted yet")
    tokens, d, f, layers = batch * seq, config.d_model, config.d_ff, config.num_layers
    kv = config.kv_heads * config.head_dim
    matrices = 3 if config.feed_forward == "swiglu" else 2
    bert = 2 * tokens * d * d + 2 * batch * d * (d + 2) if config.bert_heads else 0
    return {
        "projections": layers * 2 * tokens * d * (2 * d + 2 * kv),
        "scores": layers * 4 * tokens * seq * d,  # q k^T and weights v
        "feed-forward": layers * 2 * tokens * matrices * d * f,
        "head": 2 * tokens * d * config.vocab_size + bert,
    }


def least_forward_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """What the fastest implementation of the same model must do: fused causal attention skips half of the scores."""
    parts = forward_flops(config, batch, seq)
    skipped = parts["scores"] // 2 if config.causal and config.attention != "naive" else 0
    return sum(parts.values()) - skipped


def backward_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """FLOPs of one backward pass, recompute apart: each product has a gradient for either factor."""
    return 2 * sum(forward_flops(config, batch, seq).values())


def recompute_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """FLOPs that activation checkpointing repeats in backward (arXiv:1604.06174; arXiv:2205.05198, section 5).

    An upper bound: torch stops a recomputation once the last kept tensor is back, which saves a segment's last product.
    """
    parts = forward_flops(config, batch, seq)
    blocks = parts["projections"] + parts["scores"] + parts["feed-forward"]
    match config.recompute:
        case "none":
            return 0
        case "attention":
            return parts["scores"]
        case "segments":
            return blocks
        case "nested":
            return blocks // config.num_layers * _nested_repeats(config.num_layers)


def _nested_repeats(blocks: int) -> int:
    """How often single blocks are run again, in all, when halves are recomputed recursively."""
    if blocks == 1:
        return 0
    half = blocks // 2
    return blocks + _nested_repeats(half) + _nested_repeats(blocks - half)
