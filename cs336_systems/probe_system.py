"""Measure this machine for the model of cost: products of many sizes, memory, starting an operator, sending.

A command of its own, because ranks are forked before any tensor code runs, and because a prediction loads no torch:
`python -m cs336_systems.probe_system --out FILE`, which `python -m cs336_systems.cost probe` starts.

What is kept of many tries is the fastest, since noise only ever adds: figures are of a machine that does nothing else.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter

import click
import torch
import torch.nn.functional as F

from cs336_systems import console
from cs336_systems.comm import Place, all_reduce, distributed
from cs336_systems.comm.launch import run_ranks
from cs336_systems.cost.large.efficiency import TILE
from cs336_systems.cost.large.machine_file import SECONDS, check_out, write_machine
from cs336_systems.cost.large.product_law import Law, Timed, fit_law
from cs336_systems.cost.large.systems import System
from cs336_systems.cost.parallel import Link
from cs336_systems.cost.probe import first_touch_seconds, launch_seconds
from cs336_systems.errors import UserError
from cs336_systems.machine import available_memory, choose_device, device_name
from cs336_systems.volume import sent

# (rows inner columns): squares for the peak, then what a transformer of a laptop's size asks for, each way.
CPU_SIZES = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 128, 128),
    (2048, 128, 512), (2048, 512, 128), (128, 2048, 512), (512, 768, 768), (768, 1024, 768),
)  # fmt: skip
GPU_SIZES = (
    (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (2048, 128, 2048), (4096, 256, 4096), (4096, 1024, 4096), (4096, 4096, 1024), (1024, 4096, 1024),
)  # fmt: skip
ROUNDS = 8  # over all sizes, so that a busy moment spoils no size alone
BUSY = 1.15  # rounds that are slower than the best by this much tell of other programs
SMALL_BYTES, LARGE_BYTES, RANKS = 4096, 2**24, 2
COPIED = {"cpu": 2**27, "cuda": 2**30}  # bytes of a large copy
HEADS = 64  # of fused attention, each of 512 tokens by 64
Run = Callable[[], object]


def fastest(run: Run, device: torch.device, budget: float) -> float:
    """Seconds of the fastest call that fits into the budget (seconds), at least one, after one to warm up."""
    best, deadline = float("inf"), monotonic() + budget
    for attempt in range(10**9):
        start = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - start) if attempt else best
        if attempt and monotonic() >= deadline:
            break
    return best


def probe_system(device: torch.device, budget: float = SECONDS, advance: Callable[[str], None] | None = None) -> System:
    """This machine in about `budget` seconds: a CPU with all its threads, or one GPU. `advance` is called after each
    of `ROUNDS` + 3 steps.

    Raises UserError where ranks cannot be started. Nothing may have computed with tensors in this process before.
    """
    advance = advance or (lambda note: None)
    link, backend = measure_link(device)
    advance("sending")
    date = datetime.now(UTC).date().isoformat()
    measured = f"measured on {device_name(device)}, {date}"
    start = launch_seconds(device, 0.02 * budget)
    touch = first_touch_seconds(device, 0.04 * budget)
    copy, added = memory_rates(device, 0.08 * budget)
    advance("memory")
    laws, cuda = measure_products(device, 0.6 * budget, start, advance), device.type == "cuda"
    processors = processors_of(device)
    width = 2 if cuda else 4  # fused attention on a GPU is for half precision
    fused = attention_rate(device, 0.05 * budget, width) / laws[width].rate
    advance("attention")
    law = laws[2] if cuda else laws[4]
    constants = {"product": 1.0, "ramp": law.ramp, "wave": law.wave, "fused": fused, "memory": min(1.0, added / copy)}
    # A GPU runs behind the host; a CPU does one after the other.
    constants |= {"inside": 1.0, "between": 1.0, "call": 0.0} | (
        {"host": start} if cuda else {"host": 0.0, "start": start}
    )
    total = torch.cuda.get_device_properties(device).total_memory if cuda else available_memory(device)
    ranks = f"{measured}: {backend} between {RANKS} ranks here"
    sources = dict.fromkeys((*constants, "processors"), measured) | {
        "matmul_flops": f"{measured}: bf16 products, within {laws[2].error:.0%}",
        "wide_flops": f"{measured}: fp32 products, within {laws[4].error:.0%}",
        "attainable": "the rates are what products reach",
        "bandwidth": f"{measured}: a large copy",
        "memory": f"{measured}: {'of the device' if cuda else 'free for a program'}",
        "touch": f"{measured}: a large tensor's first write, less its next",
        "node": f"{measured}: accelerators here",
        "inside": ranks,
        "between": f"{ranks}: no other machine was there",
    }
    node = torch.cuda.device_count() if cuda else 1
    return System(
        device_name(device), laws[2].rate, laws[4].rate, 1.0, copy, total, processors, node, link, link,
        sources, touch=touch, measured=constants,
    )  # fmt: skip


def processors_of(device: torch.device) -> int:
    """What a product's tiles are shared by: threads of a CPU, streaming multiprocessors of a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


