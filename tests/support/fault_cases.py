"""Misuse and edge cases as small programs, run by real ranks and by an oracle that plays all ranks in one process.

The programs' side of a rank and the oracle are those of `python -m cs336_systems.check`: where a program yields, every
rank calls `finish_gradient_synchronization()`. A case pairs a program with its outcome: "right", or the words of the
error.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.buffers.bucket import SHARDED
from cs336_systems.check import models
from cs336_systems.check.models import Net, Program, Replica
from cs336_systems.check.oracle import in_lock_step
from cs336_systems.ddp import BucketedDDP
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.zero import WRAPPERS, zero
from tests.support import ranks
from tests.support.parallel_cases import spread
from tests.support.tolerances import bound

# The longest sum of the model and its loss has 48 terms; a step of AdamW amplifies by at most a constant.
TOLERANCE = bound(torch.float64, stages=3 * 64, longest_sum=48)
SMALL = 0.0005  # MB: a few parameters a bucket


# Stage 0 is "bucketed" with the plain optimizer: test_zero.py trains it. Stage 1 has one bucket, and so has "stage 2",
# which runs only where its outcome differs from that of small buckets.
ALL = (*WRAPPERS, "stage 1", "stage 2 in small buckets", "stage 3")
# Naive differs from flat, and overlapped from bucketed, by a constant, the size of buckets: they run as well where an
# outcome names them, or the order of gradients is unusual.
KINDS = ("flat", "bucketed", *ALL[4:])
REDUCES_EARLY = ("overlapped", "bucketed", "stage 1")
FEW = ("flat", "bucketed", "stage 2 in small buckets", "stage 3")  # one of each kind
SCATTERS = ("stage 2 in small buckets", "stage 3")


@dataclass(frozen=True)
class Case:
    """A program, what comes of it ("right", or words of the error, by mode where modes differ), and what it needs."""

    program: Program
    outcome: str | dict[str, str] = "right"
    prepare: Callable[[nn.Module, int], object] = lambda module, rank: None  # before wrapping
    inexact: tuple[str, ...] = ()  # modes in which two ranks add in another order than the oracle
    make: Callable[[], nn.Module] = Net
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict = field(default_factory=lambda: {"lr": 0.05, "weight_decay": 0.1})
    tolerance: float = TOLERANCE
    modes: tuple[str, ...] = KINDS
    worlds: tuple[int, ...] = (2,)  # numbers of ranks
    waits: bool = False  # whether some rank learns of the error by waiting, so that each mode needs ranks of its own

    def __post_init__(self) -> None:
        if self.modes is KINDS and isinstance(self.outcome, dict):
            named = " | ".join(self.outcome).split(" | ")
            object.__setattr__(self, "modes", tuple(mode for mode in ALL if mode in (*KINDS, *named)))

    def expected(self, mode: str) -> str:
        if isinstance(self.outcome, str):
            return self.outcome
        return next((words for modes, words in self.outcome.items() if mode in modes.split(" | ")), "right")

    def module(self, seed: int, rank: int) -> nn.Module:
        torch.manual_seed(seed)
        module = self.make()
        self.prepare(module, rank)
        return module


@dataclass
class Run(models.Run):
    """One rank's side of a training run, which keeps the parameters of the last step."""

    before: list[Tensor] = field(default_factory=list)

    @property
    def module(self) -> Any:
        return self.model.module

    bare = module

    def train(self, step: int, **options: Any) -> Iterator[None]:
        self.backward(step, **options)
        yield
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.remember()
        self.optimizer.zero_grad()

    def remember(self) -> None:
        self.before = [p.detach().clone() for p in self.updated()]

    def updated(self) -> list[Tensor]:
        """The optimizer's parameters."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def assert_no_step_since(self) -> None:
        for old, new in zip(self.before, self.updated(), strict=True):
            assert torch.equal(old, new.detach().to(old.dtype)), "a parameter moved although the rank failed"


def steps(number: int = 2, of: Callable = Run.backward, **options: Any) -> Program:
    """A program of ordinary steps, in each of which `of(run, step, **options)` takes the backward; an option that is a
    function is called with each step and rank."""

    def program(run: Run) -> Iterator[None]:
        for step in range(number):
            of(run, step, **{key: it(step, run.rank) if callable(it) else it for key, it in options.items()})
            yield
            run.step()

    return program


def change(act: Callable[[Run], object], at: int = 0, rank: int | None = None, number: int = 2) -> Program:
    """A program of ordinary steps, before one of which something is changed, on all ranks or on one."""

    def program(run: Run) -> Iterator[None]:
        for step in range(number):
            if step == at and rank in (None, run.rank):
                act(run)
                run.remember()
            yield from run.train(step)

    return program


def small_buckets(module: nn.Module, cls: type, group, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Stage 2 with buckets so small that several are under way; `zero` makes one of so small a model."""
    model = BucketedDDP(module, SMALL, group, gradients=SHARDED)
    return model, ShardedOptimizer(model.parameters(), cls, group, wrapper=model, **options)


