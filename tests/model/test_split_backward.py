"""Backward in two parts: the bits of one backward, hooks that are called when the gradient is there, nothing kept."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from cs336_systems.model.split_backward import SplitBackward


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4, bias=False), nn.Linear(4, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_parts_are_the_bits_of_one_backward(dtype):
    one = small().to(dtype)
    one[4].weight.requires_grad_(False)
    two, x = copy.deepcopy(one), torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    one(x).square().sum().backward()
    with SplitBackward() as split:
        loss = two(y).square().sum()
    called = []
    for name, parameter in two.named_parameters():
        if not parameter.requires_grad:
            continue
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append((name, p.grad is not None)))
    loss.backward()
    assert torch.equal(x.grad, y.grad)
    assert two[1].weight.grad is two[3].weight.grad is None
    assert {name for name, _ in called} == {"0.weight", "0.bias", "4.bias"}  # a layer with a frozen weight is not split
    split.finish()
    assert [name for name, _ in called[-3:]] == ["3.weight", "1.weight", "1.bias"]
    assert all(there for _, there in called)
    for mine, theirs in zip(two.parameters(), one.parameters(), strict=True):
        assert (mine.grad is None and theirs.grad is None) or torch.equal(mine.grad, theirs.grad)


def test_nothing_is_kept_after_both_parts():
    """Not even until garbage is collected: what is left would be alive beside the next microbatches."""
    model, kept = small(), []
    model[2].register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output)))
    gc.disable()
    try:
        with SplitBackward() as split:
            loss = model(torch.randn(2, 5, 6, requires_grad=True)).sum()
        loss.backward()
        assert kept[0]() is not None or split.later
        split.finish()
        del loss
        assert kept[0]() is None
    finally:
        gc.enable()
