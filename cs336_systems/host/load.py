"""Load by other processes: a line about times that are not to be quoted, and how this process's threads wait.

Threads of OpenMP that wait for each other spin, which takes a core from whoever computes. That is fastest on a quiet
machine; beside one other busy process a step takes several times as long as if they slept.
"""

import os
import sys
import time
from functools import cache
from pathlib import Path

SAMPLE = 0.1  # seconds
SHARE = 0.1  # of this process's cores: what others may use, and half a core at least


def _ticks() -> dict[int, tuple[int, int]]:
    """(busy, all) ticks of each core that this process may use since the machine started; none but on Linux."""
    try:
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        allowed = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        return {}
    cores = {int(name[3:]): [int(each) for each in values[:8]] for name, *values in rows if name[3:].isdigit()}
    return {core: (sum(ticks) - sum(ticks[3:5]), sum(ticks)) for core, ticks in cores.items() if core in allowed}


def measure() -> float:
    """Cores that others use while this process sleeps for a moment; 0 where nobody counts."""
    before = _ticks()
    time.sleep(SAMPLE)
    after = _ticks()
    gone = [(after[core][0] - busy, after[core][1] - total) for core, (busy, total) in before.items() if core in after]
    return sum(busy / total for busy, total in gone if total > 0)


used_by_others = cache(measure)  # when it was first asked


def busy() -> str:
    """The line that says that times taken now are not to be quoted; empty on a quiet machine."""
    used, cores = used_by_others(), len(_ticks())
    if used < max(0.5, SHARE * cores):
        return ""
    return f"busy: others used {used:.1f} of {cores} cores, load {os.getloadavg()[0]:.1f}; times are not to be quoted"


def note_if_busy() -> None:
    """Say on stderr that the machine is busy, in one line, and how threads wait."""
    if words := busy():
        asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        print(f"note: {words}{'; threads sleep while they wait' if asleep else ''}", file=sys.stderr)


def wait_asleep() -> None:
    """On a busy machine, have the threads of OpenMP sleep while they wait, unless the user has chosen. It counts only
    before torch is imported."""
    if "torch" not in sys.modules and busy():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
