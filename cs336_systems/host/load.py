"""Load by other processes: a warning that times are unreliable, and a choice of how this process's threads wait.

OpenMP's threads wait for each other by polling, which occupies a core. That is fastest on a quiet machine. Beside one
other busy process a step then takes several times as long as with threads that sleep.
"""

import os
import sys
import time
from functools import cache
from pathlib import Path

SAMPLE = 0.1  # seconds
SHARE = 0.1  # share of this process's cores that others may use; at least half a core


def _ticks() -> dict[int, tuple[int, int]]:
    """Ticks (busy, all) since the machine's start, of each core that this process may use; empty except on Linux."""
    try:
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        allowed = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        return {}
    cores = {int(name[3:]): [int(each) for each in values[:8]] for name, *values in rows if name[3:].isdigit()}
    return {core: (sum(ticks) - sum(ticks[3:5]), sum(ticks)) for core, ticks in cores.items() if core in allowed}


def measure() -> float:
    """Number of cores that others use while this process sleeps for a moment; 0 if unknown."""
    before = _ticks()
    time.sleep(SAMPLE)
    after = _ticks()
    gone = [(after[core][0] - busy, after[core][1] - total) for core, (busy, total) in before.items() if core in after]
    return sum(busy / total for busy, total in gone if total > 0)


used_by_others = cache(measure)  # measured at the first call


def busy() -> str:
    """Warning that times measured now must not be quoted; empty on a quiet machine."""
    used, cores = used_by_others(), len(_ticks())
    if used < max(0.5, SHARE * cores):
        return ""
    return f"busy: others used {used:.1f} of {cores} cores, load {os.getloadavg()[0]:.1f}; times are not to be quoted"


def note_if_busy() -> None:
    """Print a line on stderr if the machine is busy, with how threads wait."""
    if words := busy():
        asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        print(f"note: {words}{'; threads sleep while they wait' if asleep else ''}", file=sys.stderr)


def wait_asleep() -> None:
    """Make OpenMP's threads sleep while they wait if the machine is busy and the user has not chosen. This works only
    before torch is imported."""
    if "torch" not in sys.modules and busy():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
