"""The four data-parallel wrappers: results equal to one process, reductions in the order that their lesson claims."""

import gc
import inspect
import weakref
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cs336_systems.comm import Event, all_reduce, record, shared_verbs
from cs336_systems.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.zero import zero
from tests.support import ranks
from tests.support.fault_cases import MODES, full_parameters
from tests.support.parallel_cases import loss_of, make, naive_mean, spread
from tests.support.tolerances import bound
from tests.support.traffic_cases import LADDER

# The mean adds `world size` numbers in some order and divides; the rest is computed alike.
TOLERANCE = bound(torch.float64, stages=2, longest_sum=4)


def wrappers_case(group) -> None:
    for wrapper in LADDER:
        gradients_case(group, wrapper)


def gradients_case(group, wrapper: str) -> None:
    model = LADDER[wrapper](make(seed=group.rank()))
    loss_of(model, 0, group.rank(), group.size()).backward()
    model.finish_gradient_synchronization()
    want = naive_mean(make(seed=0), 0, group.size())
    got = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        if group.size() <= 2:
            assert torch.equal(gradient, want[name]), (wrapper, name)
        largest = want[name].abs().max().item()
        torch.testing.assert_close(gradient, want[name], rtol=0, atol=TOLERANCE * group.size() * largest)
    assert spread(group, list(got.values())) == 0, wrapper


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_are_the_mean_over_ranks(world_size):
    ranks.run(wrappers_case, world_size)


def halves_case(group) -> None:
    """The sum of the ranks' gradients is infinite, their mean is exact."""
    for mode, prepare in MODES.items():
        model, optimizer = prepare(nn.Linear(2, 2, bias=False).half(), torch.optim.SGD, group=group, lr=2.0**-12)
        before = full_parameters(model)["weight"].clone()
        (model(torch.ones(1, 2, dtype=torch.float16)) * 40_000).sum().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        assert torch.equal(full_parameters(model)["weight"], before - 40_000 * 2.0**-12), mode
    given = torch.full((3,), 60_000.0, dtype=torch.float16)
    all_reduce(given, group).wait()
    assert given.tolist() == [60_000.0] * 3


def test_halves_are_averaged_without_their_sum():
    ranks.run(halves_case, 2)


class Scale(nn.Module):
    """One parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


TRACES = {
    "naive": "g7 g6 g5 g4 g3 g2 g1 g0 | R R R R R R R R",
    "flat": "g7 g6 g5 g4 g3 g2 g1 g0 | R",
    "overlapped": "g7 R g6 R g5 R g4 R g3 R g2 R g1 R g0 R |",
    "bucketed": "g7 g6 R g5 g4 R g3 g2 R g1 g0 R |",
}


def traces_case(group) -> dict[str, str]:
    return {wrapper: trace_of(wrapper) for wrapper in TRACES}


def trace_of(wrapper: str) -> str:
    """The order of gradients, reductions and the end of backward in a chain of eight layers."""
    chain = nn.Sequential(*(Scale() for _ in range(8)))
    with record() as events:
        for i, layer in enumerate(chain):
            layer.weight.register_post_accumulate_grad_hook(lambda p, i=i: events.append(f"g{i}"))
        model = BucketedDDP(chain, bucket_size_mb=8e-6) if wrapper == "bucketed" else LADDER[wrapper](chain)
        events.clear()
        model(torch.ones(3)).sum().backward()
        events.append("|")
        model.finish_gradient_synchronization()
    flags = [each for each in events if isinstance(each, Event) and each.label == "used parameters"]
    assert len(flags) == 1
    reductions = [each for each in events if isinstance(each, Event) and each not in flags]
    assert sum(each.nbytes for each in reductions) == 8 * 4
    return " ".join(each if isinstance(each, str) else "R" for each in events if each not in flags)


def test_order_of_gradients_and_reductions():
    for found in ranks.run(traces_case, 2):
        assert found == TRACES


def accumulation_case(group) -> None:
    """Reductions that each backward launches: none in no_sync, afterwards, and after an exception there, all again."""
    for wrap, reductions in ((FlatDDP, 0), (OverlappedDDP, 8), (partial(BucketedDDP, bucket_size_mb=8e-6), 4)):
        model = wrap(nn.Sequential(*(Scale() for _ in range(8))))
        counts = []
        with record() as events:
            for inside in (True, False, True, False, False):
                events.clear()
                with suppress(KeyError), model.no_sync() if inside else nullcontext():
                    model(torch.ones(3)).sum().backward()
                    if inside and counts:
                        raise KeyError
                counts.append(len(events))
                if not inside:
                    model.finish_gradient_synchronization()
                    model.zero_grad()
        assert counts == [0, reductions, 0, reductions, reductions], wrap


def frames_case(group, wrapper: str) -> list[list[str]]:
    """The library's frames, outermost first, above each all-reduce that backward launches: FILE function."""
    found, real = [], shared_verbs.all_reduce

    def all_reduce(*arguments, **named):
        stack = [(Path(frame.filename), frame.function) for frame in inspect.stack()[::-1]]
        found.append([f"{file.name} {function}" for file, function in stack if "cs336_systems" in file.parts])
        return real(*arguments, **named)

    chain = nn.Sequential(*(Scale() for _ in range(8)))
    model = BucketedDDP(chain, bucket_size_mb=8e-6) if wrapper == "bucketed" else OverlappedDDP(chain)
    shared_verbs.all_reduce = all_reduce
    try:
        model(torch.ones(3)).sum().backward()
    finally:
        shared_verbs.all_reduce = real
    model.finish_gradient_synchronization()
    return found


