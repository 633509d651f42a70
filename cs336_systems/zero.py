"""ZeRO is a table of placements: each of parameters, gradients and optimizer state is replicated or sharded.

    stage   parameters   gradients    optimizer    moves each step                         fp32 AdamW, bytes/parameter
    0       replicated   replicated   replicated   all-reduce                              4 + 4 + 8
    1       replicated   replicated   sharded      all-reduce, all-gather                  4 + 4 + 8/N
    2       replicated   sharded      sharded      reduce-scatter, all-gather              4 + (4 + 8)/N
    3       sharded      sharded      sharded      2 all-gathers, reduce-scatter           (4 + 4 + 8)/N

(Rajbhandari et al., arXiv:1910.02054, figure 1.) Replicated gradients are all-reduced, sharded ones
reduce-scattered; a sharded tensor that is needed whole is all-gathered.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cs336_systems.buffers.bucket import REPLICATED, SHARDED, Placement
from cs336_systems.buffers.guards import Parameters
from cs336_systems.buffers.steps import require_elementwise
from cs336_systems.comm import Group
from cs336_systems.ddp import BucketedDDP, DataParallel, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.sharded_optimizer import ShardedOptimizer

# The data-parallel wrappers by name, for tests, observed traffic, benchmarks and the profiler.
WRAPPERS: dict[str, Callable[..., DataParallel]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
}
R, S = REPLICATED, SHARDED
STAGES: tuple[tuple[Placement, Placement, Placement], ...] = ((R, R, R), (R, R, S), (R, S, S), (S, S, S))


def zero(
    module: nn.Module, optimizer_cls: type[torch.optim.Optimizer], stage: int, group: Group | None = None,
    param_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None, apart: Parameters = (),
    ignored: Parameters = (), **kwargs: Any,
) -> tuple[DataParallel | FSDP, torch.optim.Optimizer]:  # fmt: skip
    """Wrap a module and make its optimizer, with a stage's placements; the training loop is the same for all four:

        loss.backward(); model.finish_gradient_synchronization(); optimizer.step(); optimizer.zero_grad()

    `param_groups` makes the optimizer's groups from the wrapped module (default: one group of all parameters); up to
    stage 2 parameters `apart` get buckets of their own, `ignored` ones belong to another wrapper; `kwargs` go to the
    optimizer. Raises UserError for a stage that does not exist or an optimizer that cannot be sharded.
    """
    if isinstance(stage, float) or stage not in range(len(STAGES)):
        raise UserError(f"ZeRO has stages 0 to 3, not {stage!r}")
    if not callable(optimizer_cls):
        raise UserError(f"the optimizer's class is needed, such as torch.optim.AdamW, not {optimizer_cls!r}")
    parameters, gradients, optimizer = STAGES[stage]
    wrapped: DataParallel | FSDP
    if parameters == SHARDED:
        require_elementwise(optimizer_cls, kwargs, 'use ShardedOptimizer with layout="whole" (stage 1)')
        wrapped = FSDP(module, group=group, ignored=ignored)
    else:
        wrapped = BucketedDDP(module, group=group, apart=apart, ignored=ignored, gradients=gradients)
    groups = param_groups(wrapped) if param_groups else [{"params": list(wrapped.parameters())}]
    groups = [each | {"params": [p for p in each["params"] if p not in wrapped.guard.ignored]} for each in groups]
    if optimizer == parameters:  # state rests where the optimizer's parameters do
        return wrapped, optimizer_cls(groups, **kwargs)
    wrapped.guard.refuse_shared_memory()
    source = wrapped if gradients == SHARDED else None
    return wrapped, ShardedOptimizer(groups, optimizer_cls, group, wrapper=source, **kwargs)
