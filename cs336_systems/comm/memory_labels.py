"""Memory labels: the purpose of a storage, told to a profiler if one is running."""

import torch
from torch import Tensor
from torch.profiler import record_function

MARK = "memory mark: "


def is_profiling() -> bool:
    """True if a profiler runs in this thread. torch has no public name for this."""
    return bool(torch._C._autograd._profiler_enabled())


def mark(category: str, tensor: Tensor) -> None:
    """Tell a profiler that the tensor's storage holds `parameters`, `gradients` or `optimizer state` from now on.

    It becomes an event of the trace, so that it stands among the allocations in the order in which they happened;
    `profiling/capture.py` gathers the marks. Without a profiler this does nothing.
    """
    if is_profiling():
        mark_address(category, tensor.untyped_storage().data_ptr())


def mark_address(category: str, address: int) -> None:
    """As `mark`, where a profiler is known to run."""
    with record_function(f"{MARK}{category} {address}"):
        pass
