"""Measure this machine's ceilings, and the costs of a launch and of touching new memory, in a second or two.

The only file of the cost model that runs torch.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from cs336_systems.cost.step import Hardware
from cs336_systems.presets import Precision

LAUNCHES = 200  # operators between two looks at the clock
FRESH_BYTES = 2**26  # of a tensor that no allocator keeps for the next one
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def best_seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """The fastest of the calls that fit into the budget (seconds), after one to warm up: noise only ever adds."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    best, deadline = once(), time.perf_counter() + budget
    while time.perf_counter() < deadline:
        best = min(best, once())
    return best


@torch.no_grad()
def launch_seconds(device: torch.device, budget: float) -> float:
    """Seconds in which eager torch starts an operator: a sum of four numbers, over and over."""
    few = torch.zeros(4, device=device)

    def run() -> None:
        for _ in range(LAUNCHES):
            few + 1.0

    return best_seconds(run, device, budget) / LAUNCHES


@torch.no_grad()
def first_touch_seconds(device: torch.device, budget: float) -> float:
    """Seconds a byte that a CPU's new memory costs more than memory that has been written before; 0 on a GPU, whose
    allocator keeps its memory."""
    if device.type == "cuda":
        return 0.0
    used = torch.ones(FRESH_BYTES, dtype=torch.uint8)
    fresh = best_seconds(lambda: torch.empty(FRESH_BYTES, dtype=torch.uint8).fill_(1), device, budget)
    return max(0.0, fresh - best_seconds(lambda: used.fill_(1), device, budget)) / FRESH_BYTES


@torch.no_grad()
def probe(device: torch.device, precision: Precision, name: str, budget: float = 0.5) -> Hardware:
    """The fastest matrix product and copy seen on the device, in about a budget (seconds) for each of a few sizes. The
    second factor is transposed, as a linear layer's weight is. The products' sizes double while that makes them faster,
    so that a slow device is not asked for a large one."""
    dtype, best = DTYPES[precision], 0.0
    sizes = (1024, 2048, 4096, 8192, 16384) if device.type == "cuda" else (512, 1024, 2048)
    for size in sizes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype, device=device)
        best = max(best, 2 * size**3 / best_seconds(partial(torch.mm, a, b.T, out=out), device, budget))
        if 2 * (2 * size) ** 3 / best > budget:
            break
    source = torch.empty(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / best_seconds(partial(target.copy_, source), device, budget)
    launch, touch = launch_seconds(device, budget / 5), first_touch_seconds(device, budget / 5)
    origin = f"measured: largest {precision} matrix product and copy of this machine"
    return Hardware(name, best, copy, origin, launch, touch, asynchronous=device.type == "cuda")
