"""How much memory a pass needs at its fullest moment, part by part.

Weights, gradients and optimizer state are float32 whatever the precision; what is kept for backward is counted in
`memory.py`. Backward trades that for gradients, so the fullest moment is somewhere on its way.
"""

from dataclasses import replace

from cs336_systems.cost.expert_activations import expert_workspace
from cs336_systems.cost.memory import (
    Activations,
    Mode,
    Precision,
    Sizes,
    feed_forward_activations,
    gradients_inside,
    logits_bytes,
)
from cs336_systems.cost.parameters import attention_parameters, branch_parameters, count_parameters, largest_parameter
from cs336_systems.presets import ModelConfig


def _forward_workspace(config: ModelConfig, s: Sizes) -> int:
    """The most that is alive inside one block or the loss when nothing is kept for backward."""
    gated = config.feed_forward == "swiglu"
    # Python's frames hold the embedding's output, the block's input, the stream after attention and that branch.
    feed_forward = 5 * s.stream + (3 if gated else 2) * s.hidden
    if s.experts is not None:
        feed_forward = max(feed_forward, 5 * s.stream + expert_workspace(config, s.experts))
    # The embedding's output, the block's input, its norm, q, k, v, contiguous q and k, two stages of the scores.
    attention = 3 * s.stream + 5 * s.compute + (2 * s.scores if config.attention == "naive" else 0)
    loss = s.stream + logits_bytes(config, s)
    return max(feed_forward, attention, loss)


def _backward(
    config: ModelConfig, s: Sizes, counts: dict[str, int], kept: Activations, keeps_gradients: bool
) -> tuple[int, int]:
    """(gradients, activations) in bytes at backward's fullest moment.

    Backward trades activations for gradients: first the loss's and the head's, then block by block from the last.
    """
    embedding, weights = 4 * config.d_model * config.vocab_size, 4 * sum(counts.values())
    # The gradients that are made before the first block's backward and after it.
    after_blocks = 4 * counts["positions"] + (0 if config.tied_head else embedding)
    gradients = weights - after_blocks - 4 * sum(counts[each] for each in ("attention", "feed-forward", "experts"))
    moments = [(0, kept.kept + logits_bytes(config, s))]
    for layer, held in reversed(list(enumerate(kept.held))):
        inside_attention, inside_feed_forward = gradients_inside(config, s, layer)
        moments.append((gradients, kept.shared + held + inside_feed_forward))
        gradients += 4 * branch_parameters(config, layer)
        held -= feed_forward_activations(config, s, layer)
        moments.append((gradients, kept.shared + held + kept.scores + inside_attention))
        gradients += 4 * attention_parameters(config)
    # A tied embedding's gradient is the sum of two, from the head and from the look-up.
    moments.append((weights, 2 * embedding if config.tied_head else 0))
    if keeps_gradients:
        moments = [(weights, activations) for _, activations in moments]
    return max(moments, key=sum)


def memory(
    config: ModelConfig,
    batch: int,
    seq: int,
    mode: Mode,
    precision: Precision = "fp32",
    keeps_gradients: bool = False,
) -> dict[str, int]:
    """Bytes by part at the fullest moment of a pass over (batch seq) tokens; their sum is the peak.

    forward keeps nothing for backward (`torch.no_grad`); step is forward, backward and AdamW. With `keeps_gradients`
    those of the step before are there until the next are written over them, as in a wrapper's flat buffers. Experts
    are counted as if their router were balanced.
    """
    s, counts = Sizes.of(config, batch, seq, precision), count_parameters(config)
    weights = 4 * sum(counts.values())
    products = sum(counts[each] for each in ("attention", "feed-forward", "experts"))
    products += config.d_model * config.vocab_size
    casts = 2 * products if s.mixed else 0  # autocast keeps its copies of the weights until the pass ends
    parts = {"parameters": weights, "gradients": 0, "optimizer state": 2 * weights if mode == "step" else 0}
    if mode == "forward":
        return parts | {"activations": casts + _forward_workspace(config, s)}
    kept = Activations.of(config, batch, seq, precision)
    gradients, activations = _backward(config, s, counts, replace(kept, shared=kept.shared + casts), keeps_gradients)
    # AdamW makes one temporary the size of the parameter that it updates.
    update = 4 * largest_parameter(config) if mode == "step" else 0
    if weights + update > gradients + activations:
        gradients, activations = weights, update
    return parts | {"gradients": gradients, "activations": activations}
