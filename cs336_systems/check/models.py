"""A small model with awkward parameters, its batches, and one rank's part of a training program over them.

A program is a generator over a `Run`; where it yields, the ranks' gradients are synchronised.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Tied embedding and head, a layer that is used twice, layers that a call may leave out, a scalar, a buffer; the
    first, second and fourth can be switched off."""

    calls: Tensor

    def __init__(self, tied: bool = True, shared: bool = True, scalar: bool = True) -> None:
        super().__init__()
        self.is_shared = shared
        self.embedding = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 5)
        self.shared = nn.Linear(5, 5, bias=False)
        self.deep = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(4))
        self.optional = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.last = nn.Linear(5, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.scale: Any = nn.Parameter(torch.ones(())) if scalar else 1.0
        self.register_buffer("calls", torch.zeros(3, dtype=torch.int64))
        self.double()

    def forward(
        self, tokens: Tensor, skip: bool = False, recompute: str = "", keep: list[Tensor] | None = None, boom: str = ""
    ) -> Tensor:
        """Logits (rows seq 11) of tokens (rows seq); `skip` leaves out the layer `optional`."""
        self.calls += 1
        first = x = torch.tanh(self.first(self.embedding(tokens)))
        shared: Any = self.shared
        if recompute:
            shared = partial(checkpoint, self.shared, use_reentrant=recompute == "reentrant")
        y = shared(x)
        x = x + (shared(torch.tanh(y)) if self.is_shared else y)
        for layer in self.deep:
            x = torch.tanh(layer(x))
        side = x if skip else torch.tanh(self.optional(x))
        if keep is None:
            x = x + side
        else:
            keep.append(side)  # an output that the loss does not use
        x = self.norm(x) * self.scale

        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("a backward that fails")

        if boom:
            (x if boom == "early" else first).register_hook(fail)  # early in backward, or late
        return self.head(self.last(x))


def batch(step: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs and targets (rows 4); 12 rows divide over 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens, targets = torch.randint(11, (2, rows, 4), generator=generator)
    return tokens, targets


def rows_of(full: Tensor, rank: int, world_size: int) -> Tensor:
    """This rank's rows, as many as every other's."""
    return full.chunk(world_size)[rank]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (rows seq classes) with targets (rows seq)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Replica(nn.Module):
    """Wrapper of the reference: it has the wrappers' methods, which do nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    no_sync = staticmethod(nullcontext)


@dataclass
class Run:
    """One rank's part of a training run."""

    model: Any
    optimizer: Any
    rank: int
    world: int
    data: Callable[[int], tuple[Tensor, Tensor]] = batch
    part: Callable[[Tensor, int, int], Tensor] = rows_of
    criterion: Callable[[Tensor, Tensor], Tensor] = token_loss

    def rows(self, step: int) -> tuple[Tensor, ...]:
        return tuple(self.part(each, self.rank, self.world) for each in self.data(step))

    def loss(self, step: int, **options: Any) -> Tensor:
        tokens, targets = self.rows(step)
        return self.criterion(self.model(tokens, **options), targets)

    def backward(self, step: int, **options: Any) -> None:
        self.backward_of(self.loss(step, **options))

    def backward_of(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Program = Callable[[Any], Iterator[None]]
