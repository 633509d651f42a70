"""ZeRO is a table of where things rest: each of parameters, gradients and optimizer state is replicated or sharded.

    stage   parameters   gradients    optimizer    moves each step                         fp32 AdamW, bytes a parameter
    0       replicated   replicated   replicated   all-reduce                              4 + 4 + 8
    1       replicated   replicated   sharded      all-reduce, all-gather                  4 + 4 + 8/N
    2       replicated   sharded      sharded      reduce-scatter, all-gather              4 + (4 + 8)/N
    3       sharded      sharded      sharded      2 all-gathers, reduce-scatter           (4 + 4 + 8)/N

(Rajbhandari et al., arXiv:1910.02054, figure 1.) A gradient that is to be replicated is all-reduced and one that is to
be sharded reduce-scattered; what is sharded and needed whole is all-gathered.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from cs336_systems.comm import Group, reduce_scatter
from cs336_systems.ddp import BucketedDDP, DataParallel
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.sharded_optimizer import ShardedOptimizer

ParamGroups = Callable[[nn.Module], list[dict[str, Any]]]


class ScatteredDDP(BucketedDDP):
    """Bucketed data parallelism with one verb changed: each rank keeps its slice of every bucket's mean and no more."""

    scatters, verb = True, staticmethod(reduce_scatter)


def zero(
    module: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    stage: int,
    group: Group | None = None,
    param_groups: ParamGroups | None = None,
    apart: Collection[nn.Parameter] = (),
    ignored: Collection[nn.Parameter] = (),
    **kwargs: Any,
) -> tuple[DataParallel | FSDP, torch.optim.Optimizer]:
    """The module and its optimizer with a stage's placements; the loop that trains them is the same for all four:

        loss.backward(); model.finish_gradient_synchronization(); optimizer.step(); optimizer.zero_grad()

    `param_groups` makes the optimizer's groups from the wrapped module (default: one group of all parameters); the
    gradients of `apart` are cut by themselves and `ignored` ones left alone (see `DataParallel`); `kwargs` go to the
    optimizer. Raises UserError for a stage that does not exist or an optimizer that cannot be sharded.
    """
    if stage not in (0, 1, 2, 3):
        raise UserError(f"ZeRO has stages 0 to 3, not {stage}")
    wrapped: DataParallel | FSDP
    if stage == 3:
        wrapped = FSDP(module, group=group, ignored=ignored)
    else:
        wrapped = (ScatteredDDP if stage == 2 else BucketedDDP)(module, group=group, apart=apart, ignored=ignored)
    groups = param_groups(wrapped) if param_groups else [{"params": list(wrapped.parameters())}]
    left_out = set(ignored)
    groups = [each | {"params": [p for p in each["params"] if p not in left_out]} for each in groups]
    if stage in (0, 3):
        return wrapped, optimizer_cls(groups, **kwargs)
    wrapper = wrapped if isinstance(wrapped, ScatteredDDP) else None
    return wrapped, ShardedOptimizer(groups, optimizer_cls, group, wrapper=wrapper, **kwargs)
