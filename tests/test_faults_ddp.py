"""Unusual parameters, inputs and groups in every wrapper and stage: the result is right, or every rank raises an error
that names the cause, before the optimizer can step. CASES lists each case with its outcome."""

import copy
import gc
import pickle
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.fault_cases import ALL, KINDS, MODES, SCATTERS, Case, Net, Replica, Run, check
from tests.support.parallel_cases import batch, rows_of


def steps(number: int = 2, **options):
    """Ordinary steps; an option that is a function is called with each step and rank."""

    def program(run: Run):
        for step in range(number):
            chosen = {key: value(step, run.rank) if callable(value) else value for key, value in options.items()}
            run.backward(step, **chosen)
            yield
            run.step()

    return program


def freeze(module: nn.Module, rank: int) -> None:
    module.optional.requires_grad_(False)
    module.first.weight.requires_grad_(False)


def freeze_embedding(module: nn.Module, rank: int) -> None:
    module.embedding.requires_grad_(False)


def freeze_all(module: nn.Module, rank: int) -> None:
    module.requires_grad_(False)


def change_later(flag: bool, only: int | None = None):
    """After the first step a layer is frozen or unfrozen, on all ranks or on one."""

    def program(run: Run):
        for step in range(2):
            if step == 1 and run.rank in (only, run.rank if only is None else None):
                run.module.optional.requires_grad_(flag)
            run.backward(step)
            yield
            run.step()

    return program


def cast(before_backward: bool):
    def program(run: Run):
        if not before_backward:
            run.backward(0)
        run.model.float()
        run.remember()
        if before_backward:
            run.backward(0)
        yield
        run.step()

    return program


def other_format(run: Run):
    run.model.to(memory_format=torch.channels_last)
    run.remember()
    yield from steps(2)(run)


def replace(run: Run):
    run.module.last.weight = nn.Parameter(run.module.last.weight.detach().clone())
    run.backward(0)
    yield
    run.step()


class Mixed(nn.Module):
    """Three precisions, a complex matrix, nothing, one number, a transposed and a channels-last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(4, 6)
        self.transposed = nn.Linear(6, 4).double()
        self.transposed.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64).t())
        self.short = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.rotation = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.convolution = nn.Conv2d(2, 11, 2).double().to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.transposed(self.single(tokens / 11).double().tanh()) * self.short
        z = y.to(torch.complex128) @ self.rotation
        y = (z.real + z.imag + self.nothing.sum()).view(-1, 1, 2, 2).expand(-1, 2, -1, -1)
        return (self.convolution(y) * self.scale).flatten(1)[:, None].expand(-1, 4, -1)


class Strided(nn.Module):
    """A transposed and a channels-last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(8, 4, dtype=torch.float64).t())
        self.convolution = nn.Conv2d(2, 11, 2).double().to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        y = (tokens.double() / 11 @ self.transposed).tanh().view(-1, 2, 2, 2)
        return self.convolution(y).flatten(1)[:, None].expand(-1, 4, -1)


class Normed(nn.Module):
    """Batch normalisation: running statistics that each rank takes of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(11, 6), nn.BatchNorm1d(6), nn.Linear(6, 11)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))


class Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 11)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class Buffered(Net):
    """Buffers of every kind of number; each rank counts what it has seen in all of them."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in BUFFER_DTYPES:
            self.register_buffer(f"{dtype}"[6:] + "s", torch.zeros(3, dtype=dtype))
        self.register_buffer("sliced", torch.zeros(3, 3, dtype=torch.complex64)[:, 1])
        self.register_buffer("one", torch.zeros((), dtype=torch.bool))

    def forward(self, tokens: Tensor, **options) -> Tensor:
        for buffer in self.buffers():
            buffer.copy_((buffer.float() + tokens.sum() % 5) if not buffer.is_complex() else buffer + tokens.sum())
        return super().forward(tokens, **options)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Nested(Net):
    """Outputs in a dict of a list of a named tuple."""

    def forward(self, tokens: Tensor) -> dict:
        logits = super().forward(tokens)
        return {"all": [Pair(logits, logits * 2)]}


