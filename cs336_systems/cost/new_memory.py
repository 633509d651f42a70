"""How many bytes of memory a pass is given anew on a CPU: results so large that no allocator keeps them.

The C library maps each block from MAPPED bytes on for itself and gives it back when it is freed, so that every such
tensor is zeroed page by page when it is first written. Smaller ones are carved from memory that the process has.
"""

from cs336_systems.cost.flops import repeated_blocks
from cs336_systems.cost.hardware import MAPPED
from cs336_systems.cost.memory import Mode, Precision, Sizes
from cs336_systems.presets import ModelConfig


def new_bytes(
    config: ModelConfig,
    batch: int,
    seq: int,
    mode: Mode,
    precision: Precision = "fp32",
    least: int = MAPPED,
    ep: int = 1,
) -> dict[str, int]:
    """Bytes of the tensors of `least` bytes or more that operators of a pass make, by phase; of `ep` ranks each has
    some of the experts. Rows of experts and what is summed inside a kernel are left out."""
    s = Sizes.of(config, batch, seq, precision)
    again = sum(repeated_blocks(config, range(config.num_layers)).values())
    block = _block(config, s)
    ahead = config.num_layers * _sum(block[0], least) + _sum(_ends(config, s)[0], least)
    back = config.num_layers * _sum(block[1], least) + again * _sum(block[0], least) + _sum(_ends(config, s)[1], least)
    weights = _weights(config, ep)
    table = 4 * config.d_model * config.vocab_size
    # A tied table's gradient is the sum of two.
    back += _sum(weights + ([(2, table)] if config.tied_head else []), least)
    return {
        "forward": ahead if mode != "backward" else 0,
        "backward": back if mode != "forward" else 0,
        "optimizer": _sum(weights, least) if mode == "step" else 0,  # the denominators
    }


Made = list[tuple[int, int]]  # (how many, bytes each)


def _sum(made: Made, least: int) -> int:
    return sum(count * nbytes for count, nbytes in made if nbytes >= least)


def _block(config: ModelConfig, s: Sizes) -> tuple[Made, Made]:
    """What forward and backward of a block make."""
    gated, plain = config.feed_forward == "swiglu", config.kernels == "torch"
    norms, norms_back = (2 * 3, 2 * 10) if config.norm == "rmsnorm" and plain else (2, 2)
    naive = config.attention == "naive"
    turned = 7 if config.positions == "rotary" else 0  # of two tensors, four halves' worth of products and sums
    ahead: Made = [(norms + 2, s.stream), (5 + (4 if naive else 1) + turned, s.compute)]
    back: Made = [(norms_back + 4, s.stream), (6 + (4 if naive else 3) + turned, s.compute)]
    ahead.append(((4 if plain else 3) if gated else 2, s.hidden))
    back.append(((4 if plain else 3) if gated else 2, s.hidden))
    if naive:
        ahead += [(2 + config.causal, s.scores_compute), (1, s.scores)]
        back += [(2, s.scores_compute), (1, s.scores)]
    return ahead, back


def _ends(config: ModelConfig, s: Sizes) -> tuple[Made, Made]:
    """What embedding and head make: the logits, their logarithm of softmax, and the gradients of both."""
    if config.kernels == "triton" and not config.bert_heads:
        return [], []
    return [(2, s.logits)], [(2, s.logits)]


def _weights(config: ModelConfig, ep: int) -> Made:
    """The gradient of each matrix."""
    d, ups = config.d_model, 2 if config.feed_forward == "swiglu" else 1
    dense = config.num_layers - config.expert_layers
    kv = config.kv_heads * config.head_dim
    return [
        (dense * (ups + 1), 4 * d * config.d_ff),
        (config.num_layers * 2, 4 * d * d),
        (config.num_layers * 2, 4 * d * kv),
        (1 if config.tied_head else 2, 4 * d * config.vocab_size),
        (config.expert_layers * (ups + 1), 4 * (config.num_experts // ep) * d * config.expert_d_ff),
    ]
