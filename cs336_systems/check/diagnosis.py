"""Diagnosis of wrong numbers. What a tensor would be under each mistake is computed from the reference's notes and
compared with the rank's tensor."""

import math
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.check.cases import Case, training
from cs336_systems.check.oracle import Key, Notes, copied
from cs336_systems.check.tolerances import UNIT_ROUNDOFF, bound, factor_of, largest, likely_bound

CAUSES = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
KINDS = ("buffer", "loss", "gradient", "norm", "weight")  # in the order in which a step computes them
LARGEST = 10_000  # elements of all gradients among which a slice is looked for
PARTLY = ("never synchronised", "zero", "unmoved", "stale")  # causes that a slice of a tensor may have


class Wrong(NamedTuple):
    """A tensor outside of its tolerance: its rank, its error, and the cause that its values indicate."""

    key: Key
    rank: int
    error: float
    got: Tensor
    want: Tensor
    cause: str = ""
    detail: str = ""

    @property
    def moment(self) -> tuple[int, int]:
        """Order in which tensors are computed: by step, and within it by kind."""
        return self.key[0], KINDS.index(self.key[1])


@dataclass
class Evidence:
    """Notes of the ranks beside those of the reference, for one case."""

    case: Case
    want: list[Notes]
    got: list[Notes]
    is_derived: bool = False  # gradients follow from updates

    def __post_init__(self) -> None:
        self.world = len(self.got)
        self.lowest = max(
            {torch.float64, *(p.dtype for p in self.case.module(0, 0).parameters())} & UNIT_ROUNDOFF.keys(),
            key=UNIT_ROUNDOFF.__getitem__,
        )
        self.order = [name for step, kind, name in self.want[0].tensors if (step, kind) == (-1, "weight")]
        if not any(kind == "gradient" for notes in self.got for _, kind, _ in notes.tensors):
            self._derive()

    def _derive(self) -> None:
        """Gradients from the updates of plain SGD in ordinary steps, where `.grad` cannot be read."""
        ordinary = getattr(self.case.program, "func", self.case.program) is training
        self.is_derived = self.case.cls is torch.optim.SGD and ordinary and self.lowest == torch.float64
        for tensors in [notes.tensors for notes in self.got if self.is_derived]:
            for (step, kind, name), after in list(tensors.items()):
                before = tensors.get((step - 1, "weight", name))
                if kind == "weight" and before is not None and before.shape == after.shape:
                    tensors[step, "gradient", name] = (before - after) / self.case.options["lr"]

    def tolerance(self, key: Key, want: Tensor) -> float:
        """Absolute tolerance: the case's bound, in the lowest precision of the model's parameters, times 1 + the
        tensor's largest value; in half precision `likely_bound` instead."""
        size = 1 + largest(want)
        if self.is_derived and key[1] == "gradient":  # a difference of two rounded weights over the rate
            return self.case.tolerance * size / self.case.options["lr"]
        if UNIT_ROUNDOFF[self.lowest] > UNIT_ROUNDOFF[torch.float32]:
            # In each of three steps an activation, a gradient, a sum and a mean are rounded to it.
            return likely_bound(self.lowest, 3 * 4) * size
        return self.case.tolerance * UNIT_ROUNDOFF[self.lowest] / UNIT_ROUNDOFF[torch.float64] * size

    def wrong(self) -> list[Wrong]:
        """Tensors that leave their tolerance, by moment; weights in forward order, gradients backward."""
        keys = [key for notes in self.want for key in notes.tensors]
        keys += [key for notes in self.got for key in notes.tensors if key[1] == "gradient"]
        kinds = KINDS if self.case.name == "buffers" else KINDS[1:]
        place = {name: index for index, name in enumerate(self.order)}

        def order(each: Wrong) -> tuple[Any, ...]:
            index = place.get(first_of(each.key[2]), 0)
            return each.moment, -index if each.key[1] == "gradient" else index, each.rank

        return sorted((each for key in dict.fromkeys(keys) if key[1] in kinds for each in self._wrong(key)), key=order)

    def _wrong(self, key: Key) -> Iterator[Wrong]:
        step, kind, _ = key
        for rank, notes in enumerate(self.got):
            want, got = self.want[rank].tensors.get(key), notes.tensors.get(key)
            if got is None:
                reached = any(k[0] >= step and k[1] == "weight" for k in notes.tensors) or not notes.error
                noted = kind in ("weight", "buffer", "norm") or any(k[1] == kind for k in notes.tensors)
                if want is None or not reached or not noted:
                    continue  # it came to an end before that; or a training step, whose loss is not asked for
                if kind != "gradient":
                    yield Wrong(key, rank, math.inf, torch.empty(0), torch.empty(0), "missing")
                    continue
                got = torch.zeros_like(want)
            want = torch.zeros_like(got) if want is None else shard(want, got, rank, self.world)
            error = largest(got - want) if got.shape == want.shape else math.inf
            if error > self.tolerance(key, want):
                yield Wrong(key, rank, error, got, want)

    def explained(self, wrong: Wrong) -> Wrong:
        """The wrong tensor with the mistake that would give it, and a detail of that."""
        cause, detail = (wrong.cause, "") if wrong.cause else self._cause(wrong)
        return wrong._replace(cause=cause, detail=detail)

    def _cause(self, wrong: Wrong) -> tuple[str, str]:
        key, rank, _, got, want, *_ = wrong
        if got.shape != want.shape:
            return "unknown", f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
        limit, is_gradient = self.tolerance(key, want), key[1] == "gradient"
        near = [(name, (got - value).abs() <= limit, detail) for name, value, detail in self._signatures(wrong)
                if value.shape == got.shape]  # fmt: skip
        for name, mask, detail in near:
            if mask.all():
                return name, detail
        other = ~((got - want).abs() <= limit)
        if not got.isfinite().all() and want.isfinite().all():
            return "not a number", f"{int((~got.isfinite()).sum())} of its {got.numel()} elements"
        for name, mask, detail in near:  # a slice of it
            if name in PARTLY and mask[other].all():
                return name, f"{detail}{', ' * bool(detail)}{int(other.sum())} of its {got.numel()} elements"
        if is_gradient and (place := self._elsewhere(key, rank, got, limit)):
            return "another tensor's", place
        if key[1] in ("gradient", "weight") and (rounded := self._rounded(wrong)):
            return "rounded", rounded
        if is_gradient and (factor := factor_of(got, want)) is not None:
            return "factor", f"times {factor:.6g}"
        if is_gradient and (factors := self._factors(wrong)):
            return "scaled", ", ".join(f"{each:.3g} of rank {r}'s" for r, each in enumerate(factors))
        return "unknown", ""

    def _rounded(self, wrong: Wrong) -> str:
        """A dtype in which a tensor seems to have been reduced or kept, as its elements, or those of the sum before the
        mean, have no more digits; float32 may have computed it, too."""
        got, limit = wrong.got, self.tolerance(wrong.key, wrong.want)
        off = ((got - wrong.want).norm() / wrong.want.norm()).item()
        for dtype, roundings in ((torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 64)):
            fits = any(largest(n * got - (n * got).to(dtype)) <= n * limit for n in (1, self.world))
            if off <= bound(dtype, roundings) and (fits or dtype == torch.float32):
                return f"{str(dtype).removeprefix('torch.')}: relative error {off:.1g}"
        return ""

    def _factors(self, wrong: Wrong) -> list[float]:
        """The factors, none of them 0, with which the ranks' own gradients add up to the tensor, if there are such."""
        own, got = self._own(wrong).reshape(self.world, -1).T, wrong.got.flatten()
        if not self.world < len(got) == len(own):
            return []
        factors = torch.linalg.lstsq(own, got).solution
        return factors.tolist() if largest(own @ factors - got) <= 1e-9 < factors.abs().min() else []

    def _own(self, wrong: Wrong) -> Tensor:
        """The gradients of each rank's own rows, stacked."""
        (step, _, name), want = wrong.key, self.want[wrong.rank].tensors.get(wrong.key, wrong.want)
        return torch.stack([notes.tensors.get((step, "local", name), torch.zeros_like(want)) for notes in self.want])

    def _signatures(self, wrong: Wrong) -> Iterator[tuple[str, Tensor, str]]:
        """Values that the tensor would have under each mistake, the likeliest first."""
        (step, kind, name), rank = wrong.key, wrong.rank
        before = self.got[rank].tensors.get((step - 1, "weight", name))
        if kind == "norm":
            yield "norm of replicas", wrong.want * self.world**0.5, f"times {self.world**0.5:.4g}"
            parts = torch.stack([notes.tensors.get(wrong.key, wrong.want) for notes in self.got])
            if largest(parts.square().sum().sqrt() - wrong.want) <= self.tolerance(wrong.key, wrong.want):
                yield "norm of a share", parts[rank], ""
        elif kind == "gradient":
            for cause, tensor, detail in self._of_gradient(wrong):
                yield cause, shard(tensor, wrong.got, rank, self.world), detail
        elif before is not None:
            yield "unmoved", before, ""
        elif step < 0:
            module = self.case.module(rank if self.case.seeds else 0, rank)
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            if name in tensors:
                yield "not sent", shard(copied(tensors[name]), wrong.got, rank, self.world), ""

    def _of_gradient(self, wrong: Wrong) -> Iterator[tuple[str, Tensor, str]]:
        """Values that a whole gradient would have under each mistake."""
        (step, _, name), rank, n, right = wrong.key, wrong.rank, self.world, self.want[wrong.rank].tensors
        want = right.get(wrong.key, wrong.want)
        own = self._own(wrong)
        if self.case.part.__name__ == "uneven":
            yield "mean of means", own.mean(0), ""
        parts = [notes.tensors.get(wrong.key, torch.empty(0)) for notes in self.got]
        are_whole = self.case.part.__name__ == "whole" and all(each.shape == want.shape for each in parts)
        if are_whole and largest(sum(parts[1:], parts[0]) - want) <= self.tolerance(wrong.key, want):
            yield "partial sum", parts[rank], ""
        yield from self._accumulated(step, name, rank, want)
        yield "never synchronised", own[rank], ""
        yield "never synchronised", own[rank] / n, f"divided by {n}"
        size = -(-want.numel() // n)
        shares = torch.cat([own[r].flatten()[r * size : (r + 1) * size] for r in range(n)]).view_as(want)
        yield "never synchronised", shares, "each rank's share of it"
        yield "never synchronised", shares / n, f"each rank's share of it, divided by {n}"
        yield "summed", n * want, f"{n} times the mean"
        yield "averaged twice", want / n, f"1/{n} of the mean"
        if (before := right.get((step - 1, "gradient", name))) is not None:
            yield "stale", before, ""
            yield "kept", want + before, ""
        for other in range(n):
            yield "another rank's", own[other], f"rank {other}'s"
            yield "another rank's", own[other] / n, f"rank {other}'s, divided by {n}"
        yield "added to", own[rank] + want, ""
        yield "zero", torch.zeros_like(want), ""
        for (when, what, whose), tensor in right.items():
            if (when, what) == (step, "gradient") and first_of(whose) != first_of(name):
                yield "another tensor's", tensor, f"that of {whose}"

    def _accumulated(self, step: int, name: str, rank: int, want: Tensor) -> Iterator[tuple[str, Tensor, str]]:
        """Values that a gradient would have under the mistakes of several backward passes."""
        parts = [[tensor for (when, kind, whose), tensor in notes.tensors.items()
                  if (when, kind) == (step, "part") and first_of(whose) == name] for notes in self.want]  # fmt: skip
        if len(parts[0]) > 1 and len({len(each) for each in parts}) == 1:
            means = torch.stack([torch.stack(each) for each in parts]).mean(0)
            yield "last part only", means[-1], ""
            for i, which in ((-1, "last"), (0, "first")):
                others = sum(parts[rank]) - parts[rank][i]
                yield "parts unsynchronised", means[i] + others, f"the {which} pass alone is synchronised"
            yield "factor", want / len(means), f"1/{len(means)}: divided by the number of backward passes"

    def _elsewhere(self, key: Key, rank: int, got: Tensor, limit: float) -> str:
        """Place where a tensor's elements are a slice of the means, or of the rank's own, in the order of backward."""
        tensors = self.want[rank].tensors
        names = [name for name in reversed(self.order) if (key[0], "gradient", name) in tensors]
        for kind, whose in (("gradient", "the means"), ("local", "this rank's own")):
            flat = torch.cat([torch.zeros(0), *(tensors[key[0], kind, name].flatten() for name in names)])
            for scale in (1, self.world) if 1 < got.numel() <= len(flat) <= LARGEST else ():
                off = (flat.unfold(0, got.numel(), 1) / scale - got.flatten()).abs().amax(1)
                if off.min().item() <= limit:
                    return f"elements {int(off.argmin())} and on of {whose}, in the order of backward"
        return ""


def first_of(name: str) -> str:
    """A tensor's name without the number that its later values in a step have."""
    return name.split(" no.")[0]


def shard(want: Tensor, got: Tensor, rank: int, world: int) -> Tensor:
    """This rank's part of a whole tensor, if what it has is such a part along one axis."""
    if want.shape == got.shape or want.dim() != got.dim():
        return want
    for dim in range(want.dim()):
        if want.shape[dim] == world * got.shape[dim]:
            return want.chunk(world, dim)[rank]
    return want


def diagnose(found: list[Wrong], evidence: Evidence) -> tuple[str, str, str]:
    """The cause, a sentence with the first place, the error and the invariant that fails, and the page that explains
    it, from the wrong tensors of one kind and step."""
    # Another rank's gradient: on that rank itself it looks like its own.
    sent = [each for each in found if each.cause == "another rank's" and each.key == found[0].key]
    first = (sent or found)[0]
    step, kind, name = found[0].key
    names = list(dict.fromkeys(each.key[2] for each in found))
    every = [key[2] for key in evidence.want[0].tensors if key[:2] == (step, kind)]
    backward = [each for each in reversed(evidence.order) if each in every]
    is_tail = kind == "gradient" and len(names) < len(backward) and names == backward[-len(names) :]
    cause = "from here on" if is_tail and first.cause == "unknown" else first.cause
    what, invariant, page = (CAUSES[cause][each] for each in ("says", "invariant", "page"))
    ranks = sorted({each.rank for each in found})
    whose = "every rank" if len(ranks) == evidence.world else f"rank {', '.join(map(str, ranks))}"
    whole = {"gradient": "The gradient of", "norm": "The gradient's norm"}.get(kind, f"The {kind}")
    where = " ".join(f"{whole} {name} {'at first' if step < 0 else f'in step {step}'} on {whose}".split())
    detail = f" ({first.detail})" if first.detail else ""
    off = f", off by {first.error:.2g}" if first.error < math.inf else ""
    extent = f"; {len(names)} of {len(every)} are wrong" if len(every) > 1 else ""
    extent += ", all that backward reaches from there on" if extent and is_tail else ""
    causes = Counter(each.cause for each in found).most_common(3)
    extent += f" ({', '.join(f'{count} {each}' for each, count in causes)})" if len(causes) > 1 else ""
    return cause, f"{where} is {what}{detail}{off}{extent}. Invariant: {invariant}.", page