@pytest.mark.parametrize(("wrapper", "reductions"), [("overlapped", 8), ("bucketed", 4)])
def test_five_frames_at_most_lead_from_a_hook_to_its_all_reduce(wrapper, reductions):
    found = ranks.run(frames_case, 2, wrapper=wrapper)[0]
    assert len(found) == reductions
    for frames in found:
        assert frames[0] == "guards.py hook"
        assert frames[-1] == "verbs.py all_reduce"
        assert len(frames) <= 5
        assert len({frame.split()[0] for frame in frames}) <= 4


def test_no_sync_ends_with_its_block():
    ranks.run(accumulation_case, 2)


def views_case(group) -> None:
    """Gradients are views of the bucket, so nothing is copied back; naive ones are reduced where they are."""
    model = FlatDDP(make())
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(storages) == 1
    naive = NaiveDDP(make())
    loss_of(naive, 0).backward()
    naive.finish_gradient_synchronization()
    assert all(bucket.flat is None for bucket in naive.buckets)
    chain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 1))
    convolution = BucketedDDP(chain.to(memory_format=torch.channels_last))
    convolution(torch.ones(1, 2, 4, 4)).sum().backward()
    convolution.finish_gradient_synchronization()
    wide, pointwise = (each.weight for each in convolution.module)
    assert wide.grad.stride() == wide.stride() != pointwise.stride() == (3, 1, 3, 3)
    buffer = convolution.buckets[0].flat.untyped_storage().data_ptr()
    assert pointwise.grad.untyped_storage().data_ptr() == buffer, "its elements lie in the same order, and are copied"
    torch.optim.SGD(convolution.parameters(), lr=0.1).step()
    linear = BucketedDDP(nn.Linear(2, 3), group=group)
    linear(torch.ones(1, 2)).sum().backward()
    linear.module.weight.grad = linear.module.weight.grad.t().contiguous().t()  # user code may replace it
    linear.finish_gradient_synchronization()
    assert linear.module.weight.grad.stride() == (2, 1), "a fused optimizer would pair other elements"
    assert wide.is_contiguous(memory_format=torch.channels_last)


def kept_case(group) -> None:
    """A buffer is filled again unless somebody holds a gradient in it, even by one row."""
    for wrap in (FlatDDP, lambda module: zero(module, torch.optim.SGD, 1, lr=0.1)[0], FSDP):
        model, places, held = wrap(make()), [], []
        for step, holds in enumerate((False, False, True, False, False)):
            loss_of(model, step).backward()
            model.finish_gradient_synchronization()
            vector = next(p for p in model.parameters() if p.dim() == 1 and p.grad is not None)
            held = [vector.grad[:1]] if holds else held
            places.append(vector.grad.untyped_storage().data_ptr())
            model.zero_grad()
        assert places[0] == places[1] == places[2] != places[3] == places[4], wrap


def test_gradients_lie_in_their_buckets_which_are_filled_again():
    ranks.run(views_case, 2)
    ranks.run(kept_case, 1)  # gloo's threads might hold a buffer for a moment


IMPOSSIBLE = (
    *(({"bucket_size_mb": size}, f"a bucket has 0 MB or more, not {size!r}") for size in (-1.0, float("nan"), "25")),
    (
        {"ignored": ["first.weight", *make().parameters()][:3]},
        "`ignored` are parameters of the module, which 3 of them",
    ),
    ({"module": [1]}, "BucketedDDP wraps a torch.nn.Module, not a list"),
)


def refused_case(group) -> None:
    """Arguments, norms, and clipping while gradients are one rank's."""
    for options, words in IMPOSSIBLE:
        with pytest.raises(UserError) as error:
            BucketedDDP(**{"module": make()} | options)
        assert words in str(error.value)
    assert BucketedDDP(make(), bucket_size_mb=np.float32(1)).buckets
    for stage in (0, 2, 3):
        model, _ = zero(make(), torch.optim.SGD, stage, lr=0.1)
        loss_of(model, 0).backward()
        with pytest.raises(UserError, match=r"clip_grad_norm\(\) before"):
            model.clip_grad_norm(1.0)
        model.finish_gradient_synchronization()
        assert model.clip_grad_norm(1e9, "inf") == model.clip_grad_norm(1e9, float("inf")) > 0
        for norm_type in (0, -1.0, float("nan")):
            with pytest.raises(UserError, match="norms of gradients have a type above 0"):
                model.clip_grad_norm(1.0, norm_type)


def test_what_cannot_be_is_refused():
    ranks.run(refused_case, 2)


def freed_case(group) -> None:
    """A wrapper that nobody needs any more goes, with its buffers, although its module's hooks have known it."""
    for wrap in (*LADDER.values(), FSDP):
        model = wrap(make())
        loss_of(model, 0).backward()
        model.finish_gradient_synchronization()
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None, wrap


def test_wrappers_are_freed():
    ranks.run(freed_case, 2)
