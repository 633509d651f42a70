"""A search over all layouts of a model on so many accelerators: the best, and why the rest lose.

Every configuration ends in one of three ways. It does not divide; or some rank needs more memory than there is; or it
runs, and `step_time` says for how long. Of what runs, the fastest with each value of each choice is compared with the
winner, part by part of its step: the part that grows most is why that value loses. Configurations of the same time and
memory, as those of ZeRO 1 and 2 are where several microbatches add up, share one place among the best.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cs336_systems.cost.large.candidate import Candidate, Loss, Miss
from cs336_systems.cost.large.efficiency import Constants
from cs336_systems.cost.large.plan import Overlap, Plan
from cs336_systems.cost.large.plan_memory import peak_bytes, room
from cs336_systems.cost.large.search_advice import left_out_fits, nothing_divides, nothing_fits
from cs336_systems.cost.large.search_space import (
    AXES,
    MOST_GPUS,
    RECOMPUTES,
    Choice,
    Degrees,
    Space,
    placement,
)
from cs336_systems.cost.large.step_time import CONSTANTS, step_time
from cs336_systems.cost.large.systems import System
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig

BEST = 10
LIMIT = 30_000
_REFINED = 20  # of a space that was cut: the best whose microbatches, chunks and placements are all tried


@dataclass
class Search:
    """What a search found; the counts of what does not divide, does not fit and runs add up to what was tried."""

    space: Space
    system: System
    best: list[Candidate] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    indivisible: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    running: int = 0
    nearest: Miss | None = None
    left_out: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Configurations; degrees that do not divide count once each, whatever would go with them."""
        return self.indivisible.total() + self.too_large + self.running


def search(
    config: ModelConfig,
    seq: int,
    system: System,
    gpus: int,
    global_batch: int,
    *,
    width: int = 2,
    overlap: Overlap | None = None,
    fixed: Mapping[str, Any] | None = None,
    limit: int = LIMIT,
    constants: Constants = CONSTANTS,
    advance: Callable[[str], None] = lambda note: None,
) -> Search:
    """Every layout of `config` on `gpus` of a machine, for steps of `global_batch` sequences of `seq` tokens.

    `fixed` holds some of `AXES` at one value. A space of more than `limit` configurations is cut, and `left_out` says
    by what; around the best the rest is tried as well. `overlap` is the machine's unless given. `advance` is called
    after each of `Space.layouts`. Raises UserError if nothing divides, or nothing fits: then it says what would.
    """
    if gpus > MOST_GPUS:
        raise UserError(f"{gpus} accelerators are too many to search: take {MOST_GPUS} at most")
    for axis in fixed or {}:
        if axis not in AXES:
            raise UserError(f"{axis} is none of the choices of a search: {', '.join(AXES)}")
    whole = Space(config, seq, gpus, global_batch, system.node, width, overlap or system.overlap, fixed or {})
    space, left_out = whole.within(limit)
    trial = _Trial(Search(whole, system, left_out=left_out), constants)
    layouts = space.layouts()
    if not layouts:
        held = ", ".join(f"{axis} {value}" for axis, value in whole.fixed.items())
        raise UserError(f"no layout of {gpus} accelerators has {held}: the product of all degrees must be {gpus}")
    for number, degrees in enumerate(layouts):
        if trial.found.tried >= limit:
            left_out.append(f"{len(layouts) - number} of {len(layouts)} layouts")
            break
        trial.layout(space, degrees)
        advance(f"{trial.found.tried} configurations")
    if left_out:
        trial.refine(whole)
    if not trial.found.running:
        raise UserError(_nothing(trial.found, space, limit))
    return trial.finish()


