"""Simulation and drawing of pipeline schedules: when each action of each stage runs, and how much stages keep."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from string import ascii_lowercase
from typing import NamedTuple

from cs336_systems.errors import UserError
from cs336_systems.schedule.lists import Action, receives_from

ORDER = ("forward", "backward", "weights")
LEGEND = "0> forward and 0< backward of microbatch 0; with chunks, 0a and 0A in chunk a, 0b and 0B in chunk b; . idle"
SPLIT_LEGEND = "0> forward, 0< gradients of inputs, 0w of weights of microbatch 0; chunks: 0a, 0A, 0w; . idle"


class ScheduleError(ValueError):
    """A schedule that no pipeline can run; the message names the stage and the action."""


class Timed(NamedTuple):
    """Start and end of an action on a stage."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`: a list of timed actions for each stage, in the order of time."""

    timeline: list[list[Timed]]
    chunks: int

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last one."""
        return max(row[-1].end for row in self.timeline)

    @property
    def idle(self) -> list[float]:
        """Idle time of each stage within the makespan."""
        return [self.makespan - sum(each.end - each.start for each in row) for row in self.timeline]

    @property
    def bubble(self) -> float:
        """Idle share of all stages' time, from 0 to 1."""
        return sum(self.idle) / (len(self.timeline) * self.makespan)

    @property
    def peak_live(self) -> list[int]:
        """For each stage, the largest number of forwards begun whose backward, with all its parts, has not ended."""
        last = "weights" if any(each.action.kind == "weights" for each in self.timeline[0]) else "backward"
        steps = {"forward": 1, last: -1}
        return [max(accumulate(steps.get(each.action.kind, 0) for each in row)) for row in self.timeline]

    def drawing(self, width: int = 100) -> str:
        """Text in at most `width` columns: a row per stage, characters per action (`LEGEND`), dots for idle.
        The shortest action takes a whole number of columns, so that equal times look equal, if `width` is enough."""
        margin = len(f"stage {len(self.timeline) - 1} ")
        shortest = min(each.end - each.start for row in self.timeline for each in row)
        scale = max(width - margin, 1) / self.makespan
        columns = math.floor(scale * shortest + 1e-9)  # the small term undoes the rounding of times such as a third
        if columns:
            scale = columns / shortest
        lines = []
        for stage, row in enumerate(self.timeline):
            line = f"stage {stage}".ljust(margin)
            for each in row:
                start, end = (margin + round(time * scale) for time in (each.start, each.end))
                letter = ascii_lowercase[each.action.chunk % len(ascii_lowercase)]
                forward, backward = "><" if self.chunks == 1 else (letter, letter.upper())
                marks = {"forward": forward, "backward": backward, "weights": "w"}
                number, mark = str(each.action.microbatch), marks[each.action.kind]
                line = line.ljust(start, ".") + (number * (len(number) < end - start)).ljust(end - start, mark)
            lines.append(line.ljust(margin + round(self.makespan * scale), "."))
        return "\n".join(lines)


def simulate(
    schedules: Sequence[Sequence[Action]], forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0, transfer: float = 0.0, turn: bool = False,
) -> Simulation:  # fmt: skip
    """Simulate the lists of all stages: an action starts when its stage is free and its input has arrived. `forward`
    and `backward` are the times of one microbatch in a whole stage, all chunks together, in any unit: one number, or
    one per stage; the parts of a backward that is split take half of it each. A message between stages takes
    `transfer` and keeps neither of them busy. With `turn` the chunks lie in a V, as ZBV's do. Raises ScheduleError if
    a list repeats or lacks an action, has a backward before its forward, or if the lists deadlock, naming the action
    that each stage waits for. Raises UserError for a time that is not positive."""
    stages, chunks = len(schedules), _count_chunks(schedules)
    if transfer < 0:
        raise UserError(f"transfer must be at least 0, not {transfer}")
    times = {}
    for kind, time in (("forward", forward), ("backward", backward)):
        times[kind] = list(time) if isinstance(time, Sequence) else [time] * stages
        if len(times[kind]) != stages or min(times[kind]) <= 0:
            raise UserError(f"{kind} must be a time above 0, or one for each of the {stages} stages, not {time}")
    if any(action.kind == "weights" for action in schedules[0]):
        times["backward"] = times["weights"] = [time / 2 for time in times["backward"]]
    timeline: list[list[Timed]] = [[] for _ in schedules]
    ends: dict[tuple[int, Action], float] = {}
    while True:
        count = len(ends)
        for stage, actions in enumerate(schedules):
            for action in actions[len(timeline[stage]) :]:
                source = receives_from(stage, action, stages, chunks, turn)
                if source is not None and source not in ends:
                    break
                arrival = 0.0 if source is None else ends[source] + (transfer if source[0] != stage else 0.0)
                start = max(arrival, timeline[stage][-1].end if timeline[stage] else 0.0)
                ends[stage, action] = start + times[action.kind][stage] / chunks
                timeline[stage].append(Timed(stage, action, start, ends[stage, action]))
        if len(ends) == count:
            break
    stuck = []
    for stage, (row, done) in enumerate(zip(schedules, timeline, strict=True)):
        if len(done) < len(row) and (source := receives_from(stage, row[len(done)], stages, chunks, turn)):
            stuck.append(f"stage {stage} cannot run {row[len(done)]} before stage {source[0]} has run {source[1]}")
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")
    return Simulation(timeline, chunks)


def _count_chunks(schedules: Sequence[Sequence[Action]]) -> int:
    """Number of chunks; raises ScheduleError unless each list has every action once, forward before backward."""
    everything = [action for actions in schedules for action in actions]
    if not everything:
        raise ScheduleError("a schedule needs at least one stage and one action")
    microbatches, chunks = 1 + max(each.microbatch for each in everything), 1 + max(each.chunk for each in everything)
    forwards = [Action("forward", microbatch, chunk) for microbatch in range(microbatches) for chunk in range(chunks)]
    kinds = sorted({"forward", "backward", *(each.kind for each in everything)}, key=ORDER.index)
    wanted = Counter(each._replace(kind=kind) for each in forwards for kind in kinds)
    for stage, actions in enumerate(schedules):
        found = Counter(actions)
        for action in found - wanted:
            raise ScheduleError(f"stage {stage} has a {action} too many")
        for action in wanted - found:
            raise ScheduleError(f"stage {stage} has no {action}")
        order = {action: place for place, action in enumerate(actions)}
        for each in forwards:
            for before, after in pairwise(kinds):
                if order[each._replace(kind=before)] > order[each._replace(kind=after)]:
                    what = each._replace(kind=before)
                    raise ScheduleError(f"stage {stage} has a {after} before the {what}")
    return chunks
