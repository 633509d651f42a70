"""Memory and cores that a program may use, within the limits of a machine's control groups."""

import os
from pathlib import Path

import pytest
import torch

from cs336_systems.host.machine import allowed_cores, available_memory

GROUP = "/sys/fs/cgroup"
CONTAINER = {f"{GROUP}/memory.max": "500\n", f"{GROUP}/memory.current": "300\n"}
CONTAINER |= {f"{GROUP}/memory.stat": "file 90\ninactive_file 40\n"}
JOB = {f"{GROUP}/slurm/job_1/memory.{name}": text for name, text in (("max", "700"), ("current", "9"), ("stat", ""))}
JOB |= {
    f"{GROUP}/slurm/job_1/step/memory.{name}": text for name, text in (("max", "max"), ("current", "9"), ("stat", ""))
}
OLD = {f"{GROUP}/memory/docker/1/memory.limit_in_bytes": "600", f"{GROUP}/memory/docker/1/memory.usage_in_bytes": "90"}
OLD |= {f"{GROUP}/memory/docker/1/memory.stat": "total_inactive_file 10"}


CONTAINER |= {f"{GROUP}/cpu.max": "200000 100000\n"}
JOB |= {f"{GROUP}/slurm/cpu.max": "10000 100000\n", f"{GROUP}/slurm/job_1/cpu.max": "max 100000\n"}
OLD |= {f"{GROUP}/cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n", f"{GROUP}/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"}
OLD |= {f"{GROUP}/cpu,cpuacct/cpu.cfs_quota_us": "250000\n", f"{GROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "room", "cores"),
    [
        ("0::/", {}, 2048, 64),
        ("0::/", CONTAINER, 240, 2),
        ("0::/slurm/job_1/step", JOB, 691, 1),
        ("9:cpu,cpuacct:/a\n4:memory:/docker/1\n0::/", OLD, 520, 3),
    ],
    ids=["no limit", "a container's own", "of a group around", "version 1"],
)
def test_memory_and_cores_are_limited_by_the_control_groups(groups, files, room, cores, monkeypatch):
    known = files | {"/proc/self/cgroup": groups, "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2 kB\n"}

    def read(path: Path) -> str:
        if str(path) not in known:
            raise FileNotFoundError
        return known[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert allowed_cores() == cores
    assert available_memory(torch.device("cpu")) == room
    known["/proc/meminfo"] = "MemTotal: 9 kB\n"  # a kernel that does not say
    assert available_memory(torch.device("cpu")) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
