"""SIGTERM, as a scheduler sends it before it takes the machine away: all ranks stop after the same step.

A rank that is told writes into the store after which step all are to stop; the others look there after every step. The
step must be one that no rank has passed. After step k every rank has taken part in the gradient norm of step k, so none
is behind it, and none can end step k + 1 before this one begins it: k + 1 it is. On a GPU the host runs ahead of that
norm, at most `AHEAD` steps, since it waits for the norm of so many steps before. An order that comes before the first
step, while a model is built or read, is agreed on when all are ready for that step.
"""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from cs336_systems.comm import Group, request_stop, stop_step
from cs336_systems.comm.launch import ECHO

AHEAD = 2  # steps by which a host may be ahead of its GPU


class StopSignal:
    """Catches SIGTERM inside the block, if it is `active`; another one, a second later or more, ends the process."""

    def __init__(self, group: Group, ahead: int = 0, active: bool = True) -> None:
        self.group, self.ahead, self.active = group, ahead, active
        self.told, self.since = False, 0.0

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if not self.told:
            self.told, self.since = True, time.monotonic()
        elif time.monotonic() - self.since > ECHO:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> Self:
        self.before = None
        if self.active and threading.current_thread() is threading.main_thread():  # no other may set handlers
            self.before = signal.signal(signal.SIGTERM, self._tell)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def after(self, step: int) -> bool:
        """Whether to stop now that a step is done, the first is 1: the same answer on every rank, which must ask."""
        if self.group.size() == 1 or not self.active:
            return self.told
        if self.told:
            request_stop(step + 1 + self.ahead, self.group)
        found = stop_step(self.group)
        return found is not None and step >= found