class _Trial:
    """A search under way."""

    def __init__(self, found: Search, constants: Constants) -> None:
        self.found, self.constants = found, constants
        self.seen: set[tuple[Degrees, Choice, tuple[str, ...]]] = set()
        self.models = {each: found.space.config.override(recompute=each) for each in RECOMPUTES}
        self.room = room(found.system)
        self.ranking: list[tuple[float, float, int, Candidate]] = []
        self.fastest: dict[tuple[str, Any], Candidate] = {}
        self.lacking: dict[tuple[str, Any], float] = {}

    def layout(self, space: Space, degrees: Degrees) -> None:
        """All that goes with some degrees."""
        if reason := space.refusal(degrees):
            self.found.indivisible[reason] += 1
            return
        orders = space.placements(degrees)
        for choice in space.choices(degrees):
            self.configuration(space, degrees, choice, orders)

    def configuration(self, space: Space, degrees: Degrees, choice: Choice, orders: list[tuple[str, ...]]) -> None:
        """One choice in some placements, which need the same memory."""
        orders = [order for order in orders if (degrees, choice, order) not in self.seen]
        if not orders:
            return
        self.seen.update((degrees, choice, order) for order in orders)
        config = self.models[choice.recompute]
        try:
            plans = [space.plan(degrees, choice, order) for order in orders]
            plans[0].check(config, space.seq)
        except UserError as error:
            self.found.indivisible[str(error).split(":")[0]] += len(orders)
            return
        memory = sum(peak_bytes(config, plans[0], space.seq)[1].values())
        if memory > self.room:
            self._miss(config, plans, memory)
        else:
            for plan in plans:
                self._run(config, plan, memory)

    def refine(self, whole: Space) -> None:
        """What was cut, around the best."""
        for *_, near in sorted(self.ranking, key=lambda entry: entry[:3])[:_REFINED]:
            degrees = Degrees(*(near.value(axis) for axis in Degrees._fields))
            choice = Choice(*(near.value(axis) for axis in Choice._fields))
            for each in whole.around(degrees, choice):
                self.configuration(whole, degrees, each, whole.placements(degrees))

    def finish(self) -> Search:
        """The answer, of which something runs."""
        found = self.found
        self.ranking.sort(key=lambda entry: entry[:3])
        found.best = self._best()
        winner = found.best[0]
        for axis in AXES:
            values = {value for name, value in (*self.fastest, *self.lacking) if name == axis}
            losses = [self._loss(axis, value, winner) for value in values]
            found.losses += sorted(losses, key=lambda loss: (loss.factor, str(loss.value)))
        return found

    def _best(self) -> list[Candidate]:
        """The first of each time and memory, with the others of it."""
        places: dict[tuple[float, float], list[Candidate]] = {}
        for total, memory, _, candidate in self.ranking:
            if (total, memory) not in places and len(places) == BEST:
                break
            places.setdefault((total, memory), []).append(candidate)
        return [replace(first, alike=tuple(others)) for first, *others in places.values()]

    def _miss(self, config: ModelConfig, plans: list[Plan], memory: float) -> None:
        self.found.too_large += len(plans)
        lacks = memory - self.room
        if self.found.nearest is None or lacks < self.found.nearest.lacks:
            self.found.nearest = Miss(config, plans[0], memory, lacks)
        for plan in plans:
            for axis in AXES:
                key = (axis, self._value(axis, config, plan))
                self.lacking[key] = min(self.lacking.get(key, lacks), lacks)

    def _run(self, config: ModelConfig, plan: Plan, memory: float) -> None:
        self.found.running += 1
        step = step_time(config, plan, self.found.space.seq, self.found.system, self.constants)
        candidate, total = Candidate(step, memory, placement(plan, self.found.space.node)), step.total
        self.ranking.append((total, memory, self.found.running, candidate))
        for axis in AXES:
            key = (axis, candidate.value(axis))
            if key not in self.fastest or total < self.fastest[key].step.total:
                self.fastest[key] = candidate

    def _value(self, axis: str, config: ModelConfig, plan: Plan) -> Any:
        if axis == "placement":
            return placement(plan, self.found.space.node)
        return config.recompute if axis == "recompute" else getattr(plan, axis)

    def _loss(self, axis: str, value: Any, winner: Candidate) -> Loss:
        best = self.fastest.get((axis, value))
        if best is None:
            return Loss(axis, value, None, float("inf"), "memory", self.lacking[axis, value])
        factor = best.step.total / winner.step.total
        mine, its = _joined(best), _joined(winner)
        more = {part: seconds - its[part] for part, seconds in mine.items()}
        part, gain = max(more, key=lambda name: more[name]), min(more, key=lambda name: more[name])
        if winner.value(axis) == value or more[part] <= 0:
            return Loss(axis, value, best, factor, "", 0.0)
        net, less = best.step.total - winner.step.total, -more[gain]
        forced = self._forced(winner, axis, value)
        return Loss(axis, value, best, factor, part, more[part], net, gain if less > 0 else "", max(0.0, less), forced)

    def _forced(self, winner: Candidate, axis: str, value: Any) -> bool:
        """Whether the winner with another value of one choice does not fit. Degrees never change alone."""
        if axis not in Choice._fields:
            return False
        config, changes = (self.models[value], {}) if axis == "recompute" else (winner.step.config, {axis: value})
        try:
            return (
                sum(peak_bytes(config, winner.plan.override(**changes), self.found.space.seq)[1].values()) > self.room
            )
        except UserError:  # it does not divide
            return False


def _joined(candidate: Candidate) -> dict[str, float]:
    """Parts of a step, with one for both directions of computing."""
    parts = dict(candidate.step.parts)
    return {"computing": parts.pop("forward") + parts.pop("backward"), **parts}


def _nothing(found: Search, cut: Space, limit: int) -> str:
    """Why nothing runs, and what would. `cut` is the space that was gone through, up to `limit` configurations."""
    space, system = found.space, found.system
    if advice := left_out_fits(space, cut, system, limit, found.tried, found.left_out):
        return advice
    if found.nearest is None and not found.left_out:
        return nothing_divides(space, found.indivisible)
    return nothing_fits(space, system, found.nearest, found.tried)
