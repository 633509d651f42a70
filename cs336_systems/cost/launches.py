"""How many operators a pass starts, for each of which eager torch takes its time however small the tensors are.

An operator is what torch's dispatcher runs below autograd to make or change numbers: views and empty tensors are left
out. A test holds the counts equal to the dispatcher's on a CPU; a fused kernel is one each way. In two bytes a number,
autocast casts what products read, and backward their gradients; where the weights are in two bytes as well, norms,
rotations, softmax and loss cast to float32 and back.
"""

from typing import Literal

from cs336_systems.cost.flops import repeated_blocks
from cs336_systems.cost.memory import Mode
from cs336_systems.presets import ModelConfig

# What is cast: nothing; what products read, by autocast; or what wants float32 of weights in half precision.
Casts = Literal["none", "products", "weights"]

# Of each parameter: lerp, mul, addcmul, mul, sqrt, div, add, addcdiv.
ADAMW_LAUNCHES = 8
MASTER_LAUNCHES = 2  # of each parameter in half precision: its gradient cast, its master rounded back
# Router, sort, gather, grouped products, gate and the way back; it depends a little on how tokens are routed.
EXPERT_LAUNCHES = (63, 41)
DROPOUT_LAUNCHES = (3, 1)  # draw, scale and multiply; one kernel on a GPU

Ways = tuple[int, int]  # (forward, backward)


def _add(*parts: Ways) -> Ways:
    return sum(each[0] for each in parts), sum(each[1] for each in parts)


def _if(condition: bool, ahead: int, back: int) -> Ways:
    return (ahead, back) if condition else (0, 0)


def _norm(config: ModelConfig, casts: Casts) -> Ways:
    """Square, mean, add, inverse root and two products; their derivatives, and the sum over both uses of the input."""
    if config.norm == "layernorm" or config.kernels == "triton":
        return 1, 1
    return _add((6, 14), _if(casts == "weights", 3, 4))


def _linear(config: ModelConfig, count: int, casts: Casts) -> Ways:
    """Products, and two for the gradients of each; that of a bias is a sum. Weights and biases are cast."""
    cast = (2 if config.bias else 1) if casts == "products" else 0
    return count * (1 + cast), count * ((3 if config.bias else 2) + cast)


def core_launches(config: ModelConfig, casts: Casts = "none") -> Ways:
    """Attention between its projections, which selective recomputation runs again."""
    if config.attention != "naive":
        return 1, 1
    # Two products, scale and softmax; what heads were split from or are turned in memory.
    grouped, rotary = config.kv_heads != config.num_heads, config.positions == "rotary"
    copies = (not rotary) + (not (rotary or grouped)) + (not grouped)
    found = _add((4 + copies, 9), _if(config.causal, 1, 0))  # with the bias that hides
    found = _add(found, DROPOUT_LAUNCHES if config.dropout else (0, 0))
    found = _add(found, _if(casts == "weights", 2, 2))
    return _add(found, _if(casts == "products", 1, 2 if config.causal else 1))


def _attention(config: ModelConfig, casts: Casts) -> Ways:
    found = _add(_linear(config, 4, casts), core_launches(config, casts), _if(casts == "products", 3, 3))
    if config.positions == "rotary":
        # Queries and keys each: four products, difference, sum, one tensor of both halves.
        found = _add(found, (14, 16), _if(casts != "none", 2, 10))
    if config.kv_heads != config.num_heads:
        found = _add(found, (2, 2))
    # The heads side by side in memory again, and of gradients the queries', keys' and values'.
    copies = (1, 1) if config.attention == "naive" else _if(config.positions == "rotary", 1, 3)
    return _add(found, copies, (0, 2))  # three gradients meet


def _feed_forward(config: ModelConfig, casts: Casts) -> Ways:
    if config.feed_forward != "swiglu":
        return _add(_linear(config, 2, casts), (1, 1), _if(casts == "products", 1, 1))
    gate = (2, 3) if config.kernels == "torch" else (1, 1)
    return _add(_linear(config, 3, casts), gate, (0, 1), _if(casts == "products", 2, 2))  # two gradients meet


