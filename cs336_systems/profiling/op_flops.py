"""FLOPs of an operator from the shapes that the profiler recorded: matrix products and fused attention, two FLOPs for
each multiplication with its addition.

The conventions are those of `torch.utils.flop_counter`: a causal mask saves nothing, and the backward of fused
attention makes five products, the scores once more among them (FlashAttention, arXiv:2205.14135, algorithm 4).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Where an operator's two factors stand among its inputs, (... rows inner) and (... inner columns).
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}
FUSED = re.compile(r"^(aten::_scaled_dot_product_(flash|efficient|cudnn|fused)\w*|cs336_kernels::flash_attention\w*)$")
SOFTMAX, SOFTMAX_BACKWARD = "aten::_softmax", "aten::_softmax_backward_data"
# Of each element: compare with the largest, subtract it, exponentiate, add up, divide. Its backward, y (g - sum g y):
# multiply, add up, subtract, multiply.
SOFTMAX_FLOPS = {SOFTMAX: 5, SOFTMAX_BACKWARD: 4}


def operator_flops(name: str, args: Mapping[str, Any]) -> int | None:
    """FLOPs of one call of a matrix product or of fused attention, by the "Input Dims" of its span.

    None for any other operator, for those that only call one of these (aten::linear, aten::matmul), and where no
    shapes were recorded.
    """
    shapes = args.get("Input Dims")
    if not isinstance(shapes, Sequence):
        return None
    try:
        if name in FACTORS:
            left, right = shapes[FACTORS[name] :][:2]
            return 2 * math.prod(left) * int(right[-1]) if len(left) == len(right) >= 2 else None
        if FUSED.match(name):
            return _fused_attention(shapes, backward="backward" in name)
    except (IndexError, TypeError, ValueError):  # shapes of lists of tensors, or of another version's inputs
        return None
    return None


def _fused_attention(shapes: Sequence[Sequence[int]], backward: bool) -> int:
    """Queries (... queries dim), keys (... keys dim) and values (... keys width); backward has their gradient first."""
    queries, keys, values = shapes[1:4] if backward else shapes[:3]
    scores = math.prod(queries[:-1]) * keys[-2]
    dim, width = queries[-1], values[-1]
    # Backward: the scores again, and gradients of queries and keys over dim; of weights and values over width.
    return int(2 * scores * (3 * dim + 2 * width if backward else dim + width))


def softmax_flops(name: str, args: Mapping[str, Any]) -> int | None:
    """FLOPs of one call of a softmax or its backward; None for any other operator and without shapes."""
    shapes = args.get("Input Dims")
    if name not in SOFTMAX_FLOPS or not isinstance(shapes, Sequence) or not shapes:
        return None
    return SOFTMAX_FLOPS[name] * math.prod(shapes[0])
