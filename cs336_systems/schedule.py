"""Pipeline schedules as data: what each stage computes and in which order, and a simulator that says what it costs.

A schedule is a list of actions for every stage. All three run some forwards first, then a forward and a backward in
turn, then the backwards that are left; they differ in how many forwards come first. An executor walks its own stage's
list, `simulate` walks them all.

Sends must not block. Were each to wait for its receiver, stage 0 of 2 in 1F1B would offer its second forward while
stage 1 offers its first backward, and neither would take the other's.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

from cs336_systems.errors import UserError
from cs336_systems.schedule_drawing import Cell, draw

NAMES = ("gpipe", "1f1b", "interleaved")


class ScheduleError(ValueError):
    """Lists of actions that no pipeline can run; says at which stage and action."""


class Action(NamedTuple):
    """One microbatch's pass, in one direction, through one chunk of a stage's layers."""

    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} in chunk {self.chunk}"


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Every forward, then every backward (arXiv:1811.06965, section 2.2).

    Backwards run in the order of the microbatches, as in the other two schedules, so that gradients are added up in
    the order of one process. Raises UserError, as the others do, for a count below 1 and a stage that does not exist.
    """
    return _one_stage("gpipe", stage, stages, microbatches, 1)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """1F1B: each backward as early as it can be; stage r of p holds p - r microbatches at most.

    PipeDream-Flush (arXiv:2006.09503), as in arXiv:2104.04473, section 2.2.1: as fast as GPipe, with activation
    memory that does not grow with the number of microbatches.
    """
    return _one_stage("1f1b", stage, stages, microbatches, 1)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Interleaved 1F1B: a stage has several chunks of layers, and the pipeline fills and drains `chunks` times as fast.

    arXiv:2104.04473, section 2.2.2, in the order of Megatron-LM v2.5: a stage takes as many microbatches as there are
    stages through one chunk, then through the next, so that microbatches must be a multiple of stages, else UserError.
    Stage r of p runs 2 (p - 1 - r) + (v - 1) p forwards of v chunks first or, as in Megatron, all of them where
    microbatches == stages. One chunk leaves nothing to interleave: that is 1F1B, for any number of microbatches.
    """
    return _one_stage("interleaved", stage, stages, microbatches, chunks)


def schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """The lists of all stages, for the name "gpipe", "1f1b" or "interleaved".

    Raises UserError for another name, a count below 1, chunks where the schedule has none, and microbatches that are
    no multiple of the stages where chunks are interleaved.
    """
    _check(name, stages, microbatches, chunks)
    return [list(_one_stage(name, stage, stages, microbatches, chunks)) for stage in range(stages)]


def blocks_of(stage: int, chunk: int, stages: int, chunks: int, num_layers: int) -> range:
    """The layers that a stage's chunk owns: chunk 0 of all stages comes first, then chunk 1 of all stages, and so on.

    Raises UserError if the layers do not divide evenly over all chunks of all stages, or there is no such chunk.
    """
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
    """The idle share of the pipeline's time, with stages of equal speed and messages that take no time.

    ((p - 1) / v) / (m + (p - 1) / v) for p stages, m microbatches and v chunks. arXiv:2104.04473, section 2.2, divides
    the same idle time by the busy time instead of the whole: (p - 1) / (v m).
    """
    _check(name, stages, microbatches, chunks)
    return (stages - 1) / (microbatches * chunks + stages - 1)


def peak_live(name: str, stage: int, stages: int, microbatches: int, chunks: int = 1) -> int:
    """The most passes through a chunk whose activations stage r holds at once; each is 1 / chunks of its layers.

    m for GPipe, min(p - r, m) for 1F1B (arXiv:2104.04473, section 2.2.1); interleaved with v > 1 it is the warm-up
    and one more, 2 (p - 1 - r) + (v - 1) p + 1, but m v where m = p.
    """
    _check(name, stages, microbatches, chunks, stage)
    return min(_warm_up(name, stage, stages, microbatches, chunks) + 1, microbatches * chunks)


def receives_from(stage: int, action: Action, stages: int, chunks: int) -> tuple[int, Action] | None:
    """The stage and the action whose output this action takes in; None where that is the batch or the loss.

    The last stage hands chunk c's output to chunk c + 1 of stage 0, and gradients travel the same way back.
    """
    return _next_to(stage, action, stages, chunks, -1 if action.kind == "forward" else 1)


def sends_to(stage: int, action: Action, stages: int, chunks: int) -> tuple[int, Action] | None:
    """The stage and the action that take in this action's output; None after the last chunk and before the first."""
    return _next_to(stage, action, stages, chunks, 1 if action.kind == "forward" else -1)


@dataclass(frozen=True)
class Timed:
    """When a stage ran an action, in the unit of the times that were given to `simulate`."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule played out: one list of timed actions for every stage, in the order of time."""

    timeline: list[list[Timed]]
    chunks: int

    @property
    def makespan(self) -> float:
        """The time from the first action's start to the last one's end."""
        return max(row[-1].end for row in self.timeline)

    @property
    def idle(self) -> list[float]:
        """For each stage, how much of the makespan it computes nothing."""
        gaps = [sum(after.start - before.end for before, after in pairwise(row)) for row in self.timeline]
        return [row[0].start + gap + self.makespan - row[-1].end for row, gap in zip(self.timeline, gaps, strict=True)]

    @property
    def bubble(self) -> float:
        """The idle share of all stages' time, from 0 to 1."""
        return sum(self.idle) / (len(self.timeline) * self.makespan)

    @property
    def peak_live(self) -> list[int]:
        """For each stage, the most passes through a chunk whose forward has begun and whose backward has not ended."""
        return [max(accumulate(1 if each.action.kind == "forward" else -1 for each in row)) for row in self.timeline]

    def drawing(self, width: int = 100) -> str:
        """The timeline as text, at most `width` columns wide; `schedule_drawing.LEGEND` says how to read it.

        An action too narrow for its number shows its direction and chunk alone.
        """
        rows = [[Cell(each.start, each.end, *each.action) for each in row] for row in self.timeline]
        return draw(rows, self.chunks, width)


