"""Recorded step of each wrapper on a small model: every event, and what both ranks hold after it.

One process imitates one rank and then the other (`fake_ranks`): what a rank launches and keeps depends on its number
alone, not on the other's values.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs336_systems import ddp
from cs336_systems.buffers.shard_tensor import raw
from cs336_systems.comm import Event, fake_ranks
from cs336_systems.comm.events import records
from cs336_systems.fsdp import FSDP
from cs336_systems.sharded_optimizer import ShardedOptimizer

RANKS, LAYERS, WIDTH, ROWS = 2, 4, 64, 8
WHOLE = WIDTH * WIDTH * 4  # bytes of a layer's weight, and of its gradient; AdamW's state has twice as many
BUCKET_MB = 2 * WHOLE / 1e6  # of two layers
BUCKETED = partial(ddp.BucketedDDP, bucket_size_mb=BUCKET_MB)
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "NaiveDDP": ddp.NaiveDDP,
    "FlatDDP": ddp.FlatDDP,
    "OverlappedDDP": ddp.OverlappedDDP,
    "BucketedDDP": BUCKETED,
    "ZeRO 1 (ShardedOptimizer)": BUCKETED,
    "ZeRO 3 (FSDP)": FSDP,
}
STATES = ("absent", "whole", "slice", "own gradient", "being sent", "mean gradient")


class Held(NamedTuple):
    """Bytes of a layer's parameter, gradient or optimizer state on a rank, and which of `STATES` they are in."""

    nbytes: int
    state: int


class Recorder(list[Event]):
    """Log of a rank's step. A row is what happened, bytes that the rank sends, and what it holds as soon as that has
    happened: for each kind (parameters, gradients, optimizer state) and each layer a `Held`."""

    def __init__(self) -> None:
        super().__init__()
        self.observer: Observer | None = None
        self.rows = list[list[Any]]()

    def append(self, event: Event) -> None:
        """A collective is being launched."""
        self.note(f"{event.verb} of {event.label} starts", round(event.bytes_sent), launching=event.label)

    def note(self, what: str, sent: int = 0, **seen: Any) -> None:
        if self.observer is not None:
            self.rows.append([what, sent, self.observer.look(**seen)])


class Observer:
    """The part of each layer that one rank holds, read from the wrapper and the optimizer."""

    def __init__(self, wrapped: Any, optimizer: Any) -> None:
        self.wrapped, self.optimizer = wrapped, optimizer
        self.sharded, self.reduced = getattr(wrapped, "sharded", []), set[int]()

    def look(self, launching: str = "", fresh: int = -1) -> list[list[Held]]:
        """By kind and layer. A collective of this label is being launched, of which the wrapper does not know yet; the
        gradient of layer `fresh` has been computed, and autograd has yet to deliver it."""
        of = self._of_slices if self.sharded else self._of_wholes
        return [list(kind) for kind in zip(*(of(i, launching, fresh == i) for i in range(LAYERS)), strict=True)]

    def _of_wholes(self, layer: int, launching: str, fresh: bool) -> tuple[Held, Held, Held]:
        parameter = list(self.wrapped.module.parameters())[layer]
        bucket = self.wrapped.bucket_of[parameter]
        if moving := bucket.work is not None or bucket.label == launching:
            self.reduced.add(layer)
        reduced = "being sent" if moving else "mean gradient" if layer in self.reduced else "own gradient"
        updated = "being sent" if launching.startswith("updated parameters") else "whole"
        gradient = _held(0 if parameter.grad is None else parameter.grad.nbytes, reduced)
        return _held(parameter.nbytes, updated), gradient, self._of_optimizer(parameter)

    def _of_slices(self, layer: int, launching: str, fresh: bool) -> tuple[Held, Held, Held]:
        weight = self.sharded[layer]
        bucket, gathered = weight.gradients, weight.full.untyped_storage().nbytes()
        state = "whole" if weight.unsharded else "being sent" if gathered else "slice"
        with raw():
            mine = None if weight.promised else weight.shard.grad
            own = _storages((weight.full.grad, bucket.flat)) or WHOLE * fresh
            mean = _storages((bucket.shard, mine))
        moving = bucket.work is not None or bucket.label == launching
        of_gradient = "being sent" if moving else "own gradient" if own else "mean gradient"
        parameter = _held(weight.shard.nbytes + gathered, state)
        return parameter, _held(own + mean, of_gradient), self._of_optimizer(weight.shard)

    def _of_optimizer(self, parameter: nn.Parameter) -> Held:
        with raw():
            nbytes = _storages(v for v in self.optimizer.state.get(parameter, {}).values() if v.ndim)
        return _held(nbytes, "whole" if nbytes == 2 * WHOLE else "slice")


def recorded(name: str, rank: int) -> list[list[Any]]:
    """Rows of `Recorder` for the second step of a wrapper, when the optimizer has its state."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    recorder, computed = Recorder(), "gradient of layer {} computed".format
    for number, layer in enumerate(layers):  # before the wrapper's own hooks
        layer.register_forward_hook(lambda *_, n=number: recorder.note(f"forward of layer {n}"))
        if WRAPPERS[name] is not FSDP:  # which has tensors of its own for the gradients
            layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: recorder.note(computed(n)))
    with fake_ranks(rank, RANKS):
        wrapped = WRAPPERS[name](nn.Sequential(*layers))
        for number, weight in enumerate(getattr(wrapped, "sharded", ())):
            weight.full.register_hook(lambda _, n=number: recorder.note(computed(n), fresh=n))
        kind = partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW) if "Optimizer" in name else torch.optim.AdamW
        optimizer = kind(wrapped.parameters(), lr=1e-3)
        _step(wrapped, optimizer, recorder)
        recorder.observer = Observer(wrapped, optimizer)
        with _recording(recorder):
            _step(wrapped, optimizer, recorder)
    return recorder.rows


def steps() -> dict[str, Any]:
    """Events of every wrapper, bytes that each rank sends in each and has sent so far, and what ranks 0 and 1 hold
    after it."""
    found, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors as small as these
    both_ranks = {name: [recorded(name, rank) for rank in range(RANKS)] for name in WRAPPERS}
    torch.set_num_threads(threads)
    for name, ranks in both_ranks.items():
        rows, so_far = list[Any](), 0
        for both in zip(*ranks, strict=True):
            what, sent = {(each[0], each[1]) for each in both}.pop()
            so_far += sent
            rows.append([what, sent, so_far, *(each[2] for each in both)])
        found[name] = rows
    return {"states": STATES, "whole": [WHOLE, WHOLE, 2 * WHOLE], "rows": found}


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    records.append(recorder)
    try:
        yield
    finally:
        records[:] = [each for each in records if each is not recorder]


def _step(wrapped: Any, optimizer: Any, recorder: Recorder) -> None:
    output = wrapped(torch.ones(ROWS, WIDTH))
    recorder.note("loss computed")
    output.square().mean().backward()
    recorder.note("backward has ended")
    wrapped.finish_gradient_synchronization()
    recorder.note("gradient synchronization has finished")
    optimizer.step()
    recorder.note("AdamW has stepped")
    optimizer.zero_grad()
    wrapped.zero_grad()
    recorder.note("gradients freed")


def _held(nbytes: int, state: str) -> Held:
    return Held(nbytes, STATES.index(state) if nbytes else 0)


def _storages(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the different storages of some tensors."""
    return sum({(s := each.untyped_storage()).data_ptr(): s.nbytes() for each in tensors if each is not None}.values())