def nested(run: Run):
    for step in range(2):
        tokens, targets = (rows_of(each, run.rank, run.world) for each in batch(step))
        F.cross_entropy(run.model(tokens)["all"][0].second.flatten(0, 1), targets.flatten()).backward()
        yield
        run.step()


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


def empty_batch(run: Run):
    for step in range(2):
        tokens, targets = (rows_of(each, run.rank, run.world)[: 0 if run.rank == 1 else 6] for each in batch(step))
        logits = run.model(tokens).flatten(0, 1)
        (F.cross_entropy(logits, targets.flatten(), reduction="sum") / 48).backward()
        yield
        run.step()


def evaluate_on_rank_0(run: Run):
    for step in range(2):
        run.backward(step)
        yield
        run.step()
        if run.rank == 0:
            run.model.eval()
            with torch.no_grad():
                run.loss(9)
            run.model.train()


def one_more(in_no_sync: bool):
    def program(run: Run):
        with run.model.no_sync() if in_no_sync else nullcontext():
            if run.rank == 0:
                run.backward(1)
        run.backward(0)
        yield
        run.step()

    return program


def forward_only(run: Run):
    run.loss(0)
    yield
    run.step()


def wrap_anew(run: Run):
    """The module is taken out, changed and wrapped again; one process only changes it."""
    run.backward(0)
    yield
    run.step()
    module = run.module if isinstance(run.model, Replica) else run.model.unwrap()
    module.optional.requires_grad_(True)
    run.model = Replica(module) if isinstance(run.model, Replica) else type(run.model)(module)
    run.backward(1)
    yield
    run.step()


def bare_forward(run: Run):
    for step in range(2):
        tokens, targets = (rows_of(each, run.rank, run.world) for each in batch(step))
        F.cross_entropy(run.module(tokens).flatten(0, 1), targets.flatten()).backward()
        yield
        run.step()


def drop_wrapper(run: Run):
    """Only the optimizer and the bare module are kept."""
    run.model = Replica(run.module)
    gc.collect()
    run.backward(0)
    run.optimizer.step()
    yield


def copied(run: Run):
    copy.deepcopy(run.model)
    yield


def pickled(run: Run):
    pickle.dumps(run.model)
    yield


def hook_small(module: nn.Module, rank: int) -> None:
    for parameter in (module.norm.weight, module.scale, module.first.bias):
        parameter.register_hook(lambda gradient: 2 * gradient)


def hook_weight(module: nn.Module, rank: int) -> None:
    module.first.weight.register_hook(lambda gradient: 2 * gradient)


def hook_weight_later(run: Run):
    hook_weight(run.module, run.rank)
    yield from steps(2)(run)


def other_options(first: int, **options):
    """From a step on, rank 1 has other options."""

    def program(run: Run):
        for step in range(first + 2):
            if step == first and run.rank == 1:
                run.optimizer.param_groups[0].update(options)
            run.backward(step)
            yield
            run.step()

    return program


def write_on_one_rank(back: bool):
    """After a step rank 1 writes to a vector and a number; it may put the old values back."""

    def program(run: Run):
        for step in range(3):
            run.backward(step)
            yield
            run.step()
            if step == 0 and run.rank == 1:
                for p in (run.module.norm.weight, run.module.scale):
                    before = p.detach().clone()
                    with torch.no_grad():
                        p.fill_(0.5)
                        p.copy_(before if back else p)
                run.remember()

    return program


def other_buffer(change):
    """After a step rank 1 changes a buffer."""

    def program(run: Run):
        run.backward(0)
        yield
        run.step()
        if run.rank == 1:
            change(run.module)
        run.backward(1)
        yield

    return program


def same_buffers(run: Run):
    """On all ranks a buffer grows, and one comes."""
    for step in range(3):
        run.module.register_buffer(f"more{step}", torch.ones(step + 1, dtype=torch.complex128))
        run.module.more0 = torch.ones(step + 2)
        run.backward(step)
        yield
        run.step()


def by_hand(run: Run, drop) -> None:
    with torch.no_grad():
        for p in run.module.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)
                run.remember()
    drop(run)
    run.remember()


