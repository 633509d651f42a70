"""Start a kernel with as little work on the host as can be.

`kernel[grid](...)` inspects every argument at each call, and even a compiled kernel looks up the driver, the stream
and hooks one by one: some ten microseconds, in which a GPU normalises a small batch. What a launch depends on is
little: the kernel, its constants, and of each tensor the dtype and whether it is 16-byte aligned. So the compiled
kernel is found by these, and the driver's function is called directly. (Hooks that Triton's own profiler sets are not.)
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.backend import INTERPRETED, triton

Grid = tuple[int, int, int]
_compiled: dict[tuple[Any, ...], Any] = {}


def sort_of(argument: Tensor | int | float | None) -> Any:
    """What Triton compiles anew for: a tensor's dtype and alignment, the width of an integer."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument.__class__, isinstance(argument, int) and not -(2**31) <= argument < 2**31


def launch(
    kernel: Any, grid: Grid, *args: Tensor | int | float | None, num_warps: int, num_stages: int = 1, **constants: Any
) -> None:
    """Run `grid` programs of a kernel on the device of its first argument.

    `constants` are its `tl.constexpr` parameters, all of them and in its order, after the others. Integers among `args`
    must be named in the kernel's `do_not_specialize`, since they are no part of what a compiled kernel is found by.
    """
    if INTERPRETED:
        kernel[grid](*args, **constants)
        return
    device = args[0].device  # type: ignore[union-attr]
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, num_warps=num_warps, num_stages=num_stages, **constants)
        return
    values = tuple(constants.values())
    key = (kernel.fn, device.index, num_warps, num_stages, values, *map(sort_of, args))
    compiled = _compiled.get(key)
    if compiled is None:
        require_order(kernel, len(args), constants)
        compiled = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        _compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)  # which unloads if freed
        return
    run, function, metadata, _ = compiled
    run(*grid, current_stream(device.index), function, metadata, None, None, None, *args, *values)


def current_stream(device: int | None) -> int:
    """The handle of torch's current stream on a device."""
    return triton.runtime.driver.active.get_current_stream(device)


def require_order(kernel: Any, num_args: int, constants: dict[str, Any]) -> None:
    """Raises TypeError where a compiled kernel would be given its arguments in another order than it was made for."""
    expected = kernel.arg_names[num_args:]
    if list(constants) != expected:
        raise TypeError(f"{kernel.fn.__name__} takes the constants {expected}, in this order, not {list(constants)}")


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many blocks of threads run side by side; on a CPU few, so that what loops over programs does loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def ceil_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; `triton.next_power_of_2` is meant for kernels and takes 3 us."""
    return 1 << max(0, n - 1).bit_length()
