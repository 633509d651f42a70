"""Properties that a parallel run must have: small training programs, each with the model, data and optimizer it needs.

`must`: a wrong number without an error is a mistake (exit code 1); otherwise it is reported as a weak point. With
`error` the program has no right result: every rank that still runs must raise an error. How far two right answers may
differ is derived, never tuned.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from os import _exit  # itself, not what os._exit is while a user's code runs
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.check.models import Net, Program, batch, rows_of, token_loss
from cs336_systems.check.targets import KINDS

DP = ("ddp", "fsdp")
MODULES = (*DP, "sharded-optimizer")
ALL = (*MODULES, "step")
HOW, WRONG = "docs/data_parallel.md#one-mechanism", "docs/check.md#weak-points"
DIED = "docs/troubleshooting.md#a-rank-died"
UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def bound(dtype: torch.dtype, stages: int, longest_sum: int = 1) -> float:
    """Relative error, to first order, of `stages` operations one after another, each a sum of up to `longest_sum` terms
    in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1)."""
    return stages * longest_sum * UNIT_ROUNDOFF[dtype]


def likely_bound(dtype: torch.dtype, stages: int) -> float:
    """Relative error, in the L2 norm of many elements, of `stages` roundings one after another that are independent and
    as often up as down: variances add, so it grows with the square root (Higham and Mary, A New
    Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019).
    For half precision, where `bound` is larger than any mistake."""
    return math.sqrt(stages) * UNIT_ROUNDOFF[dtype]


def largest(x: Tensor) -> float:
    """The largest absolute value, infinite if one is not a number, and 0 of an empty tensor."""
    return x.abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if x.numel() else 0.0


def factor_of(got: Tensor, want: Tensor) -> float | None:
    """The number, not 1, by which a tensor is a multiple of another one, which has several elements, or None."""
    factor = (got * want).sum().item() / max((want * want).sum().item(), 1e-300)
    is_multiple = want.numel() > 1 and (got - factor * want).norm() <= 1e-6 * got.norm()
    return factor if is_multiple and abs(factor - 1) > 1e-6 else None


def training(run: Any, steps: Iterable[int] = (0, 1, 2), **options: Any) -> Any:
    """Take ordinary steps; an option that is a function is called for each step and rank."""
    for step in steps:
        chosen = {key: value(step, run.rank) if callable(value) else value for key, value in options.items()}
        yield from run.train(step, **chosen)


def accumulate(run: Any, quiet: bool) -> Any:
    """Take three backward passes per step: two in no_sync, or each with a synchronisation of its own."""
    for step in range(2):
        for micro in range(3):
            is_quiet = quiet and micro < 2
            with run.model.no_sync() if is_quiet else nullcontext():
                run.backward(3 * step + micro)
            if not is_quiet:
                yield
        run.step()


def clipped(run: Any) -> Any:
    """Take steps with gradients that are clipped to a small norm."""
    for step in range(2):
        run.backward(step)
        yield
        run.clip(LIMIT)
        run.step()


def reload(run: Any) -> Any:
    """Save the state after a step, take another step, and load the state again."""
    yield from run.train(0)
    saved = run.save()
    yield from run.train(1)
    run.load(saved)
    yield from training(run, (2, 3))


def halve(first: int, run: Any) -> None:
    """Use half of the learning rate from now on, on a rank and those after it."""
    for group in run.optimizer.param_groups if run.rank >= first % run.world else ():
        group["lr"] /= 2


def change(action: Callable[[Any], object], run: Any, after: int = 1) -> Any:
    """Apply a change on all ranks after so many steps."""
    yield from training(run, range(after))
    action(run)
    yield from training(run, range(after, 3))


def replace_last(run: Any) -> None:
    """Replace a Parameter by a new one with its values, also in the optimizer."""
    old = run.bare.last.weight
    new = run.bare.last.weight = nn.Parameter(old.detach().clone())
    for group in run.optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]


def twice(run: Any, graphs: int) -> Any:
    """Run two forward passes, then two backward passes; or two backward passes through one graph."""
    for step in range(2):
        losses = [run.loss(2 * step + number) for number in range(graphs)]
        for number in range(2):
            run.backward_of(losses[number % graphs], retain_graph=graphs == 1)
        yield
        run.step()


def bare(run: Any) -> Any:
    """Call the bare module instead of its wrapper."""
    for step in range(2):
        inputs, targets = run.rows(step)
        run.backward_of(run.criterion(run.bare(inputs), targets))
        yield
        run.step()


def retry(run: Any) -> Any:
    """Let a backward pass fail on every rank, zero the gradients, and repeat the batch."""
    for step in range(2):
        if step == 1:
            try:
                run.loss(step, boom="late").backward()
            except ArithmeticError:
                run.optimizer.zero_grad()
        yield from run.train(step)


def offset(module: Any, rank: int) -> None:
    """Add a buffer to the result, with values drawn at random."""
    module.register_buffer("offset", torch.randn(11, dtype=torch.float64))
    module.register_forward_hook(lambda module, inputs, logits: logits + module.offset)


class Added(nn.Linear):
    """A layer of any precision, whose output is added to its input in double precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.to(self.weight.dtype)).double()


