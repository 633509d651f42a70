"""Candidates of the data-parallel benchmarks, this project's and PyTorch's own for the same purpose, and their training
steps on the same ranks, turn by turn: the gate, the clock, and what was sent."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import require_close, take_turns, time_ranks
from benchmarks.lib.gate import make_it_matter
from benchmarks.lib.workload import Case
from cs336_systems.comm import Event, Group, all_gather, all_reduce, broadcast, record, reduce_scatter, shared_empty
from cs336_systems.ddp import BucketedDDP, DataParallel
from cs336_systems.fsdp import FSDP
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.zero import WRAPPERS, zero


@dataclass
class Trained:
    """A model ready to be trained: the forward to call, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def weights(self) -> list[Tensor]:
        """Whole weights, in the order of the plain model's parameters."""
        if isinstance(self.model, FSDP):
            full = self.model.gather_full_params()
            return [full[name] for name, _ in self.model.module.named_parameters()]
        found = (parameter.detach() for parameter in self.model.parameters())
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]  # of FSDP2, which has DTensors

    def finish(self) -> None:
        """End the synchronisation after backward: this project's wrappers need a call, PyTorch's none."""
        if isinstance(self.model, DataParallel | FSDP):
            self.model.finish_gradient_synchronization()


OptimizerClass = type[torch.optim.Optimizer]
Build = Callable[[TransformerLM, OptimizerClass, dict[str, Any]], Trained]


def wrapped(wrap: Callable[[TransformerLM], nn.Module], sharded: Callable[..., Any] | None = None) -> Build:
    """A wrapper of the model, and an optimizer, whole on every rank or given to one that is `sharded`."""

    def build(model: TransformerLM, cls: OptimizerClass, options: dict[str, Any]) -> Trained:
        made = wrap(model)
        optimizer = sharded(made.parameters(), cls, **options) if sharded else cls(made.parameters(), **options)
        return Trained(made, optimizer)

    return build


def stage(number: int) -> Build:
    """One of this project's ZeRO stages."""
    return lambda model, cls, options: Trained(*zero(model, cls, number, **options))


def torch_sharded(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
    """PyTorch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here, because the import warns of torch's own use

    return ZeroRedundancyOptimizer(*arguments, **options)


def torch_fsdp(model: TransformerLM) -> TransformerLM:
    """Wrap by PyTorch's FSDP2, one unit per block."""
    from torch.distributed.fsdp import fully_shard  # here, because the import takes seconds

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


ALONE = "no communication"
TORCH_DDP = "torch DDP"
TORCH_ZERO, TORCH_FSDP = "torch ZeroRedundancyOptimizer", "torch FSDP2"


# Computing without communication, which shows its cost and trains wrongly; PyTorch's own with buckets of 25 MB.
alone, torch_ddp = wrapped(lambda model: model), wrapped(DistributedDataParallel)


def ddp_candidates(bucket_sizes: list[float]) -> dict[str, Build]:
    """All wrappers, bucketed once for each size in MB, after computing alone and PyTorch's own."""
    ours = {name: wrapped(kind) for name, kind in WRAPPERS.items() if name != "bucketed"}
    for size in bucket_sizes:
        ours[f"bucketed {size:g} MB"] = wrapped(partial(BucketedDDP, bucket_size_mb=size))
    return {ALONE: alone, TORCH_DDP: torch_ddp, **ours}


def zero_candidates() -> dict[str, Build]:
    """Every stage, both layouts of the first (in "whole" each rank owns whole parameters, and broadcasts them), and
    PyTorch's own."""
    whole = wrapped(BucketedDDP, partial(ShardedOptimizer, layout="whole"))
    ours = {"stage 0": stage(0), "stage 1": stage(1), "stage 1, whole": whole, "stage 2": stage(2), "stage 3": stage(3)}
    theirs = {TORCH_ZERO: wrapped(DistributedDataParallel, torch_sharded), TORCH_FSDP: wrapped(torch_fsdp)}
    return {**ours, **theirs}


UNTIMED = 2  # steps of a turn before those that count: buckets and optimizer state are made in them
VERBS = {"all-reduce": all_reduce, "all-gather": all_gather, "reduce-scatter": reduce_scatter}
OF_GRADIENTS = ("all-reduce", "reduce-scatter")
# torch's fastest implementation for all, so that parallelism alone is compared.
ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}


@dataclass
class Turn:
    """A candidate's turns: milliseconds of its steps, and what one step sends."""

    events: list[Event] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    # A step's collectives and nothing else: those of gradients, and those of parameters.
    reductions: list[float] = field(default_factory=list)
    gathers: list[float] = field(default_factory=list)


