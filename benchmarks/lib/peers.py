"""The candidates of the data-parallel benchmarks: this project's strategies, and PyTorch's own for the same purpose."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.ddp import BucketedDDP, DataParallel
from cs336_systems.fsdp import FSDP
from cs336_systems.model.transformer import TransformerLM
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
