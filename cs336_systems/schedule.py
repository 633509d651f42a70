"""Pipeline schedules as data: GPipe, 1F1B, interleaved 1F1B and zero bubble, their closed forms, a simulator and a
drawing.

A schedule is a list of actions per stage. All have a warm-up of forwards, a steady state in which a forward and
a backward alternate, and a cool-down of backwards; they differ in the length of the warm-up. `pipeline.py` executes one
stage's list, `simulate` plays all of them. Sends must not block: in 1F1B with two stages, stage 0 sends its second
forward while stage 1 sends its first backward.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from string import ascii_lowercase
from typing import Literal, NamedTuple, get_args

from cs336_systems.errors import UserError

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1"]
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
ORDER = ("forward", "backward", "weights")
LEGEND = "0> forward and 0< backward of microbatch 0; with chunks, 0a and 0A in chunk a, 0b and 0B in chunk b; . idle"
SPLIT_LEGEND = "0> forward, 0< gradients of inputs and 0w of weights of microbatch 0; . idle"


class ScheduleError(ValueError):
    """A schedule that no pipeline can run; the message names the stage and the action."""


class Action(NamedTuple):
    """Forward or backward of one microbatch through one chunk of a stage's layers; or of a backward that is split, the
    gradients of weights, after those of inputs ("backward")."""

    kind: Literal["forward", "backward", "weights"]
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} in chunk {self.chunk}"


def gpipe(stage: int, stages: int, microbatches: int) -> list[Action]:
    """GPipe: all forwards, then all backwards (arXiv:1811.06965, section 2.2), these in the order of microbatches, as
    one process adds gradients. A stage holds the activations of all microbatches."""
    return _one_stage("gpipe", stage, stages, microbatches, 1)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B: each backward as early as possible; stage r of p holds the activations of at most p - r microbatches.
    PipeDream-Flush (arXiv:2006.09503; arXiv:2104.04473, section 2.2.1). As fast as GPipe, in constant memory."""
    return _one_stage("1f1b", stage, stages, microbatches, 1)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Interleaved 1F1B: a stage has several chunks of layers, and the pipeline fills and drains `chunks` times as fast.
    arXiv:2104.04473, section 2.2.2, as in Megatron-LM v2.5: for p stages, p microbatches pass one chunk, then the next
    chunk, and so on. The warm-up of stage r is 2 (p - 1 - r) + (v - 1) p forwards for v chunks, and it holds one more,
    or all where microbatches == p. One chunk: 1F1B, for any number of microbatches."""
    return _one_stage("interleaved", stage, stages, microbatches, chunks)


def zero_bubble(stage: int, stages: int, microbatches: int) -> list[Action]:
    """ZB-H1: 1F1B with each backward in two (Qi et al., arXiv:2401.10241, section 2.3). The stage before waits for the
    gradients of inputs alone; those of weights can wait, and fill what would be idle. Stage r leaves those of the
    latest r microbatches for later, so that every stage keeps the activations of at most p microbatches, as stage 0 of
    1F1B does."""
    return _one_stage("zb-h1", stage, stages, microbatches, 1)


def schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """The lists of all stages of a schedule by name. Raises UserError for a name that is not in NAMES, a count below 1,
    chunks of a schedule that has none, and interleaved microbatches that are not a multiple of the stages."""
    _check(name, stages, microbatches, chunks)
    return [_one_stage(name, stage, stages, microbatches, chunks) for stage in range(stages)]


def blocks_of(stage: int, chunk: int, stages: int, chunks: int, num_layers: int) -> range:
    """Layers of a stage's chunk: the model begins with chunk 0 of every stage, then chunk 1 of every stage, and so on.
    Raises UserError if the layers do not divide evenly over all chunks of all stages, or the chunk does not exist."""
    _check("interleaved", stages, stages, chunks, stage)
    if not 0 <= chunk < chunks:
        raise UserError(f"chunk {chunk} does not exist: the {chunks} chunks of a stage are 0 to {chunks - 1}")
    size, rest = divmod(num_layers, stages * chunks)
    if rest or not size:
        product = f"stages {stages} x chunks {chunks} = {stages * chunks}"
        raise UserError(f"num_layers {num_layers} is not a multiple of {product}: change one of the three")
    start = (chunk * stages + stage) * size
    return range(start, start + size)


def bubble_fraction(name: str, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle share of the pipeline's time, ((p - 1) / v) / (m + (p - 1) / v) for p equal stages, m microbatches, v chunks
    and messages that take no time. arXiv:2104.04473, section 2.2, divides by the busy time instead: (p - 1) / (v m).
    ZB-H1, whose forward and two parts of backward take equal times, is idle for one of these p - 1 times, not three; a
    pipeline of fewer than p microbatches for longer."""
    _check(name, stages, microbatches, chunks)
    if name == "zb-h1":
        idle = max(stages - 1, 2 * stages - 1 - microbatches)
        return idle / (3 * microbatches + idle)
    return (stages - 1) / (microbatches * chunks + stages - 1)