def simulate(
    schedules: Sequence[Sequence[Action]],
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    transfer: float = 0.0,
) -> Simulation:
    """Run every stage's list, each action as soon as its stage is free and its input has come.

    `forward` and `backward` are the times of one microbatch in a whole stage, all chunks together, in any unit: one
    number, or one for each stage. A message between stages takes `transfer` and keeps neither of them busy.

    Raises ScheduleError if a list repeats or lacks an action or has a backward before its forward, and, naming what
    every stage waits for, if the lists deadlock. Raises UserError for times that cannot be.
    """
    stages, chunks = len(schedules), _count_chunks(schedules)
    if transfer < 0:
        raise UserError(f"transfer must be at least 0, not {transfer}")
    times = {"forward": _of_each("forward", forward, stages), "backward": _of_each("backward", backward, stages)}
    timeline: list[list[Timed]] = [[] for _ in schedules]
    ends: dict[tuple[int, Action], float] = {}
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedules):
            for action in actions[len(timeline[stage]) :]:
                source = receives_from(stage, action, stages, chunks)
                if source is not None and source not in ends:
                    break
                come = 0.0 if source is None else ends[source] + (transfer if source[0] != stage else 0.0)
                start = max(come, timeline[stage][-1].end if timeline[stage] else 0.0)
                ends[stage, action] = start + times[action.kind][stage] / chunks
                timeline[stage].append(Timed(stage, action, start, ends[stage, action]))
                moved = True
    stuck = [(stage, row[len(timeline[stage])]) for stage, row in enumerate(schedules) if row[len(timeline[stage]) :]]
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(_waits(*each, stages, chunks) for each in stuck)}")
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
        near = f"{below} or {below + stages}" if below else str(stages)
        raise UserError(
            f"microbatches {microbatches} is not a multiple of stages {stages}, as interleaved needs: use {near}"
        )


def _warm_up(name: str, stage: int, stages: int, microbatches: int, chunks: int) -> int:
    """How many forwards a stage runs before its first pair of a forward and a backward."""
    if name == "gpipe" or (chunks > 1 and microbatches == stages):
        return microbatches * chunks
    if chunks == 1:
        return min(stages - 1 - stage, microbatches)
    return 2 * (stages - 1 - stage) + (chunks - 1) * stages


def _micro_steps(group: int, microbatches: int, chunks: int) -> tuple[list[Action], list[Action]]:
    """All forwards and all backwards of a stage: `group` microbatches through one chunk, then through the next."""
    forwards, backwards = [], []
    for step in range(microbatches * chunks):
        rounds, place = divmod(step, group * chunks)
        chunk, microbatch = place // group, rounds * group + place % group
        forwards.append(Action("forward", microbatch, chunk))
        backwards.append(Action("backward", microbatch, chunks - 1 - chunk))
    return forwards, backwards


def _one_stage(name: str, stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    _check(name, stages, microbatches, chunks, stage)
    forwards, backwards = _micro_steps(stages, microbatches, chunks)
    warm_up = _warm_up(name, stage, stages, microbatches, chunks)
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return chain(forwards[:warm_up], chain.from_iterable(pairs), backwards[len(forwards) - warm_up :])


def _next_to(stage: int, action: Action, stages: int, chunks: int, step: int) -> tuple[int, Action] | None:
    place = action.chunk * stages + stage + step
    if not 0 <= place < stages * chunks:
        return None
    return place % stages, action._replace(chunk=place // stages)


def _of_each(what: str, time: float | Sequence[float], stages: int) -> list[float]:
    times = list(time) if isinstance(time, Sequence) else [time] * stages
    if len(times) != stages or min(times) <= 0:
        raise UserError(f"{what} must be a time above 0, or one for each of the {stages} stages, not {time}")
    return times


def _count_chunks(schedules: Sequence[Sequence[Action]]) -> int:
    """How many chunks the lists speak of, once each is seen to have every action once, forward before backward."""
    everything = [action for actions in schedules for action in actions]
    if not everything:
        raise ScheduleError("a schedule needs at least one stage and one action")
    microbatches, chunks = 1 + max(each.microbatch for each in everything), 1 + max(each.chunk for each in everything)
    forwards = [Action("forward", microbatch, chunk) for microbatch in range(microbatches) for chunk in range(chunks)]
    wanted = Counter(forwards + [each._replace(kind="backward") for each in forwards])
    for stage, actions in enumerate(schedules):
        found = Counter(actions)
        for action in found - wanted:
            raise ScheduleError(f"stage {stage} has a {action} too many")
        for action in wanted - found:
            raise ScheduleError(f"stage {stage} has no {action}")
        order = {action: place for place, action in enumerate(actions)}
        for each in forwards:
            if order[each] > order[each._replace(kind="backward")]:
                raise ScheduleError(f"stage {stage} has a backward before the {each}")
    return chunks


def _waits(stage: int, action: Action, stages: int, chunks: int) -> str:
    source = receives_from(stage, action, stages, chunks)
    assert source is not None, "an action without a source never waits"
    return f"stage {stage} cannot run {action} before stage {source[0]} has run {source[1]}"
