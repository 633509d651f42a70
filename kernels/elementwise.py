"""Start a kernel that treats every element by itself, whatever the tensors' shapes."""

from typing import Any

from torch import Tensor

from kernels.launch import launch

BLOCK, NUM_WARPS = 2048, 8  # 8 elements a thread: 16 bytes of bfloat16


def launch_over(kernel: Any, *tensors: Tensor, **flags: bool) -> None:
    """Run a kernel over all elements of contiguous tensors, of which the first has them all.

    After its pointers the kernel takes `units`, and after its flags UNIT and BLOCK: there are units * UNIT elements. Of
    that product the compiler knows that it is a multiple of UNIT, so that UNIT neighbours are all inside or all
    outside, and it reads them with one instruction in spite of the mask.
    """
    elements = tensors[0].numel()
    if elements:
        unit = 16 if elements % 16 == 0 else 1
        grid = (-(-elements // BLOCK), 1, 1)
        launch(kernel, grid, *tensors, elements // unit, num_warps=NUM_WARPS, **flags, UNIT=unit, BLOCK=BLOCK)
