"""What a kernel demands of its arguments, said with the argument's name before a pointer is handed over."""

from torch import Tensor


def require_floating(**tensors: Tensor) -> None:
    """Raises TypeError for tensors of integers or complex numbers."""
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} must be of a floating-point dtype, not {tensor.dtype}")


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