def wrapped(wrapper: Callable, module: nn.Module, cls: type, group, **options) -> tuple:
    model = wrapper(module, group=group)
    return model, cls(model.parameters(), **options)


MODES = {
    **{name: partial(wrapped, kind) for name, kind in WRAPPERS.items()},
    "bucketed": partial(wrapped, partial(BucketedDDP, bucket_size_mb=SMALL)),
    "stage 1": partial(zero, stage=1),
    "stage 2": partial(zero, stage=2),
    "stage 2 in small buckets": small_buckets,
    "stage 3": partial(zero, stage=3),
}


def start(case: Case, mode: str, group) -> Run:
    """Seeds differ by rank, so that what is not sent from rank 0 is seen."""
    module = case.module(seed=group.rank(), rank=group.rank())
    model, optimizer = MODES[mode](module, case.cls, group=group, **case.options)
    return Run(model, optimizer, group.rank(), group.size())


def drive(run: Run, program: Program) -> None:
    for _ in program(run):
        run.model.finish_gradient_synchronization()


def oracle(case: Case, world: int) -> dict[str, Tensor]:
    """Final parameters by name, from as many copies of the module as there are ranks."""
    modules = [case.module(seed=0, rank=rank) for rank in range(world)]
    replicas = [Replica(module) for module in modules]
    runs = [Run(m, case.cls(m.parameters(), **case.options), rank, world) for rank, m in enumerate(replicas)]
    in_lock_step(runs, case.program)
    return {name: p.detach() for name, p in modules[0].named_parameters()}


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by the bare module's name, tied ones once."""
    whole = model.gather_full_params() if hasattr(model, "gather_full_params") else None
    return {name: whole[name] if whole else p.detach() for name, p in model.module.named_parameters()}


def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    data = b"".join(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return list(hashlib.sha256(data).digest())


def compare(group, case: Case, run: Run, mode: str, want: dict[str, Tensor]) -> None:
    """The same on all ranks, buffers as well, and on rank 0, which alone computes the oracle, equal to it: to the bit
    where the order of additions is the same."""
    got = full_parameters(run.model)
    prints = torch.tensor([fingerprint(got.values()), fingerprint(run.module.buffers())])
    assert spread(group, [prints]) == 0, f"{mode}: the ranks' parameters or buffers differ"
    if group.rank() > 0:
        return
    assert got.keys() == want.keys()
    for name, parameter in got.items():
        if group.size() <= 2 and mode not in case.inexact:
            assert torch.equal(parameter, want[name]), f"{mode}: {name} differs from the oracle's"
        where = f"{mode}, {name}"
        torch.testing.assert_close(
            parameter, want[name], rtol=case.tolerance, atol=case.tolerance, msg=lambda m, w=where: f"{w}: {m}"
        )


def case_of(module: str, name: str) -> Case:
    return importlib.import_module(module).CASES[name]


def together_case(group, module: str, name: str, modes: list[str]) -> None:
    """One mode after another: right, or the error that every rank raises by itself."""
    case = case_of(module, name)
    can_be_right = any(case.expected(mode) == "right" for mode in modes)
    want = oracle(case, group.size()) if can_be_right and group.rank() == 0 else {}
    for mode in modes:
        if case.expected(mode) == "right":
            run = start(case, mode, group)
            drive(run, case.program)
            compare(group, case, run, mode, want)
            continue
        try:
            failing_case(group, module, name, mode)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            assert case.expected(mode) in said, f"{mode}: {said}"
        else:
            raise AssertionError(f"{mode}: no error")
        dist.barrier(group)


def failing_case(group, module: str, name: str, mode: str) -> None:
    """A program that fails on this rank, before a parameter has moved since all ranks were in order."""
    case = case_of(module, name)
    run = start(case, mode, group)
    run.remember()
    try:
        drive(run, case.program)
    finally:
        run.assert_no_step_since()


def check(module: str, name: str, case: Case) -> None:
    """Run a case in all of its modes: equal to the oracle, or every rank raises the error that is expected."""
    for world in case.worlds:
        modes = case.modes if world == 2 else [mode for mode in case.modes if mode in FEW]  # three ranks are slow
        apart = [mode for mode in modes if case.waits and case.expected(mode) != "right"]
        if together := [mode for mode in modes if mode not in apart]:
            ranks.run(together_case, world, module=module, name=name, modes=together)
        for mode in apart:
            errors = ranks.run_failing(failing_case, world, module=module, name=name, mode=mode)
            for rank, error in enumerate(errors):
                assert error is not None, f"{mode}: rank {rank} raised nothing"
                assert case.expected(mode) in error[1], f"{mode}: rank {rank} raised {error}"
