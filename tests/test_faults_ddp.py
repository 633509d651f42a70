"""Unusual parameters, inputs and groups in every wrapper and stage: the result is right, or every rank raises an error
that names the cause, before the optimizer can step. CASES lists each case with its outcome."""

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.check.cases import bare
from tests.support.fault_cases import ALL, KINDS, MODES, SCATTERS, Case, Replica, Run, change, check, steps


def freeze(module: nn.Module, rank: int) -> None:
    module.optional.requires_grad_(False)
    module.first.weight.requires_grad_(False)
    module.embedding.requires_grad_(False)  # which is tied


def set_wanted(flag: bool) -> Callable[[Run], object]:
    return lambda run: run.module.optional.requires_grad_(flag)


def cast_after_backward(run: Run, step: int) -> None:
    run.backward(step)
    run.model.float()
    run.remember()


def replace(run: Run) -> None:
    run.module.last.weight = nn.Parameter(run.module.last.weight.detach().clone())


class Strided(nn.Module):
    """A transposed and a channels-last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(4, 4, dtype=torch.float64).t())
        self.convolution = nn.Conv2d(2, 11, 2).double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = (x.double() / 11 @ self.transposed).tanh().view(-1, 1, 2, 2).expand(-1, 2, -1, -1)
        return self.convolution(y).flatten(1)[:, None].expand(-1, 4, -1)


class Mixed(Strided):
    """Three precisions, a complex matrix, nothing, one number."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.short = nn.Linear(4, 4), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.rotation = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        z = (self.single(tokens / 11).tanh() * self.short).to(torch.complex128) @ self.rotation
        return super().forward(z.real + z.imag + self.nothing.sum()) * self.scale


def add_buffers(module: nn.Module, rank: int) -> None:
    """Of every kind of number; each rank counts what it has seen in all of them."""
    for dtype in BUFFER_DTYPES:
        module.register_buffer(f"{dtype}"[6:] + "s", torch.zeros(3, dtype=dtype))
    module.register_buffer("sliced", torch.zeros(3, 3, dtype=torch.complex64)[:, 1])
    module.register_buffer("one", torch.zeros((), dtype=torch.bool))

    def count(module: nn.Module, inputs: tuple) -> None:
        for buffer in module.buffers():
            buffer.copy_((buffer if buffer.is_complex() else buffer.float()) + inputs[0].sum() % 5)

    module.register_forward_pre_hook(count)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def nest(module: nn.Module, rank: int) -> None:
    """Outputs in a dict of a list of a named tuple."""
    module.register_forward_hook(lambda module, inputs, logits: {"all": [Pair(logits, logits * 2)]})


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 11)).double()


def nested(run: Run, step: int) -> None:
    tokens, targets = run.rows(step)
    run.criterion(run.model(tokens)["all"][0].second, targets).backward()


def uneven_with_join(run: Run):
    """Rank 0 has four batches, rank 1 two, and no gradients after them; one process has the same."""
    batches = range(4) if run.rank == 0 else range(2)
    joined = [*batches, *[None] * (4 - len(batches))] if isinstance(run.model, Replica) else run.model.join(batches)
    for step in joined:
        if step is None:
            for p in run.module.parameters() if isinstance(run.model, Replica) else ():
                p.grad = torch.zeros_like(p)
        else:
            run.backward(step)
        yield
        run.step()


def empty_batch(run: Run, step: int) -> None:
    tokens, targets = (each[: 0 if run.rank == 1 else 6] for each in run.rows(step))
    logits = run.model(tokens).flatten(0, 1)
    (nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / 48).backward()


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.loss(9)
    run.model.train()


def one_more(run: Run, step: int, quiet: bool) -> None:
    with run.model.no_sync() if quiet else nullcontext():
        if run.rank == 0:
            run.backward(1)
    run.backward(0)


def wrap_anew(run: Run):
    """The module is taken out, changed and wrapped again; one process only changes it."""
    yield from run.train(0)
    module = run.module if isinstance(run.model, Replica) else run.model.unwrap()
    module.optional.requires_grad_(True)
    run.model = Replica(module) if isinstance(run.model, Replica) else type(run.model)(module)
    yield from run.train(1)


def drop_wrapper(run: Run):
    """Only the optimizer and the bare module are kept."""
    run.model = Replica(run.module)
    gc.collect()
    run.backward(0)
    run.optimizer.step()
    yield


def hook_small(module: nn.Module, rank: int) -> None:
    for parameter in (module.norm.weight, module.scale, module.first.bias):
        parameter.register_hook(lambda gradient: 2 * gradient)


