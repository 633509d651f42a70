"""Gradients of a model that is spread over tensor-parallel ranks and pipeline stages: the sums that remain after the
data-parallel synchronisation, and the global norm, in which every gradient counts once.

    weights that are split               this rank's part: nothing to add, counts on every rank
    partial (routers, sequence parallel) added over tp, then alike there: counts on tp rank 0
    whole on every tp rank               alike: counts on tp rank 0
    the tied embedding                   added over the first and last stage: counts on the first
    experts of expert parallelism        other ones on each ep rank: count on every ep rank
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, Mesh, all_reduce
from cs336_systems.ddp import DataParallel
from cs336_systems.fsdp import FSDP
from cs336_systems.layout import TIED
from cs336_systems.optim.grad_norm import LocalGradient
from cs336_systems.pipeline import Stage
from cs336_systems.tensor_parallel.plan import TensorParallel
from cs336_systems.train.expert_zero import JointModel


def tied_copy(stage: Stage) -> list[nn.Parameter]:
    """The tied embedding, if it is on another stage as well: its gradients must be cut alike on both."""
    if stage.stages == 1 or not stage.model.config.tied_head or not (stage.has_first or stage.has_last):
        return []
    return [stage.model.get_parameter(TIED)]


@dataclass(frozen=True, eq=False)
class ModelGradients:
    """Between a wrapper's synchronisation and the optimizer's step; every rank of the mesh must call each method."""

    wrapper: DataParallel | FSDP | JointModel
    stage: Stage
    plan: TensorParallel
    experts: Collection[str]  # names of the parameters that ep ranks have different ones of
    mesh: Mesh

    def kept(self) -> dict[str, LocalGradient]:
        """This rank's part of every parameter's gradient, by the name in the whole model."""
        names = {parameter: name for name, parameter in self.stage.model.named_parameters()}
        return {names[each.parameter]: each for each in self.wrapper.kept_gradients()}

    def add_partial(self) -> None:
        """Add up, over tp, what was computed of some tokens only, or of a part of what experts make of them."""
        kept = self.kept()
        self._add([kept[name].gradient for name in sorted(self.plan.partial & kept.keys())], self.mesh.tp, "norms")

    def add_tied(self) -> None:
        """Add up what the first and the last stage have of the embedding that they share."""
        if self.mesh.ends is not None and tied_copy(self.stage) and TIED in (kept := self.kept()):
            self._add([kept[TIED].gradient], self.mesh.ends, "tied embedding")

    @staticmethod
    @torch.no_grad()
    def _add(gradients: list[Tensor], group: Group, label: str) -> None:
        """Sum over a group, in place, by one all-reduce."""
        if not gradients or group.size() == 1:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce(flat, group, label, "sum").wait()
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def replicas(self, name: str) -> Group | None:
        """The group of ranks, this one included, that stand for a part of a parameter; None if others do.

        Of tensor-parallel ranks with the same tensor the first does, and of a tied embedding the first stage.
        """
        duplicate = name not in self.plan.cut and self.mesh.tp.rank() > 0
        if duplicate or (name == TIED and not self.stage.has_first):
            return None
        return self.mesh.dp if name in self.experts else self.mesh.data

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The L2 norm of the whole model's gradient, a float64 scalar, equal on every rank.

        Not finite if any gradient of any rank is not: a sum keeps infinity and NaN, where a largest value would lose
        NaN. The device is not asked.
        """
        norms = list[Tensor]()
        for name, each in self.kept().items():
            replicas = self.replicas(name)
            if each.gradient.numel() and replicas is not None and (each.sharded or replicas.rank() == 0):
                dtype = torch.promote_types(each.gradient.dtype, torch.float32)
                norms.append(torch.linalg.vector_norm(each.gradient, dtype=dtype).double())
        total = torch.zeros(1, dtype=torch.float64, device=next(self.stage.parameters()).device)
        if norms:
            total += torch.stack(norms).square().sum()
        all_reduce(total, self.mesh.world, "gradient norm", "sum").wait()
        return total.sqrt()[0]
