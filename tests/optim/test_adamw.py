"""AdamW against torch's and against its printed algorithm; the schedule; clipping."""

import copy
import math

import pytest
import torch
from torch import nn

from cs336_systems.errors import UserError
from cs336_systems.optim.adamw import AdamW, learning_rate
from cs336_systems.optim.grad_norm import LocalGradient, clip_local
from cs336_systems.optim.master_weights import MasterAdamW
from kernels.adamw import FusedAdamW
from tests.support import ranks
from tests.support.tolerances import bound

HYPER = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
STEPS = 30
# One update rounds about 12 times, and a step inherits the error of those before it.
ROUNDING = bound(torch.float64, stages=12 * STEPS)


def run(optimizer_class, gradients, **hyper) -> torch.Tensor:
    p = nn.Parameter(torch.linspace(-1, 1, gradients.shape[1], dtype=torch.float64))
    optimizer = optimizer_class([p], **hyper)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}])
def test_equals_torch(options):
    gradients = torch.randn(STEPS, 64, dtype=torch.float64) / torch.arange(1, STEPS + 1)[:, None]
    ours, theirs = run(AdamW, gradients, **HYPER, **options), run(torch.optim.AdamW, gradients, **HYPER, **options)
    assert (ours - theirs).abs().max() <= ROUNDING * theirs.abs().max()
    assert not options or (ours - run(AdamW, gradients, **HYPER)).abs().max() > 0.01


def test_a_state_of_torch_with_all_options_is_continued():
    gradients, lists = torch.randn(4, 5), [[nn.Parameter(torch.ones(5))] for _ in range(2)]
    theirs, ours = torch.optim.AdamW(lists[0], amsgrad=True, maximize=True, **HYPER), AdamW(lists[1])
    for step, gradient in enumerate(gradients):
        if step == 2:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
            with torch.no_grad():
                lists[1][0].copy_(lists[0][0])
        lists[0][0].grad = lists[1][0].grad = gradient
        theirs.step()
        ours.step()
    torch.testing.assert_close(lists[1], lists[0], rtol=bound(torch.float32, stages=2 * 12), atol=0)
    old = ours.state_dict()
    del old["param_groups"][0]["amsgrad"], old["param_groups"][0]["maximize"]  # of a version without them
    AdamW(lists[1]).load_state_dict(old | {"state": {}})


@pytest.mark.usefixtures("where_triton_runs")
@pytest.mark.parametrize("cls", [AdamW, MasterAdamW, FusedAdamW])
def test_load_hooks_see_and_change_the_state(cls):
    params = [nn.Parameter(torch.linspace(0, 1, 5).bfloat16())]
    first, second = cls(params), cls(params)
    params[0].grad = torch.full((5,), 0.3).bfloat16()
    first.step()
    saved = first.state_dict()

    def double(_, state: dict) -> dict:
        return state | {"state": {0: state["state"][0] | {"exp_avg": 2 * state["state"][0]["exp_avg"]}}}

    def treble(optimizer: AdamW) -> None:
        optimizer.state[params[0]]["exp_avg"].mul_(3)

    second.register_load_state_dict_pre_hook(double)
    second.register_load_state_dict_post_hook(treble)
    second.load_state_dict(saved)
    want, got = first.state[params[0]], second.state[params[0]]
    assert torch.equal(got["exp_avg"], want["exp_avg"] * 2 * 3)
    assert torch.equal(got["exp_avg_sq"], want["exp_avg_sq"])
    assert got["exp_avg"].dtype == want["exp_avg"].dtype
    second.register_load_state_dict_pre_hook(lambda _, state: state | {"state": {0: {"momentum_buffer": 1}}})
    with pytest.raises(ValueError, match="another algorithm than AdamW: it has momentum_buffer"):
        second.load_state_dict(saved)


def test_what_cannot_be_done_is_refused():
    p = nn.Parameter(torch.ones(1, dtype=torch.float16))
    p.grad = torch.zeros_like(p)  # torch makes it NaN: eps is 0 in float16, and 0 / 0 no number
    with pytest.raises(TypeError, match=r"float16 holds neither an eps of 1e-8 .* take MasterAdamW"):
        AdamW([p]).step()
    assert p.item() == 1
    with pytest.raises(TypeError, match="multiplier"):  # a keyword of MasterAdamW's steps only
        AdamW([p]).step(multiplier=0.5)


def test_schedule():
    def rate(step, shape="cosine"):
        return learning_rate(step, peak=1.0, floor=0.1, warmup_steps=10, decay_steps=110, shape=shape)

    assert [rate(0), rate(4), rate(9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate(10) == 1.0
    assert rate(60) == pytest.approx(0.55)
    assert rate(35) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(35, "linear") == pytest.approx(0.1 + 0.9 * 0.75)
    assert rate(110) == rate(10**6) == 0.1
    assert learning_rate(0, 1.0, 0.1, warmup_steps=0, decay_steps=1) == 1.0
    assert learning_rate(5, 1.0, 0.1, warmup_steps=5, decay_steps=5) == 0.1


def clip(parameters, max_norm: float, group):
    gradients = [LocalGradient(p, p.grad, False) for p in parameters if p.grad is not None]
    return clip_local(gradients, max_norm, 2.0, group)


def clip_case(group) -> None:
    """Clipping equals torch's, and is in float32; NaN stays, and any norm can be asked for."""
    close = bound(torch.float64, 5, 12)
    for max_norm in (0.5, 1e6):
        ours, theirs = ([nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (5, 1, 7)] for _ in range(2))
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        norm, wanted = clip(ours, max_norm, group), nn.utils.clip_grad_norm_(theirs, max_norm)
        assert norm.item() == pytest.approx(wanted.item(), rel=close)
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            # torch adds 1e-6 to the norm before it divides; ours reaches max_norm exactly.
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-6, atol=0)
        if max_norm < norm:
            assert torch.cat([p.grad for p in ours[:2]]).norm().item() == pytest.approx(max_norm, rel=close)

    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    p.grad = torch.full((4,), 300.0, dtype=torch.float16)  # the square of 300 overflows fp16
    assert clip([p], 1.0, group).item() == 600.0
    assert p.grad.tolist() == [0.5] * 4
    p.grad = torch.tensor([1.0, math.nan, 0.0, 0.0], dtype=torch.float16)
    assert math.isnan(clip([p], 1.0, group).item())
    assert clip([nn.Parameter(torch.ones(2))], 1.0, group).item() == 0.0
    q = nn.Parameter(torch.zeros(2))
    for value, max_norm, want in ((0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (3.0, 0.0, 0.0), (3.0, math.inf, 3.0)):
        q.grad = torch.full((2,), value)
        assert clip([q], max_norm, group).item() == pytest.approx(value * 2**0.5)
        assert q.grad.tolist() == [want, want]
    for max_norm in (-1.0, math.nan):
        with pytest.raises(UserError, match="clipped to a norm of 0 or more, not"):
            clip([q], max_norm, group)


def test_clipping_equals_torch():
    ranks.run(clip_case, 1)