def unsynchronised(drop):
    """Steps by hand, the first without a synchronisation before it."""

    def program(run: Run):
        run.backward(0)
        by_hand(run, drop)
        run.backward(1)
        yield
        by_hand(run, drop)

    return program


def drop_all(run: Run) -> None:
    for p in run.module.parameters():
        p.grad = None


def zero_all(run: Run) -> None:
    for p in run.module.parameters():
        if p.grad is not None:
            p.grad.zero_()


def update_in_hook(module: nn.Module, rank: int) -> None:
    """Each rank's own gradient moves a number as soon as it is there."""

    def hook(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.sub_(p.grad)

    module.scale.register_post_accumulate_grad_hook(hook)


def moved_by_hook(run: Run):
    run.backward(0)
    run.remember()
    yield
    run.step()


BUFFER_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
)  # fmt: skip
THAWED = "optional.weight was frozen when wrapped and wants a gradient now"
RATE = "group 0, lr = 0.05, rank 1 has "
GONE = "the wrapper of these parameters is gone"
USED_EARLY = "was used before finish_gradient_synchronization"
CAST = "was torch.float64 when wrapped and is torch.float32 now"
HOOKED = {"stage 3": "first.weight has a gradient hook, which would never run"}
WAITS_TO_REDUCE = ("naive", "flat", "stage 3")  # else a gradient may be the mean already, and then all is well
UNSYNCHRONISED = {
    "naive | flat": "the ranks' weights differ",
    "stage 3": USED_EARLY,
}
DDP = ("naive", "flat", "overlapped", "bucketed")
FEW = ("overlapped", "stage 2 in small buckets", "stage 3")  # where each case waits for a timeout

