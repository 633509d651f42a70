"""FusedAdamW against float64, torch and the written-out AdamW: values, launches, tables, views."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from kernels import adamw
from kernels.adamw import BLOCK, CHUNK, FusedAdamW
from kernels.launch import INTERPRETED
from tests.support.adamw_cases import HYPER, ONE_STEP, STEPS, assert_close, copies, give, make, train
from tests.support.tolerances import bound

pytestmark = pytest.mark.usefixtures("where_triton_runs")


@pytest.fixture
def launches(monkeypatch):
    """The grids and constants of the launches, as they happen."""
    seen = []
    launch = adamw.launch

    def spy(kernel, grid, *args, **options):
        seen.append((grid, options))
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(adamw, "launch", spy)
    return seen


@pytest.mark.parametrize(("betas", "maximize"), [((0.8, 0.95), False), ((0.0, 0.999), True), ((0.9, 0.0), False)])
def test_equals_torch_in_float64(betas, maximize, launches):
    ours = make()
    truth = copies(ours, torch.float64)
    hyper = HYPER | {"betas": betas, "maximize": maximize}
    train([FusedAdamW(ours, **hyper), torch.optim.AdamW(truth, **hyper)])
    assert_close(ours, truth)
    assert len(launches) == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_step_is_rounded_once(dtype, grad_dtype, launches):
    """Moments stay float32 and the parameter is rounded to its dtype only when it is stored."""
    (p,) = make([(BLOCK + 70,)], dtype)
    if grad_dtype != dtype:
        if not hasattr(p, "grad_dtype"):
            pytest.skip("this torch has no gradients of another dtype")
        p.grad_dtype = grad_dtype
    optimizer = FusedAdamW([p], **HYPER)
    for t in range(1, 4):
        state = optimizer.state[p]
        m, v = (state.get(name, torch.zeros(p.shape)).double() for name in ("exp_avg", "exp_avg_sq"))
        before, gradient = p.detach().double(), torch.randn(p.shape).to(grad_dtype)
        p.grad = gradient.clone()
        optimizer.step()
        g = gradient.double()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        want = before * (1 - 0.03 * 0.2) - 0.03 / (1 - 0.8**t) * m / ((v / (1 - 0.95**t)).sqrt() + 0.05)
        assert p.dtype == dtype
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        assert_close([state["exp_avg"], state["exp_avg_sq"]], [m, v], ONE_STEP)
        own = 0 if dtype == torch.float32 else bound(dtype, 1)
        assert ((p.detach().double() - want).abs() <= own * want.abs() + ONE_STEP * want.abs().max()).all()
    assert len(launches) == 3


def test_one_launch_for_a_hundred_parameters(launches):
    params = make([(n,) for n in range(100)])
    truth = copies(params, torch.float64)
    groups = [{"params": params[:50]}, {"params": params[50:], "lr": 0.3, "weight_decay": 0.0, "eps": 0.2}]
    others = [{"params": truth[:50]}, {"params": truth[50:], "lr": 0.3, "weight_decay": 0.0, "eps": 0.2}]
    train([FusedAdamW(groups, **HYPER), torch.optim.AdamW(others, **HYPER)], 1)
    assert [grid for grid, _ in launches] == [(99, 1, 1)]  # the empty one needs no program
    assert_close(params, truth, ONE_STEP)


def test_a_compiled_step_is_the_same():
    ours = make()
    compiled = copies(ours)
    gradients = [torch.randn_like(p) for p in ours]
    for params, compile in ((ours, lambda step: step), (compiled, partial(torch.compile, backend="eager"))):
        give(gradients, params)
        compile(FusedAdamW(params).step)()
    assert all(map(torch.equal, ours, compiled))


def test_parameters_without_a_gradient_stay_and_count_no_step_and_the_learning_rate_of_now_counts():
    ours = make([(5,), (6,), (7,)])
    truth = copies(ours, torch.float64)
    frozen = ours[2].detach().clone()
    optimizers = [FusedAdamW(ours), torch.optim.AdamW(truth)]  # whose defaults are equal
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3) for optimizer in optimizers]
    for step in range(STEPS):
        gradients = [torch.randn(p.shape) for p in ours]
        for params, optimizer, schedule in zip((ours, truth), optimizers, schedules, strict=True):
            give(gradients, params)
            params[2].grad = None
            if step % 2:
                params[1].grad = None  # so that it is corrected for another bias than its neighbour
            optimizer.step()
            schedule.step()
    assert_close(ours, truth)
    assert torch.equal(ours[2], frozen)
    assert ours[2] not in optimizers[0].state
    assert [optimizers[0].state[p]["step"] for p in ours[:2]] == [STEPS, STEPS // 2]


def test_nothing_to_do(launches):
    optimizer = FusedAdamW(make([(3,), (0,)]))
    optimizer.step()
    optimizer.param_groups[0]["params"][1].grad = torch.zeros(0)
    optimizer.step()
    assert launches == []


def test_views_of_a_flat_buffer_at_any_address(launches):
    """As a sharded optimizer cuts them: pieces that do not begin at a multiple of 16 bytes, and neighbours to spare."""
    for dtype in (torch.float32, torch.bfloat16):
        launches.clear()
        flat = torch.randn(3000).to(dtype)
        start = flat.clone()
        cuts = [(16, 1100), (1101, 1108), (1108, 2999)]
        params = [nn.Parameter(flat[a:b], requires_grad=False) for a, b in cuts]
        alone = [nn.Parameter(flat[a:b].clone(), requires_grad=False) for a, b in cuts]
        gradient = torch.randn(3000).to(dtype)
        optimizer, reference = FusedAdamW(params, **HYPER), FusedAdamW(alone, **HYPER)
        for (a, b), p, q in zip(cuts, params, alone, strict=True):
            p.grad, q.grad = gradient[a:b], gradient[a:b].clone()
        optimizer.step()
        assert sorted(options["ALIGNED"] for _, options in launches) == [False, True]
        reference.step()
        for (a, b), q in zip(cuts, alone, strict=True):
            assert torch.equal(flat[a:b], q)
            start[a:b] = q.detach()
        assert torch.equal(flat, start), "elements beside the pieces stay"


def test_layouts_that_are_not_contiguous(launches):
    base = torch.randn(6, 4)
    ours = [nn.Parameter(base.t()), nn.Parameter(torch.randn(4, 6))]
    truth = copies(ours, torch.float64)
    optimizers = [FusedAdamW(ours, **HYPER), torch.optim.AdamW(truth, **HYPER)]
    for _ in range(2):
        kept = optimizers[0].state[ours[0]].get("exp_avg")
        gradient = torch.randn(6, 4)
        for params, optimizer in zip((ours, truth), optimizers, strict=True):
            params[0].grad = gradient.t().to(params[0].dtype)
            params[1].grad = gradient[0, 1].to(params[1].dtype).expand(4, 6)
            optimizer.step()
    assert_close(ours, truth)
    assert len(launches) == 2  # the transposed parameter takes plain torch
    assert optimizers[0].state[ours[0]]["exp_avg"] is kept  # its moments are not copied at every step


def test_negated_gradients_are_read_as_they_are_meant():
    ours = make([(5,)])
    truth = copies(ours, torch.float64)
    gradient = torch._neg_view(torch.randn(5))  # as of an imaginary part: its sign is a note beside the numbers
    ours[0].grad, truth[0].grad = gradient, gradient.double()
    assert ours[0].grad.is_neg()
    FusedAdamW(ours, **HYPER).step()
    torch.optim.AdamW(truth, **HYPER).step()
    assert_close(ours, truth)


def test_float64_takes_plain_torch(launches):
    ours = make(dtype=torch.float64)
    theirs = copies(ours)
    train([FusedAdamW(ours, **HYPER), torch.optim.AdamW(theirs, **HYPER)])
    assert_close(ours, theirs, bound(torch.float64, stages=2 * 14 * STEPS))
    assert launches == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_gradients_beside_tiny_ones(dtype):
    """(1 - b2) g^2 is finite in float32 up to 5.8e20, although g^2 is not; each element is updated as if alone."""
    gradient = torch.tensor([1e20, 1e-12, 2e19, 1.0, 0.0, 6e4]).clamp(max=torch.finfo(dtype).max)
    ours = [nn.Parameter(torch.ones(6, dtype=dtype))]
    truth = copies(ours, torch.float64)
    give([gradient.to(dtype)], ours)
    give([gradient.to(dtype).double()], truth)
    FusedAdamW(ours, lr=0.1).step()
    torch.optim.AdamW(truth, lr=0.1).step()
    assert ((ours[0].double() - truth[0]).abs() <= (bound(dtype, 1) + ONE_STEP) * truth[0].abs()).all()


def test_not_a_number_stays_in_its_element():
    params = make([(70,), (80,)])
    optimizer = FusedAdamW(params, **HYPER)
    give([torch.ones(70), torch.ones(80)], params)
    params[0].grad[3] = torch.nan
    params[0].grad[65] = torch.inf
    optimizer.step()
    assert params[0].isnan().nonzero().flatten().tolist() == [3, 65]  # an infinite mean over an infinite root
    assert params[1].isfinite().all()


def test_tables_are_sent_anew_only_when_they_change():
    params = make([(5,), (6,)])
    optimizer, kept = FusedAdamW(params, **HYPER), []
    for same in ((), ("programs", "places", "grads"), ("programs", "places")):
        if "grads" not in same:
            kept.append([p.grad for p in params])  # so that the next ones have other addresses
            give([torch.ones(5), torch.ones(6)], params)
        before = {name: tensor for batch in optimizer._tables.values() for name, (_, tensor) in batch.sent.items()}
        optimizer.step()
        (batch,) = optimizer._tables.values()
        assert {name for name, (_, tensor) in batch.sent.items() if tensor is before.get(name)} == {*same}
        assert batch.sent["grads"][0] == [p.grad.data_ptr() for p in params]


def test_parameters_that_move_are_found():
    ours = make([(5,)])
    truth = copies(ours, torch.float64)
    optimizers = [FusedAdamW(ours, **HYPER), torch.optim.AdamW(truth, **HYPER)]
    for _ in range(2):
        train(optimizers, 1)
        ours[0].data = ours[0].data.clone()
        optimizers[0].state[ours[0]]["exp_avg"] = optimizers[0].state[ours[0]]["exp_avg"].clone()
    assert_close(ours, truth)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter checks this")
def test_far_chunks_are_counted_in_64_bits(monkeypatch):
    """A chunk beyond 2^31 elements of a tensor that ends before it: nothing is read, but its addresses are computed,
    and the interpreter is asked to complain of a product that does not fit."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    chunk = 2**31 // CHUNK
    monkeypatch.setattr(adamw, "program_table", lambda sizes: torch.tensor([[0, chunk]], dtype=torch.int32))
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    FusedAdamW([p]).step()
    assert torch.equal(p, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_computes_where_triton_cannot(dtype, monkeypatch, launches):
    ours = make([(50,), (3, 4)], dtype)
    theirs = copies(ours)
    hyper = HYPER | {"maximize": True}
    plain, fused = FusedAdamW(ours, **hyper), FusedAdamW(theirs, **hyper)
    gradients = [torch.randn(p.shape) for p in ours]
    give(gradients, theirs)
    fused.step()
    monkeypatch.setattr(adamw, "runs_triton", lambda *_: False)
    give(gradients, ours)
    plain.step()
    assert len(launches) == 1
    assert all(torch.equal(p.grad, g.to(dtype)) for p, g in zip((*ours, *theirs), gradients * 2, strict=True))
    own = 0 if dtype == torch.float32 else 2 * bound(dtype, 1)  # neighbours, where the two round to either side
    assert_close(ours, [p.double() for p in theirs], 2 * ONE_STEP + own)
    assert plain.state[ours[0]]["exp_avg"].dtype == torch.float32
