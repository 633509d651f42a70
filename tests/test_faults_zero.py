"""Errors of sharding alone: overflow on one rank, norms over shards, optimizers that cannot be divided, layers
hidden from their wrapper. The result is right, or every rank raises an error that names the cause, before a step."""

from collections.abc import Callable
from dataclasses import dataclass

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
    check,
    full_parameters,
    start,
)
from tests.support.parallel_cases import batch, rows_of, spread
from tests.test_faults_backward import stale_graph, two_backwards
from tests.test_faults_ddp import steps


class Probed(Net):
    """With a weight (4 rows) whose gradient a call chooses by rows: of two ranks, each owns two."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(1, 4, bias=False).double()

    def forward(self, tokens: Tensor, rows: list[float]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(rows, dtype=torch.float64)
        return super().forward(tokens), (self.side(torch.ones(1, dtype=torch.float64)) * chosen).sum()


def loss_with(run: Run, step: int, rows: list[float]) -> Tensor:
    tokens, targets = (rows_of(each, run.rank, run.world) for each in batch(step))
    logits, extra = run.model(tokens, rows)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + extra


def rows_with(value: float, row: int) -> list[float]:
    return [value if i == row else 1.0 for i in range(4)]


PROBED = Case(steps(), make=Probed)


def each_mode(group, case: str, modes: list[str]) -> None:
    for mode in modes:
        globals()[case](group, mode)


def scaler_case(group, mode: str) -> None:
    """inf or NaN on each rank, in a row of each rank, in pairs, between ordinary steps."""
    run = start(PROBED, mode, group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scale, moved = 2.0**10, 0
    inf, nan = float("inf"), float("nan")
    for step, (value, bad, row) in enumerate(((inf, 0, 0), (inf, 1, 3), (nan, 0, 3), (nan, 1, 0))):
        for poison in (1.0, value if group.rank() == bad else 1.0):
            before = {name: p.clone() for name, p in full_parameters(run.model).items()}
            scaler.scale(loss_with(run, step, rows_with(poison, row))).backward()
            run.model.finish_gradient_synchronization()
            scaler.unscale_(run.optimizer)
            run.model.clip_grad_norm(1.0)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            after = full_parameters(run.model)
            moved += any(not torch.equal(before[name], p) for name, p in after.items())
        scale /= 2
        assert scaler.get_scale() == scale, f"{mode}: {value} on rank {bad} in row {row}"
        assert moved == step + 1, f"{mode}: {value} on rank {bad} in row {row} reached the weights"
    assert all(p.isfinite().all() for p in after.values())
    assert spread(group, list(after.values())) == 0


def test_overflow_on_one_rank_makes_every_rank_skip_and_halve():
    ranks.run(each_mode, 2, case="scaler_case", modes=KINDS)


def nan_case(group, mode: str) -> None:
    """Without a scaler every rank sees it: in the norm of every type, and in its weights after the step."""
    for bad, (row, norm_type) in enumerate((row, kind) for row in (0, 3) for kind in (1.0, 2.0, float("inf"))):
        run = start(PROBED, mode, group)
        loss_with(run, 0, rows_with(float("nan") if group.rank() == bad % 2 else 1.0, row)).backward()
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


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Linear):
    """A layer whose output is not a tensor."""

    kind: type = Hidden

    def forward(self, x: Tensor):
        return self.kind(super().forward(x))


class Hider(nn.Module):
    def __init__(self, kind: type = Hidden, borrowed: bool = False) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(11, 6), nn.Linear(6, 6), Hiding(6, 11)
        self.second.kind, self.borrowed = kind, borrowed
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens))
        return self.second(x).value + (F.linear(x, self.embedding.weight) if self.borrowed else 0)


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


def fail_in_forward(run: Run):
    shorten = run.module.last.register_forward_pre_hook(lambda layer, args: args[0][..., :3])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run.loss(0)
    shorten.remove()
    yield from steps(2)(run)


def optimizer_from_before(run: Run):
    """The optimizer holds the weights that the module had before it was wrapped."""
    run.optimizer = torch.optim.SGD(run.module.before, lr=0.1)
    run.remember()
    run.backward(0)
    yield
    run.step()


def keep_parameters(module: nn.Module, rank: int) -> None:
    module.before = list(module.parameters())


def clipped_by_torch(run: Run):
    for step in range(2):
        run.backward(step)
        yield
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.step()


def with_penalty(penalty: Callable[[nn.Module], Tensor]) -> Callable:
    def program(run: Run):
        for step in range(2):
            (run.loss(step) + 0.1 * penalty(run.module)).backward()
            yield
            run.step()

    return program


def sum_of_norms(module: nn.Module) -> Tensor:
    return sum(p.norm() + p.abs().mean() for p in module.parameters())


def not_orthogonal(module: nn.Module) -> Tensor:
    return (module.shared.weight.T @ module.shared.weight - torch.eye(5)).square().sum()


def changed_by_hand(change: Callable[[Tensor], object]) -> Callable:
    def program(run: Run):
        with torch.no_grad():
            torch.manual_seed(5)
            change(run.module.shared.weight)
        yield from steps(2)(run)

    return program


CASES = {
    "torch's clip_grad_norm_ after finish": Case(
        clipped_by_torch, inexact=("stage 3",), modes=(*KINDS[:3], "stage 3")
    ),
    "a penalty of norms and means of all parameters": Case(with_penalty(sum_of_norms), inexact=("stage 3",)),
    "a penalty that multiplies a weight with itself": Case(
        with_penalty(not_orthogonal), {"stage 3": "T() of shared.weight would see rows"}, inexact=ALL[4:]
    ),
    "rows of a weight normalised by hand": Case(changed_by_hand(lambda w: w.div_(w.norm(dim=1, keepdim=True)))),
    "columns of a weight normalised by hand": Case(
        changed_by_hand(lambda w: w.div_(w.norm(dim=0))), {"stage 3": "norm() of shared.weight would see rows"}
    ),
    "a weight filled with random numbers after wrapping": Case(
        changed_by_hand(nn.init.xavier_normal_), {"stage 3": "normal() of shared.weight would see rows"}
    ),
    "one weight on two ranks": Case(steps(), make=One),
    "one weight, two backward passes": Case(two_backwards(), make=One, inexact=ALL[2:]),
    "one weight, a scaler": Case(scaled, make=One),
    "backward through a graph from before the step, weights only": Case(
        stale_graph, "modified by an inplace operation", make=Hider
    ),
    "a layer that returns a dataclass": Case(steps(), make=Hider),
    "a dataclass, and the embedding's weight read outside": Case(steps(), make=lambda: Hider(Hidden, True)),
    "a layer that returns an object": Case(
        steps(), {"stage 3": "second.weight returns a Opaque, in which FSDP finds no tensor"},
        make=lambda: Hider(Opaque),
    ),
    "a layer that returns an object with slots": Case(
        steps(), {"stage 3": "second.weight returns a Slotted, in which FSDP finds no tensor"},
        make=lambda: Hider(Slotted),
    ),
    "layers called in another order": Case(steps(), make=Reversed),
    "layers called in another order, one frozen": Case(steps(), make=Reversed, prepare=freeze_middle),
    "layers called in another order, one unused on one rank": Case(
        steps(skip=lambda step, rank: rank == 1), {"stage 3": "waited in"}, make=Reversed, waits=True
    ),
    "exception in forward, then steps": Case(fail_in_forward),
    "an optimizer from before wrapping": Case(
        optimizer_from_before, {"stage 3": "SGD was made before embedding.weight was sharded"},
        prepare=keep_parameters, modes=("bucketed", "stage 3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])


def test_fewer_rows_than_ranks_are_right():
    check(__name__, "one weight on two ranks", CASES["one weight on two ranks"], world=3)


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
