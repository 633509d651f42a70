"""Timing all-reduces on every rank: check one, probe the links, predict, measure, and record on rank 0."""

import json
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import torch
from torch import Tensor

from benchmarks.harness import WrongResultError, noise, require_close, summarise, time_ranks
from benchmarks.lib.options import COUNT, RecordOptions
from benchmarks.records import Record
from cs336_systems.comm import Group, Place, agree, all_reduce, all_to_all, backend_of, broadcast, distributed, subgroup
from cs336_systems.comm.shared_verbs import shared_empty
from cs336_systems.comm.startup import TIMEOUT
from cs336_systems.cost.closed_forms import Link
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import PATIENCE, format_bytes, format_count, os_errors, setting
from cs336_systems.host.machine import environment, out_of_memory, usable_memory
from cs336_systems.traffic import sent

COURSE_SIZES = "512KB 1MB 10MB 50MB 100MB 500MB 1GB"
SMOKE_SIZES = "4KB 256KB"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
ITEM = torch.float32.itemsize
WORKSPACE = 2  # bytes that a rank needs for each byte reduced: the tensor, and at most as much for the collective
SMALL_BYTES = 4096  # of an all-reduce that takes its latency; of one element most ranks would have no part to send
PROBE_BYTES = 8_000_000  # sent by each rank to measure the links: larger than the caches, but sent quickly

AllReduceBackend = Literal["shm", "gloo", "nccl", "mpi"]


@dataclass(frozen=True)
class AllReduceSettings(RecordOptions):
    """Options of the command line, one field each."""

    device: Literal["cpu", "cuda"] | None = setting(None, "Device of the tensors.  [default: cpu, and cuda if there]")
    backend: AllReduceBackend | None = setting(None, "Communication backend.  [default: every one that is here]")
    sizes: str | None = setting(
        None, f"Sizes of the float32 tensor in bytes; 1 KB = 1000 bytes.  [default: {COURSE_SIZES}]"
    )
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 2, then 4, then 6]", type=COUNT)
    steps: int = setting(5, "Timed all-reduces of each size.", type=COUNT)
    warmup: int = setting(5, "Untimed all-reduces of each size before the timed ones.", type=click.IntRange(0))
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
    link: str | None = setting(None, "Description of the link for the record, if ranks are on several machines.")


def parse_sizes(text: str) -> tuple[int, ...]:
    """`512KB 1MB, 2MiB` in bytes: K, M and G count in thousands, Ki, Mi and Gi in 1024s. Raises UserError."""
    sizes = []
    for word in text.replace(",", " ").split():
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]I?)?B?", word.upper())
        if not found:
            raise UserError(f"{word!r} is no size; write bytes, or 512KB, 10MB, 1GB (thousands), 64MiB (1024s)")
        count = float(found[1]) * UNITS[found[2] or ""]
        if count < ITEM or count % ITEM:
            raise UserError(
                f"{word} is {count:.12g} bytes, which no number of float32 elements ({ITEM} bytes each) fills"
            )
        sizes.append(int(count))
    return tuple(sizes)


def size_name(nbytes: float) -> str:
    """1000000 -> `1 MB`, in thousands as the course and the makers of networks count."""
    text = format_count(nbytes)
    return f"{text}B" if " " in text else f"{text} B"