def sends_to(stage: int, action: Action, stages: int, chunks: int, back: bool = False) -> tuple[int, Action] | None:
    """Stage and action that receive this action's output; None after the last chunk and before the first, and for the
    gradients of weights. The last stage sends chunk c's output to chunk c + 1 of stage 0, and gradients take the same
    way back."""
    if action.kind == "weights":
        return None
    place = action.chunk * stages + stage + (1 if (action.kind == "forward") != back else -1)
    return (place % stages, action._replace(chunk=place // stages)) if 0 <= place < stages * chunks else None


# Stage and action whose output an action receives; None where the input is the batch or the loss.
receives_from = partial(sends_to, back=True)


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
        """Of each stage, the largest number of forwards begun whose backward, with all its parts, has not ended."""
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
    backward: float | Sequence[float] = 2.0, transfer: float = 0.0,
) -> Simulation:  # fmt: skip
    """Play the lists of all stages, each action as soon as its stage is free and its input has arrived. `forward` and
    `backward` are the times of one microbatch in a whole stage, all chunks together, in any unit: one number, or one
    per stage; the parts of a backward that is split take half of it each. A message between stages takes `transfer` and
    keeps neither of them busy. Raises ScheduleError if a list repeats or lacks an action, has a backward before its
    forward, or if the lists deadlock, naming the action that each stage waits for. Raises UserError for a time that is
    not positive."""
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
                source = receives_from(stage, action, stages, chunks)
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
        if len(done) < len(row) and (source := receives_from(stage, row[len(done)], stages, chunks)):
            stuck.append(f"stage {stage} cannot run {row[len(done)]} before stage {source[0]} has run {source[1]}")
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")
    return Simulation(timeline, chunks)


def _check(name: str, stages: int, microbatches: int, chunks: int, stage: int = 0) -> None:
    if name not in NAMES:
        raise UserError(f"no schedule is called {name!r}: choose from {', '.join(NAMES)}")
    for what, count in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if count < 1:
            raise UserError(f"{what} must be at least 1, not {count}")
    if not 0 <= stage < stages:
        raise UserError(f"stage {stage} does not exist: the {stages} stages are 0 to {stages - 1}")
    if name != "interleaved" and chunks > 1:
        raise UserError(f"{name} has one chunk per stage, not {chunks}: use interleaved for more")
    if chunks > 1 and microbatches % stages:
        below = microbatches // stages * stages
        numbers = f"microbatches {microbatches} is not a multiple of stages {stages}"
        near = f"{below} or {below + stages}" if below else str(stages)
        raise UserError(f"{numbers}, as interleaved needs: use {near}")


def _one_stage(name: str, stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Warm-up of `ahead` forwards, then one forward and one backward in turn, then the remaining backwards."""
    _check(name, stages, microbatches, chunks, stage)
    # `stages` microbatches through one chunk, then the same through the next; backwards begin at the last chunk.
    forwards, backwards = [], []
    for step in range(microbatches * chunks):
        group, place = divmod(step, stages * chunks)
        chunk, microbatch = place // stages, group * stages + place % stages
        forwards.append(Action("forward", microbatch, chunk))
        backwards.append(Action("backward", microbatch, chunks - 1 - chunk))
    if name == "gpipe" or (chunks > 1 and microbatches == stages):
        ahead = len(forwards)
    elif chunks > 1:
        ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    else:
        ahead = min(stages - 1 - stage, microbatches)
    steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))  # one forward, one backward
    actions = [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]
    if name != "zb-h1":
        return actions
    later = [Action("weights", microbatch) for microbatch in range(microbatches)]
    split = []
    for action in actions:
        split.append(action)
        if action.kind == "backward" and action.microbatch >= stage:
            split.append(later[action.microbatch - stage])
    return [*split, *later[max(0, microbatches - stage) :]]


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
