"""The candidates of the data-parallel benchmarks: this project's strategies, and PyTorch's own for the same purpose."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.ddp import BucketedDDP, DataParallel
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.zero import WRAPPERS, zero


@dataclass
class Trained:
    """A model ready to be trained: the forward to call, its optimizer, the call after backward, its whole weights."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    weights: Callable[[], list[Tensor]]
    finish: Callable[[], object] = lambda: None


OptimizerClass = type[torch.optim.Optimizer]
Build = Callable[[TransformerLM, OptimizerClass, dict[str, Any]], Trained]


def parameters_of(model: nn.Module) -> list[Tensor]:
    """The parameters of a model that are whole on every rank."""
    return [parameter.detach() for parameter in model.parameters()]


def alone(model: TransformerLM, cls: OptimizerClass, options: dict[str, Any]) -> Trained:
    """Prepare a model that does not communicate: it shows the cost of computing, and trains wrongly."""
    return Trained(model, cls(model.parameters(), **options), partial(parameters_of, model))


def wrapped(kind: Callable[[nn.Module], DataParallel]) -> Build:
    """One of this project's data-parallel wrappers."""

    def build(model: TransformerLM, cls: OptimizerClass, options: dict[str, Any]) -> Trained:
        ours, weights = kind(model), partial(parameters_of, model)
        return Trained(ours, cls(ours.parameters(), **options), weights, ours.finish_gradient_synchronization)

    return build


def stage(number: int) -> Build:
    """One of this project's ZeRO stages."""

    def build(model: TransformerLM, cls: OptimizerClass, options: dict[str, Any]) -> Trained:
        ours, optimizer = zero(model, cls, number, **options)

        def weights() -> list[Tensor]:
            if isinstance(ours, DataParallel):
                return parameters_of(model)
            full = ours.gather_full_params()
            return [full[name] for name, _ in model.named_parameters()]

        return Trained(ours, optimizer, weights, ours.finish_gradient_synchronization)

    return build


def whole_layout(model: TransformerLM, cls: OptimizerClass, options: dict[str, Any]) -> Trained:
    """Wrap for stage 1 with layout "whole": each rank owns whole parameters, and broadcasts them."""
    ours = BucketedDDP(model)
    optimizer = ShardedOptimizer(ours.parameters(), cls, layout="whole", **options)
    return Trained(ours, optimizer, partial(parameters_of, model), ours.finish_gradient_synchronization)


def torch_ddp(model: TransformerLM, cls: OptimizerClass, options: dict[str, Any]) -> Trained:
    """Wrap by PyTorch's DistributedDataParallel with its defaults, buckets of 25 MB."""
    theirs = DistributedDataParallel(model)
    return Trained(theirs, cls(theirs.parameters(), **options), partial(parameters_of, model))


def torch_zero(model: TransformerLM, cls: OptimizerClass, options: dict[str, Any]) -> Trained:
    """Wrap by PyTorch's DistributedDataParallel and ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here, because the import warns of torch's own use

    theirs = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(theirs.parameters(), optimizer_class=cls, **options)
    return Trained(theirs, optimizer, partial(parameters_of, model))


def torch_fsdp(model: TransformerLM, cls: OptimizerClass, options: dict[str, Any]) -> Trained:
    """Wrap by PyTorch's FSDP2, one unit per block."""
    from torch.distributed.fsdp import fully_shard  # here, because the import takes seconds
    from torch.distributed.tensor import DTensor

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    def weights() -> list[Tensor]:
        found = [parameter.detach() for parameter in model.parameters()]
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in found]

    return Trained(model, cls(model.parameters(), **options), weights)


ALONE = "no communication"
TORCH_DDP = "torch DDP"
TORCH_ZERO, TORCH_FSDP = "torch ZeroRedundancyOptimizer", "torch FSDP2"


def ddp_candidates(bucket_sizes: list[float]) -> dict[str, Build]:
    """All wrappers, bucketed once for each size in MB, after computing alone and PyTorch's own."""
    ours = {name: wrapped(kind) for name, kind in WRAPPERS.items() if name != "bucketed"}
    for size in bucket_sizes:
        ours[f"bucketed {size:g} MB"] = wrapped(partial(BucketedDDP, bucket_size_mb=size))
    return {ALONE: alone, TORCH_DDP: torch_ddp, **ours}


def zero_candidates() -> dict[str, Build]:
    """Every stage, both layouts of the first, and PyTorch's own."""
    ours = {"stage 0": stage(0), "stage 1": stage(1), "stage 1, whole": whole_layout}
    ours |= {"stage 2": stage(2), "stage 3": stage(3)}
    return {**ours, TORCH_ZERO: torch_zero, TORCH_FSDP: torch_fsdp}
