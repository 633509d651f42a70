"""Flame graphs: a whole trace as a tree of frames whose own times sum, to the nanosecond, to the time of its roots.

Tools that sample stacks show the backward pass as one flat list below `loss.backward()`. Here every operator of it
stands below the modules whose forward made it: `backward;model;blocks.0;attention;query` is what that layer costs on
the way back. Time is moved between frames, never lost.

Posted sends and receives, which lie "in flight" until they are waited for, are no work of any thread and left out.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.host.text import printable
from cs336_systems.profiling.frames import Frame, FrameBuilder, Python, Weigh, add_kernel
from cs336_systems.profiling.timeline import IN_FLIGHT, MAIN, role_of, roles, timeline
from cs336_systems.profiling.trace import DEVICE, Lane, Trace, uncollected


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
    nodes = timeline(trace).nodes
    names = {lane: name for lane, name in roles(trace).items() if role_of(name) != IN_FLIGHT}
    main = next((lane for lane, name in names.items() if name == MAIN), None)
    builder = FrameBuilder(nodes, main, weigh, merge_steps, collapse_blocks, python)
    roots: dict[Lane, Frame] = {}
    for node in nodes:
        if (lane := node.span.lane) in names:
            builder.add(node, roots.setdefault(lane, Frame(names[lane], calls=1)))
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


def weights(trace: Trace, stem: str) -> dict[str, Weigh]:
    """The flame graphs of a trace by the stem of their files: of the CPU's time and, with kernels, of the device's."""
    device = any(span.category in DEVICE for span in trace.spans)
    return {stem: "cpu", f"{stem}_device": "device"} if device else {stem: "cpu"}


def write_flame(trace: Trace, folder: Path, stem: str) -> list[Path]:
    """Write `<stem>.collapsed.txt` and `<stem>.speedscope.json`, with kernels also those of `<stem>_device`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, weigh in weights(trace, stem).items():
        threads = flames(trace, weigh)
        text, scope = folder / f"{name}.collapsed.txt", folder / f"{name}.speedscope.json"
        text.write_text(collapsed(threads), encoding="utf-8")
        found = speedscope(threads, f"Flame graph of rank {trace.rank} of {trace.world_size}, {weigh}")
        scope.write_text(json.dumps(found, separators=(",", ":"), allow_nan=False), encoding="utf-8")
        paths += [text, scope]
    return paths