def hook_weight(module: nn.Module, rank: int = 0) -> None:
    module.first.weight.register_hook(lambda gradient: 2 * gradient)


def other_options(**options) -> Callable[[Run], object]:
    return lambda run: run.optimizer.param_groups[0].update(options)


def write(back: bool) -> Callable[[Run], object]:
    """Write to a vector and a number, and perhaps put the old values back."""

    @torch.no_grad()
    def act(run: Run) -> None:
        for p in (run.module.norm.weight, run.module.scale):
            before = p.detach().clone()
            p.fill_(0.5)
            p.copy_(before if back else p)

    return act


def grow_buffer(run: Run, step: int) -> None:
    """On all ranks a buffer grows, and one comes."""
    run.module.register_buffer(f"more{step}", torch.ones(step + 1, dtype=torch.complex128))
    run.module.more0 = torch.ones(step + 2)
    run.backward(step)


def unsynchronised(set_to_none: bool):
    """Steps by hand, the first without a synchronisation before it."""

    def program(run: Run):
        for step in range(2):
            run.backward(step)
            if step == 1:
                yield
            for p in run.module.parameters():
                if p.grad is not None:
                    subtract(p)
                    run.remember()
            run.module.zero_grad(set_to_none)

    return program


@torch.no_grad()
def subtract(p: nn.Parameter) -> None:
    p.sub_(0.1 * p.grad)


def subtract_in_hook(module: nn.Module, rank: int) -> None:
    """Each rank's own gradient moves a number as soon as it is there."""
    module.scale.register_post_accumulate_grad_hook(subtract)


def moved_by_hook(run: Run, step: int) -> None:
    run.backward(step)
    run.remember()


BUFFER_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
)  # fmt: skip
THAWED = "optional.weight was frozen when wrapped and wants a gradient now"
USED_EARLY = "was used before finish_gradient_synchronization"
CAST = "was torch.float64 when wrapped and is torch.float32 now"
HOOKED = {"stage 3": "first.weight has a gradient hook, which would never run"}
UNSYNCHRONISED = {"naive | flat": "the ranks' weights differ", "stage 3": USED_EARLY}
WAITS_TO_REDUCE = ("naive", "flat", "stage 3")  # else a gradient may be the mean already, and then all is well
WAITED = {"stage 3": "waited in"}
DDP = ("naive", "flat", "overlapped", "bucketed")

