"""Memory marks: what a storage is for, said to a profiler that may be running."""

import torch
from torch import Tensor
from torch.profiler import record_function

MARK = "memory mark: "


def mark(category: str, tensor: Tensor) -> None:
    """Tell a profiler that the tensor's storage holds `parameters`, `gradients` or `optimizer state` from now on.

    It becomes an event of the trace, so that it stands among the allocations in the order in which they happened;
    `profiling/capture.py` gathers the marks. Without a profiler this does nothing.
    """
    if torch._C._autograd._profiler_enabled():
        mark_address(category, tensor.untyped_storage().data_ptr())


def mark_address(category: str, address: int) -> None:
    """As `mark`, where a profiler is known to run."""
    with record_function(f"{MARK}{category} {address}"):
        pass
