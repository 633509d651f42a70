"""What to change where a search finds nothing that runs: more of the space, more accelerators, or a choice held fixed.

Advice keeps what is held at one value. Where no number of accelerators would do with it, each held choice is let go in
turn, and those are named without which fewest are enough.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cs336_systems.console import format_bytes
from cs336_systems.cost.large.candidate import Miss
from cs336_systems.cost.large.plan_memory import peak_bytes, room
from cs336_systems.cost.large.search_space import MOST_GPUS, RECOMPUTES, Choice, Degrees, Space, refused
from cs336_systems.cost.large.settings import RECOMPUTE
from cs336_systems.cost.large.systems import System

_WORDS = {ours: said for said, ours in RECOMPUTE.items()}


def nothing_divides(space: Space, reasons: Counter[str]) -> str:
    """Why no configuration divides, and what to change."""
    words = "; ".join(reason for reason, _ in reasons.most_common(2)) or "no choice is left"
    return f"nothing divides over {space.gpus} accelerators: {words}; change the number of them or the batch"


def nothing_fits(space: Space, system: System, nearest: Miss | None, tried: int) -> str:
    """How much is missing in what was tried, and what would do; none of it, tried or not, may fit these."""
    fill = f"a plan may fill {format_bytes(room(system))}"
    need = f"{format_bytes(nearest.memory)} on a rank at least" if nearest else f"none of the {tried} tried divides"
    return f"nothing fits {space.gpus} x {system.name}: {need}, and {fill}; {_more(space, system)}"


def left_out_fits(space: Space, cut: Space, system: System, limit: int, tried: int, left_out: list[str]) -> str | None:
    """Where something that a limit left out does fit: that it does, and the limit that reaches it; None otherwise."""
    if not left_out or not gpus_needed(space, system, space.gpus, space.gpus):
        return None
    # Once every layout has been tried, only the choices that were cut remain.
    most, words = (cut.size(), "every layout") if tried < cut.size() else (space.size(), "all")
    return (
        f"nothing that was tried fits {space.gpus} x {system.name}, but some does that --limit {limit} left out "
        f"({'; '.join(left_out)}): raise it; --limit {most} tries {words}"
    )


def gpus_needed(space: Space, system: System, least: int = 0, most: int = MOST_GPUS) -> int:
    """The first number of accelerators, doubled from `least` (twice as many as there are) to `most`, on which something
    fits with what the space holds fixed; 0 if none does with this batch."""
    gpus = least or 2 * space.gpus
    while gpus <= most:
        wider = replace(space, gpus=gpus)
        if any(not wider.refusal(each) and _fits_somehow(wider, each, room(system)) for each in wider.layouts()):
            return gpus
        gpus *= 2
    return 0


def _fits_somehow(space: Space, degrees: Degrees, most: float) -> bool:
    """Whether degrees fit with the choices that need least memory of those that there are."""
    if "placement" in space.fixed and not space.placements(degrees):
        return False
    choices = set(space.choices(degrees))
    if not choices:
        return False
    chunks, small = min(each.chunks for each in choices), min(each.micro_batch for each in choices)
    recompute = max((each.recompute for each in choices), key=RECOMPUTES.index)
    for choice in sorted(choices, key=lambda each: (-each.zero, not each.sequence, each.micro_batch)):
        if (choice.chunks, choice.recompute) != (chunks, recompute):
            continue
        # Gradients of ZeRO 2 are split only where a single microbatch is all: a large one may need less.
        if choice.micro_batch > small and choice.zero != 2:
            continue
        if _need(space, degrees, choice) <= most:
            return True
    return False


def _need(space: Space, degrees: Degrees, choice: Choice) -> float:
    """Bytes of the fullest rank; infinite for what does not divide."""
    config = space.config.override(recompute=choice.recompute)
    if refused(lambda: space.plan(degrees, choice).check(config, space.seq)):
        return float("inf")
    return sum(peak_bytes(config, space.plan(degrees, choice), space.seq)[1].values())


def _more(space: Space, system: System) -> str:
    """How many accelerators would do, and without which held choice if none does with it."""
    if enough := gpus_needed(space, system):
        return f"it would fit on {enough}"
    never = f"no number up to {MOST_GPUS} would do"
    if not space.fixed:
        return f"{never}: raise the batch"
    never += f" with {' '.join(option(axis, value) for axis, value in space.fixed.items())}"
    fewest, named = MOST_GPUS, list[str]()
    for axis, value in space.fixed.items():
        freed = gpus_needed(_without(space, {axis: value}), system, space.gpus, fewest)
        if freed:
            named = [*(named if freed == fewest else []), option(axis, value)]
            fewest = freed
    if named:
        return f"{never}: without {' or without '.join(named)} it would fit on {fewest}"
    if freed := gpus_needed(_without(space, space.fixed), system, space.gpus):
        return f"{never}: without all of these it would fit on {freed}"
    return f"{never}, nor without: raise the batch"


def _without(space: Space, released: Mapping[str, Any]) -> Space:
    return replace(space, fixed={axis: value for axis, value in space.fixed.items() if axis not in released})


def option(axis: str, value: Any) -> str:
    """The option of `search` that holds a choice at one value."""
    if axis == "sequence":
        return "--sequence-parallel" if value else "--no-sequence-parallel"
    if axis == "recompute":
        return f"--recompute {_WORDS[value]}"
    return f"--{'micro-batch-size' if axis == 'micro_batch' else axis} {value}"
