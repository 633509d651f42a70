"""Flame graphs: a whole trace as a tree of frames whose own times sum, to the nanosecond, to the time of its roots.

Tools that sample stacks show the backward pass as one flat list below `loss.backward()`. Here every operator of it
stands below the modules whose forward made it: `backward;model;blocks.0;attention;query` is what that layer costs on
the way back. Time is moved between frames, never lost.

Posted sends and receives, which lie "in flight" until they are waited for, are no work of any thread and left out.
"""

from dataclasses import dataclass
from typing import Any

from cs336_systems.profiling.attribution import ENGINE, PHASES, Placed, attribute
from cs336_systems.profiling.frames import STEP, Frame, FrameBuilder, Python, Weigh, add_kernel
from cs336_systems.profiling.tags import parse_tag
from cs336_systems.profiling.trace import COMMUNICATION, DEVICE, Lane, Trace


@dataclass(frozen=True)
class Flame:
    """The frames of one thread of one rank, over `steps` steps. The root bears the thread's name."""

    rank: int
    root: Frame
    steps: int
    weigh: Weigh = "cpu"

    @property
    def name(self) -> str:
        return f"rank {self.rank} {self.root.name}"


def flames(
    trace: Trace,
    weigh: Weigh = "cpu",
    merge_steps: bool = True,
    collapse_blocks: bool = False,
    python: Python = "own",
) -> list[Flame]:
    """One tree a thread: the main thread first, then autograd's (on a GPU), those of gloo and others.

    `weigh` says what is summed, in nanoseconds: "cpu", the time that the thread was in a frame, or "device", the time
    of the kernels that it launched, which stand as leaves below their operator; those of two streams may overlap.
    `merge_steps` adds equal stacks of all steps; divide by `Flame.steps` for the mean. `collapse_blocks` adds up
    blocks.0, blocks.1, ... as blocks.*. `python` says which Python frames stay: the user's "own" inside steps (none of
    torch, the standard library, builtins or this profiler), "all" or "none".
    """
    placed = attribute(trace)
    main = main_lane(placed)
    builder = FrameBuilder(placed, main, weigh, merge_steps, collapse_blocks, python)
    names = _lane_names(placed, main)
    roots: dict[Lane, Frame] = {}
    for each in placed:
        if each.lane in names:
            root = roots.setdefault(each.lane, Frame(names[each.lane], calls=1))
            builder.add(each, root)
    found = [roots[lane] for lane in names]
    if weigh == "device":
        found.append(Frame("kernels of no known operator"))
        for span in trace.spans:
            if span.category in DEVICE and id(span) not in builder.claimed:
                add_kernel(found[-1], span.name, span.duration)
    steps = builder.steps if merge_steps else 1
    return [Flame(trace.rank, root, steps, weigh) for root in found if root.total()]


def collapsed(threads: list[Flame]) -> str:
    """Brendan Gregg's collapsed stacks, a line each: `rank 0 main thread;step;forward;... <nanoseconds>`."""
    lines = []
    for flame in threads:
        for stack, own in flame.root.stacks():
            if own:
                names = [flame.name, *(frame.name for frame in stack[1:])]
                lines.append(";".join(name.replace(";", ",") for name in names) + f" {own}")
    return "".join(f"{line}\n" for line in lines)


def speedscope(threads: list[Flame], name: str) -> dict[str, Any]:
    """The JSON that https://www.speedscope.app shows (its file-format-schema.json): one sampled profile a thread."""
    frames: dict[str, int] = {}
    profiles = []
    for flame in threads:
        stacks = [(stack, own) for stack, own in flame.root.stacks() if own]
        samples = [[frames.setdefault(frame.name, len(frames)) for frame in stack] for stack, _ in stacks]
        weights = [own for _, own in stacks]
        profile = {"type": "sampled", "name": flame.name, "unit": "nanoseconds", "startValue": 0}
        profiles.append(profile | {"endValue": sum(weights), "samples": samples, "weights": weights})
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": each} for each in frames]},
        "profiles": profiles,
    }


def main_lane(placed: list[Placed]) -> Lane | None:
    """The thread that took the steps: the one with most annotations of steps, phases and modules, then most spans."""
    score: dict[Lane, tuple[int, int]] = {}
    for each in placed:
        name = each.span.name
        told = each.span.category == "user_annotation" and (
            name in PHASES or bool(STEP.match(name)) or bool(parse_tag(name))
        )
        annotations, spans = score.get(each.lane, (0, 0))
        score[each.lane] = annotations + told, spans + 1
    return max(score, key=lambda lane: score[lane], default=None)


def _lane_names(placed: list[Placed], main: Lane | None) -> dict[Lane, str]:
    """What each thread is called, in the order in which they are shown."""
    roots: dict[Lane, list[str]] = {}
    for each in placed:
        roots.setdefault(each.lane, [])
        if each.node.parent is None:
            roots[each.lane].append(each.span.name)
    kinds: dict[str, list[Lane]] = {
        "main thread": [],
        "autograd thread": [],
        "communication thread": [],
        "other thread": [],
    }
    for lane, names in roots.items():
        if lane == main:
            kinds["main thread"].append(lane)
        elif str(lane[1]).startswith("in flight"):
            continue
        elif all(COMMUNICATION.match(name) for name in names):
            kinds["communication thread"].append(lane)
        else:
            kinds["autograd thread" if any(n.startswith(ENGINE) for n in names) else "other thread"].append(lane)
    return {
        lane: kind if len(lanes) == 1 else f"{kind} {number}"
        for kind, lanes in kinds.items()
        for number, lane in enumerate(lanes)
    }
