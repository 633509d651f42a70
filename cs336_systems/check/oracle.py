"""Reference, and the tensors of the ranks that differ from it: one copy of the bare module for each rank, all in this
process, whose gradients are averaged by hand.

It shares no code with the library. A run's notes are the tensors that the ranks of a candidate are compared with.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cs336_systems.check.cases import UNIT_ROUNDOFF, Case, largest, likely_bound, training
from cs336_systems.check.models import Program, Replica, Run

Key = tuple[int, str, str]  # step, kind of tensor, name
KINDS = ("buffer", "loss", "gradient", "norm", "weight")  # in the order in which a step computes them


@dataclass
class Notes:
    """Tensors of one rank in the order in which they were computed, by (step, kind, name).

    Kinds: weight, buffer, loss, gradient, norm; of the reference also local (a rank's own gradient before the mean) and
    part (of a single backward pass). The first weights are of step -1.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    error: str = ""

    def add(self, step: int, kind: str, name: str, tensor: Tensor) -> None:
        """A copy in float64; the second of a key gets a number."""
        key, number = (step, kind, name), 1
        while key in self.tensors:
            number += 1
            key = (step, kind, f"{name} no. {number}".strip())
        self.tensors[key] = copied(tensor)

    def of(self, step: int, kind: str) -> dict[str, Tensor]:
        """Tensors of a kind in a step by name."""
        return {key[2]: tensor for key, tensor in self.tensors.items() if key[:2] == (step, kind)}


def copied(tensor: Tensor) -> Tensor:
    """A copy in float64, of complex numbers both parts."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().to("cpu", torch.float64, copy=True)


def whole_of(x: Any) -> Any:
    """A tensor, or the whole of a DTensor."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@dataclass(kw_only=True)
class ObservedRun(Run):
    """A run of a case that notes what it computes: whole weights and gradients, by the bare module's names."""

    case: Case
    bare: Any  # the module itself
    notes: Notes = field(default_factory=Notes)
    number: int = -1  # of the step; -1 before the first

    def __post_init__(self) -> None:
        self.data, self.part, self.criterion = self.case.data, self.case.part, self.case.criterion

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.bare.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients, without those that are None."""
        return {name: p.grad for name, p in self.bare.named_parameters() if p.grad is not None}

    def note(self, kind: str, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.notes.add(self.number, kind, name, tensor)

    def observed(self) -> Iterator[None]:
        """Run the case's program; note what it begins with, synchronised gradients, and the buffers at its end."""
        self.note("buffer", dict(self.bare.named_buffers()))
        self.ended()
        for _ in self.case.program(self):
            self.synchronise()
            yield
            self.note("gradient", self.gradients())
        self.note("buffer", dict(self.bare.named_buffers()))

    def synchronise(self) -> None:
        """Note this rank's own gradients, which become the mean in lock step."""
        self.note("local", self.gradients())

    def loss(self, step: int, **options: Any) -> Tensor:
        loss = super().loss(step, **options)
        self.note("loss", {"": loss})
        return loss

    def backward_of(self, loss: Tensor, **options: Any) -> None:
        """Backward; what it has added to each gradient is noted, too."""
        before = {name: g.clone() for name, g in self.gradients().items()}
        loss.backward(**options)
        self.note("part", {name: g - before[name] if name in before else g for name, g in self.gradients().items()})

    def step(self) -> None:
        super().step()
        self.ended()

    def ended(self) -> None:
        """Note the weights that a step begins with, or has updated."""
        self.note("weight", self.weights())
        self.number += 1

    def train(self, step: int, **options: Any) -> Iterator[None]:
        self.backward(step, **options)
        yield
        self.step()

    def clip(self, limit: float) -> None:
        """Scale all gradients down to a norm, by the wrapper's own method if it has one, and note the norm before."""
        usual = partial(torch.nn.utils.clip_grad_norm_, self.model.parameters())
        clip = getattr(self.model, "clip_grad_norm", getattr(self.model, "clip_grad_norm_", usual))
        self.note("norm", {"": torch.as_tensor(whole_of(clip(limit)))})

    def save(self) -> tuple[dict[str, Any], Any]:
        whole = getattr(self.model, "gather_full_params", self.model.state_dict)()
        return tree_map_only(Tensor, lambda value: value.detach().clone(), (whole, self.optimizer.state_dict()))

    def load(self, saved: tuple[dict[str, Any], Any]) -> None:
        inner = hasattr(self.model, "gather_full_params")
        (self.model.module if inner else self.model).load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])


def in_lock_step(runs: Sequence[Any], program: Program, weights: Sequence[float] = ()) -> None:
    """Run a program on replicas; where it yields, each gradient becomes the mean over them, in which each replica has
    its weight, by default 1."""
    for _ in zip_longest(*(program(run) for run in runs)):
        for same in zip(*(run.model.parameters() for run in runs), strict=True):
            weighted = zip(same, weights or [1.0] * len(same), strict=True)
            ours = [p.grad * weight for p, weight in weighted if p.grad is not None]
            mean = sum(ours[1:], ours[0]) / len(same) if ours else None
            for p in same:
                p.grad = None if mean is None else mean.clone()


def reference(case: Any, world: int) -> list[Notes]:
    """Notes of each rank's replica; its weight is its number of rows over the mean number."""
    models = [Replica(case.module(0, rank)) for rank in range(world)]
    runs = [ObservedRun(each, case.cls(each.parameters(), **case.options), rank, world, case=case, bare=each.module)
            for rank, each in enumerate(models)]  # fmt: skip
    sizes = [len(run.rows(0)[0]) for run in runs]
    in_lock_step(runs, ObservedRun.observed, [world * size / sum(sizes) for size in sizes])
    return [run.notes for run in runs]


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
        dtypes = {torch.float64, *(p.dtype for p in self.case.module(0, 0).parameters())}
        self.lowest = max(dtypes & UNIT_ROUNDOFF.keys(), key=UNIT_ROUNDOFF.__getitem__)
        self.order = [*self.want[0].of(-1, "weight")]
        self.in_step = self._differ("gradient") and not self._differ("weight")  # the optimizer reduces the gradients
        for tensors in [notes.tensors for notes in self.got if self.in_step]:
            for key in [key for key in tensors if key[1] == "gradient"]:
                del tensors[key]
        if not any(kind == "gradient" for notes in self.got for _, kind, _ in notes.tensors):
            self._derive()

    def _differ(self, kind: str) -> bool:
        """True if the tensors of a kind in the first step differ over the ranks, or a rank has none."""
        first, *rest = ({key: x for key, x in notes.tensors.items() if key[:2] == (0, kind)} for notes in self.got)
        return not first or any(
            each.keys() != first.keys()
            or any(
                x.shape != each[key].shape or largest(each[key] - x) > self.case.tolerance for key, x in first.items()
            )
            for each in rest
        )

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

    def own(self, wrong: Wrong) -> Tensor:
        """The gradients of each rank's own rows, stacked."""
        (step, _, name), want = wrong.key, self.want[wrong.rank].tensors.get(wrong.key, wrong.want)
        return torch.stack([notes.tensors.get((step, "local", name), torch.zeros_like(want)) for notes in self.want])


def first_of(name: str) -> str:
    """A tensor's name without the number that its later values in a step have."""
    return name.split(" no.")[0]


def shard(want: Tensor, got: Tensor, rank: int, world: int) -> Tensor:
    """This rank's part of a whole tensor, if what it has is such a part along one axis."""
    for dim in range(want.dim() if want.dim() == got.dim() else 0):
        if want.shape[dim] == world * got.shape[dim]:
            return want.chunk(world, dim)[rank]
    return want