CASES = {
    "tied weights, a layer called twice": Case(steps(), modes=ALL),
    "a layer unused on every rank": Case(steps(3, skip=lambda step, rank: step != 1)),
    "a layer unused on one rank": Case(steps(skip=lambda step, rank: rank == 1), modes=ALL, worlds=(2, 3)),
    "an output that the loss does not use": Case(steps(keep=lambda step, rank: [])),
    "an output unused on one rank": Case(
        steps(keep=lambda step, rank: [] if rank == 1 else None), WAITED, waits=True
    ),
    "frozen before wrapping": Case(steps(), prepare=freeze),
    "frozen after wrapping": Case(change(set_wanted(False), at=1)),
    "frozen after wrapping on one rank": Case(change(set_wanted(False), at=1, rank=1), worlds=(2, 3)),
    "unfrozen after wrapping": Case(change(set_wanted(True), at=1), THAWED, prepare=freeze),
    "unfrozen after wrapping on one rank": Case(
        change(set_wanted(True), at=1, rank=1), THAWED,
        prepare=freeze, modes=("overlapped", "stage 3"), waits=True,
    ),
    "another learning rate on one rank": Case(
        change(other_options(lr=0.5), at=1, rank=1, number=3), "group 0, lr = 0.05, rank 1 has "
    ),
    "other options on one rank": Case(
        change(other_options(betas=(0.5, 0.9)), rank=1), "group 0, betas = (0.5, 0.9)"
    ),
    "weights changed on one rank": Case(change(write(back=False), at=1, rank=1), "rank 0 has scale with hash"),
    "weights changed on one rank, and put back": Case(change(write(back=True), at=1, rank=1, number=3)),
    "every parameter frozen": Case(steps(1, Run.loss), prepare=lambda module, rank: module.requires_grad_(False)),
    # A transposed weight lies in a flat buffer untransposed, so that the matrix product adds in another order.
    "three dtypes, complex, empty, 0-d, transposed, channels-last": Case(steps(), make=Mixed, inexact=ALL[4:]),
    "a fused optimizer, transposed and channels-last weights": Case(
        steps(), make=Strided, options={"lr": 0.05, "fused": True}, inexact=ALL[4:]
    ),
    "non-reentrant activation checkpointing, one layer twice": Case(steps(recompute="non-reentrant")),
    "reentrant activation checkpointing, one layer twice": Case(
        steps(recompute="reentrant"), inexact=("overlapped", "bucketed", *ALL[4:])
    ),
    "cast after wrapping": Case(change(lambda run: run.model.float()), CAST),
    "cast between backward and finish": Case(
        steps(1, cast_after_backward),
        {" | ".join((*ALL[:5], "stage 2")): CAST, "stage 2 in small buckets | stage 3": USED_EARLY},
        modes=tuple(MODES),
    ),
    "channels-last after wrapping": Case(
        change(lambda run: run.model.to(memory_format=torch.channels_last)),
        {" | ".join(ALL[4:-1]): "was moved or cast"}, make=Mixed, inexact=ALL,
    ),
    "a parameter replaced after wrapping": Case(change(replace), "last.weight is not the parameter that was wrapped"),
    "evaluation on rank 0 only, with running statistics": Case(
        change(evaluate, at=1, rank=0), WAITED, waits=True,
        make=lambda: nn.Sequential(nn.Embedding(11, 6), nn.BatchNorm1d(4), nn.Linear(6, 11)).double(),
    ),
    "nested outputs": Case(steps(of=nested), prepare=nest),
    "an empty batch on one rank": Case(steps(of=empty_batch)),
    "a sparse gradient": Case(steps(), make=sparse, cls=torch.optim.Adagrad, options={"lr": 0.1}, inexact=ALL),
    "a sparse gradient, SparseAdam": Case(
        steps(), "SparseAdam does not support dense gradients",
        make=sparse, cls=torch.optim.SparseAdam, options={"lr": 0.1}, modes=KINDS[:2],
    ),
    "4 batches on one rank, 2 on the other, join, stages 0 to 2": Case(uneven_with_join, modes=KINDS[:-1]),
    "buffers of 14 dtypes": Case(steps(), prepare=add_buffers),
    "buffers that grow and come on all ranks": Case(steps(3, grow_buffer)),
    "a buffer of another size on one rank": Case(
        change(lambda run: run.module.register_buffer("calls", torch.zeros(4, dtype=torch.int64)), at=1, rank=1),
        "rank 0 has buffer calls (3,) torch.int64, rank 1 has buffer calls (4,) torch.int64",
    ),
    "a buffer more on one rank": Case(
        change(lambda run: run.module.register_buffer("more", torch.zeros(2)), at=1, rank=1),
        "rank 0 has nothing more, rank 1 has buffer more (2,)",
    ),
    "weights updated by hand before the synchronisation, gradients None": Case(
        unsynchronised(True), UNSYNCHRONISED, modes=WAITS_TO_REDUCE
    ),
    "weights updated by hand before the synchronisation, gradients 0": Case(
        unsynchronised(False), UNSYNCHRONISED, modes=WAITS_TO_REDUCE
    ),
    "weights updated in a gradient hook": Case(
        steps(1, moved_by_hook), "the ranks' weights differ", prepare=subtract_in_hook
    ),
    "one more backward on one rank, in no_sync": Case(steps(1, one_more, quiet=True), WAITED, waits=True),
    "one more backward on one rank, without no_sync": Case(
        steps(1, one_more, quiet=False), {"overlapped": "used parameters", **WAITED},  # where rank 1 waits
        modes=("naive", "flat", "overlapped", "stage 3"), waits=True,
    ),
    "hooks on small parameters": Case(steps(), prepare=hook_small),
    "a hook on a weight, before wrapping": Case(steps(), HOOKED, prepare=hook_weight),
    "a hook on a weight, after wrapping": Case(change(lambda run: hook_weight(run.module)), HOOKED),
    "taken out, unfrozen, wrapped anew": Case(wrap_anew, prepare=freeze, modes=DDP),
    "the bare module called instead of the wrapper": Case(bare),
    "the wrapper dropped, the bare module trained": Case(
        drop_wrapper,
        {" | ".join(ALL[:5]): "the wrapper of these parameters is gone", " | ".join(SCATTERS): "step() before "},
    ),
    "deepcopy of the wrapper": Case(change(lambda run: copy.deepcopy(run.model)), "UserError: copy "),
    "pickle of the wrapper": Case(change(lambda run: pickle.dumps(run.model)), "or save its state: "),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])
