"""SIGTERM, as a scheduler sends it before it takes the machine away: all ranks stop after the same step.

A rank that gets the signal writes the step after which all are to stop into the store; the others look there after
every step. It must be a step that no rank has passed. After step k every rank has taken part in the gradient norm of
step k, so none can end step k + 1 before this rank begins it: they stop after k + 1. On a GPU the host runs ahead of
that norm by at most `STEPS_AHEAD` steps, which are added. A signal before the first step, while a model is built or
read, is agreed on when all ranks are ready for that step.
"""

import os
import signal
import threading
import time
from types import FrameType
from typing import Self

from cs336_systems.comm import Group, request_stop, stop_step
from cs336_systems.comm.launch import SAME_SIGNAL

STEPS_AHEAD = 2  # steps by which a host may be ahead of its GPU


class StopSignal:
    """Catches SIGTERM inside the block, if it is `active`; another one, a second later or more, ends the process."""

    def __init__(self, group: Group, ahead: int = 0, active: bool = True) -> None:
        self.group, self.ahead, self.active = group, ahead, active
        self.told, self.since = False, 0.0

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if not self.told:
            self.told, self.since = True, time.monotonic()
        elif time.monotonic() - self.since > SAME_SIGNAL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> Self:
        self.before = None
        if self.active and threading.current_thread() is threading.main_thread():  # no other may set handlers
            self.before = signal.signal(signal.SIGTERM, self._tell)
        return self

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def after(self, step: int) -> bool:
        """True, on every rank, if the run is to stop after this step (the first is 1). Every rank must call this."""
        if self.group.size() == 1 or not self.active:
            return self.told
        if self.told:
            request_stop(step + 1 + self.ahead, self.group)
        found = stop_step(self.group)
        return found is not None and step >= found