CASES = {
    "tied weights, a layer called twice": Case(steps(), modes=ALL),
    "a layer unused on every rank": Case(steps(3, skip=lambda step, rank: step != 1)),
    "a layer unused on one rank": Case(steps(skip=lambda step, rank: rank == 1), modes=ALL),
    "an output that the loss does not use": Case(steps(keep=lambda step, rank: [])),
    "an output unused on one rank": Case(steps(keep=lambda step, rank: [] if rank == 1 else None), modes=KINDS[:-1]),
    "an output unused on one rank, stage 3": Case(
        steps(keep=lambda step, rank: [] if rank == 1 else None), "waited in", modes=ALL[-1:], waits=True
    ),
    "frozen before wrapping": Case(steps(), prepare=freeze),
    "a tied weight frozen before wrapping": Case(steps(), prepare=freeze_embedding),
    "frozen after wrapping": Case(change_later(False)),
    "frozen after wrapping on one rank": Case(change_later(False, only=1)),
    "unfrozen after wrapping": Case(change_later(True), THAWED, prepare=freeze),
    "unfrozen after wrapping on one rank": Case(
        change_later(True, only=1), THAWED, prepare=freeze, modes=FEW, waits=True
    ),
    "another learning rate on one rank": Case(other_options(0, lr=0.5), RATE),
    "another scheduler on one rank": Case(other_options(1, lr=0.5), RATE),
    "other options on one rank": Case(other_options(1, betas=(0.5, 0.9)), "group 0, betas = (0.5, 0.9)"),
    "weights changed on one rank": Case(write_on_one_rank(back=False), "rank 0 has scale with hash"),
    "weights changed on one rank, and put back": Case(write_on_one_rank(back=True)),
    "every parameter frozen": Case(forward_only, prepare=freeze_all),
    # A transposed weight lies in a flat buffer untransposed, so that the matrix product adds in another order.
    "three dtypes, complex, empty, 0-d, transposed, channels-last": Case(steps(), make=Mixed, inexact=ALL[4:]),
    "a fused optimizer, transposed and channels-last weights": Case(
        steps(), make=Strided, options={"lr": 0.05, "fused": True}, inexact=ALL[4:]
    ),
    "non-reentrant activation checkpointing, one layer twice": Case(steps(recompute="non-reentrant")),
    "reentrant activation checkpointing, one layer twice": Case(
        steps(recompute="reentrant"), inexact=("overlapped", "bucketed", *ALL[4:])
    ),
    "cast after wrapping": Case(cast(before_backward=True), CAST),
    "cast between backward and finish": Case(
        cast(before_backward=False),
        {" | ".join((*ALL[:5], "stage 2")): CAST, "stage 2 in small buckets | stage 3": USED_EARLY},
        modes=tuple(MODES),
    ),
    "channels-last after wrapping": Case(
        other_format, {" | ".join(ALL[4:-1]): "was moved or cast"}, make=Mixed, inexact=ALL
    ),
    "a parameter replaced after wrapping": Case(replace, "last.weight is not the parameter that was wrapped"),
    "evaluation on rank 0 only, with running statistics": Case(
        evaluate_on_rank_0, make=Normed, modes=KINDS[:-1]
    ),
    "evaluation on rank 0 only, stage 3": Case(
        evaluate_on_rank_0, "waited in", make=Normed, modes=ALL[-1:], waits=True
    ),
    "nested outputs": Case(nested, make=Nested),
    "an empty batch on one rank": Case(empty_batch),
    "a sparse gradient": Case(steps(), make=Sparse, cls=torch.optim.Adagrad, options={"lr": 0.1}, inexact=ALL),
    "a sparse gradient, SparseAdam": Case(
        steps(), "SparseAdam does not support dense gradients",
        make=Sparse, cls=torch.optim.SparseAdam, options={"lr": 0.1}, modes=KINDS[:2],
    ),
    "4 batches on one rank, 2 on the other, join, stages 0 to 2": Case(uneven_with_join, modes=KINDS[:-1]),
    "buffers of 14 dtypes": Case(steps(), make=Buffered),
    "buffers that grow and come on all ranks": Case(same_buffers),
    "a buffer of another size on one rank": Case(
        other_buffer(lambda module: module.register_buffer("calls", torch.zeros(4, dtype=torch.int64))),
        "rank 0 has buffer calls (3,) torch.int64, rank 1 has buffer calls (4,) torch.int64",
    ),
    "a buffer more on one rank": Case(
        other_buffer(lambda module: module.register_buffer("more", torch.zeros(2))),
        "rank 0 has nothing more, rank 1 has buffer more (2,)",
    ),
    "weights updated by hand before the synchronisation, gradients None": Case(
        unsynchronised(drop_all), UNSYNCHRONISED, modes=WAITS_TO_REDUCE
    ),
    "weights updated by hand before the synchronisation, gradients 0": Case(
        unsynchronised(zero_all), UNSYNCHRONISED, modes=WAITS_TO_REDUCE
    ),
    "weights updated in a gradient hook": Case(
        moved_by_hook, "the ranks' weights differ", prepare=update_in_hook
    ),
    "one more backward on one rank, in no_sync": Case(one_more(True), {"stage 3": "waited in"}, waits=True),
    "one more backward on one rank, without no_sync": Case(
        one_more(False), {"overlapped": "used parameters", "stage 3": "waited in"},  # where rank 1 waits
        modes=("naive", "flat", "overlapped", "stage 3"), waits=True,
    ),
    "hooks on small parameters": Case(steps(), prepare=hook_small),
    "a hook on a weight, before wrapping": Case(steps(), HOOKED, prepare=hook_weight),
    "a hook on a weight, after wrapping": Case(hook_weight_later, HOOKED),
    "taken out, unfrozen, wrapped anew": Case(wrap_anew, prepare=freeze, modes=DDP),
    "the bare module called instead of the wrapper": Case(bare_forward),
    "the wrapper dropped, the bare module trained": Case(
        drop_wrapper, {" | ".join(ALL[:5]): GONE, " | ".join(SCATTERS): "step() before "}
    ),
    "deepcopy of the wrapper": Case(copied, "UserError: copy "),
    "pickle of the wrapper": Case(pickled, "or save its state: "),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])


@pytest.mark.parametrize("name", ["a layer unused on one rank", "frozen after wrapping on one rank"])
def test_right_on_three_ranks(name):
    check(__name__, name, CASES[name], world=3)
