"""Diagnosis of wrong numbers. What a tensor would be under each mistake is computed from the reference's notes and
compared with the rank's tensor."""

import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cs336_systems.check.cases import Case, training
from cs336_systems.check.oracle import Key, Notes
from cs336_systems.check.tolerances import UNIT_ROUNDOFF, likely_bound

CAUSES = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
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


@dataclass
class Evidence:
    """Notes of the ranks beside those of the reference, for one case."""

    case: Case
    want: list[Notes]
    got: list[Notes]

    def __post_init__(self) -> None:
        self.world = len(self.got)
        first = self.want[0].tensors
        dtypes = {"float64", *self.want[0].dtypes.values()}
        self.lowest = max(value for each, value in UNIT_ROUNDOFF.items() if str(each).removeprefix("torch.") in dtypes)
        self.order = [name for step, kind, name in first if (step, kind) == (-1, "weight")]
        if not any(kind == "gradient" for notes in self.got for _, kind, _ in notes.tensors):
            for notes in self.got:
                self._derive(notes)

    def _derive(self, notes: Notes) -> None:
        """Gradients from the updates of plain SGD in ordinary steps, where `.grad` cannot be read."""
        ordinary = getattr(self.case.program, "func", self.case.program) is training
        if self.case.cls is not torch.optim.SGD or not ordinary or self.lowest > UNIT_ROUNDOFF[torch.float64]:
            return
        rate = self.case.options["lr"]
        for (step, kind, name), after in list(notes.tensors.items()):
            before = notes.tensors.get((step - 1, "weight", name))
            if kind == "weight" and before is not None and before.shape == after.shape:
                notes.tensors[step, "gradient", name] = (before - after) / rate
                notes.dtypes[step, "gradient", name] = "derived"

    def tolerance(self, key: Key, want: Tensor, dtype: str) -> float:
        """Absolute: the case's bound, in the lowest precision of the model's parameters, times the tensor's size; for
        halves the likely bound."""
        size = 1 + (want.abs().max().item() if want.numel() else 0.0)
        if dtype == "derived":  # a difference of two rounded weights over the rate
            return self.case.tolerance * size / self.case.options["lr"]
        if self.lowest > UNIT_ROUNDOFF[torch.float32]:
            # In each of three steps an activation, a gradient, a sum and a mean are rounded to it.
            return likely_bound({value: each for each, value in UNIT_ROUNDOFF.items()}[self.lowest], 3 * 4) * size
        return self.case.tolerance * self.lowest / UNIT_ROUNDOFF[torch.float64] * size

    def wrong(self, kind: str) -> list[Wrong]:
        """Tensors of a kind that leave their tolerance: by step, weights in forward order, gradients backward."""
        keys = dict.fromkeys(key for notes in self.want for key in notes.tensors if key[1] == kind)
        if kind == "gradient":
            keys |= dict.fromkeys(key for notes in self.got for key in notes.tensors if key[1] == kind)
        place = {name: index for index, name in enumerate(self.order)}
        sign = -1 if kind == "gradient" else 1
        found = [wrong for key in keys for wrong in self._wrong(key)]
        ranked = [((each.key[0], sign * place.get(each.key[2].split(" no.")[0], 0), each.rank), each) for each in found]
        return [each for _, each in sorted(ranked, key=lambda pair: pair[0])]

    def _wrong(self, key: Key) -> Iterator[Wrong]:
        step, kind, _ = key
        for rank, notes in enumerate(self.got):
            want, got = self.want[rank].tensors.get(key), notes.tensors.get(key)
            if got is None:
                reached = any(k[0] >= step and k[1] == "weight" for k in notes.tensors) or not notes.error
                noted = kind in ("weight", "buffer", "norm") or any(k[1] == kind for k in notes.tensors)
                if want is None or not reached or not noted:
                    continue  # it came to an end before that; or a training step that returns no loss
                if kind != "gradient":
                    yield Wrong(key, rank, float("inf"), torch.empty(0), torch.empty(0), "missing")
                    continue
                got = torch.zeros_like(want)
            want = torch.zeros_like(got) if want is None else want
            own = shard(want, got, rank, self.world)
            error = (got - own).abs().max().item() if got.shape == own.shape and got.numel() else 0.0
            error = float("inf") if got.shape != own.shape or error != error else error
            if error > self.tolerance(key, own, notes.dtypes.get(key, "float64")):
                yield Wrong(key, rank, error, got, want)

    def explained(self, wrong: Wrong) -> Wrong:
        if wrong.cause:
            return wrong
        cause, detail = self.cause(wrong.key, wrong.rank, wrong.got, wrong.want)
        return wrong._replace(cause=cause, detail=detail)

    def cause(self, key: Key, rank: int, got: Tensor, want: Tensor) -> tuple[str, str]:
        """The mistake that would give this tensor, and a detail of it."""
        right = shard(want, got, rank, self.world)
        if got.shape != right.shape:
            return "unknown", f"shape {tuple(got.shape)}, not {tuple(right.shape)}"
        signatures = [(name, shard(tensor, got, rank, self.world), detail)
                      for name, tensor, detail in self._signatures(key, rank, want)]  # fmt: skip
        limit = self.tolerance(key, right, self.got[rank].dtypes.get(key, "float64"))
        near = [(name, (got - value).abs() <= limit, detail) for name, value, detail in signatures
                if value.shape == got.shape]  # fmt: skip
        for name, mask, detail in near:
            if mask.all():
                return name, detail
        other = (got - right).abs() > limit
        for name, mask, detail in near:  # a slice of it
            if name in PARTLY and mask[other].all():
                return name, f"{detail}{', ' * bool(detail)}{int(other.sum())} of its {got.numel()} elements"
        if key[1] == "gradient" and (place := self._elsewhere(key, rank, got, limit)):
            return "another tensor's", place
        want = right
        if key[1] in ("gradient", "weight") and (got - want).norm() <= 2.0**-18 * want.norm():
            return "rounded", ""
        factor = (got * want).sum().item() / max((want * want).sum().item(), 1e-300)
        if key[1] == "gradient" and want.numel() > 1 and (got - factor * want).norm() <= 1e-6 * got.norm():
            return "factor", f"times {factor:.6g}"
        return "unknown", ""

    def _signatures(self, key: Key, rank: int, want: Tensor) -> Iterator[tuple[str, Tensor, str]]:
        step, kind, name = key
        if kind == "norm":
            yield "norm of replicas", want * self.world**0.5, f"times {self.world**0.5:.4g}"
        if kind in ("weight", "buffer"):
            if step < 0:
                yield from self._initial(name, rank)
            elif (before := self.got[rank].tensors.get((step - 1, "weight", name))) is not None:
                yield "unmoved", before, ""
            return
        if kind != "gradient":
            return
        n, local = self.world, [notes.tensors.get((step, "local", name)) for notes in self.want]
        locals_ = [torch.zeros_like(want) if each is None else each for each in local]
        before = self.want[rank].tensors.get((step - 1, "gradient", name))
        if self.case.part.__name__ == "uneven":
            yield "mean of means", sum(locals_[1:], locals_[0]) / n, ""
        if self.case.part.__name__ == "whole":
            parts = [notes.tensors.get(key) for notes in self.got]
            whole = [each for each in parts if each is not None and each.shape == want.shape]
            if len(whole) == n:
                total = sum(whole[1:], whole[0])
                if (total - want).abs().max().item() <= self.tolerance(key, want, "float64"):
                    yield "partial sum", whole[rank], ""
        yield from self._accumulated(step, name, rank, want)
        yield "never synchronised", locals_[rank], ""
        yield "never synchronised", locals_[rank] / n, f"divided by {n}"
        yield "summed", n * want, f"{n} times the mean"
        yield "averaged twice", want / n, f"1/{n} of the mean"
        if before is not None:
            yield "stale", before, ""
            yield "kept", want + before, ""
        for other in range(n):
            yield "another rank's", locals_[other], f"rank {other}'s"
            yield "another rank's", locals_[other] / n, f"rank {other}'s, divided by {n}"
        yield "added to", locals_[rank] + want, ""
        yield "zero", torch.zeros_like(want), ""
        for (when, what, whose), tensor in self.want[rank].tensors.items():
            if what == "gradient" and when == step and whose.split(" no.")[0] != name.split(" no.")[0]:
                yield "another tensor's", tensor, f"that of {whose}"

    def _elsewhere(self, key: Key, rank: int, got: Tensor, limit: float) -> str:
        """Where else in the order of backward a tensor's elements stand, as a slice of the means or the rank's own."""
        names = [name for name in reversed(self.order) if (key[0], "gradient", name) in self.want[rank].tensors]
        for kind, whose in (("gradient", "the means"), ("local", "this rank's own")):
            tensors = self.want[rank].tensors
            flat = torch.cat([tensors[key[0], kind, name].flatten() for name in names] or [torch.zeros(0)])
            if 1 < got.numel() <= len(flat) <= LARGEST:
                for scale in (1, self.world):
                    off = (flat.unfold(0, got.numel(), 1) / scale - got.flatten()).abs().amax(1)
                    if off.min().item() <= limit:
                        return f"elements {int(off.argmin())} and on of {whose}, in the order of backward"
        return ""

    def _initial(self, name: str, rank: int) -> Iterator[tuple[str, Tensor, str]]:
        module = self.case.module(rank if self.case.seeds else 0, rank)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        if name in tensors:
            yield "not sent", tensors[name].detach().double(), ""

    def _accumulated(self, step: int, name: str, rank: int, want: Tensor) -> Iterator[tuple[str, Tensor, str]]:
        labels = [f"{name} no. {i}" if i > 1 else name for i in range(1, 9)]
        parts = [
            [n.tensors[step, "part", each] for each in labels if (step, "part", each) in n.tensors] for n in self.want
        ]
        if len(parts[0]) > 1 and all(len(each) == len(parts[0]) for each in parts):
            means = [sum(each[1:], each[0]) / self.world for each in map(list, zip(*parts, strict=True))]
            yield "last part only", means[-1], ""
            for i, which in ((-1, "last"), (0, "first")):
                rest = sum(parts[rank]) - parts[rank][i]
                yield "parts unsynchronised", means[i] + rest, f"the {which} pass alone is synchronised"
            yield "factor", want / len(means), f"1/{len(means)}: divided by the number of backward passes"


