"""The space of a search over layouts: every way to spread a model over a number of accelerators.

For all degrees whose product is the number of accelerators, there are choices of microbatch, chunks, recomputation,
sequence parallelism, ZeRO stage, and of the axes that share a node. They multiply, so a space can be cut.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import permutations, product, starmap
from math import isqrt, prod
from typing import Any, NamedTuple

from cs336_systems.cost.machines import System
from cs336_systems.cost.plan import OPTIONS, ORDER, RECOMPUTE_NAMES, Plan
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.stacks import STACKS
from cs336_systems.errors import UserError
from cs336_systems.host.console import flag
from cs336_systems.presets import ModelConfig, Recompute

COUNTS = ("tp", "pp", "dp", "cp", "ep", "chunks", "micro_batch")
AXES = (*COUNTS, "recompute", "sequence", "zero", "placement")
MOST_GPUS = 2**20
RECOMPUTES: tuple[Recompute, ...] = ("none", "attention", "segments")

MOST = 16  # sequences of a microbatch, chunks of a stage

# Cuts of a space that is too large, in this order: a choice, its values that are kept (of placements one, Megatron's),
# and the words for what is left out.
_CUTS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("placement", lambda ranks: True, "placements other than Megatron's order"),
    ("chunks", lambda count: count <= 4, "more than 4 chunks"),
    ("micro_batch", lambda rows: rows <= 4, "microbatches of more than 4 sequences"),
    ("chunks", lambda count: count <= 2, "more than 2 chunks"),
    ("zero", lambda stage: stage != 2, "ZeRO stage 2"),
)


class Degrees(NamedTuple):
    """Ranks along each axis."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1


class Choice(NamedTuple):
    """Choices for given degrees, except the placement."""

    micro_batch: int = 1
    chunks: int = 1
    sequence: bool = False
    recompute: Recompute = "none"
    zero: int = 0