def block_launches(config: ModelConfig, layer: int = 0, casts: Casts = "none") -> Ways:
    """Operators of one block, without what backward runs again."""
    branch = EXPERT_LAUNCHES if config.has_experts(layer) else _feed_forward(config, casts)
    found = _add(_norm(config, casts), _attention(config, casts), _norm(config, casts), branch)
    if config.dropout:
        found = _add(found, DROPOUT_LAUNCHES, DROPOUT_LAUNCHES)
    return _add(found, (2, 2), _if(casts == "products", 0, 2))  # each branch meets the stream


def embedding_launches(config: ModelConfig) -> Ways:
    """From ids to the stream, and what all blocks share: the rotary table, the bias that hides."""
    found = _add((1, 1), _if(config.positions == "learned", 1, 2), _if(config.positions == "rotary", 9, 0))
    found = _add(found, _if(config.positions == "sinusoidal", 11, 1), _if(config.token_types > 0, 3, 1))
    found = _add(found, _if(config.attention == "naive" and config.causal, 4, 0))
    return _add(found, DROPOUT_LAUNCHES) if config.dropout else found


def head_launches(config: ModelConfig, casts: Casts = "none") -> Ways:
    """From the last norm to the loss, and the sum over both uses of a tied weight."""
    found = _add(_norm(config, casts), _if(config.tied_head, 0, 1), _if(casts == "products", 2, 2))
    if config.bert_heads:  # transform, GELU, norm and a bias of the logits; pooler, tanh and pair, of which no loss is
        found = _add(found, (6, 6), _if(casts == "products", 10, 5))
    fused = config.kernels == "triton" and not config.bert_heads
    return _add(found, (1, 2) if fused else (3, 5), _if(casts != "none", 1, 1))


def span_launches(config: ModelConfig, layers: range, casts: Casts = "none") -> Ways:
    """Operators of some blocks in a row, with what backward runs again, which ends with what was kept last."""
    again, ahead, back = repeated_blocks(config, layers), 0, 0
    for layer in layers:
        forward, backward = block_launches(config, layer, casts)
        ahead += forward
        back += backward + again[layer] * (forward - 2)
        if config.recompute == "attention":
            back += core_launches(config, casts)[0] - 1
    return ahead, back


def count_tensors(config: ModelConfig) -> int:
    """Parameters, as tensors."""
    norm = 2 if config.norm == "layernorm" and config.bias else 1
    matrix, ups = 2 if config.bias else 1, 2 if config.feed_forward == "swiglu" else 1
    dense = matrix * (ups + 1)
    sparse = config.expert_layers
    experts = dense + 1 + (dense if config.mixture.shared_expert else 0)
    found = 1 + (config.positions == "learned") + (config.token_types > 0) + (0 if config.tied_head else 1)
    found += config.num_layers * (2 * norm + 4 * matrix) + norm + (config.num_layers - sparse) * dense
    return found + sparse * experts + (9 if config.bert_heads else 0)


def update_launches(casts: Casts) -> int:
    """Operators of AdamW's update of a parameter."""
    return ADAMW_LAUNCHES + (MASTER_LAUNCHES if casts == "weights" else 0)


def launches(config: ModelConfig, mode: Mode, casts: Casts = "none") -> dict[str, int]:
    """Operators of a pass of the whole model by phase: forward, backward, optimizer."""
    found = _add(embedding_launches(config), span_launches(config, range(config.num_layers), casts))
    ahead, back = _add(found, head_launches(config, casts))
    return {
        "forward": ahead if mode != "backward" else 0,
        "backward": back if mode != "forward" else 0,
        "optimizer": update_launches(casts) * count_tensors(config) if mode == "step" else 0,
    }
