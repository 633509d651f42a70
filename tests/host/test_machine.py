"""Memory that a program may use, within the limits of a machine's control groups."""

import os
from pathlib import Path

import pytest
import torch

from cs336_systems.host.machine import available_memory

GROUP = "/sys/fs/cgroup"
CONTAINER = {f"{GROUP}/memory.max": "500\n", f"{GROUP}/memory.current": "300\n"}
CONTAINER |= {f"{GROUP}/memory.stat": "file 90\ninactive_file 40\n"}
JOB = {f"{GROUP}/slurm/job_1/memory.{name}": text for name, text in (("max", "700"), ("current", "9"), ("stat", ""))}
JOB |= {
    f"{GROUP}/slurm/job_1/step/memory.{name}": text for name, text in (("max", "max"), ("current", "9"), ("stat", ""))
}
OLD = {f"{GROUP}/memory/docker/1/memory.limit_in_bytes": "600", f"{GROUP}/memory/docker/1/memory.usage_in_bytes": "90"}
OLD |= {f"{GROUP}/memory/docker/1/memory.stat": "total_inactive_file 10"}


@pytest.mark.parametrize(
    ("groups", "files", "room"),
    [
        ("0::/", {}, 2048),
        ("0::/", CONTAINER, 240),
        ("0::/slurm/job_1/step", JOB, 691),
        ("9:cpu,cpuacct:/a\n4:memory:/docker/1\n0::/", OLD, 520),
    ],
    ids=["no limit", "a container's own", "of a group around", "version 1"],
)
def test_memory_is_limited_by_the_control_groups(groups, files, room, monkeypatch):
    known = files | {"/proc/self/cgroup": groups, "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2 kB\n"}

    def read(path: Path) -> str:
        if str(path) not in known:
            raise FileNotFoundError
        return known[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert available_memory(torch.device("cpu")) == room
    known["/proc/meminfo"] = "MemTotal: 9 kB\n"  # a kernel that does not say
    assert available_memory(torch.device("cpu")) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
