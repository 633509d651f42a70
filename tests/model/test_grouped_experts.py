"""Experts side by side against one at a time, in every dtype and width."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.model.feed_forward import Experts, FeedForward, GroupedLinear, grouped_linear, scale_gradient
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.optim.adamw import decay_groups
from cs336_systems.presets import ModelConfig
from tests.support.tolerances import UNIT_ROUNDOFF, bound, relative_error

TOY = ModelConfig(vocab_size=19, context_length=7, d_model=8, d_ff=24, num_layers=2, num_heads=2, num_experts=3)
COUNTS = [[2, 0, 5], [0, 0, 0], [0, 7, 0], [1, 1, 0]]
WIDTHS = [(8, 16), (24, 8), (7, 16), (8, 5), (3, 3)]  # the later ones are no multiples of 16 bytes


def some(*shape: int, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_grouped_product_equals_a_loop(dtype):
    for split, (size_in, size_out) in product(COUNTS, WIDTHS):
        x, weight = some(sum(split), size_in, dtype=dtype), some(3, size_out, size_in, dtype=dtype)
        y = grouped_linear(x, weight, torch.tensor(split))
        direction = torch.randn(y.shape, dtype=torch.float64).to(dtype)
        got = y, *torch.autograd.grad(y, (x, weight), direction)

        wide_x, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
        parts = zip(wide_x.split(split), wide_weight.unbind(), strict=True)
        want = torch.cat([torch.einsum("ri,oi->ro", part, matrix) for part, matrix in parts])
        gradients = torch.autograd.grad(want, (wide_x, wide_weight), direction.double())
        for mine, other in zip(got, (want, *gradients), strict=True):
            assert mine.dtype == dtype
            assert mine.shape == other.shape
            if other.numel() and other.any():  # products are added up in float32 at least, and rounded
                inner = bound(torch.promote_types(dtype, torch.float32), stages=1, longest_sum=24)
                assert relative_error(mine, other) < 4 * inner + UNIT_ROUNDOFF[dtype]
            else:
                assert not mine.any()


@pytest.mark.parametrize("width", [16, 5])
def test_an_expanded_gradient_is_taken(width):
    layer = GroupedLinear(3, 8, width, True)
    for p in layer.parameters():
        nn.init.normal_(p)
    x = some(7, 8, dtype=torch.float32)
    layer(x, torch.tensor([2, 0, 5])).sum().backward()  # whose gradient is one number, expanded
    sums = layer.weight.detach().sum(1)
    want = torch.cat((sums[[0]].expand(2, -1), sums[[2]].expand(5, -1)))
    assert relative_error(x.grad, want) < bound(torch.float32, stages=4, longest_sum=16)
    assert layer.bias.grad.tolist() == [[2.0] * width, [0.0] * width, [5.0] * width]


def test_autocast_gives_the_dtypes_of_a_linear_layer():
    for dtype, width in product((torch.float64, torch.float32, torch.bfloat16), (16, 5)):
        x, weight = some(7, 8, dtype=dtype), some(3, width, 8, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            y = grouped_linear(x, weight, torch.tensor([0, 7, 0]))
            want = F.linear(x, weight[1])
        assert y.dtype == want.dtype
        assert relative_error(y, want) < 2 * UNIT_ROUNDOFF[want.dtype]
        y.sum().backward()
        assert (x.grad.dtype, weight.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize("kind", ["gelu", "gelu-tanh", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_each_expert_is_a_feed_forward(kind, bias):
    config = replace(TOY, feed_forward=kind, bias=bias)
    experts, dense = Experts(config).double(), FeedForward(config).double()
    for p in experts.parameters():
        nn.init.normal_(p, std=0.5)
    for layer in (experts.up, experts.down):
        layer.bias_share = 0.25  # of a rank whose result is added to those of three others
    x, want = some(7, 8), []
    for expert, rows in enumerate(x.split([2, 0, 5])):
        state = {name: p[expert].detach().clone() for name, p in experts.named_parameters()}
        for name in ("up.bias", "down.bias") if bias else ():
            state[name] *= 0.25
        dense.load_state_dict(state)
        want.append(dense(rows))
    rounding = bound(torch.float64, stages=20, longest_sum=24)
    assert relative_error(experts(x, torch.tensor([2, 0, 5])).detach(), torch.cat(want).detach()) < rounding
    slots = some(3, 4, 8)
    by_counts = experts(slots.flatten(0, 1), torch.tensor([4, 4, 4])).view(3, 4, 8)
    assert relative_error(experts.one_by_one(slots).detach(), by_counts.detach()) < rounding


@pytest.mark.parametrize("one_by_one", [False, True])
def test_scaled_gradients_of_experts_and_no_other(one_by_one):
    experts = Experts(replace(TOY, bias=True)).double()
    for p in experts.parameters():
        nn.init.normal_(p, std=0.5)
    slots, found = some(3, 4, 8), []
    for scale in (1.0, 0.25):
        for layer in (experts.up, experts.down):
            layer.gradient_scale = scale
        rows = slots.flatten(0, 1)
        y = experts.one_by_one(slots) if one_by_one else experts(rows, torch.tensor([4, 4, 4]))
        found.append([y, *torch.autograd.grad(y.square().sum(), (slots, *experts.parameters()))])
    (y, x, *whole), (scaled_y, scaled_x, *quarter) = found
    assert torch.equal(y, scaled_y)
    assert torch.equal(x, scaled_x)
    assert scale_gradient(x, 1.0) is x  # which costs nothing
    assert all(torch.equal(a, 4 * b) for a, b in zip(whole, quarter, strict=True))


def test_stacked_matrices_decay_and_stacked_biases_do_not():
    model = TransformerLM(replace(TOY, bias=True, feed_forward="swiglu"))
    names = {p: name for name, p in model.named_parameters()}
    decays, rest = ([names[p] for p in group["params"]] for group in decay_groups(model, 0.1))
    layer = "blocks.1.feed_forward"
    experts = [f"{layer}.experts.{name}" for name in ("gate", "up", "down")]
    assert {f"{name}.weight" for name in (*experts, f"{layer}.router")} <= {*decays}
    assert {f"{name}.bias" for name in experts} <= {*rest}
    assert not any(name.endswith("bias") for name in decays)
    assert len(decays) + len(rest) == len(names)
