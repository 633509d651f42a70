"""FusedAdamW's state: loading it both ways, copies, autograd's notice of a step, and what is refused."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from cs336_systems.optim.adamw import AdamW
from cs336_systems.optim.master_weights import MasterAdamW
from kernels.adamw import FusedAdamW
from tests.support.adamw_cases import HYPER, assert_close, copies, make, train

pytestmark = pytest.mark.usefixtures("where_triton_runs")


def test_autograd_notices_the_step():
    (p,) = make([(5,)])
    loss = (p**2).sum()
    p.grad = torch.ones(5)
    version = p._version
    FusedAdamW([p]).step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("first", "second"),
    [(torch.optim.AdamW, FusedAdamW), (FusedAdamW, torch.optim.AdamW), (FusedAdamW, FusedAdamW)],
)
def test_state_dicts_load_both_ways(first, second):
    before = make([(5,), (6, 2), (3,)])
    truth = copies(before, torch.float64)
    saver, oracle = first(before, **HYPER), torch.optim.AdamW(truth, **HYPER)
    train([saver, oracle], 2)
    after = copies(before)
    loader = second(after, lr=1.0)
    loader.load_state_dict(saver.state_dict())
    assert loader.param_groups[0]["lr"] == HYPER["lr"]
    train([loader, oracle], 2)
    assert_close(after, truth)
    assert set(loader.state[after[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert loader.state[after[0]]["step"] == 4
    assert saver.state[before[0]]["step"] == 2


def test_loading_copies_and_keeps_the_moments_of_half_precision_whole():
    params = make([(50,)], torch.bfloat16)
    optimizer = FusedAdamW(params, **HYPER)
    train([optimizer], 2)
    twin = copies(params)
    loaded = FusedAdamW(twin)
    loaded.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(loaded.state[twin[0]][name], optimizer.state[params[0]][name])
        assert loaded.state[twin[0]][name] is not optimizer.state[params[0]][name]


def test_moments_from_elsewhere_are_made_to_fit():
    params = make([(4, 6)])
    twin = copies(params)
    optimizer, other = FusedAdamW(params, **HYPER), FusedAdamW(twin, **HYPER)
    train([optimizer, other], 1)
    state = other.state[twin[0]]
    state["step"] = torch.tensor(1.0)
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    state["exp_avg_sq"] = state["exp_avg_sq"].double()
    third = copy.deepcopy(other)
    train([optimizer, other, third], 1)
    assert torch.equal(params[0], twin[0])
    assert torch.equal(params[0], third.param_groups[0]["params"][0])


def test_what_cannot_be_trained_is_refused():
    betas = [{"betas": pair} for pair in ((1.0, 0.9), (0.9, -0.1), (0.9,), 0.9)]
    numbers = [{name: bad} for name in ("lr", "eps", "weight_decay") for bad in (-1, math.nan, math.inf)]
    complex_one = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    whole = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    for error, said, options in (
        *((ValueError, "must not be negative", each) for each in (*numbers, *betas)),
        *((TypeError, "weight_decay must be numbers", {"lr": each}) for each in (torch.tensor(0.1), "0.1")),
        *((TypeError, r"params\[1\] must be of a real", {"params": [*make([(2,)]), p]}) for p in (complex_one, whole)),
    ):
        with pytest.raises(error, match=said):
            FusedAdamW(**{"params": make([(2,)])} | options)


@pytest.mark.parametrize("late", ["exp_avg", "a gradient"])
def test_a_resized_parameter_is_refused(late):
    """The kernel has only addresses: it would read and write beyond the end of what was not resized."""
    (p,) = make([(3,)])
    optimizer = FusedAdamW([p], **HYPER)
    train([optimizer], 1)
    p.data = torch.ones(5)
    if late == "exp_avg":
        p.grad = torch.ones(5)
    else:
        optimizer.state.clear()
    with pytest.raises(ValueError, match=rf"{late} has shape \(3,\), not \(5,\)"):
        optimizer.step()


def test_parameters_without_memory():
    params = [nn.Parameter(torch.zeros(3, device="meta"))]
    params[0].grad = torch.zeros(3, device="meta")
    FusedAdamW(params).step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("cls", [AdamW, MasterAdamW, FusedAdamW])
def test_a_parameter_that_comes_twice(cls):
    first, second = make([(2,), (3,)])
    optimizer = cls([first])
    with pytest.raises(ValueError, match="a parameter comes twice in a group"):
        optimizer.add_param_group({"params": [second, second]})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_anything_moves():
    first, second = make([(3,), (4, 2)])
    optimizer = FusedAdamW([first, second], **HYPER)
    before = first.detach().clone()
    first.grad, second.grad = torch.ones(3), torch.ones(4, 2).to_sparse()
    with pytest.raises(TypeError, match="dense moments"):
        optimizer.step()
    assert torch.equal(first, before)
    assert not optimizer.state


def test_the_state_of_another_algorithm_is_refused():
    params = make([(3,)])
    others = [
        (torch.optim.AdamW(params, amsgrad=True), "amsgrad"),
        (torch.optim.Adam(params, lr=1e-3), "coupled weight decay"),
        (torch.optim.SGD(params, momentum=0.9), "momentum"),
        (torch.optim.NAdam(params, decoupled_weight_decay=True), "mu_product"),
        (torch.optim.AdamW(params, maximize=True), "maximize"),
    ]
    for (other, word), cls in itertools.product(others, (AdamW, MasterAdamW, FusedAdamW)):
        train([other], 1)
        if word not in (("maximize",) if cls is FusedAdamW else ("maximize", "amsgrad")):  # which it can do
            with pytest.raises(ValueError, match=f"another algorithm than AdamW: it has .*{word}"):
                cls(params).load_state_dict(other.state_dict())