@dataclass(frozen=True)
class Space:
    """All layouts of a model on `gpus` accelerators, `node` of them joined by the faster network. `fixed` holds some of
    the choices `AXES` at one value; `base` has the batch and what is not tried."""

    config: ModelConfig
    seq: int
    gpus: int
    base: Plan
    node: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    cuts: int = 0  # that are made, the first of `_CUTS`

    @property
    def held(self) -> str:
        """The options that fix choices, as they are given."""
        return " ".join(option(axis, value) for axis, value in self.fixed.items())

    def layouts(self) -> list[Degrees]:
        """Degrees whose product is the number of accelerators, the usual ones first."""
        low = [n for n in range(1, isqrt(self.gpus) + 1) if self.gpus % n == 0]
        divisors = sorted({*low, *(self.gpus // n for n in low)})

        def of(count: int) -> list[int]:
            return [n for n in divisors if count % n == 0]

        spread = ((tp, pp, cp) for tp in divisors for pp in of(self.gpus // tp) for cp in of(self.gpus // (tp * pp)))
        rests = ((tp, pp, cp, self.gpus // (tp * pp * cp)) for tp, pp, cp in spread)
        experts = self.config.num_experts
        found = [Degrees(tp, pp, n // ep, cp, ep) for tp, pp, cp, n in rests for ep in (of(n) if experts else [1])]
        held = [each for each in found if all(self._allows(*pair) for pair in each._asdict().items())]
        return sorted(held, key=lambda each: (each.tp > self.node, each.cp, each))

    def refusal(self, degrees: Degrees) -> str:
        """The reason that model or batch do not divide over degrees, whatever else is chosen; empty if they do."""
        data = degrees.dp * degrees.ep
        if self.base.global_batch % data:
            return f"a batch of {self.base.global_batch} does not divide over {data} replicas"
        try:
            Plan(**degrees._asdict(), global_batch=data).check(self.config, self.seq)
        except UserError as error:
            return str(error).split(":")[0]
        return ""

    def choices(self, degrees: Degrees) -> Iterator[Choice]:
        """Every combination of choices for some degrees, even if it does not divide."""
        return starmap(Choice, product(*self._lists(degrees)))

    def placements(self, degrees: Degrees) -> list[tuple[str, ...]]:
        """Orders of the axes that differ in the ranks that share a node, Megatron's first."""
        active = [axis for axis in ORDER if getattr(degrees, axis) > 1]
        found: dict[str, tuple[str, ...]] = {}
        for first in permutations(active):
            turn = iter(first)
            order = tuple(next(turn) if axis in active else axis for axis in ORDER)
            plan = Plan(**degrees._asdict(), global_batch=degrees.dp * degrees.ep, order=order)
            name = placement(plan, self.node)
            if self._allows("placement", name):
                found.setdefault(name, order)
            if self.cuts and "placement" not in self.fixed:
                break
        return list(found.values())

    def plan(self, degrees: Degrees, choice: Choice, order: tuple[str, ...] = ORDER) -> Plan:
        """The plan of degrees, choice and order. Raises UserError for what does not divide."""
        chosen, stack = choice._asdict() | degrees._asdict(), STACKS[self.base.stack]
        del chosen["recompute"]
        plan = self.base.override(**chosen, order=order)
        return stack.shape(self.config, plan)[1] if stack.balanced else plan

    def size(self) -> int:
        """Configurations in all; degrees that do not divide count once each."""
        return sum(
            1 if self.refusal(each) else prod(map(len, self._lists(each))) * len(self.placements(each))
            for each in self.layouts()
        )

    def within(self, limit: int) -> tuple["Space", list[str]]:
        """(the space cut to about `limit` configurations, what was left out in words); fixed choices are never cut."""
        space, left_out = self, []
        for cuts, (axis, _, words) in enumerate(_CUTS, 1):
            if axis in self.fixed:
                continue
            if space.size() <= limit:
                break
            space = replace(space, cuts=cuts)
            left_out.append(words)
        return space, left_out

    def gpus_needed(self, system: System, least: int = 0, most: int = MOST_GPUS) -> int:
        """The first number of accelerators, doubled from `least` (twice as many as there are) to `most`, on which
        something fits with the space's fixed choices; 0 if nothing does with this batch."""
        gpus, available = least or 2 * self.gpus, usable_memory(system)
        while gpus <= most:
            wider = replace(self, gpus=gpus)
            if any(not wider.refusal(each) and wider._fits_somehow(each, available) for each in wider.layouts()):
                return gpus
            gpus *= 2
        return 0

    def _fits_somehow(self, degrees: Degrees, most: float) -> bool:
        """True if these degrees fit with the choices that need least memory."""
        choices = set(self.choices(degrees))
        if not choices or ("placement" in self.fixed and not self.placements(degrees)):
            return False
        chunks, small = min(each.chunks for each in choices), min(each.micro_batch for each in choices)
        recompute = max((each.recompute for each in choices), key=RECOMPUTES.index)
        config = self.config.override(recompute=recompute)
        for choice in sorted(choices, key=lambda each: (-each.zero, not each.sequence, each.micro_batch)):
            if (choice.chunks, choice.recompute) != (chunks, recompute):
                continue
            # ZeRO 2 splits gradients only if a step has a single microbatch: then a large one may need less.
            if choice.micro_batch > small and choice.zero != 2:
                continue
            with suppress(UserError):  # it does not divide
                if sum(peak_bytes(config, self.plan(degrees, choice), self.seq)[1].values()) <= most:
                    return True
        return False

    def _lists(self, degrees: Degrees) -> list[list[Any]]:
        """The values of each field of `Choice`: microbatches in powers of two, chunks that cut a stage evenly, ..."""
        rows = self.base.global_batch // (degrees.dp * degrees.ep)
        layers, rest = divmod(self.config.num_layers, degrees.pp)
        even = 1 if degrees.pp == 1 or rest else min(layers, max(MOST, self.fixed.get("chunks", 1)))
        sizes = {max(1, self.fixed.get("micro_batch", 1)), *(2**n for n in range(MOST.bit_length()))}
        values = (
            [size for size in sorted(sizes) if rows % size == 0],
            [n for n in range(1, even + 1) if layers % n == 0],
            (False, True) if degrees.tp > 1 else (False,),
            RECOMPUTES,
            range(4) if degrees.dp * degrees.cp * degrees.ep > 1 else (0,),
        )
        fields = zip(Choice._fields, values, strict=True)
        return [[value for value in each if self._allows(axis, value)] for axis, each in fields]

    def _allows(self, axis: str, value: object) -> bool:
        if axis in self.fixed:
            return self.fixed[axis] == value
        return all(keeps(value) for name, keeps, _ in _CUTS[: self.cuts] if name == axis)


def placement(plan: Plan, node: int) -> str:
    """Ranks that share a node, in words: "tp 4 x dp 2"."""
    held = [f"{axis} {count}" for axis in ORDER if (count := plan.local(axis, node=node)) > 1]
    return " x ".join(held) or "nothing"


def option(axis: str, value: Any) -> str:
    """The command-line option of `search` that fixes a choice."""
    if axis == "sequence":
        return "--sequence-parallel" if value else "--no-sequence-parallel"
    if axis == "recompute":
        return f"--recompute {RECOMPUTE_NAMES[value]}"
    return f"{flag(OPTIONS.get(axis, axis))} {value}"
