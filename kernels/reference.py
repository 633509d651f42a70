"""The maths of the hot spots in plain torch: what a fused kernel has to equal, and the baseline it has to beat."""

import torch
from torch import Tensor


def rmsnorm(x: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467, equation 4).

    y_i = g_i x_i / sqrt(mean_j(x_j^2) + eps)

    x is (... d_model) and g (d_model); y has x's shape and dtype. The arithmetic is in float32 at least, because a
    mean of d_model squares in half precision loses most of its digits.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_rms = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * g).to(x.dtype)