def shard(want: Tensor, got: Tensor, rank: int, world: int) -> Tensor:
    """This rank's part of a whole tensor, if what it has is such a part along one axis."""
    if want.shape == got.shape or want.dim() != got.dim():
        return want
    for dim in range(want.dim()):
        if want.shape[dim] == world * got.shape[dim]:
            return want.chunk(world, dim)[rank]
    return want


def moment(wrong: Wrong) -> tuple[int, int]:
    """Order in which tensors are computed: by step, and within it the loss, gradients, their norm, and weights."""
    return wrong.key[0], ("buffer", "loss", "gradient", "norm", "weight").index(wrong.key[1])


def diagnose(found: list[Wrong], evidence: Evidence) -> tuple[str, str, str]:
    """The cause, a sentence with the first place, the error and the invariant that fails, and the page that explains
    it, from the wrong tensors of one kind and step."""
    sent = [each for each in found if each.cause == "another rank's"]  # which to that rank itself is its own
    first = (sent or found)[0]
    (step, kind, name), cause = found[0].key, first.cause
    names = list(dict.fromkeys(each.key[2] for each in found))
    every = [key[2] for key in evidence.want[0].tensors if key[:2] == (step, kind)]
    backward = [each for each in reversed(evidence.order) if each in every]
    is_tail = kind == "gradient" and len(names) < len(backward) and names == backward[-len(names) :]
    if is_tail and cause == "unknown":
        cause = "from here on"
    what, invariant, page = (CAUSES[cause][each] for each in ("says", "invariant", "page"))
    ranks = sorted({each.rank for each in found})
    whose = "every rank" if len(ranks) == evidence.world else f"rank {', '.join(map(str, ranks))}"
    whole = {"gradient": "the gradient of", "norm": "the gradient's norm"}.get(kind, f"the {kind}")
    where = " ".join(f"{whole} {name} {'at first' if step < 0 else f'in step {step}'} on {whose}".split())
    detail = f" ({first.detail})" if first.detail else ""
    extent = ""
    if len(every) > 1:
        tail = ", all that backward reaches from there on" if is_tail else ""
        extent = f"; {len(names)} of {len(every)} are wrong{tail}"
    causes = Counter(each.cause for each in found)
    if len(causes) > 1:
        extent += f" ({', '.join(f'{count} {each}' for each, count in causes.most_common(3))})"
    off = f", off by {first.error:.2g}" if first.error < float("inf") else ""
    says = f"{where[0].upper()}{where[1:]} is {what}{detail}{off}{extent}. Invariant: {invariant}."
    return cause, says, page
