"""How long a pass takes: matrix products at the device's peak, everything else at its memory bandwidth, a start of each
operator, and the first touch of large tensors on a CPU.

All are added, not overlapped: eager torch runs one operator after another. The lower efficiency of small products is
left out, so tiny models take longer than predicted.
"""

from cs336_systems.cost.expert_activations import ExpertSizes
from cs336_systems.cost.flops import backward_flops, forward_flops, recompute_flops
from cs336_systems.cost.hardware import Hardware
from cs336_systems.cost.launches import launches
from cs336_systems.cost.memory import Mode, Precision, Sizes
from cs336_systems.cost.new_memory import new_bytes
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.presets import ModelConfig

# Reads and writes of a parameter-sized tensor by `optim.AdamW`: lerp 3, mul 2, addcmul 3, mul 2, sqrt 2, div 2, add 2,
# addcdiv 4.
ADAMW_PASSES = 20


def forward_traffic(config: ModelConfig, batch: int, seq: int, precision: Precision, ep: int = 1) -> int:
    """Bytes that the element-wise operators of one forward pass read and write, one operator at a time, and the weights
    of experts, whose few rows each do not hide it; of `ep` ranks each has some of the experts."""
    s = Sizes.of(config, batch, seq, precision)
    plain = config.kernels == "torch"
    # Square, mean and two products; LayerNorm is fused, as is everything in Triton.
    norm = (8 if config.norm == "rmsnorm" and plain else 2) * s.stream
    residual = 2 * 3 * s.stream
    passes = (6 if plain else 3) if config.feed_forward == "swiglu" else 2  # over what is between two products
    sparse = config.expert_layers
    hidden = (config.num_layers - sparse) * passes * s.hidden
    if s.experts is not None:
        hidden += sparse * _expert_traffic(config, s.experts, passes)
        touched = min(config.num_experts // ep, s.experts.rows)
        matrices = 3 if config.feed_forward == "swiglu" else 2
        hidden += sparse * s.experts.width * touched * matrices * config.d_model * config.expert_d_ff
        hidden += sparse * passes * s.hidden if config.mixture.shared_expert else 0
    copies = 8 * s.compute  # q, k, v and the output become contiguous
    scores = 6 * s.scores if config.attention == "naive" else 0  # scale, bias, softmax
    return config.num_layers * (2 * norm + residual + copies + scores) + hidden + norm + 3 * s.logits


def _expert_traffic(config: ModelConfig, e: ExpertSizes, passes: int) -> int:
    """The same of one expert layer's rows: between their products, and on the way there and back. The router's few
    numbers are left out; one-hot tensors are made, compared with zero and cast."""
    hidden = passes * e.width * e.rows * (config.expert_d_ff // e.tp)
    if config.mixture.dispatch == "einsum":
        return hidden + (4 * config.mixture.top_k * e.gate + 2 * e.width) * e.tokens * e.rows
    return hidden + (2 + 2 + 3) * e.width * e.rows * config.d_model  # gather, multiply, add to what is there


def predict(
    config: ModelConfig, batch: int, seq: int, mode: Mode, precision: Precision, hardware: Hardware
) -> dict[str, float]:
    """Seconds of one pass over (batch seq) tokens by kind of work; their sum is the prediction."""
    forward = sum(forward_flops(config, batch, seq).values())
    backward = backward_flops(config, batch, seq) + recompute_flops(config, batch, seq)
    traffic = forward_traffic(config, batch, seq, precision)
    # Backward's element-wise operators read what forward read and the gradients as well.
    flops, moved = {
        "forward": (forward, traffic),
        "backward": (backward, 2 * traffic),
        "forward-backward": (forward + backward, 3 * traffic),
        "step": (forward + backward, 3 * traffic),
    }[mode]
    update = ADAMW_PASSES * 4 * sum(count_parameters(config).values()) if mode == "step" else 0
    seconds = {
        "matrix products": flops / hardware.matmul_flops,
        "element-wise": moved / hardware.bandwidth,
        "optimizer": update / hardware.bandwidth,
    }
    started = sum(launches(config, mode, "products" if precision in ("bf16", "fp16") else "none").values())
    seconds["launches"] = hardware.waiting(started, sum(seconds.values()))
    touched = sum(new_bytes(config, batch, seq, mode, precision).values()) if hardware.first_touch else 0
    return seconds | {"first touch": hardware.first_touch * touched}