@torch.no_grad()
def measure_products(
    device: torch.device, budget: float, start: float, advance: Callable[[str], None]
) -> dict[int, Law]:
    """The law of products by the bytes of a number, 2 (bf16) and 4 (fp32), in rounds over all sizes."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    laps: dict[tuple[int, tuple[int, int, int]], list[float]] = {}
    each = budget / ROUNDS / (2 * len(sizes))
    for _ in range(ROUNDS):
        for dtype in (torch.bfloat16, torch.float32):
            for size in sizes:
                rows, inner, columns = size
                a, b = (torch.ones(n, inner, dtype=dtype, device=device) for n in (rows, columns))
                out = torch.empty(rows, columns, dtype=dtype, device=device)
                seconds = fastest(partial(torch.mm, a, b.T, out=out), device, each)
                laps.setdefault((dtype.itemsize, size), []).append(seconds)
        advance("products")
    tile = TILE * processors_of(device)
    slower = median(median(each) / min(each) for each in laps.values())
    if slower > BUSY:
        warnings.warn(
            f"products took {slower:.1f} x their best: other programs are running, figures may be low", stacklevel=2
        )
    best = {key: min(each) for key, each in laps.items()}
    return {width: fit_law([Timed(*size, best[width, size]) for size in sizes], tile, start) for width in (2, 4)}


@torch.no_grad()
def memory_rates(device: torch.device, budget: float) -> tuple[float, float]:
    """Bytes/s read and written by a large copy, and by a sum of a tensor and a number, in memory used before."""
    numel = COPIED[device.type] // 4
    source, target = torch.ones(numel, device=device), torch.ones(numel, device=device)
    copy = fastest(lambda: target.copy_(source), device, budget / 2)
    added = fastest(lambda: torch.add(source, 1.0, out=target), device, budget / 2)
    return 8 * numel / copy, 8 * numel / added


@torch.no_grad()
def attention_rate(device: torch.device, budget: float, width: int) -> float:
    """FLOP/s of fused attention, forward, on numbers of so many bytes, no score hidden."""
    dtype = torch.bfloat16 if width == 2 else torch.float32
    q, k, v = (torch.ones(1, HEADS, 512, 64, dtype=dtype, device=device) for _ in range(3))
    return 4 * HEADS * 512**2 * 64 / fastest(partial(F.scaled_dot_product_attention, q, k, v), device, budget)


def measure_link(device: torch.device) -> tuple[Link, str]:
    """What joins two ranks here, and by which backend: NCCL between two GPUs, else gloo between two processes."""
    kind = "cuda" if device.type == "cuda" and torch.cuda.device_count() >= RANKS else "cpu"
    with tempfile.TemporaryDirectory(prefix="link-") as folder:
        out = Path(folder, "link.json")
        run_ranks(_time_link, RANKS, kind, kind, str(out))
        found = json.loads(out.read_text())
    return Link(found["latency"], found["bandwidth"]), found["backend"]


def _time_link(place: Place, kind: str, out: str) -> None:
    """One of two ranks: the fastest all-reduces of a little and of much, after which the first writes what they say."""
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
        rounds = sent("all-reduce", RANKS)
        latency = best[SMALL_BYTES]
        bandwidth = rounds * LARGE_BYTES / max(best[LARGE_BYTES] - latency, 1e-9)
        if group.rank() == 0:
            # An all-reduce over two ranks is two steps of a ring.
            Path(out).write_text(
                json.dumps({"latency": latency / 2, "bandwidth": bandwidth, "backend": backend}, allow_nan=False)
            )


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What is measured.  [default: cuda if there]")
@click.option("--budget", default=SECONDS, show_default=True, type=click.FloatRange(1.0), help="Seconds, about.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File of the machine.")
@click.option("--errors", type=click.Path(path_type=Path), help="File of what went wrong, in place of the screen.")
def main(device: str | None, budget: float, out: Path, errors: Path | None) -> None:
    """Measure this machine for `python -m cs336_systems.cost`, and write it to a file."""
    try:
        check_out(out)
        chosen = choose_device(device)
        with console.progress("measuring this machine", ROUNDS + 3, budget) as advance:
            write_machine(out, probe_system(chosen, budget, advance))
    except UserError as error:
        if not errors:
            raise
        errors.write_text(str(error))
        sys.exit(2)


if __name__ == "__main__":
    sys.exit(console.run_command(main))