def mixed() -> nn.Module:
    """A model with parameters of three precisions."""
    layers = (Added(6, 6, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    return nn.Sequential(nn.Embedding(11, 6, dtype=torch.float64), *layers, nn.Linear(6, 11, dtype=torch.float64))


def freeze(module: Any, rank: int, *names: str) -> None:
    """Freeze a layer, and what else is named."""
    for each in (module.optional, *map(module.get_parameter, names)):
        each.requires_grad_(False)


def reorder(module: Any, rank: int) -> None:
    """Register the last layers of equal shapes in another order on rank 1."""
    if rank == 1:
        layers = module.deep._modules
        for name in sorted(layers, reverse=True):
            layers[name] = layers.pop(name)


def uneven(full: Tensor, rank: int, world: int) -> Tensor:
    """Parts of which the first is half of the rows, and the others are equal."""
    half = len(full) // 2 if world > 2 else 2 * len(full) // 3
    return full[:half] if rank == 0 else full[half:].chunk(world - 1)[rank - 1]


def whole(full: Tensor, rank: int, world: int) -> Tensor:
    """All rows on every rank, as under tensor parallelism."""
    return full


BOUND = bound(torch.float64, stages=3 * 64, longest_sum=48)  # see Net: 64 operations a step
LIMIT = 0.1  # of the gradient's norm, where it is clipped
# With this eps an error of a gradient, also of one near 0, moves a weight by at most lr / eps: half as much.
ADAMW = {"lr": 0.05, "weight_decay": 0.1, "eps": 0.1}


class AdamW(torch.optim.AdamW):
    """AdamW with the options that are compared as defaults, for targets that pass on the learning rate alone."""

    __init__ = partialmethod(torch.optim.AdamW.__init__, weight_decay=0.1, eps=0.1)


Plain = partial(Net, tied=False, shared=False, scalar=False)


@dataclass(frozen=True)
class Case:
    """A property, the program that shows it, and what the program needs."""

    name: str
    program: Program = training
    make: Callable[[], nn.Module] = Plain
    prepare: Callable[[Any, int], object] = lambda module, rank: None
    kinds: tuple[str, ...] = ALL
    must: bool = True
    error: bool = False
    page: str = HOW
    slow: bool = False  # asynchronous collectives are carried out when they are waited for
    seeds: bool = False  # a different seed on each rank, which shows what rank 0 does not send
    part: Callable[[Tensor, int, int], Tensor] = rows_of
    cls: type[torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05})
    data: Callable[[int], tuple[Tensor, Tensor]] = batch
    criterion: Callable[[Tensor, Tensor], Tensor] = token_loss
    tolerance: float = BOUND

    def module(self, seed: int, rank: int) -> nn.Module:
        torch.manual_seed(seed)
        module = self.make()
        self.prepare(module, rank)
        return module

    def of(self, kind: str) -> "Case":
        """Adapt the case to a kind of candidate: a sharded optimizer needs state; ranks of tensor parallelism have
        equal rows."""
        if kind == "sharded-optimizer":
            return replace(self, cls=torch.optim.AdamW, options=ADAMW, seeds=False)
        must = self.must and not (kind == "fsdp" and self.program is clipped)  # few wrappers offer a norm over shards
        part = whole if kind == "tensor-parallel" else self.part
        seeds = self.seeds and (kind == "ddp" or not self.must)
        return replace(self, seeds=seeds, part=part, must=must)


FIRST = Case("training", kinds=KINDS, seeds=True)
weak = partial(Case, kinds=DP, must=False, page=WRONG)  # a usage that one process allows
CASES = (
    FIRST,
    Case("waits for what it launches", kinds=KINDS, slow=True),
    weak("buffers", prepare=offset, seeds=True, kinds=("ddp",)),
    Case("tied weights", make=partial(Net, shared=False, scalar=False)),
    Case("a layer used twice", make=partial(Net, tied=False, scalar=False)),
    Case("a parameter without axes", make=partial(Net, tied=False, shared=False)),
    Case("frozen parameters", prepare=lambda module, rank: freeze(module, rank, "first.weight"), seeds=True),
    Case("unused on every rank", partial(training, skip=lambda step, rank: step == 1), kinds=DP, page=WRONG),
    Case("unused on one rank", partial(training, skip=lambda step, rank: step == rank == 1), kinds=DP, page=WRONG),
    Case("AdamW instead of SGD", kinds=(*DP, "step"), cls=AdamW),
    Case("mixed dtypes", make=mixed, kinds=MODULES, options={"lr": 1.0}),  # so that weights show any gradient
    Case("another learning rate later", partial(change, partial(halve, 0)), kinds=MODULES),
    Case("accumulation in no_sync", partial(accumulate, quiet=True), kinds=DP),
    Case("accumulation without no_sync", partial(accumulate, quiet=False), kinds=("ddp",)),
    Case("recomputation", partial(training, recompute="yes"), kinds=DP),
    # torch divides by the norm + 1e-6 and others by the norm, which is above the limit: relative, 1e-6 over that.
    Case("clipping by the norm", clipped, kinds=DP, tolerance=BOUND + 1e-6 / LIMIT),
    Case("state saved and loaded", reload, kinds=MODULES),
    Case("unequal parts of the batch", kinds=("step",), part=uneven),
    weak("unequal parts of the batch", part=uneven),
    Case("seeds that differ by rank", kinds=("fsdp",), must=False, seeds=True),
    weak("a backward that fails, and again", retry),
    weak("two forwards, two backwards", partial(twice, graphs=2)),
    weak("two backwards of one graph", partial(twice, graphs=1)),
    weak("the bare module called", bare, kinds=("ddp",)),
    weak("frozen later", partial(change, lambda run: freeze(run.bare, 0))),
    weak("unfrozen later", partial(change, lambda run: run.bare.optional.requires_grad_(True)), prepare=freeze),
    weak("a parameter replaced", partial(change, replace_last)),
    weak("cast after wrapping", partial(change, lambda run: run.bare.float()), kinds=("ddp",)),
    weak("layers in another order on one rank", prepare=reorder, error=True),
    weak("another learning rate on one rank", partial(change, partial(halve, -1), after=0), kinds=MODULES, error=True),
    Case("a rank that dies", partial(change, lambda run: run.rank < run.world - 1 or _exit(0)),
         must=False, error=True, page=DIED),
)  # fmt: skip
