"""Recorded step of each wrapper: the library runs as rank 0 of two on a small model, and every event is written down.

One process stands for two ranks (`fake_ranks`): what a rank launches, and what it keeps, does not depend on the other.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems import ddp
from cs336_systems.comm import Event, fake_ranks, record
from cs336_systems.fsdp import FSDP
from cs336_systems.sharded_optimizer import ShardedOptimizer

RANKS, WIDTH, ROWS = 2, 64, 8
BUCKET_MB = 0.04  # holds two of the model's layers
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "NaiveDDP": ddp.NaiveDDP,
    "FlatDDP": ddp.FlatDDP,
    "OverlappedDDP": ddp.OverlappedDDP,
    "BucketedDDP": partial(ddp.BucketedDDP, bucket_size_mb=BUCKET_MB),
    "ShardedOptimizer": partial(ddp.BucketedDDP, bucket_size_mb=BUCKET_MB),
    "FSDP": FSDP,
}


class Recorder:
    """Log of one step: rows of [what happened, bytes that the rank sends, bytes of parameters, gradients and optimizer
    state that it holds after]."""

    def __init__(self, events: list[Event]) -> None:
        self.events, self.seen, self.rows = events, 0, list[list[Any]]()
        self.held: dict[str, Callable[[], Iterable[Tensor | None]]] = {}

    def note(self, what: str, sent: float = 0) -> None:
        """Write down collectives since the last row, and this."""
        new, self.seen = self.events[self.seen :], len(self.events)
        for event in new:
            self._row(f"launch {event.verb} of {event.label}", event.bytes_sent)
        self._row(what, sent)

    def _row(self, what: str, sent: float) -> None:
        self.rows.append([what, round(sent), *(storages(tensors()) for tensors in self.held.values())])


def storages(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the different storages of some tensors."""
    found = {(s := each.untyped_storage()).data_ptr(): s.nbytes() for each in tensors if each is not None}
    return sum(found.values())


def recorded(name: str) -> list[list[Any]]:
    """Rows of `Recorder` for the second step of a wrapper, when the optimizer has its state."""
    with fake_ranks(0, RANKS), record() as events:
        torch.manual_seed(0)
        layers, recorder = [nn.Linear(WIDTH, WIDTH) for _ in range(4)], Recorder(events)
        _watch(layers, recorder, name == "FSDP")
        model = WRAPPERS[name](nn.Sequential(*layers))
        for weight in getattr(model, "sharded", ()):  # a gradient hook of a shard would never run
            weight.full.register_hook(lambda _, w=weight: recorder.note(f"gradient of {w.name} computed"))
        kind = partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW) if name == "ShardedOptimizer" else None
        optimizer = (kind or torch.optim.AdamW)(model.parameters(), lr=1e-3)
        recorder.held = {
            "parameters": lambda: [*model.parameters(), *(each.full for each in getattr(model, "sharded", ()))],
            "gradients": lambda: (parameter.grad for parameter in _all(model)),
            "optimizer state": lambda: (
                value for state in getattr(optimizer, "inner", optimizer).state.values() for value in state.values() if isinstance(value, Tensor)
            ),
        }
        _step(model, optimizer, lambda what: None)
        recorder.seen, recorder.rows = len(events), []
        _step(model, optimizer, recorder.note)
    return recorder.rows


def steps() -> dict[str, list[list[Any]]]:
    """The recorded step of every wrapper."""
    return {name: recorded(name) for name in WRAPPERS}


def _all(model: Any) -> list[nn.Parameter]:
    return [*model.parameters(), *(each.full for each in getattr(model, "sharded", ()))]


def _watch(layers: list[nn.Linear], recorder: Recorder, sharded: bool) -> None:
    """Hooks that note when a layer has run and when a gradient is ready, registered before the wrapper's own."""
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, n=number: recorder.note(f"forward of layer {n}"))
        for kind, parameter in layer.named_parameters():
            if not (sharded and kind == "weight"):
                what = f"gradient of {number}.{kind} ready"
                parameter.register_post_accumulate_grad_hook(lambda _, w=what: recorder.note(w))


def _step(model: Any, optimizer: Any, note: Callable[[str], None]) -> None:
    output = model(torch.ones(ROWS, WIDTH))
    note("loss")
    output.square().mean().backward()
    note("backward ends")
    model.finish_gradient_synchronization()
    note("all gradients averaged")
    optimizer.step()
    note("optimizer steps")
    optimizer.zero_grad()
    model.zero_grad()
    note("gradients freed")
