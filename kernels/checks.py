"""What a kernel demands of its arguments, said with the argument's name before a pointer is handed over."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def require_floating(**tensors: Tensor) -> None:
    """Raises TypeError for what is no dense tensor of float32, float16, bfloat16 or float64."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} must be of a floating-point dtype of 16 to 64 bits, not {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be dense, not {tensor.layout}")


def require_same_device(**tensors: Tensor) -> None:
    """Raises ValueError unless all tensors live on the first one's device: a kernel would read foreign memory."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, {first_name} on {first.device}; move one of them")


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    """Raises ValueError unless the tensor has the shape, which follows from `why`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape} as {why} demands")