class Arena:
    """A model's shape, this rank's batch (batch context_length), and the candidates that train it."""

    def __init__(
        self, config: ModelConfig, batch: int, candidates: dict[str, Build], group: Group, device: torch.device
    ) -> None:
        self.config, self.batch, self.candidates, self.group, self.device = config, batch, candidates, group, device
        case = Case(config, batch, "fp32", False, device)
        self.base = case.make_model(config)
        self.tokens, self.targets = replace(case, seed=1 + group.rank()).make_batch(config, batch)
        self.trainable = sum(p.numel() for p in self.base.parameters())

    def build(self, name: str, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Trained:
        """A fresh copy of the model under one candidate."""
        gc.collect()  # reference cycles of the last candidate would hold its hooks and memory
        return self.candidates[name](copy.deepcopy(self.base), cls, options or ADAMW)

    def forward_backward(self, trained: Trained) -> None:
        """Gradients, synchronised."""
        lm_loss(trained.model, self.tokens, self.targets).backward()
        trained.finish()

    def step(self, trained: Trained) -> None:
        """One training step."""
        self.forward_backward(trained)
        trained.optimizer.step()
        trained.optimizer.zero_grad()

    def turn(self, name: str, steps: int, found: Turn) -> None:
        """Build one candidate, warm it up, and time it."""
        trained = self.build(name)
        for _ in range(UNTIMED):
            with record() as events:
                self.step(trained)
        found.events = events
        found.steps += self.slowest(partial(self.step, trained), steps)
        del trained
        if name != ALONE:
            for times, of_gradients in ((found.reductions, True), (found.gathers, False)):
                if part := [event for event in events if (event.verb in OF_GRADIENTS) == of_gradients]:
                    times += self.replay(part)

    def slowest(self, run: Callable[[], object], times: int) -> list[float]:
        """Milliseconds of the rank that takes longest, each time that all do `run`."""
        return list(time_ranks(run, self.group, self.device, 0, times).amax(dim=0).tolist())

    def replay(self, events: list[Event]) -> list[float]:
        """Milliseconds of some collectives by themselves, each launched when the one before is done, in buffers that
        ranks share if they can."""
        buffers = [shared_empty(each.numel, each.dtype, self.device, self.group).zero_() for each in events]

        def run() -> None:
            for number, (event, buffer) in enumerate(zip(events, buffers, strict=True)):
                if event.verb == "broadcast":
                    broadcast(buffer, number % self.group.size(), self.group, "replay").wait()
                else:
                    VERBS[event.verb](buffer, self.group, "replay").wait()

        return self.slowest(run, 1)

    def play(self, rounds: int, steps: int, expected_seconds: float) -> dict[str, Turn]:
        """Let every candidate take a turn of `steps` in each round."""
        found = {name: Turn() for name in self.candidates}
        turns = {name: partial(self.turn, name, steps, each) for name, each in found.items()}
        take_turns(turns, rounds, expected_seconds, quiet=self.group.rank() > 0)
        return found


def check(
    config: ModelConfig,
    candidates: dict[str, Build],
    group: Group,
    device: torch.device,
    advance: Callable[[str], None] = lambda note: None,
) -> dict[str, float]:
    """The gate: every candidate's step of SGD on two blocks of the model's width, against the mean of the ranks'
    gradients computed without it: relative errors of what the step changed. Raises WrongResultError.

    SGD, because AdamW's first step would hide a wrong scale.
    """
    arena = Arena(replace(config, num_layers=min(2, config.num_layers)), 1, candidates, group, device)
    torch.manual_seed(0)
    make_it_matter(arena.base)
    before = torch.cat([p.detach().flatten() for p in arena.base.parameters()])
    lm_loss(arena.base, arena.tokens, arena.targets).backward()
    want = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in arena.base.parameters()])
    arena.base.zero_grad()
    all_reduce(want, group, "gate").wait()
    # Subtracting a gradient rounds to the weight's unit roundoff, adding the ranks' in another order to the gradient's.
    unit = torch.finfo(torch.float32).eps
    tolerance = float(unit * before.norm() / want.norm()) + 4 * group.size() * unit
    errors = {}
    for name in candidates:
        if name != ALONE:
            trained = arena.build(name, torch.optim.SGD, lr=1.0)
            arena.forward_backward(trained)
            trained.optimizer.step()
            after = torch.cat([weight.flatten() for weight in trained.weights()])
            errors[name] = require_close(f"{name}'s update", before - after, want, tolerance)
            del trained
        advance(name)
    return errors
