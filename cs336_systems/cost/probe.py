"""Measure this machine's two ceilings in a second or two. The only file of the model of cost that runs torch."""

import time
from collections.abc import Callable
from functools import partial

import torch

from cs336_systems.cost.hardware import Hardware
from cs336_systems.cost.memory import Precision

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _best_seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
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
def probe(device: torch.device, precision: Precision, name: str, budget: float = 0.5) -> Hardware:
    """The fastest matrix product and copy seen on the device, in about a budget (seconds) for each of a few sizes.

    The second factor is transposed, as a linear layer's weight is. The products' sizes double while that makes them
    faster, so that a slow device is not asked for a large one.
    """
    dtype, best = DTYPES[precision], 0.0
    sizes = (1024, 2048, 4096, 8192, 16384) if device.type == "cuda" else (512, 1024, 2048)
    for size in sizes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype, device=device)
        best = max(best, 2 * size**3 / _best_seconds(partial(torch.mm, a, b.T, out=out), device, budget))
        if 2 * (2 * size) ** 3 / best > budget:
            break
    source = torch.empty(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / _best_seconds(partial(target.copy_, source), device, budget)
    return Hardware(name, best, copy, source=f"measured: largest {precision} matrix product and copy of this machine")
