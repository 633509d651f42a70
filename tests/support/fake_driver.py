"""A fake GPU driver: Triton compiles for an H100 and starts its kernels, and nothing runs.

`python -m tests.support.fake_driver` (without TRITON_INTERPRET) launches a kernel twice as Triton does it and twice
through `kernels.launch`, and prints what the driver was given each time and how many kernels were compiled.
"""

import json
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels import launch, rmsnorm

started: list[tuple] = []


class FakeLauncher:
    """Stands for the C function that hands a kernel to the driver: notes its arguments."""

    def __init__(self, source, metadata):
        pass

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        started.append((x, y, z, args))


def install() -> None:
    """Make Triton and torch believe in one H100, number 0."""
    fake = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=FakeLauncher,
        utils=SimpleNamespace(
            load_binary=lambda *args: (None, 1, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232_448, "multiprocessor_count": 132},
            unload_module=lambda module: None,
        ),
    )
    triton.runtime.driver.set_active(fake)
    torch.cuda.current_device = lambda: None  # what CPU tensors are on


def main() -> None:
    install()
    x, w = torch.zeros(4, 1024, dtype=torch.bfloat16), torch.ones(1024)
    y, inverse_rms = torch.empty_like(x), torch.empty(4)
    arguments = (x, None, w, y, y, inverse_rms, 4)
    constants = {"COLUMNS": 1024, "EPS": 1e-5, "ADD": False, "BLOCK_ROWS": 2, "BLOCK_COLUMNS": 1024}

    def by_triton():
        rmsnorm.forward_kernel[(2, 1, 1)](*arguments, num_warps=4, num_stages=1, **constants)

    def by_us():
        launch.launch(rmsnorm.forward_kernel, (2, 1, 1), *arguments, num_warps=4, **constants)

    for run in (by_triton, by_triton, by_us, by_us):
        run()
    given = [[*grid, [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]] for *grid, args in started]
    known = len(launch._compiled)
    for other in ((x, None, w.half(), *arguments[3:]), (x.view(-1)[1:1025], *arguments[1:])):
        launch.launch(rmsnorm.forward_kernel, (2, 1, 1), *other, num_warps=4, **constants)
    print(json.dumps({"given": given, "compiled": [known, len(launch._compiled)]}))


if __name__ == "__main__":
    main()
