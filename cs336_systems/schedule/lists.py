"""Pipeline schedules as data: GPipe, 1F1B, interleaved 1F1B, zero bubble (ZB-H1, ZBV), and their closed forms.

A schedule is a list of actions per stage. All have a warm-up of forwards, a steady state in which forwards and
backwards alternate, and a cool-down of backwards; they differ in the length of the warm-up. `pipeline.py` executes one
stage's list, `simulation.py` simulates all. Sends must not block: in 1F1B with two stages, stage 0 sends its second
forward while stage 1 sends its first backward.
"""

from collections import Counter
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, get_args

from cs336_systems.errors import UserError, require_count

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]
Kind = Literal["forward", "backward", "weights"]
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
CHUNKS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zbv": 2}  # of a stage; interleaved takes any number
SPLIT = ("zb-h1", "zbv")  # schedules that compute the gradients of weights apart
TURNING = ("zbv",)  # every second chunk goes from the last stage back to the first


class Action(NamedTuple):
    """Forward or backward of one microbatch through one chunk of a stage's layers; or of a backward that is split, the
    gradients of weights, after those of inputs ("backward")."""

    kind: Kind
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


def schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """The lists of all stages of a schedule by name. Raises UserError for a name that is not in NAMES, a count below 1,
    chunks that the schedule does not have, and interleaved microbatches that are not a multiple of the stages."""
    _check(name, stages, microbatches, chunks)
    return [_one_stage(name, stage, stages, microbatches, chunks) for stage in range(stages)]


def place_of(stage: int, chunk: int, stages: int, turn: bool = False) -> int:
    """Place of a stage's chunk in the model: chunk 0 of every stage, then chunk 1 of every stage, and so on. Where the
    schedule turns, as a V does, every second chunk goes from the last stage to the first."""
    return chunk * stages + (stages - 1 - stage if turn and chunk % 2 else stage)


def at_place(place: int, stages: int, turn: bool = False) -> tuple[int, int]:
    """Stage and chunk that have a place in the model."""
    chunk, stage = divmod(place, stages)
    return (stages - 1 - stage if turn and chunk % 2 else stage), chunk


def blocks_of(stage: int, chunk: int, stages: int, chunks: int, num_layers: int, turn: bool = False) -> range:
    """Layers of a stage's chunk, at its place in the model. Raises UserError if the layers do not divide evenly over
    all chunks of all stages, or the chunk does not exist."""
    _check("interleaved", stages, stages, chunks, stage)
    if not 0 <= chunk < chunks:
        raise UserError(f"chunk {chunk} does not exist: the {chunks} chunks of a stage are 0 to {chunks - 1}")
    size, rest = divmod(num_layers, stages * chunks)
    if rest or not size:
        product = f"stages {stages} x chunks {chunks} = {stages * chunks}"
        raise UserError(f"num_layers {num_layers} is not a multiple of {product}: change one of the three")
    start = place_of(stage, chunk, stages, turn) * size
    return range(start, start + size)


def bubble_fraction(name: str, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle share of the pipeline's time, ((p - 1) / v) / (m + (p - 1) / v) for p equal stages, m microbatches, v chunks
    and messages that take no time. arXiv:2104.04473, section 2.2, divides by the busy time instead: (p - 1) / (v m).
    If forward and both parts of backward take a time t each, ZB-H1 is idle for (p - 1) t instead of 3 (p - 1) t, ZBV
    for half of that; longer with fewer than p (ZBV: 3 p / 2) microbatches."""
    _check(name, stages, microbatches, chunks)
    if name in SPLIT:
        fill = 2 * stages - 1 - microbatches
        idle = max(stages - 1, fill) if name == "zb-h1" else max((stages - 1) / 2, fill)
        return idle / (3 * microbatches + idle)
    return (stages - 1) / (microbatches * chunks + stages - 1)


def sends_to(
    stage: int, action: Action, stages: int, chunks: int, turn: bool = False, back: bool = False
) -> tuple[int, Action] | None:
    """Stage and action that receive this action's output; None after the last chunk and before the first, and for the
    gradients of weights. The output of a chunk goes to the next place in the model, and gradients the same way back."""
    if action.kind == "weights":
        return None
    place = place_of(stage, action.chunk, stages, turn) + (1 if (action.kind == "forward") != back else -1)
    if not 0 <= place < stages * chunks:
        return None
    target, chunk = at_place(place, stages, turn)
    return target, action._replace(chunk=chunk)


# Stage and action whose output an action receives; None where the input is the batch or the loss.
receives_from = partial(sends_to, back=True)


def _check(name: str, stages: int, microbatches: int, chunks: int, stage: int = 0) -> None:
    if name not in NAMES:
        raise UserError(f"no schedule is called {name!r}: choose from {', '.join(NAMES)}")
    for what, count in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        require_count(what, count)
    if not 0 <= stage < stages:
        raise UserError(f"stage {stage} does not exist: the {stages} stages are 0 to {stages - 1}")
    if (own := CHUNKS.get(name, chunks)) != chunks:
        has = "one chunk" if own == 1 else f"{own} chunks"
        raise UserError(f"{name} has {has} per stage, not {chunks}: use interleaved for other numbers")
    if name == "interleaved" and chunks > 1 and microbatches % stages:
        below = microbatches // stages * stages
        numbers = f"microbatches {microbatches} is not a multiple of stages {stages}"
        near = f"{below} or {below + stages}" if below else str(stages)
        raise UserError(f"{numbers}, as interleaved needs: use {near}")


def _one_stage(name: str, stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Warm-up of `ahead` forwards, then one forward and one backward in turn, then the remaining backwards. ZB-H1
    splits each backward (Qi et al., arXiv:2401.10241, section 2.3): the stage before waits for the gradients of inputs
    alone. Those of weights fill what would be idle: stage r leaves the latest r microbatches' for later, so that every
    stage keeps the activations of at most p microbatches, as stage 0 of 1F1B does."""
    _check(name, stages, microbatches, chunks, stage)
    if name == "zbv":
        return _in_a_v(stage, stages, microbatches)
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


def _in_a_v(stage: int, stages: int, microbatches: int) -> list[Action]:
    """ZBV (ZB-V in arXiv:2401.10241): chunk 0 goes down the stages and chunk 1 comes back up, so that stage 0 has the
    first and last blocks, and the loss. Every stage keeps at most 2 p chunks of activations.

    Its phases are (number of times, actions): F0 is a forward in chunk 0, B1 the gradients of inputs in chunk 1, W1
    those of its weights; each takes its microbatches in order. Fewer than 2 p - 1 microbatches leave some out."""
    many, later = max(microbatches, 2 * stages - 1), stages - stage
    phases = (
        (2 * later - 1, "F0"), (stage, "F1 F0"), (later, "F1 B1 W1"),
        (many + 1 - stages - later, "F0 B0 W0 F1 B1 W1"), (later - 1, "B0 W0 F1 B1 W1"),
        (stage, "B0 B1"), (later, "B0 W0"), (stage, "W1"), (stage, "W0"),
    )  # fmt: skip
    kinds: dict[str, Kind] = {"F": "forward", "B": "backward", "W": "weights"}
    done: Counter[str] = Counter()
    actions = []
    for word in chain.from_iterable(words.split() * times for times, words in phases):
        actions.append(Action(kinds[word[0]], done[word], int(word[1])))
        done[word] += 1
    return [action for action in actions if action.microbatch < microbatches]