@dataclass(frozen=True)
class AllReduceJob:
    """One backend, one kind of device, some sizes, and the file in which rank 0 leaves its records for its parent."""

    settings: AllReduceSettings
    backend: AllReduceBackend
    device: str
    sizes: tuple[int, ...]
    path: Path

    def record(self, place: Place, nbytes: int, stamp: dict[str, Any]) -> Record:
        """Make the record of one size, still without results. `stamp` is the machine's environment."""
        ranks, settings = place.world_size, self.settings
        config: dict[str, Any] = {"ranks": ranks, "nodes": ranks // place.local_world_size, "backend": self.backend}
        config |= {"device": self.device, "bytes": nbytes, "warmup": settings.warmup, "link": settings.link or ""}
        return Record("allreduce", config, stamp | {"world_size": ranks, "backend": self.backend})

    def keep(self, record: Record) -> None:
        """Hand a record to the process that started the ranks, at once, in case that a later measurement fails."""
        with os_errors(f"write {self.path}"), self.path.open("a", encoding="utf-8") as file:
            print(json.dumps(asdict(record), allow_nan=False), file=file)


def probe(group: Group, device: torch.device) -> Link:
    """Measure the links of all ranks without a large all-reduce: one of 4 KiB, and a shift of 8 MB to the next rank.

    All send at once, as in a ring: ranks then share cores, memory and wire, which a lone pair would have to itself.
    """
    token, numel = torch.zeros(SMALL_BYTES // ITEM, device=device), PROBE_BYTES // ITEM
    outbox = shared_empty(numel, torch.float32, device, group).fill_(1)
    shift = make_shift(outbox, torch.empty(numel, device=device), group)
    # The long transfers come first: meanwhile the system separates ranks that began on one core.
    large = time_ranks(shift, group, device, warmup=2, steps=5)
    small = time_ranks(lambda: all_reduce(token, group, "probe").wait(), group, device, warmup=5, steps=20)
    return link_of(small, large)


def link_of(small: Tensor, shift: Tensor) -> Link:
    """A link from milliseconds (rank sample) of a small all-reduce, and of a shift to the next rank."""
    latency, seconds = (times.amax(dim=0).median().item() / 1e3 for times in (small, shift))
    return Link(latency, PROBE_BYTES / seconds)


def make_shift(outbox: Tensor, inbox: Tensor, group: Group) -> Callable[[], None]:
    """Return a function that sends each rank's outbox to the next rank's inbox."""
    ranks, me = group.size(), group.rank()
    if backend_of(group) == "nccl":
        given, expected = [0] * ranks, [0] * ranks
        given[(me + 1) % ranks], expected[(me - 1) % ranks] = len(outbox), len(inbox)
        return lambda: all_to_all(inbox, outbox, expected, given, group, "probe").wait()
    # Gloo would take turns, all there and then all back, where two ranks exchange large messages on one connection.
    pairs = [subgroup(sorted({rank, (rank + 1) % ranks})) for rank in range(ranks)]
    following, preceding = pairs[me], pairs[me - 1]
    assert following is not None
    assert preceding is not None

    def shift() -> None:
        sent = broadcast(outbox, following.rank(), following, "probe")
        broadcast(inbox, preceding.size() - 1 - preceding.rank(), preceding, "probe").wait()
        sent.wait()

    return shift


def gate(group: Group, device: torch.device) -> None:
    """The mean of known values over all ranks, of a length that nothing divides. Raises WrongResultError."""
    known = torch.arange(1009, dtype=torch.float32, device=device) % 17
    flat = known + group.rank()
    all_reduce(flat, group, "gate").wait()
    require_close("this all-reduce", flat, known + (group.size() - 1) / 2, tolerance(group.size()))


def tolerance(ranks: int) -> float:
    """The relative error of a mean in float32: every rank's value is scaled and added once."""
    return 2 * ranks * torch.finfo(torch.float32).eps


def allocate(nbytes: int, group: Group, device: torch.device) -> Tensor | None:
    """A flat tensor filled with rank + 1 on each rank, or None on all of them if one has no memory for it."""
    flat = None
    try:
        flat = shared_empty(nbytes // ITEM, torch.float32, device, group).fill_(group.rank() + 1.0)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    except UserError:  # no memory to share
        pass
    return None if "short" in agree("memory", "short" if flat is None else "there", group) else flat


def room(group: Group, device: torch.device) -> int:
    """Bytes of tensors that fit on every rank, if ranks of one machine, or of one GPU, share its memory evenly."""
    index = torch.cuda.current_device() if device.type == "cuda" else 0
    answers = agree("room", f"{socket.gethostname()}:{index} {usable_memory(device)}", group)
    owners = [answer.split()[0] for answer in answers]
    return min(int(answer.split()[1]) // owners.count(answer.split()[0]) for answer in answers)


def bandwidths(nbytes: int, ranks: int, milliseconds: float) -> dict[str, float]:
    """Bytes/s: of the tensor (algorithm), and out of each rank (bus), which is what a link's speed is compared with."""
    algorithm = nbytes / milliseconds * 1e3
    return {"algorithm_bytes_per_s": algorithm, "bus_bytes_per_s": algorithm * sent("all-reduce", ranks)}


def finished(blank: Record, times: Tensor | None, link: Link, usable: int, copies: Tensor | None = None) -> Record:
    """The record with its figures, from milliseconds (rank sample): an all-reduce is over when its last rank is done,
    and so are copies.

    Without times there was no memory for it, and the record says how much it needs.
    """
    ranks, nbytes = blank.config["ranks"], blank.config["bytes"]
    if times is None:
        needed = {"memory_bytes": WORKSPACE * nbytes, "usable_bytes": usable}
        short = f"needs {format_bytes(WORKSPACE * nbytes)} on each rank, where {format_bytes(usable)} are usable"
        return replace(blank, predicted=needed, flags=[short], status="out-of-memory")
    slowest, fastest = times.amax(dim=0), times.amin(dim=0)
    metrics: dict[str, Any] = summarise(slowest.tolist())
    metrics |= bandwidths(nbytes, ranks, metrics["mean_ms"])
    metrics |= {"rank_spread_ms": (slowest - fastest).mean().item(), "rank_mean_ms": times.mean(dim=1).tolist()}
    if copies is not None:
        metrics["copy_ms"] = copies.amax(dim=0).median().item()
    metrics |= {"latency_ms": 1e3 * link.latency, "link_bytes_per_s": link.bandwidth}
    predicted = {"mean_ms": 1e3 * link.seconds(nbytes, ranks)}
    return replace(blank, samples_ms=slowest.tolist(), metrics=metrics, predicted=predicted, flags=noise(metrics))


def require_mean(error: float, nbytes: int, ranks: int, settings: AllReduceSettings) -> None:
    """Check the relative error after all all-reduces of a size. Raises WrongResultError."""
    if not error <= (settings.warmup + settings.steps) * tolerance(ranks):
        name = size_name(nbytes)
        raise WrongResultError(f"{name}: the mean over the ranks is off by {error:.2e} of itself: no speed reported")


def time_size(
    nbytes: int, group: Group, device: torch.device, settings: AllReduceSettings, advance: Callable[[str], None]
) -> tuple[Tensor, Tensor] | None:
    """Milliseconds of one size's all-reduces and of as many copies (rank sample); None if a rank has no memory. Raises
    WrongResultError."""
    flat = allocate(nbytes, group, device)
    if flat is None:
        return None
    name, steps = size_name(nbytes), settings.steps
    times = time_ranks(lambda: all_reduce(flat, group, name).wait(), group, device, settings.warmup, steps, advance)
    mean = (group.size() + 1) / 2  # and it stays that: the mean of equal values
    require_mean(max(abs(extreme.item() / mean - 1) for extreme in flat.aminmax()), nbytes, group.size(), settings)
    twin = torch.empty_like(flat)
    return times, time_ranks(lambda: twin.copy_(flat), group, device, 1, steps)


def work(place: Place, job: AllReduceJob) -> None:
    """One rank's part in a job, which ends in a record of every size. Raises UserError and CommError."""
    settings, device = job.settings, torch.device(job.device)
    with distributed(device, job.backend, settings.timeout, place) as group:
        gate(group, device)
        link, usable = probe(group, device), room(group, device)
        passes, first = settings.warmup + settings.steps, group.rank() == 0
        stamp = environment(device, settings.commit) if first else {}
        for nbytes in job.sizes:
            title = f"{group.size()} ranks, {job.backend}, {job.device}, {size_name(nbytes)}"
            expected, found = passes * link.seconds(nbytes, group.size()), None
            if WORKSPACE * nbytes <= usable:
                with console.progress(title, passes, expected, quiet=not first) as advance:
                    found = time_size(nbytes, group, device, settings, advance)
            if first:
                times, copies = found or (None, None)
                job.keep(finished(job.record(place, nbytes, stamp), times, link, usable, copies))
