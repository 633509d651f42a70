"""Search all layouts of a model on a number of accelerators: the best, and why the rest lose.

A configuration does not divide, or some rank needs more memory than there is, or it runs. For each value of each
choice, the fastest with that value is compared with the winner: the part of the step that grows most explains why the
value loses. Configurations of equal time and memory share one place, such as ZeRO 1 and 2 with several microbatches.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from cs336_systems.cost.machines import System
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plan_memory import fits, peak_bytes, usable_memory
from cs336_systems.cost.search_space import AXES, COUNTS, MOST_GPUS, RECOMPUTES, Choice, Degrees, Space, placement
from cs336_systems.cost.step_time import PARTS, Case
from cs336_systems.errors import UserError, require_count
from cs336_systems.host.console import format_bytes
from cs336_systems.layout import check_experts
from cs336_systems.presets import ModelConfig, Recompute

BEST = 10
LIMIT = 30_000
_REFINED = 20  # best configurations of a space that was cut, around which the rest is tried as well


@dataclass(frozen=True)
class Candidate(Case):
    """A configuration that divides, and the bytes of its fullest rank, which may be too many."""

    memory: float
    placement: str
    alike: tuple["Candidate", ...] = ()  # others of the same time and memory

    @property
    def lacks(self) -> float:
        """Bytes of memory that are missing; below zero if it fits."""
        return self.memory - usable_memory(self.system)

    @property
    def rate(self) -> float:
        return self.plan.global_batch * self.seq / self.step.total

    @property
    def values(self) -> dict[str, Any]:
        """The value of each of `AXES`."""
        own = {"recompute": self.config.recompute, "placement": self.placement}
        return {axis: own[axis] if axis in own else getattr(self.plan, axis) for axis in AXES}

    @property
    def parts(self) -> dict[str, float]:
        """Parts of its step, forward and backward as one."""
        parts = dict(self.step.parts)
        return {"computing": parts.pop("forward") + parts.pop("backward"), **parts}


@dataclass(frozen=True)
class Loss:
    """The best configuration with one value of a choice, and why it loses; `best` is None if nothing with it fits."""

    axis: str
    value: Any
    best: Candidate | None
    factor: float  # its time over the winner's
    part: str  # the part of the step that grows most, or "memory"
    more: float  # seconds that this part grows, or bytes of memory that are missing
    net: float = 0.0  # seconds that the step is longer
    gain: str = ""  # the part that shrinks most
    less: float = 0.0  # seconds that it shrinks
    forced: bool = False  # the winner with nothing but this value changed does not fit

    @property
    def why(self) -> str:
        if self.best is None:
            return f"does not fit: {format_bytes(self.more)} too much at least"
        step = self.best.step
        if self.part == "computing" and step.plan.pp > 1:
            # If the layers do not divide, the last stage is the first to have one less.
            last = step.stage == step.plan.pp - 1
            return f"stages are uneven: {'the last has the head as well' if last else 'the busiest computes longer'}"
        return PARTS[self.part]["longer"] if self.part in PARTS else "the winner has it"


@dataclass
class Search:
    """A search and its result. Each configuration that was tried counts once: as indivisible, too large or running."""

    space: Space
    system: System
    best: list[Candidate] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    indivisible: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    nearest: Candidate | None = None  # that lacks the least memory
    left_out: list[str] = field(default_factory=list)
    # Of a search in progress: all that run; by (choice, value), the fastest, and the least memory that one lacks.
    seen: set[tuple[Degrees, Choice, tuple[str, ...]]] = field(default_factory=set)
    ranking: list[Candidate] = field(default_factory=list)
    fastest: dict[tuple[str, Any], Candidate] = field(default_factory=dict)
    lacking: dict[tuple[str, Any], float] = field(default_factory=dict)

    @cached_property
    def models(self) -> dict[Recompute, ModelConfig]:
        return {each: self.space.config.override(recompute=each) for each in RECOMPUTES}

    @property
    def running(self) -> int:
        return len(self.ranking)

    @property
    def tried(self) -> int:
        return self.indivisible.total() + self.too_large + self.running

    def configuration(self, space: Space, degrees: Degrees, choice: Choice, orders: list[tuple[str, ...]]) -> None:
        """Try one choice in some placements, which need the same memory."""
        orders = [order for order in orders if (degrees, choice, order) not in self.seen]
        if not orders:
            return
        self.seen.update((degrees, choice, order) for order in orders)
        config, seq = self.models[choice.recompute], space.seq
        try:
            plans = [space.plan(degrees, choice, order) for order in orders]
            memory = sum(peak_bytes(config, plans[0], seq)[1].values())
        except UserError as error:
            self.indivisible[str(error).split(":")[0]] += len(orders)
            return
        found = [Candidate(config, plan, seq, self.system, memory, placement(plan, space.node)) for plan in plans]
        if (lacks := found[0].lacks) > 0:
            self.too_large += len(found)
            if self.nearest is None or lacks < self.nearest.lacks:
                self.nearest = found[0]
            for key in (key for each in found for key in each.values.items()):
                self.lacking[key] = min(self.lacking.get(key, lacks), lacks)
            return
        self.ranking += found
        for key, candidate in ((key, each) for each in found for key in each.values.items()):
            self.fastest[key] = min(self.fastest.get(key, candidate), candidate, key=lambda each: each.step.total)

    def refine(self, whole: Space) -> None:
        """Try the choices that were cut, around the best configurations."""
        for near in sorted(self.ranking, key=lambda each: (each.step.total, each.memory))[:_REFINED]:
            degrees = Degrees(*(near.values[axis] for axis in Degrees._fields))
            choice = Choice(*(near.values[axis] for axis in Choice._fields))
            orders = whole.placements(degrees)
            for each in whole.choices(degrees):
                if each[2:] == choice[2:]:  # of another microbatch and number of chunks
                    self.configuration(whole, degrees, each, orders)

    def finish(self) -> None:
        """Complete the result, if something runs: the best of each time and memory, and losses against the winner."""
        places = dict[tuple[float, float], list[Candidate]]()
        for each in sorted(self.ranking, key=lambda each: (each.step.total, each.memory)):
            if (each.step.total, each.memory) not in places and len(places) == BEST:
                break
            places.setdefault((each.step.total, each.memory), []).append(each)
        self.best = [replace(first, alike=tuple(others)) for first, *others in places.values()]
        for axis in AXES:
            values = {value for name, value in (*self.fastest, *self.lacking) if name == axis}
            losses = [self._loss(axis, value, self.best[0]) for value in values]
            self.losses += sorted(losses, key=lambda loss: (loss.factor, str(loss.value)))

    def _loss(self, axis: str, value: Any, winner: Candidate) -> Loss:
        best = self.fastest.get((axis, value))
        if best is None:
            return Loss(axis, value, None, float("inf"), "memory", self.lacking[axis, value])
        factor, net = best.step.total / winner.step.total, best.step.total - winner.step.total
        more = {part: seconds - winner.parts[part] for part, seconds in best.parts.items()}
        part, gain = max(more, key=lambda name: more[name]), min(more, key=lambda name: more[name])
        if winner.values[axis] == value or more[part] <= 0:
            return Loss(axis, value, best, factor, "", 0.0)
        less, forced = max(0.0, -more[gain]), False
        if axis in Choice._fields:  # degrees never change alone
            config, changes = (self.models[value], {}) if axis == "recompute" else (winner.config, {axis: value})
            with suppress(UserError):  # it does not divide
                forced = not fits(config, winner.plan.override(**changes), self.space.seq, self.system)
        return Loss(axis, value, best, factor, part, more[part], net, gain if less > 0 else "", less, forced)


def search(
    config: ModelConfig, seq: int, system: System, gpus: int, global_batch: int, *, limit: int = LIMIT,
    advance: Callable[[str], None] = lambda note: None, fixed: Mapping[str, Any] | None = None, **rest: Any,
) -> Search:  # fmt: skip
    """Search every layout of `config` on `gpus` of a machine, for steps of `global_batch` sequences of `seq` tokens.

    `fixed` is that of `Space`, `rest` are fields of `Plan`. A space of more than `limit` configurations is cut, which
    `left_out` names, except around the best. Raises UserError if nothing divides or fits, saying what would.
    """
    if unknown := [axis for axis in fixed or () if axis not in AXES]:
        raise UserError(f"{unknown[0]} is none of the choices of a search: {', '.join(AXES)}")
    counts = {axis: value for axis, value in (fixed or {}).items() if axis in COUNTS}
    for name, value in ({"gpus": gpus, "limit": int(min(limit, 10**18))} | counts).items():
        require_count(name, value)
    for axis in (name for name in rest if name in AXES):
        raise UserError(f"{axis} is a choice of a search: hold it with fixed={{{axis!r}: {rest[axis]!r}}}")
    rest["overlap"] = rest.get("overlap") or system.overlap
    whole = Space(config, seq, gpus, Plan(global_batch=global_batch, **rest), system.node, fixed or {})
    check_experts(config, whole.fixed.get("ep", 1))
    if (again := whole.fixed.get("recompute", "none")) not in RECOMPUTES:
        raise UserError(f"recompute {again!r} does not exist; choose from {', '.join(RECOMPUTES)}")
    space, left_out = whole.within(limit)
    found = Search(whole, system, left_out=left_out)
    layouts = space.layouts()
    if not layouts:
        raise UserError(f"no layout of {gpus} accelerators has {whole.held}: the product of degrees must be {gpus}")
    for number, degrees in enumerate(layouts):
        if found.tried >= limit:
            left_out.append(f"{len(layouts) - number} of {len(layouts)} layouts")
            break
        if reason := space.refusal(degrees):
            found.indivisible[reason] += 1
        else:
            orders = space.placements(degrees)
            for choice in space.choices(degrees):
                found.configuration(space, degrees, choice, orders)
        advance(f"{found.tried} configurations")
    if left_out:
        found.refine(whole)
    if not found.running:
        raise UserError(_nothing(found, space, limit))
    found.finish()
    return found


def _nothing(found: Search, cut: Space, limit: int) -> str:
    """Text of the error if nothing runs, with advice; up to `limit` configurations of `cut` were searched."""
    space, system, tried = found.space, found.system, found.tried
    machines = f"{space.gpus} x {system.name}"
    if found.left_out and space.gpus_needed(system, space.gpus, space.gpus):
        # Once every layout has been tried, only the choices that were cut remain.
        most, words = (cut.size(), "every layout") if tried < cut.size() else (space.size(), "all")
        return (
            f"nothing that was tried fits {machines}, but some does that --limit {limit} left out "
            f"({'; '.join(found.left_out)}): raise it; --limit {most} tries {words}"
        )
    if found.nearest is None and not found.left_out:
        words = "; ".join(reason for reason, _ in found.indivisible.most_common(2)) or "no choice is left"
        held = f" with {space.held}" if space.fixed else ""
        return f"nothing divides over {space.gpus} accelerators{held}: {words}; change their number, batch or model"
    least = f"none of the {tried} tried divides"
    if found.nearest:
        least = f"{format_bytes(found.nearest.memory)} on a rank at least"
    fill = f"a plan may fill {format_bytes(usable_memory(system))}"
    if enough := space.gpus_needed(system):
        advice = f"it would fit on {enough}"
    else:
        release = f" with {space.held}: release one of these, or" if space.fixed else ":"
        advice = f"no number up to {MOST_GPUS} would do{release} raise the batch"
    return f"nothing fits {machines}: {least}, and {fill}; {advice}"
