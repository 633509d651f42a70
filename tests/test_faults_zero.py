"""Errors of sharding alone: overflow on one rank, norms over shards, optimizers that cannot be divided, layers
hidden from their wrapper. The result is right, or every rank raises an error that names the cause, before a step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.fsdp import FSDP
from tests.support import ranks
from tests.support.fault_cases import (
    ALL,
    KINDS,
    MODES,
    TOLERANCE,
    Case,
    Net,
    Replica,
    Run,
    change,
    check,
    full_parameters,
    start,
    steps,
)
from tests.support.parallel_cases import spread
from tests.test_faults_backward import stale_graph, two_backwards
from tests.test_faults_ddp import WAITED


class Probed(Net):
    """With a weight (4 rows) whose gradient a call chooses by rows: of two ranks, each owns two."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(1, 4, bias=False).double()

    def forward(self, tokens: Tensor, rows: list[float]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(rows, dtype=torch.float64)
        return super().forward(tokens), (self.side(torch.ones(1, dtype=torch.float64)) * chosen).sum()


def probe(run: Run, step: int, row: int, value: float, scaler: torch.amp.GradScaler | None = None) -> None:
    """The backward of a loss with a number in a row."""
    tokens, targets = run.rows(step)
    logits, extra = run.model(tokens, [value if i == row else 1.0 for i in range(4)])
    loss = run.criterion(logits, targets) + extra
    (scaler.scale(loss) if scaler else loss).backward()


PROBED = Case(steps(), make=Probed)


def each_mode(group, case: str, modes: list[str]) -> None:
    for mode in modes:
        globals()[case](group, mode)


def scaler_case(group, mode: str) -> None:
    """inf or NaN on each rank, in a row of each rank, in pairs, between ordinary steps."""
    run = start(PROBED, mode, group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    moved, (inf, nan) = 0, (float("inf"), float("nan"))
    for step, (value, bad, row) in enumerate(((inf, 0, 0), (inf, 1, 3), (nan, 0, 3), (nan, 1, 0))):
        for poison in (1.0, value if group.rank() == bad else 1.0):
            before = {name: p.clone() for name, p in full_parameters(run.model).items()}
            probe(run, step, row, poison, scaler)
            run.model.finish_gradient_synchronization()
            scaler.unscale_(run.optimizer)
            run.model.clip_grad_norm(1.0)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            after = full_parameters(run.model)
            moved += any(not torch.equal(before[name], p) for name, p in after.items())
        assert scaler.get_scale() == 2.0 ** (9 - step), f"{mode}: {value} on rank {bad} in row {row}"
        assert moved == step + 1, f"{mode}: {value} on rank {bad} in row {row} reached the weights"
    assert all(p.isfinite().all() for p in after.values())
    assert spread(group, list(after.values())) == 0


def test_overflow_on_one_rank_makes_every_rank_skip_and_halve():
    ranks.run(each_mode, 2, case="scaler_case", modes=KINDS)


def nan_case(group, mode: str) -> None:
    """Without a scaler every rank sees it: in the norm of every type, and in its weights after the step."""
    for bad, (row, norm_type) in enumerate((row, kind) for row in (0, 3) for kind in (1.0, 2.0, float("inf"))):
        run = start(PROBED, mode, group)
        probe(run, 0, row, float("nan") if group.rank() == bad % 2 else 1.0)
        run.model.finish_gradient_synchronization()
        norm = run.model.clip_grad_norm(1.0, norm_type)
        assert norm.isnan(), f"{mode}: norm {norm_type} is {norm}, NaN on rank {bad % 2} in row {row}"
        run.step()
        assert full_parameters(run.model)["side.weight"][row].isnan()


def test_nan_on_one_rank_is_seen_by_every_rank_and_norm():
    ranks.run(each_mode, 2, case="nan_case", modes=KINDS)


class Complex(nn.Module):
    """A complex weight beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6).double()
        self.rotation = nn.Parameter(torch.randn(6, 11, dtype=torch.complex128))

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.first(tokens.double() / 11).to(torch.complex128) @ self.rotation
        return (y.real + y.imag)[:, None].expand(-1, 4, -1)


def norm_case(group, mode: str) -> None:
    """The norm and what clipping makes of the gradients are one process's, complex elements by absolute value."""
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        case = Case(steps(), make=Complex, cls=torch.optim.SGD, options={"lr": 1.0})
        run = start(case, mode, group)
        alone = Run(Replica(case.module(0, 0)), None, 0, 1)
        alone.backward(0)
        wanted = alone.module
        flat = torch.cat([p.grad.abs().flatten() for p in wanted.parameters()])
        want = torch.linalg.vector_norm(flat, norm_type)
        run.backward(0)
        run.model.finish_gradient_synchronization()
        norm = run.model.clip_grad_norm(want.item() / 2, norm_type)
        torch.testing.assert_close(norm, want, rtol=TOLERANCE, atol=0)
        run.step()
        for name, p in full_parameters(run.model).items():
            expected = wanted.get_parameter(name) - wanted.get_parameter(name).grad / 2
            torch.testing.assert_close(p, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("modes", [list(MODES)[:4], list(MODES)[4:]], ids=["wrappers", "stages"])
def test_norms_of_every_type_are_those_of_one_process(modes):
    ranks.run(each_mode, 3, case="norm_case", modes=modes)


class One(nn.Module):
    """One weight (1 2): fewer rows than ranks, and on three ranks fewer elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False).double()

    def forward(self, tokens: Tensor, skip: bool = False) -> Tensor:
        x = torch.stack((tokens.double() / 11, torch.ones_like(tokens).double()), -1)
        return self.layer(x) * torch.arange(11)


def scaled(run: Run):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        scaler.scale(run.loss(step)).backward()
        yield
        scaler.step(run.optimizer)
        run.remember()  # a rank that owns nothing fails here, when the others have made their step
        scaler.update()
        run.optimizer.zero_grad()


@dataclass
class Hidden:
    value: Tensor


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Linear):
    """A layer whose output is not a tensor."""

    def __init__(self, kind: type) -> None:
        super().__init__(6, 11)
        self.kind = kind

    def forward(self, x: Tensor):
        return self.kind(super().forward(x))


class Hider(nn.Module):
    """A layer's hidden output, and the embedding's weight, which is read outside."""

    def __init__(self, kind: type = Hidden) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(11, 6), nn.Linear(6, 6), Hiding(kind)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens))
        return self.second(x).value + F.linear(x, self.embedding.weight)


class Reversed(nn.Module):
    """Layers that are called in another order than they are registered in; one gets its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6 if i else 11) for i in range(5))
        self.embedding = nn.Embedding(11, 6)
        self.double()

    def forward(self, tokens: Tensor, skip: bool = False) -> Tensor:
        x = self.embedding(tokens)
        for layer in list(self.layers)[: 1 if skip else 0 : -1]:
            x = x + torch.tanh(layer(input=x))
        return self.layers[0](x)


def freeze_middle(module: Reversed, rank: int) -> None:
    module.layers[2].requires_grad_(False)


def fail_in_forward(run: Run) -> None:
    shorten = run.module.last.register_forward_pre_hook(lambda layer, args: args[0][..., :3])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run.loss(0)
    shorten.remove()


def by_hand(act: Callable[[Tensor], object]) -> Callable:
    @torch.no_grad()
    def with_seed(run: Run) -> None:
        torch.manual_seed(5)
        act(run.module.shared.weight)

    return change(with_seed)


CASES = {
    "rows of a weight normalised by hand": Case(by_hand(lambda w: w.div_(w.norm(dim=1, keepdim=True)))),
    "columns of a weight normalised by hand": Case(
        by_hand(lambda w: w.div_(w.norm(dim=0))), {"stage 3": "norm() of shared.weight would see rows"}
    ),
    "one weight on two ranks": Case(steps(), make=One, worlds=(2, 3)),
    "one weight, two backward passes": Case(steps(of=two_backwards), make=One, inexact=ALL[2:]),
    "one weight, a scaler": Case(scaled, make=One),
    "backward through a graph from before the step, weights only": Case(
        stale_graph, "modified by an inplace operation", make=Hider
    ),
    "a layer that returns a dataclass, and the embedding's weight read outside": Case(steps(), make=Hider),
    "a layer that returns an object": Case(
        steps(), {"stage 3": "second.weight returns a Slotted, in which FSDP finds no tensor"},
        make=partial(Hider, Slotted),
    ),
    "layers called in another order, one frozen": Case(steps(), make=Reversed, prepare=freeze_middle),
    "layers called in another order, one unused on one rank": Case(
        steps(skip=lambda step, rank: rank == 1), WAITED, make=Reversed, waits=True
    ),
    "exception in forward, then steps": Case(change(fail_in_forward)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])


def precision_case(group) -> None:
    """A forward that fails in half precision leaves every bias the parameter that it was."""
    model = FSDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), compute_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))
    assert isinstance(model.module[0].bias, nn.Parameter)
    model(torch.ones(2, 3)).sum().backward()
    model.finish_gradient_synchronization()
    assert all(p.grad is not None for p in model.parameters())


def test_a_failed_forward_in_half_precision_leaves_the_masters_in_place():
    ranks.run(precision_case, 2)
