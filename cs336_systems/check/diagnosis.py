"""Diagnosis of wrong numbers. What a tensor would be under each mistake is computed from the reference's notes and
compared with the rank's tensor."""

import math
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import partial, reduce
from itertools import accumulate, product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from cs336_systems.check.cases import BOUND, bound, factor_of, largest, reload, training
from cs336_systems.check.oracle import Evidence, Key, Wrong, copied, first_of, shard

FOUND = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
CAUSES = {name: FOUND["default"] | each for name, each in FOUND.items() if name != "default"}
LARGEST = 10_000  # elements of all gradients among which a slice is looked for
PARTLY = ("never synchronised", "zero", "unmoved", "stale")  # causes that a slice of a tensor may have


class Diagnosis(Evidence):
    """Evidence, and the mistakes that would give what is wrong."""

    def cause(self, wrong: Wrong) -> tuple[str, str]:
        """The mistake that would give a wrong tensor, and a detail of it."""
        key, rank, _, got, want, *_ = wrong
        if wrong.cause:
            return wrong.cause, ""
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
        own = self.own(wrong).reshape(self.world, -1).T
        if is_gradient and self.world < got.numel() == len(own):
            factors = torch.linalg.lstsq(own, got.flatten()).solution.round(decimals=9) + 0
            if largest(own @ factors - got.flatten()) <= 1e-8 and factors.count_nonzero() > 1:
                return "scaled", ", ".join(f"{each:.3g} of rank {r}'s" for r, each in enumerate(factors.tolist()))
        return "unknown", ""

    def _rounded(self, wrong: Wrong) -> str:
        """A dtype in which a tensor seems to have been reduced or kept, as its elements, or those of the sum before the
        mean, have no more digits; float32 may have computed it, too."""
        got, limit, own = wrong.got, self.tolerance(wrong.key, wrong.want), self.own(wrong)
        off = ((got - wrong.want).norm() / wrong.want.norm()).item()
        for dtype, roundings in ((torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 64)):
            fits = any(largest(n * got - (n * got).to(dtype)) <= n * limit for n in (1, self.world))
            fits |= own.shape[1:] == got.shape and largest(own.to(dtype).double().mean(0) - got) <= limit
            if off <= bound(dtype, roundings) and (fits or dtype == torch.float32):
                return f"{str(dtype).removeprefix('torch.')}: relative error {off:.1g}"
        return ""

    def _signatures(self, wrong: Wrong) -> Iterator[tuple[str, Tensor, str]]:
        """Values that the tensor would have under each mistake, the likeliest first."""
        (step, kind, name), rank = wrong.key, wrong.rank
        before = self.got[rank].tensors.get((step - 1, "weight", name))
        if kind == "norm":
            yield "norm of replicas", wrong.want * self.world**0.5, f"times {self.world**0.5:.4g}"
            parts = torch.stack([notes.tensors.get(wrong.key, wrong.want) for notes in self.got])
            if largest(parts.square().sum().sqrt() - wrong.want) <= self.tolerance(wrong.key, wrong.want):
                yield "norm of a share", parts[rank], ""
            own = torch.stack([x.norm() for x in self.want[rank].of(step, "local").values()])
            yield "never synchronised", own.norm(), "until the optimizer's step"
        elif kind == "gradient":
            for cause, tensor, detail in self._of_gradient(wrong):
                yield cause, shard(tensor, wrong.got, rank, self.world), detail
        elif kind == "loss":
            yield from self._of_loss(step, rank)
        elif before is not None:
            every = [notes.tensors.get(wrong.key, wrong.want) for notes in self.got]
            is_lost = all(x.shape == before.shape and largest(x - before) <= BOUND for x in every)
            yield "unmoved", before, "no rank has its update: none made it, or another rank sends it" * is_lost
            is_used = before.shape == wrong.got.shape and (step, "gradient", name) in self.got[rank].tensors
            if is_used and (factor := factor_of(wrong.got - before, wrong.want - before)) is not None:
                yield "another step size", wrong.got, f"times {factor:.6g}"
            yield from self._of_update(wrong, before)
        elif step < 0:
            for other in range(self.world):
                module = self.case.module(other if self.case.seeds else 0, rank)
                tensors = dict(module.named_parameters()) | dict(module.named_buffers())
                if name in tensors:
                    cause = "not sent" if other == rank else "wrong source"
                    yield cause, shard(copied(tensors[name]), wrong.got, rank, self.world), f"rank {other}'s"
                whole = self.want[rank].tensors[wrong.key]
                yield "another rank's shard", shard(whole, wrong.got, other, self.world), f"rank {other}'s"
        if kind in ("gradient", "weight"):
            yield from self._of_other_shards(wrong.key, rank)

    def _of_loss(self, step: int, rank: int) -> Iterator[tuple[str, Tensor, str]]:
        """Values of an ordinary step's loss with old weights, all or those of a part of the model, and with this rank's
        parts of split weights alone."""
        new, old = (self.want[rank].of(step - n, "weight") for n in (1, 2))
        places = {place for name in new for place in accumulate(name.split("."), "{}.{}".format)} | {"matrices"}
        is_small = sum(map(torch.numel, new.values())) <= LARGEST
        for part in ("", *sorted(places if is_small else ())) if old else ():
            some = {name: x for name, x in old.items()
                    if f"{name}.".startswith(part and f"{part}.") or (part == "matrices" and x.dim() > 1)}  # fmt: skip
            yield "stale weights", self._loss(step, rank, new | some), f"those of {part} alone" * bool(part)
        split = {name: torch.zeros_like(x) for name, x in new.items()}
        for name, x in new.items():
            got = self.got[rank].tensors.get((step - 1, "weight", name), x)
            shard(split[name], got, rank, self.world).copy_(shard(x, got, rank, self.world))
        yield "partial output", self._loss(step, rank, split), ""

    def _loss(self, step: int, rank: int, weights: dict[str, Tensor]) -> Tensor:
        """The loss of an ordinary step with some weights."""
        module = self.case.module(0, rank)
        inputs, targets = (self.case.part(each, rank, self.world) for each in self.case.data(step))
        given = {
            name: (torch.view_as_complex(weights[name]) if p.is_complex() else weights[name]).to(p.dtype)
            for name, p in module.named_parameters()
        }
        return copied(self.case.criterion(functional_call(module, given, (inputs,)), targets))

    def _updated(self, before: Tensor, gradient: Tensor) -> Tensor:
        """A weight after a first step of its optimizer."""
        weight = torch.nn.Parameter(before.clone())
        weight.grad = gradient.clone()
        self.case.cls([weight], **self.case.options).step()
        return weight.detach()

    def _of_update(self, wrong: Wrong, before: Tensor) -> Iterator[tuple[str, Tensor, str]]:
        """Values of a weight after a first step that is taken with each wrong gradient, and after a later step that is
        taken like a first one."""
        (step, _, name), right = wrong.key, self.want[wrong.rank].tensors
        key, updated = (step, "gradient", name), partial(self._updated, before)
        if (want := right.get(key)) is None or want.shape != before.shape:
            return
        if step > 0:  # where the state has been loaded, a step has been taken back
            last = start = right[step - 1, "weight", name]
            if self.case.program is reload:
                start, decay = right[step - 2, "weight", name], self.case.options.get("weight_decay", 0.0)
                moved = (1 - self.case.options["lr"] * decay) * (last - start)
                yield "own copy", wrong.want + moved, ""
            yield "state lost", self._updated(start, want), ""
            return
        of_gradient = wrong._replace(key=key, want=want)
        yield "averaged weights", torch.stack([updated(each) for each in self.own(of_gradient)]).mean(0), ""
        for cause, value, detail in (*self._of_gradient(of_gradient), *self._of_other_shards(key, wrong.rank)):
            if value.shape == before.shape:
                yield cause, updated(value), f"its gradient{', ' * bool(detail)}{detail}"

    def _of_other_shards(self, key: Key, rank: int) -> Iterator[tuple[str, Tensor, str]]:
        """Values that a tensor would have if ranks had each other's shards, of this tensor or of all joined, or of a
        weight the updates of such shards."""
        right = self.want[rank].tensors
        tensors = self.want[rank].of(*key[:2])
        is_update = key[1] == "weight" and key[0] >= 0
        old = {name: right[key[0] - 1, "weight", name] for name in tensors} if is_update else {}
        names = [name for name in self.order if name in tensors]
        buffers = (names, names[::-1]) if sum(map(torch.numel, tensors.values())) <= LARGEST else ()
        is_split = key[2] in names and tensors[key[2]].numel() >= self.world
        for joined, base in product(([key[2]], *buffers), ({}, old) if old else ({},)) if is_split else ():
            flat = torch.cat([(tensors[each] - base.get(each, 0)).flatten() for each in joined])
            shards = F.pad(flat, (0, -len(flat) % self.world)).view(self.world, -1)
            for other in range(1, self.world):
                pieces = shards.roll(-other, 0).flatten()[: len(flat)].split([tensors[each].numel() for each in joined])
                moved = pieces[joined.index(key[2])].view_as(tensors[key[2]])
                detail = f"rank r has that of rank r + {other}" * (self.world > 2)
                yield "another rank's shard", base.get(key[2], 0) + moved, detail

    def _of_gradient(self, wrong: Wrong) -> Iterator[tuple[str, Tensor, str]]:
        """Values that a whole gradient would have under each mistake."""
        (step, _, name), rank, n, right = wrong.key, wrong.rank, self.world, self.want[wrong.rank].tensors
        want = right.get(wrong.key, wrong.want)
        own = self.own(wrong)
        if self.case.part.__name__ == "uneven":
            yield "mean of means", own.mean(0), ""
        parts = [notes.tensors.get(wrong.key, torch.empty(0)) for notes in self.got]
        are_whole = self.case.part.__name__ == "whole" and all(each.shape == want.shape for each in parts)
        if are_whole and largest(sum(parts[1:], parts[0]) - want) <= self.tolerance(wrong.key, want):
            yield "partial sum", parts[rank], ""
        yield from self._accumulated(step, name, rank, want)
        if self._unseen(wrong, own[rank]):
            yield "averaged weights", own[rank], ""
        size = -(-want.numel() // n)
        shares = torch.cat([own[r].flatten()[r * size : (r + 1) * size] for r in range(n)]).view_as(want)
        for value, which in ((own[rank], ""), (shares, "each rank's share of it")):
            yield "never synchronised", value, which
            yield "never synchronised", value / n, f"{which}{', ' * bool(which)}divided by {n}"
        yield "summed", n * want, f"{n} times the mean"
        yield "averaged twice", want / n, f"1/{n} of the mean"
        if (before := right.get((step - 1, "gradient", name))) is not None:
            yield "stale", before, ""
            yield "kept", want + n * before, f"{n} times, summed once more"
            for k in range(n, 0, -1):
                yield "kept", want + before * k / n, f"{k} of {n} ranks' share of it" * (k < n)
        others = [("another rank's", own[other], f"rank {other}'s") for other in range(n)]
        instead = (("maximum", own.amax(0)), ("minimum", own.amin(0)), ("product", own.prod(0)))
        for cause, value, which in (*others, *(("not summed", value, which) for which, value in instead)):
            yield cause, value, which
            yield cause, value / n, f"{which}, divided by {n}"
        yield "added to", own[rank] + want, ""
        yield "zero", torch.zeros_like(want), ""
        for whose, tensor in self.want[rank].of(step, "gradient").items():
            if first_of(whose) != first_of(name):
                yield "another tensor's", tensor, f"that of {whose}"

    def _unseen(self, wrong: Wrong, own: Tensor) -> bool:
        """True if the next loss is right although an update of this weight with the own gradient would change it."""
        (step, _, name), rank = wrong.key, wrong.rank
        later, before = (step + 1, "loss", ""), self.want[rank].tensors.get((step - 1, "weight", name))
        if self.case.program is not training or before is None or later not in self.got[rank].tensors:
            return False
        if own.shape != before.shape or any(each.rank == rank for each in self._wrong(later)):
            return False
        loss = self._loss(step + 1, rank, self.want[rank].of(step, "weight") | {name: self._updated(before, own)})
        want = self.want[rank].tensors[later]
        return largest(loss - want) > self.tolerance(later, want)

    def _accumulated(self, step: int, name: str, rank: int, want: Tensor) -> Iterator[tuple[str, Tensor, str]]:
        """Values that a gradient would have under the mistakes of several backward passes."""
        parts = [[x for whose, x in notes.of(step, "part").items() if first_of(whose) == name] for notes in self.want]
        if len(parts[0]) > 1 and len({len(each) for each in parts}) == 1:
            means = torch.stack([torch.stack(each) for each in parts]).mean(0)
            yield "last part only", means[-1], ""
            for i, which in ((-1, "last"), (0, "first")):
                others = sum(parts[rank]) - parts[rank][i]
                yield "parts unsynchronised", means[i] + others, f"the {which} pass alone is synchronised"
            yield "factor", want / len(means), f"1/{len(means)}: divided by the number of backward passes"
            again = reduce(lambda total, mean: total / self.world + mean, means)
            yield "averaged twice", again, "that of earlier backward passes, at each later one"

    def _elsewhere(self, key: Key, rank: int, got: Tensor, limit: float) -> str:
        """Place where a tensor's elements are a slice of the means, or of the rank's own, in the order of backward."""
        for kind, whose in (("gradient", "the means"), ("local", "this rank's own")):
            tensors = self.want[rank].of(key[0], kind)
            flat = torch.cat([torch.zeros(0), *(tensors[x].flatten() for x in reversed(self.order) if x in tensors)])
            for scale in (1, self.world) if 1 < got.numel() <= len(flat) <= LARGEST else ():
                off = (flat.unfold(0, got.numel(), 1) / scale - got.flatten()).abs().amax(1)
                if off.min().item() <= limit:
                    return f"elements {int(off.argmin())} and on of {whose}, in the order of backward"
        return ""


def diagnose(found: list[Wrong], evidence: Evidence) -> tuple[str, str, str]:
    """The cause, a sentence with the first place, the error and the invariant that fails, and the page that explains
    it, from the wrong tensors of one kind and step."""
    # Another rank's gradient: on that rank itself it looks like its own.
    sent = [each for each in found if each.cause == "another rank's" and each.key == found[0].key]
    first = (sent or found)[0]
    if 0 < len(sent) < evidence.world and len({each.detail for each in found if each.cause == "another rank's"}) > 1:
        first = first._replace(cause="never synchronised", detail="each rank's share of all")
    step, kind, name = found[0].key
    names = list(dict.fromkeys(each.key[2] for each in found))
    every = [*evidence.want[0].of(step, kind)]
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
