"""Advice if a search finds nothing that runs: a larger limit, more accelerators, or a fixed choice to release.

Advice keeps fixed choices if it can. If no number of accelerators is enough with them, each is released in turn, and
the advice names those whose release needs the fewest accelerators.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from cs336_systems.cost.machines import System
from cs336_systems.cost.plan import OPTIONS, RECOMPUTE_NAMES
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.search_space import MOST_GPUS, RECOMPUTES, Degrees, Space
from cs336_systems.errors import UserError
from cs336_systems.host.console import flag


def gpus_needed(space: Space, system: System, least: int = 0, most: int = MOST_GPUS) -> int:
    """The first number of accelerators, doubled from `least` (twice as many as there are) to `most`, on which something
    fits with the space's fixed choices; 0 if nothing does with this batch."""
    gpus = least or 2 * space.gpus
    available = usable_memory(system)
    while gpus <= most:
        wider = replace(space, gpus=gpus)
        if any(not wider.refusal(each) and _fits_somehow(wider, each, available) for each in wider.layouts()):
            return gpus
        gpus *= 2
    return 0


def _fits_somehow(space: Space, degrees: Degrees, most: float) -> bool:
    """True if these degrees fit with the choices that need least memory."""
    choices = set(space.choices(degrees))
    if not choices or ("placement" in space.fixed and not space.placements(degrees)):
        return False
    chunks, small = min(each.chunks for each in choices), min(each.micro_batch for each in choices)
    recompute = max((each.recompute for each in choices), key=RECOMPUTES.index)
    config = space.config.override(recompute=recompute)
    for choice in sorted(choices, key=lambda each: (-each.zero, not each.sequence, each.micro_batch)):
        if (choice.chunks, choice.recompute) != (chunks, recompute):
            continue
        # ZeRO 2 splits gradients only if a step has a single microbatch: then a large one may need less.
        if choice.micro_batch > small and choice.zero != 2:
            continue
        with suppress(UserError):  # it does not divide
            if sum(peak_bytes(config, space.plan(degrees, choice), space.seq)[1].values()) <= most:
                return True
    return False


def more_gpus(space: Space, system: System) -> str:
    """Text: the number of accelerators that would be enough, or the fixed choice to release if none is."""
    if enough := gpus_needed(space, system):
        return f"it would fit on {enough}"
    never = f"no number up to {MOST_GPUS} would do"
    if not space.fixed:
        return f"{never}: raise the batch"
    never += f" with {' '.join(option(axis, value) for axis, value in space.fixed.items())}"
    fewest, named = MOST_GPUS, list[str]()
    for axis, value in space.fixed.items():
        others = {name: held for name, held in space.fixed.items() if name != axis}
        if freed := gpus_needed(replace(space, fixed=others), system, space.gpus, fewest):
            named = [*(named if freed == fewest else []), option(axis, value)]
            fewest = freed
    if named:
        return f"{never}: without {' or without '.join(named)} it would fit on {fewest}"
    if freed := gpus_needed(replace(space, fixed={}), system, space.gpus):
        return f"{never}: without all of these it would fit on {freed}"
    return f"{never}, nor without: raise the batch"


def option(axis: str, value: Any) -> str:
    """The command-line option of `search` that fixes a choice."""
    if axis == "sequence":
        return "--sequence-parallel" if value else "--no-sequence-parallel"
    if axis == "recompute":
        return f"--recompute {RECOMPUTE_NAMES[value]}"
    return f"{flag(OPTIONS.get(axis, axis))} {value}"
