"""Flame graphs: a whole trace as a tree of frames whose own times sum, to the nanosecond, to the time of its roots.

Tools that sample stacks show the backward pass as one flat list below `loss.backward()`. Here every operator of it
stands below the modules whose forward made it: `backward;model;blocks.0;attention;query` is what that layer costs on
the way back. Time is moved between frames, never lost.

Posted sends and receives, which lie "in flight" until they are waited for, are no work of any thread and left out.
"""

from dataclasses import dataclass
from typing import Any

from cs336_systems.profiling.attribution import attribute
from cs336_systems.profiling.frames import Frame, FrameBuilder, Python, Weigh, add_kernel
from cs336_systems.profiling.threads import IN_FLIGHT, MAIN, role_of, roles
from cs336_systems.profiling.trace import DEVICE, Lane, Trace, uncollected
from cs336_systems.text import printable


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


@uncollected()
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
    names = {lane: name for lane, name in roles(trace).items() if role_of(name) != IN_FLIGHT}
    main = next((lane for lane, name in names.items() if name == MAIN), None)
    builder = FrameBuilder(placed, main, weigh, merge_steps, collapse_blocks, python)
    roots: dict[Lane, Frame] = {}
    for each in placed:
        if each.lane in names:
            root = roots.setdefault(each.lane, Frame(names[each.lane], calls=1))
            builder.add(each, root)
    found = [roots[lane] for lane in names if lane in roots]
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
                lines.append(";".join(printable(name).replace(";", ",") for name in names) + f" {own}")
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
