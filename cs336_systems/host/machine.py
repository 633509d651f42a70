"""This computer's device and memory, and the stamp of hardware and software in every log and record."""

import ctypes
import gc
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from cs336_systems.errors import UserError


def choose_device(name: str | None) -> torch.device:
    """Device that `--device` names, by default the first GPU, else the CPU. Raises UserError for a missing GPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch finds no CUDA device here; use --device cpu")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Name of the device by its maker, such as `NVIDIA H200` or `AMD EPYC`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = " ".join(_fields("/proc/cpuinfo").get("model name", "").split())
    return model or platform.processor() or platform.machine()


def allowed_cores() -> int:
    """Number of CPU cores that this process and its children may use; a part of one counts as one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota, period in (" ".join(texts).split() for texts in _group_files("cpu")):
        cores = min(cores, -(-int(quota) // int(period))) if quota.isdigit() else cores  # not max, or -1
    return cores


def _fields(path: str) -> dict[str, str]:
    """Fields of a file with lines `name: value`; empty without such a file, as on other systems than Linux."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def available_memory(device: torch.device) -> int:
    """Bytes that a program started now could use: free memory of the GPU, or of this container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not (free := _fields("/proc/meminfo").get("MemAvailable")):  # not Linux: half of the memory is a fair guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min([int(free.split()[0]) * 1024, *_room_in_groups()]))


# Files of Linux's control groups, versions 2 and 1.
GROUPS = {
    "cpu": (("max",), ("cfs_quota_us", "cfs_period_us")),
    "memory": (("max", "current", "stat"), ("limit_in_bytes", "usage_in_bytes", "stat")),
}


def _group_files(kind: str) -> Iterator[list[str]]:
    """Texts of the files of this process's control groups of a kind and those around, as of a container or a job."""
    for place in _fields("/proc/self/cgroup").values():  # such as `memory:/docker/1`, and in version 2 `:/job_1`
        controller, _, path = place.partition(":/")
        inner = Path("/sys/fs/cgroup", controller, path)
        for folder in (inner, *inner.parents) if kind in (controller or kind).split(",") else ():
            with suppress(OSError):
                yield [(folder / f"{kind}.{name}").read_text() for name in GROUPS[kind][bool(controller)]]


def _room_in_groups() -> Iterator[int]:
    """Bytes left below every limit, with the file cache that can be dropped."""
    for room, use, stat in _group_files("memory"):
        if room.strip().isdigit():
            kept = dict(map(str.split, stat.splitlines()))
            yield int(room) - int(use) + int(kept.get("total_inactive_file", kept.get("inactive_file", 0)))


def out_of_memory(error: RuntimeError) -> bool:
    """True if torch ran out of memory. Only a GPU's allocator has an error type for this."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


# Tensors can fill only a part of the available memory, because of fragmentation: the C allocator cannot give back all
# freed activations (up to 1.5 x was measured); a GPU's caching allocator loses less.
USABLE = {"cpu": 1 / 1.5, "cuda": 0.95}


def usable_memory(device: torch.device) -> int:
    """Bytes of tensors that a program started now can count on."""
    return int(USABLE[device.type] * available_memory(device))


class PeakMemory:
    """Peak memory since `reset`, in bytes. On a CPU it is the resident set above that at construction, or None on
    systems other than Linux, where a process cannot reset its peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Otherwise free memory that the allocator keeps would count in the base, and its reuse would not be seen.
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        self.base = self._resident("VmRSS")
        self.reset()

    @staticmethod
    def _resident(field: str) -> int:
        return int(_fields("/proc/self/status").get(field, "0 kB").split()[0]) * 1024

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            self.resettable = Path("/proc/self/clear_refs").write_text("5") > 0
        except OSError:
            self.resettable = False

    def read(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, self._resident("VmHWM") - self.base) if self.resettable else None


def _git(*arguments: str) -> str | None:
    how: dict[str, Any] = {"cwd": Path(__file__).resolve().parent, "capture_output": True, "text": True, "timeout": 10}
    try:
        return subprocess.run(["git", *arguments], check=True, **how).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Stamp of a measurement: device, versions, commit and date. `commit` is for copies that lack their .git."""
    # Records that a benchmark has just appended do not change the code.
    unclean = ("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    status = _git(*unclean) if commit is None else ""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "cores": allowed_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": next((each.version for each in distributions(name="triton")), None),
        "python": platform.python_version(),
        "world_size": 1,
        "backend": None,
        "commit": commit or _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
