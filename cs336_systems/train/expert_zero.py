"""ZeRO for a model with expert parallelism, whose experts have fewer replicas than the rest.

    dense parameters    replicas on all data-parallel ranks, dp x ep: their gradients are reduced over these
    experts             replicas on the dp ranks that have the same ones: reduced over these only

So there are two wrappers and two optimizers, and one face for both. In stage 3 the experts are sharded as in stage 2:
FSDP gathers matrices layer by layer, and to gather experts would undo what expert parallelism has cut.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cs336_systems.comm import Mesh
from cs336_systems.ddp import DataParallel
from cs336_systems.expert_parallel import ExpertParallel
from cs336_systems.fsdp import FSDP
from cs336_systems.optim.grad_norm import LocalGradient
from cs336_systems.zero import ParamGroups, zero


class JointModel(nn.Module):
    """A wrapped module whose experts a second wrapper synchronises. Calls go to the first, all else to both."""

    def __init__(self, dense: DataParallel | FSDP, experts: DataParallel | FSDP) -> None:
        super().__init__()
        self.dense = dense
        self.wrappers = (dense, experts)  # not a module of this one: the parameters are in `dense`

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.dense(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `DataParallel`, as for the methods below."""
        with self.wrappers[0].no_sync(), self.wrappers[1].no_sync():
            yield

    def finish_gradient_synchronization(self) -> None:
        """Every rank must call it, before the step."""
        for wrapper in self.wrappers:
            wrapper.finish_gradient_synchronization()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Every rank must call it after an interrupted backward."""
        for wrapper in self.wrappers:
            wrapper.zero_grad(set_to_none)

    def kept_gradients(self) -> list[LocalGradient]:
        """Of both."""
        return [kept for wrapper in self.wrappers for kept in wrapper.kept_gradients()]


class JointOptimizer:
    """The `optimizers` of the dense parameters and of the experts as one."""

    def __init__(self, dense: torch.optim.Optimizer, experts: torch.optim.Optimizer) -> None:
        self.optimizers = (dense, experts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both, whose settings may be changed."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, **kwargs: Any) -> None:
        """One step of both. Every rank must call it."""
        for optimizer in self.optimizers:
            optimizer.step(**kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of both."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def expert_zero(
    module: nn.Module,
    plan: ExpertParallel,
    optimizer_cls: type[torch.optim.Optimizer],
    stage: int,
    mesh: Mesh,
    param_groups: ParamGroups,
    apart: Collection[nn.Parameter] = (),
    **kwargs: Any,
) -> tuple[DataParallel | FSDP | JointModel, torch.optim.Optimizer | JointOptimizer]:
    """`zero` over the mesh's data-parallel ranks for a module with the experts of a plan, which may be none.

    The arguments are those of `zero`. Experts that are not split over ranks are like all other parameters, but in stage
    3, which shards matrices, and theirs are stacked.
    """
    experts = plan.experts()
    if not list(experts.parameters()) or (plan.group.size() == 1 and stage < 3):
        return zero(module, optimizer_cls, stage, mesh.data, param_groups, apart, **kwargs)
    ignored = list(experts.parameters())
    dense = zero(module, optimizer_cls, stage, mesh.data, param_groups, apart, ignored, **kwargs)
    others = zero(experts, optimizer_cls, min(stage, 2), mesh.dp, param_groups, **kwargs)
    return JointModel(dense[0], others[0]), JointOptimizer(dense[1], others[1])
