"""Reference: one copy of the bare module for each rank, all in this process, whose gradients are averaged by hand.

It shares no code with the library. A run's notes are the tensors that the ranks of a candidate are compared with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cs336_systems.check.models import Program, Replica, Run

Key = tuple[int, str, str]  # step, kind of tensor, name


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


def copied(tensor: Tensor) -> Tensor:
    """A copy in float64, of complex numbers both parts."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().to("cpu", torch.float64, copy=True)


@dataclass
class ObservedRun(Run):
    """A run of a case that notes what it computes: whole weights and gradients, by the bare module's names."""

    case: Any = None
    bare: Any = None  # the module itself
    notes: Notes = field(default_factory=Notes)
    number: int = -1  # of the step; -1 before the first

    def __post_init__(self) -> None:
        self.data, self.part, self.criterion = self.case.data, self.case.part, self.case.criterion

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.bare.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients, without those that are None."""
        return {name: p.grad for name, p in self.bare.named_parameters() if p.grad is not None}

    def norm(self, limit: float) -> Any:
        """The norm of all gradients, which are scaled down to the limit."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def optimizer_state(self) -> Any:
        return self.optimizer.state_dict()

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
        self.note("norm", {"": torch.as_tensor(self.norm(limit))})

    def save(self) -> tuple[dict[str, Any], Any]:
        whole = getattr(self.model, "gather_full_params", self.model.state_dict)()
        return tree_map_only(Tensor, lambda value: value.detach().clone(), (whole, self.optimizer_state()))

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
    runs = []
    for rank in range(world):
        model = Replica(case.module(0, rank))
        optimizer = case.cls(model.parameters(), **case.options)
        runs.append(ObservedRun(model, optimizer, rank, world, case=case, bare=model.module))
    sizes = [len(run.rows(0)[0]) for run in runs]
    in_lock_step(runs, ObservedRun.observed, [world * size / sum(sizes) for size in sizes])
    return [run.notes for run in runs]
