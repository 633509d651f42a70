"""Reference: one copy of the bare module for each rank, all in this process, whose gradients are averaged by hand.

It shares no code with the library. A run's notes are the tensors that the ranks of a candidate are compared with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336_systems.check.models import Program, Replica, Run

Key = tuple[int, str, str]  # step, kind of tensor, name


@dataclass
class Notes:
    """Tensors of one rank in the order in which they were computed, by (step, kind, name), and their dtypes.

    Kinds: weight, buffer, loss, gradient, norm; of the reference also local (a rank's own gradient before the mean) and
    part (of a single backward pass). The first weights are of step -1.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    dtypes: dict[Key, str] = field(default_factory=dict)
    error: str = ""

    def add(self, step: int, kind: str, name: str, tensor: Tensor) -> None:
        """A copy in float64; the second of a key gets a number."""
        key, number = (step, kind, name), 1
        while key in self.tensors:
            number += 1
            key = (step, kind, f"{name} no. {number}".strip())
        self.tensors[key] = tensor.detach().to("cpu", torch.float64, copy=True)
        self.dtypes[key] = str(tensor.dtype).removeprefix("torch.")


class Side:
    """Access to a rank's whole weights and whole gradients, by the bare module's names; `traced`: each backward pass's
    own gradients are noted, too."""

    def __init__(self, module: nn.Module, traced: bool = False) -> None:
        self.module, self.traced = module, traced

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients, without those that are None."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def clip(self, run: Run, limit: float) -> Any:
        """The norm of all gradients, which are scaled down to the limit."""
        return torch.nn.utils.clip_grad_norm_(run.model.parameters(), limit)

    def optimizer_state(self, optimizer: Any) -> Any:
        return optimizer.state_dict()


@dataclass
class ObservedRun(Run):
    """A run that notes what it computes."""

    side: Any = None
    notes: Notes = field(default_factory=Notes)
    number: int = 0  # of the step

    def note(self, kind: str, tensors: dict[str, Tensor], step: int | None = None) -> None:
        for name, tensor in tensors.items():
            self.notes.add(self.number if step is None else step, kind, name, tensor)

    def loss(self, step: int, **options: Any) -> Tensor:
        loss = super().loss(step, **options)
        self.note("loss", {"": loss})
        return loss

    def backward_of(self, loss: Tensor, **options: Any) -> None:
        """Backward; the reference notes what it has added to each gradient."""
        before = {name: g.clone() for name, g in self.side.gradients().items()} if self.side.traced else {}
        loss.backward(**options)
        if self.side.traced:
            after = self.side.gradients().items()
            self.note("part", {name: g - before[name] if name in before else g for name, g in after})

    def step(self) -> None:
        """An update, and the weights after it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.note("weight", self.side.weights())
        self.number += 1

    def train(self, step: int, **options: Any) -> Iterator[None]:
        self.backward(step, **options)
        yield
        self.step()

    def clip(self, limit: float) -> None:
        self.note("norm", {"": torch.as_tensor(self.side.clip(self, limit))})

    def save(self) -> tuple[dict[str, Any], Any]:
        whole = getattr(self.model, "gather_full_params", self.model.state_dict)()
        state = whole, self.side.optimizer_state(self.optimizer)
        return tree_map_only(Tensor, lambda value: value.detach().clone(), state)

    def load(self, saved: tuple[dict[str, Any], Any]) -> None:
        inner = hasattr(self.model, "gather_full_params")
        (self.model.module if inner else self.model).load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])


def in_lock_step(runs: Sequence[Any], program: Program, shares: Sequence[float] = ()) -> None:
    """Run a program on replicas; where it yields, each gradient becomes the mean over them, or the sum weighted by the
    replicas' shares of the batch."""
    observed = [run for run in runs if isinstance(run, ObservedRun)]
    for _ in zip_longest(*(program(run) for run in runs)):
        for run in observed:
            run.note("local", run.side.gradients())
        for same in zip(*(run.model.parameters() for run in runs), strict=True):
            weights = shares or [1.0] * len(same)
            ours = [p.grad if not shares else p.grad * weight * len(same)
                    for p, weight in zip(same, weights, strict=True) if p.grad is not None]  # fmt: skip
            mean = sum(ours[1:], ours[0]) / len(same) if ours else None
            for p in same:
                p.grad = None if mean is None else mean.clone()
        for run in observed:
            run.note("gradient", run.side.gradients())


def reference(case: Any, world: int) -> list[Notes]:
    """Notes of each rank's replica."""
    modules = [case.module(0, rank) for rank in range(world)]
    runs = []
    for rank, module in enumerate(modules):
        model = Replica(module)
        run = ObservedRun(
            model, case.cls(model.parameters(), **case.options), rank, world, side=Side(module, traced=True)
        )
        case.adapt(run)
        run.note("buffer", dict(module.named_buffers()), step=-1)
        run.note("weight", run.side.weights(), step=-1)
        runs.append(run)
    sizes = [len(run.rows(0)[0]) for run in runs]
    in_lock_step(runs, case.program, [] if len(set(sizes)) == 1 else [size / sum(sizes) for size in sizes])
    for run in runs:
        run.note("buffer", dict(run.side.module.named_buffers()))
    return [run.notes for run in runs]
