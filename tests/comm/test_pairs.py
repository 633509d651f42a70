"""Differentiable collectives: each against one process, and inputs that they must not change."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cs336_systems.comm import pairs, record
from cs336_systems.comm.events import Event
from tests.support import ranks

Formula = Callable[[list[Tensor]], list[Tensor]]


class Meaning(NamedTuple):
    """A pair in one process, from the x of all ranks to the y of all ranks; what is alike on every rank is one."""

    formula: Formula
    same_x: bool = False
    same_y: bool = False


def parts(x: Tensor, size: int) -> list[Tensor]:
    return list(x.tensor_split(size, 1))


def meanings(size: int) -> dict[str, Meaning]:
    return {
        "copy": Meaning(lambda xs: xs * size, same_x=True),
        "reduce": Meaning(lambda xs: [torch.stack(xs).sum(0)], same_y=True),
        "scatter": Meaning(lambda xs: parts(xs[0], size), same_x=True),
        "gather": Meaning(lambda xs: [torch.cat(xs, 1)], same_y=True),
        "gather_sequence": Meaning(lambda xs: [torch.cat(xs, 1)] * size),
        "reduce_sequence": Meaning(lambda xs: parts(torch.stack(xs).sum(0), size)),
    }


# What each sends forward and backward.
SENT = {
    "copy": (None, "all-reduce"),
    "reduce": ("all-reduce", None),
    "scatter": (None, "all-gather"),
    "gather": ("all-gather", None),
    "gather_sequence": ("all-gather", "reduce-scatter"),
    "reduce_sequence": ("reduce-scatter", "all-gather"),
}


def call(name: str, x: Tensor, group, dim: int = 1, label: str = "here") -> Tensor:
    operator = getattr(pairs, name)
    return operator(x, group, label) if name in ("copy", "reduce") else operator(x, dim, group, label)


def drawn(seed: int, *shape: int) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def layouts(x: Tensor) -> list[Tensor]:
    """The same values, contiguous and not; and one that repeats a row by a stride of 0."""
    return [x, x.transpose(0, -1).contiguous().transpose(0, -1), x[:1].expand_as(x) if len(x) else x]


def compare(
    call: Callable[[Tensor], Tensor], formula: Formula, xs: list[Tensor], kinds: tuple[int, int], at: tuple[int, int]
) -> list[Event]:
    """Value and gradient of a call, twice, are those of a formula in one process, from the x of all ranks to their y;
    `kinds` are the layouts of x and of the gradient of y, and `at` are the places of this rank's x and y. Returns the
    record of the call and its backward."""
    xs = [layouts(x)[kinds[0]] for x in xs]
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = formula(leaves)
    gs = [layouts(drawn(100 + i, *y.shape).to(y.dtype))[kinds[1]] for i, y in enumerate(ys)]
    (wanted,) = torch.autograd.grad(ys, leaves[at[0] : at[0] + 1], gs)
    x, g = xs[at[0]].detach().requires_grad_(), gs[at[1]]
    before = x._version, x.detach().clone(), g._version, g.clone()
    with record() as events:
        y = call(x)
        (gradient,) = torch.autograd.grad(y, x, g, retain_graph=True)
    assert torch.equal(y, ys[at[1]])
    assert torch.equal(gradient, wanted)
    assert y.dtype == gradient.dtype == x.dtype
    assert (x._version, g._version) == (before[0], before[2])
    assert torch.equal(x, before[1])
    assert torch.equal(g, before[3])
    assert torch.equal(torch.autograd.grad(y, x, g)[0], wanted), "a backward that runs twice gives the same"
    return events


def run_pair(name: str, dtype: torch.dtype, which_x: int, which_g: int, group) -> None:
    size, me = group.size(), group.rank()
    formula, same_x, same_y = meanings(size)[name]
    xs = [drawn(i, 3, 2 * size, 2).to(dtype) for i in range(1 if same_x else size)]
    at = 0 if same_x else me, 0 if same_y else me
    events = compare(lambda x: call(name, x, group), formula, xs, (which_x, which_g), at)
    sent = [(verb, way) for verb, way in zip(SENT[name], ("here", "here, gradient"), strict=True) if verb and size > 1]
    assert [(event.verb, event.label) for event in events] == sent, name
    # Whatever is gathered or reduced is counted whole.
    whole = 12 * size * (size if name in ("gather", "gather_sequence") else 1)
    assert all(event.nbytes == whole * dtype.itemsize and event.ranks == size for event in events), name


def pairs_case(group) -> None:
    for name in SENT:
        for which_x, which_g in itertools.product(range(3), repeat=2):
            run_pair(name, torch.float64, which_x, which_g, group)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            run_pair(name, dtype, 0, 0, group)
    if group.size() > 1:
        check_refusals(group)
    if group.size() == 2:
        check_jacobians(group)
    if group.size() == 1:
        x = drawn(1, 2, 3, 2)
        assert all(call(name, x, group) is x for name in SENT), "a group of one does nothing"


def check_jacobians(group) -> None:
    """Every rank differentiates the same function of the x of all ranks twice, in step; its y are used unlike by
    rank."""
    size, me = group.size(), group.rank()
    for name, (_, same_x, same_y) in meanings(size).items():

        def everything(x: Tensor, name=name, same_x=same_x, same_y=same_y) -> Tensor:
            mine = x if same_x else pairs.scatter(x, 0, group)[0]
            y = call(name, mine.sin(), group)
            return y.exp() if same_y else pairs.gather((y * (me + 2)).exp()[None], 0, group)

        x = torch.rand(() if same_x else (size,), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x = x[..., None, None].expand(*x.shape, 1, size).clone().requires_grad_()
        torch.manual_seed(0)  # the gradients that are drawn are the same on every rank
        assert torch.autograd.gradgradcheck(everything, x), name


def check_refusals(group) -> None:
    x, size = torch.zeros(2, 2 * group.size() + 1, 2, requires_grad=True), group.size()
    for name, dim in itertools.product(("scatter", "reduce_sequence"), (1, -2)):
        with pytest.raises(ValueError) as error:
            call(name, x, group, dim)
        assert str(error.value) == f"dimension {dim} of {tuple(x.shape)} does not divide over {size} ranks"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pairs(world_size):
    ranks.run(pairs_case, world_size)
