"""What computer this is: its device, its memory, and the stamp that every log and record carries."""

import ctypes
import gc
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cs336_systems.errors import UserError


def choose_device(name: str | None) -> torch.device:
    """The device that `--device` names, by default the first GPU, else the CPU.

    Raises UserError for a GPU that is not there.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch finds no CUDA device here; use --device cpu")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """What the maker calls the device, such as `NVIDIA H200` or `AMD EPYC`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine()


def available_memory(device: torch.device) -> int:
    """Bytes that a program started now could use: free GPU memory, or memory available to this process group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: half of what is installed is a fair guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    return min(free, _cgroup_memory(Path("/sys/fs/cgroup")) or free)


def _cgroup_memory(folder: Path) -> int | None:
    """What a container (cgroup v2) may still take: its limit less what it uses, except file cache it can drop."""
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return int(limit) - used + int(stat.get("inactive_file", 0)) if limit.isdigit() else None


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory, which only a GPU's allocator says by the type of its error."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


# Tensors can fill only a part of what is available: a CPU process grows holes (freed activations that the C allocator
# cannot give back; up to 1.5 x was measured), a GPU's caching allocator fewer.
USABLE = {"cpu": 1 / 1.5, "cuda": 0.95}


def usable_memory(device: torch.device) -> int:
    """Bytes of tensors that a program started now can count on."""
    return int(USABLE[device.type] * available_memory(device))


class PeakMemory:
    """The most memory in use since `reset`, in bytes; on a CPU above what the process held when this was made.

    On a CPU it is the resident set, which Linux lets a process reset for itself; elsewhere `read` returns None.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # What the allocator holds for reuse would otherwise be counted as there already, and not as used again.
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        self.base = 0 if device.type == "cuda" else (_resident("VmRSS") or 0)
        self.reset()

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.resettable = True
        except OSError:
            self.resettable = False

    def read(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = _resident("VmHWM") if self.resettable else None
        return None if peak is None else max(0, peak - self.base)


def _resident(field: str) -> int | None:
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """The stamp of a measurement: device, versions, commit and date. `commit` is for copies that lack their .git."""
    # Records that a benchmark has just appended do not make the code another one.
    unclean = ("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    status = _git(*unclean) if commit is None else ""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "world_size": 1,
        "backend": None,
        "commit": commit or _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
