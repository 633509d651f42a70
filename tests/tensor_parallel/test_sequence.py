"""The gathered sequence: the bytes kept for backward, which gathers it again, and no context is left open."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.comm import pairs, record
from cs336_systems.tensor_parallel.layers import gather_input
from tests.support import ranks

ROWS, SEQ, D_MODEL = 2, 12, 4


class Reader(nn.Module):
    """Two layers that read the same input, whose product is the output; on request it breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(D_MODEL, D_MODEL, bias=False, dtype=torch.float64) for _ in range(2))
        self.broken = False

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.first(x).sin() * self.second(x) * scale
        if self.broken:
            raise RuntimeError("broken on request")
        return y


def make_reader(group, again: bool) -> Reader:
    torch.manual_seed(1)
    reader = Reader()
    gather_input(reader, group, "reader", again)
    return reader


def inputs(group) -> tuple[Tensor, Tensor]:
    """The whole sequence, and what each rank makes of it: the loss is the sum over the ranks."""
    whole = torch.randn(ROWS, SEQ, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights = torch.randn(group.size(), ROWS, SEQ, D_MODEL, dtype=torch.float64)
    return whole, weights


def hooks_are_closed() -> bool:
    """Outside every forward, what is saved is the tensor itself."""
    x = torch.ones(2, requires_grad=True)
    return (x * x).grad_fn._saved_self is x


def spy_on_gathers(monkeypatch) -> list[StorageWeakRef]:
    """Every whole sequence from now on, to see whether it lives."""
    storages = []
    for name in ("gather_sequence", "gather"):
        true_gather = getattr(pairs, name)

        def spied(*arguments, true_gather=true_gather):
            whole = true_gather(*arguments)
            storages.append(StorageWeakRef(whole.untyped_storage()))
            return whole

        monkeypatch.setattr(pairs, name, spied)
    return storages


def regather_case(group) -> None:
    size, me = group.size(), group.rank()
    whole, weights = inputs(group)
    with pytest.MonkeyPatch.context() as monkeypatch:
        storages = spy_on_gathers(monkeypatch)
        for again in (True, False):
            storages.clear()
            check_reader(group, again, whole, weights, storages)
    check_errors(group)
    reader = make_reader(group, True)
    part = whole.chunk(size, 1)[me].clone().requires_grad_()
    with torch.no_grad():
        y = reader(part, scale=3.0)
    assert torch.equal(y, Reader.forward(reader, whole, 3.0)), "other arguments pass"
    assert not y.requires_grad
    assert hooks_are_closed()
    check_partial_backward(group, whole)


def check_reader(group, again: bool, whole: Tensor, weights: Tensor, storages: list[StorageWeakRef]) -> None:
    """Two passes at once, one of them run backward twice: gradients, what lives when, and what is said."""
    size, me = group.size(), group.rank()
    reader, oracle = make_reader(group, again), make_reader(group, False)
    parts = [x.chunk(size, 1)[me].clone().requires_grad_() for x in (whole, whole + 1)]
    wholes = [x.clone().requires_grad_() for x in (whole, whole + 1)]
    readings = [Reader.forward(oracle, x) for x in wholes]
    total = (readings[0] * weights.sum(0)).sum() + (readings[1] * (weights**2).sum(0)).sum()
    wanted = torch.autograd.grad(total, wholes)
    with record() as events:
        outputs = [reader(part) for part in parts]
        gc.collect()
        assert [storage.expired() for storage in storages] == [again, again], "backward keeps the part alone"
        losses = [(y * w[me]).sum() for y, w in zip(outputs, (weights, weights**2), strict=True)]
        for turn in range(2):
            gradients = torch.autograd.grad(losses[1], [parts[1], *reader.parameters()], retain_graph=turn == 0)
            assert torch.allclose(gradients[0], wanted[1].chunk(size, 1)[me], rtol=1e-13, atol=1e-13)
            if again:
                assert len(storages) == 3 + turn, "one gather serves both layers"
                assert storages[-1].expired(), "let go after its last use"
        (gradient,) = torch.autograd.grad(losses[0], parts[0])
        assert torch.allclose(gradient, wanted[0].chunk(size, 1)[me], rtol=1e-13, atol=1e-13)
    said = [event.label for event in events]
    once = ["reader again"] * again + ["reader, gradient"]
    assert said == ["reader"] * 2 + once * 3


def check_errors(group) -> None:
    """An error in forward, before or in the module, leaves no context open, and the next pass is right."""
    reader = make_reader(group, True)
    part = torch.ones(ROWS, 2, D_MODEL, dtype=torch.float64, requires_grad=True)
    reader.broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken on request"):
            reader(part)
        assert hooks_are_closed()
    reader.broken = False
    with pytest.MonkeyPatch.context() as monkeypatch:

        def fail(*arguments):
            raise RuntimeError("no network")

        monkeypatch.setattr(pairs, "gather_sequence", fail)
        with pytest.raises(RuntimeError, match="no network"):
            reader(part)
    assert hooks_are_closed()
    reader(part).sum().backward()
    assert part.grad is not None
    assert hooks_are_closed()


def check_partial_backward(group, whole: Tensor) -> None:
    """A backward that needs one of the layers only, and then all."""
    size, me = group.size(), group.rank()
    reader = make_reader(group, True)
    part = whole.chunk(size, 1)[me].clone().requires_grad_()
    y = reader(part).sum()
    (first,) = torch.autograd.grad(y, reader.first.weight, retain_graph=True)
    y.backward()
    assert torch.equal(first, reader.first.weight.grad)
    x = whole.clone().requires_grad_()
    want = torch.autograd.grad(Reader.forward(reader, x).sum() * size, x)[0]
    assert torch.allclose(part.grad, want.chunk(size, 1)[me], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_gathered_sequence(world_size):
    ranks.run(regather_case, world_size)
