"""Measure this machine: the ceilings of one device in a second or two, and all figures of a `System` in twenty.

`probe` is for `closed_forms.predict`, `probe_here` for the predictions of large runs. Commands import this file when
they measure: a prediction loads no torch, and ranks are forked before any tensor code runs. The fastest of many
tries counts, since noise only adds time: the figures describe a machine that does nothing else.
"""

import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F

from cs336_systems.comm import Place, all_reduce, distributed
from cs336_systems.comm.launch import run_ranks
from cs336_systems.cost.closed_forms import Hardware, Link
from cs336_systems.cost.machines import SECONDS, System
from cs336_systems.cost.operator_time import TILE
from cs336_systems.cost.template import fill_file
from cs336_systems.errors import UserError
from cs336_systems.host.console import progress
from cs336_systems.host.machine import available_memory, choose_device, device_name
from cs336_systems.presets import Precision
from cs336_systems.traffic import sent

LAUNCHES = 200  # operators between two looks at the clock
FRESH_BYTES = 2**26  # of a tensor that no allocator keeps for the next one
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (rows inner columns): squares for the peak, then shapes of a transformer of a laptop's size, each way.
CPU_SIZES = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 128, 128),
    (2048, 128, 512), (2048, 512, 128), (128, 2048, 512), (512, 768, 768), (768, 1024, 768),
)  # fmt: skip
GPU_SIZES = (
    (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (2048, 128, 2048), (4096, 256, 4096), (4096, 1024, 4096), (4096, 4096, 1024), (1024, 4096, 1024),
)  # fmt: skip
# Values of `ramp` and of `wave` among which the best pair is looked for.
RAMPS = (0.0, 2.0, 5.0, 10.0, 20.0, 40.0, 70.0, 100.0, 140.0, 180.0, 250.0, 350.0, 500.0, 700.0, 1000.0)
WAVES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
ROUNDS = 8  # over all sizes, so that a busy moment spoils no size alone
BUSY = 1.15  # a median this many times the best shows that other programs run
SMALL_BYTES, LARGE_BYTES, RANKS = 4096, 2**24, 2
COPIED = {"cpu": 2**27, "cuda": 2**30}  # bytes of a large copy
HEADS = 64  # of fused attention, each of 512 tokens by 64


@torch.no_grad()
def best_seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """The fastest of the calls that fit into the budget (seconds), after one to warm up: noise only ever adds."""

    def once() -> float:
        start = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - start

    once()
    best, deadline = once(), perf_counter() + budget
    while perf_counter() < deadline:
        best = min(best, once())
    return best


def launch_seconds(device: torch.device, budget: float) -> float:
    """Seconds in which eager torch starts an operator: a sum of four numbers, over and over."""
    few = torch.zeros(4, device=device)

    def run() -> None:
        for _ in range(LAUNCHES):
            few + 1.0

    return best_seconds(run, device, budget) / LAUNCHES


def first_touch_seconds(device: torch.device, budget: float) -> float:
    """Seconds a byte that a CPU's new memory costs more than used; 0 on a GPU, whose allocator keeps its memory."""
    if device.type == "cuda":
        return 0.0
    used = torch.ones(FRESH_BYTES, dtype=torch.uint8)
    fresh = best_seconds(lambda: torch.empty(FRESH_BYTES, dtype=torch.uint8).fill_(1), device, budget)
    return max(0.0, fresh - best_seconds(lambda: used.fill_(1), device, budget)) / FRESH_BYTES


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
    source, target = torch.ones(2, COPIED[device.type] // 4, device=device)
    copy = 8 * source.numel() / best_seconds(partial(target.copy_, source), device, budget)
    launch, touch = launch_seconds(device, budget / 5), first_touch_seconds(device, budget / 5)
    origin = f"measured: largest {precision} matrix product and copy of this machine"
    return Hardware(name, best, copy, origin, launch, touch, asynchronous=device.type == "cuda")


class GemmLaw(NamedTuple):
    """FLOP/s of very large GEMMs, the losses of small ones, and the error of this description."""

    rate: float
    ramp: float
    wave: float
    error: float  # mean |log(predicted / measured)|: 0.1 is about 10%


def fit_law(timed: Sequence[tuple[int, int, int, float]], tile: float, start: float) -> GemmLaw:
    """Fit the law of `operator_time.product_rate` to GEMMs, each (rows, inner, columns, seconds), all counting alike.
    `tile` is the number of elements that all processors compute at once, `start` the seconds to launch an operator."""

    def fitted(ramp: float, wave: float) -> GemmLaw:
        logs = []
        for rows, inner, columns, seconds in timed:
            waves = rows * columns / tile
            share = waves / (waves + wave) * inner / (inner + ramp)
            logs.append(log(2 * rows * inner * columns / share / max(seconds - start, 0.2 * seconds)))
        middle = median(logs)
        return GemmLaw(exp(middle), ramp, wave, fmean(abs(each - middle) for each in logs))

    return min((fitted(ramp, wave) for ramp, wave in product(RAMPS, WAVES)), key=lambda law: law.error)


def probe_here(budget: float = SECONDS, device: str | None = None) -> System:
    """Measure this machine in about `budget` seconds, with progress on stderr. Raises UserError if it cannot be."""
    chosen = choose_device(device)
    try:
        with progress("measuring this machine", ROUNDS + 3, budget) as advance:
            return probe_system(chosen, budget, advance)
    except (RuntimeError, MemoryError) as error:  # of torch, or with the traceback of a rank
        *_, reason = type(error).__name__, *str(error).strip().splitlines()
        raise UserError(f"cannot measure this machine: {reason}; try again, or name another with --system") from None


def probe_system(device: torch.device, budget: float, advance: Callable[[str], None] = lambda note: None) -> System:
    """Measure this machine: a CPU with all its threads, or one GPU. `advance` is called after each of `ROUNDS` + 3
    steps. Raises UserError where ranks cannot be started: nothing may have computed with tensors in this process."""
    link, backend = measure_link(device)
    advance("sending")
    start, touch = launch_seconds(device, 0.02 * budget), first_touch_seconds(device, 0.04 * budget)
    copy, added = memory_rates(device, 0.08 * budget)
    advance("memory")
    laws, cuda = measure_products(device, 0.6 * budget, start, advance), device.type == "cuda"
    width = 2 if cuda else 4  # fused attention on a GPU is for half precision
    law, fused = laws[width], attention_rate(device, 0.05 * budget, width) / laws[width].rate
    advance("attention")
    constants = {"product": 1.0, "ramp": law.ramp, "wave": law.wave, "fused": fused, "memory": min(1.0, added / copy)}
    # A GPU runs asynchronously; a CPU launches and computes one after the other.
    constants |= {"inside": 1.0, "between": 1.0, "call": 0.0, "host": start if cuda else 0.0}
    constants |= {} if cuda else {"start": start}
    measured = f"measured on {device_name(device)}, {datetime.now(UTC).date().isoformat()}"
    values = {"measured": measured, "backend": backend, "ranks": RANKS, "cuda": cuda}
    values |= {"half": laws[2].error, "whole": laws[4].error}
    named = (line.partition("|") for line in fill_file("sources", values))
    sources = dict.fromkeys((*constants, "processors"), measured) | {name: text for name, _, text in named}
    total = torch.cuda.get_device_properties(device).total_memory if cuda else available_memory(device)
    return System(
        device_name(device), laws[2].rate, laws[4].rate, 1.0, copy, total, processors_of(device),
        torch.cuda.device_count() if cuda else 1, link, link, sources, touch=touch, measured=constants,
    )  # fmt: skip


def processors_of(device: torch.device) -> int:
    """Processors that share the tiles of a GEMM: threads of a CPU, streaming multiprocessors of a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


def measure_products(
    device: torch.device, budget: float, start: float, advance: Callable[[str], None]
) -> dict[int, GemmLaw]:
    """The law of GEMMs by the bytes of a number, 2 (bf16) and 4 (fp32), in rounds over all sizes."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    laps: dict[tuple[int, tuple[int, int, int]], list[float]] = {}
    each = budget / ROUNDS / (2 * len(sizes))
    for _ in range(ROUNDS):
        for dtype, size in product((torch.bfloat16, torch.float32), sizes):
            rows, inner, columns = size
            a, b = (torch.ones(n, inner, dtype=dtype, device=device) for n in (rows, columns))
            out = torch.empty(rows, columns, dtype=dtype, device=device)
            seconds = best_seconds(partial(torch.mm, a, b.T, out=out), device, each)
            laps.setdefault((dtype.itemsize, size), []).append(seconds)
        advance("products")
    slower = median(median(each) / min(each) for each in laps.values())
    if slower > BUSY:
        warnings.warn(
            f"products took {slower:.1f} x their best: other programs are running, figures may be low", stacklevel=2
        )
    best, tile = {key: min(each) for key, each in laps.items()}, TILE * processors_of(device)
    return {width: fit_law([(*size, best[width, size]) for size in sizes], tile, start) for width in (2, 4)}


def memory_rates(device: torch.device, budget: float) -> tuple[float, float]:
    """Bytes/s read and written by a large copy, and by a sum of a tensor and a number, in memory used before."""
    numel = COPIED[device.type] // 4
    source, target = torch.ones(numel, device=device), torch.ones(numel, device=device)
    copy = best_seconds(lambda: target.copy_(source), device, budget / 2)
    added = best_seconds(lambda: torch.add(source, 1.0, out=target), device, budget / 2)
    return 8 * numel / copy, 8 * numel / added


def attention_rate(device: torch.device, budget: float, width: int) -> float:
    """FLOP/s of fused attention, forward, on numbers of `width` bytes, without a mask."""
    dtype = torch.bfloat16 if width == 2 else torch.float32
    q, k, v = (torch.ones(1, HEADS, 512, 64, dtype=dtype, device=device) for _ in range(3))
    return 4 * HEADS * 512**2 * 64 / best_seconds(partial(F.scaled_dot_product_attention, q, k, v), device, budget)


def measure_link(device: torch.device) -> tuple[Link, str]:
    """The link of two ranks here, and its backend: NCCL between two GPUs, else gloo between two processes."""
    kind = "cuda" if device.type == "cuda" and torch.cuda.device_count() >= RANKS else "cpu"
    with tempfile.TemporaryDirectory(prefix="link-") as folder:
        out = Path(folder, "link.json")
        run_ranks(_time_link, RANKS, kind, kind, str(out))
        found = json.loads(out.read_text())
    return Link(found["latency"], found["bandwidth"]), found["backend"]


def _time_link(place: Place, kind: str, out: str) -> None:
    """Time small and large all-reduces on one of two ranks; the first rank writes the link's figures from them."""
    device, backend = torch.device(kind), "nccl" if kind == "cuda" else "gloo"
    with distributed(device, backend, 60.0, place) as group:
        best = {}
        for nbytes, times in ((SMALL_BYTES, 100), (LARGE_BYTES, 15)):
            flat = torch.ones(nbytes // 4, device=device)
            laps = []
            for _ in range(times):
                start = perf_counter()
                all_reduce(flat, group, f"{nbytes} bytes").wait()
                if kind == "cuda":
                    torch.cuda.synchronize()
                laps.append(perf_counter() - start)
            best[nbytes] = sorted(laps)[len(laps) // 4]  # a lap may be short because the other rank came late
        latency = best[SMALL_BYTES]
        bandwidth = sent("all-reduce", RANKS) * LARGE_BYTES / max(best[LARGE_BYTES] - latency, 1e-9)
        if group.rank() == 0:
            # An all-reduce over two ranks is two steps of a ring.
            figures = {"latency": latency / 2, "bandwidth": bandwidth, "backend": backend}
            Path(out).write_text(json.dumps(figures, allow_nan=False))
