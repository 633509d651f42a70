"""The gradients of a model that is spread over tensor-parallel ranks and pipeline stages: what is still to be added up
after the data-parallel synchronisation, and the norm of it all, in which every gradient counts once.

    weights that are split               this rank's part: nothing to add, counts on every rank
    partial (routers, sequence parallel) added over tp, then alike there: counts on tp rank 0
    whole on every tp rank               alike: counts on tp rank 0
    the tied embedding                   added over the first and last stage: counts on the first
    experts of expert parallelism        other ones on each ep rank: count on every ep rank
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, Mesh, all_reduce
from cs336_systems.cost.layout import TIED
from cs336_systems.grad_norm import Kept
from cs336_systems.pipeline import Stage
from cs336_systems.tensor_parallel import TensorParallel


class KeepsGradients(Protocol):
    """A data-parallel wrapper."""

    def kept_gradients(self) -> list[Kept]:
        """What this rank has of every parameter's synchronised gradient, as views."""


def tied_copy(stage: Stage) -> list[nn.Parameter]:
    """The tied embedding, if it is on another stage as well: its gradients must be cut alike on both."""
    if stage.stages == 1 or not stage.model.config.tied_head or not (stage.has_first or stage.has_last):
        return []
    return [stage.model.get_parameter(TIED)]


class ModelGradients:
    """Between a wrapper's synchronisation and the optimizer's step; every rank of the mesh must call each method."""

    def __init__(
        self, wrapper: KeepsGradients, stage: Stage, plan: TensorParallel, experts: Collection[str], mesh: Mesh
    ) -> None:
        self.wrapper, self.stage, self.plan, self.mesh = wrapper, stage, plan, mesh
        self.experts = experts  # names of the parameters that ep ranks have different ones of

    def kept(self) -> dict[str, Kept]:
        """What this rank keeps of every parameter's gradient, by the name in the whole model."""
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

    def _counts_here(self, name: str, kept: Kept) -> bool:
        """Whether this rank adds the gradient to the norm; the others have the same, or another share."""
        duplicate = name not in self.plan.cut and self.mesh.tp.rank() > 0
        copy = name == TIED and not self.stage.has_first
        replicas = self.mesh.dp if name in self.experts else self.mesh.data
        return not duplicate and not copy and (kept.sharded or replicas.rank() == 0)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The L2 norm of the whole model's gradient, a float64 scalar, equal on every rank.

        Not finite if any gradient of any rank is not: a sum keeps infinity and NaN, where a largest value would lose
        NaN. The device is not asked.
        """
        kept = self.kept()
        squares = [
            torch.linalg.vector_norm(each.gradient, dtype=torch.promote_types(each.gradient.dtype, torch.float32))
            for name, each in kept.items()
            if each.gradient.numel() and self._counts_here(name, each)
        ]
        device = next(self.stage.parameters()).device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if squares:
            total += torch.stack([each.double() for each in squares]).square().sum()
        all_reduce(total, self.mesh.world, "gradient norm", "sum").wait()
        return total.sqrt()[0]
