"""Global norm of gradients, of which some may be sharded over ranks, and clipping by it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, all_gather
from cs336_systems.errors import UserError


class LocalGradient(NamedTuple):
    """Gradient of a parameter on this rank after synchronisation: whole and equal on every rank, or a shard."""

    parameter: nn.Parameter
    gradient: Tensor
    sharded: bool


def _norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor | float:
    """Norm of several tensors as one vector, in float32 at least, as float64; of complex elements by absolute value."""
    pairs = [(g, torch.promote_types(g.dtype, torch.float32)) for g in gradients if g.numel()]
    parts = [torch.linalg.vector_norm(g, norm_type, dtype=wide).double() for g, wide in pairs]
    return torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else 0.0


@torch.no_grad()
def gather_norms(lists: Sequence[Sequence[Tensor]], norm_type: float, group: Group, device: torch.device) -> Tensor:
    """Norm of each list of shards on each rank: (ranks lists) in float64, by one all-gather. An all-reduce with the
    maximum, for the infinity norm, would lose NaN. Every rank must call this."""
    # Always float64, since a rank without gradients could not know the dtype of the others'.
    norms = torch.zeros(group.size(), len(lists), dtype=torch.float64, device=device)
    for i, shards in enumerate(lists):
        norms[group.rank(), i] = _norm(shards, norm_type)
    all_gather(norms.view(-1), group, "gradient norm").wait()
    return norms


@torch.no_grad()
def global_norm(sharded: Sequence[Tensor], replicated: Sequence[Tensor], norm_type: float, group: Group) -> Tensor:
    """Norm of all gradients as one vector, a float64 scalar equal on every rank. `sharded` are this rank's shards;
    `replicated` are equal on every rank and count once. Every rank must call this if any gradient is sharded. Raises
    UserError for a norm_type that is not above 0."""
    if not (norm_type := float(norm_type)) > 0:  # torch takes "inf", too
        raise UserError(f"norms of gradients have a type above 0, such as 2 or inf, not {norm_type}")
    device = (*sharded, *replicated, torch.empty(0))[0].device
    norms = gather_norms([sharded], norm_type, group, device)
    norms = torch.cat((norms[:, 0], norms.new_zeros(1)))
    norms[-1] = _norm(replicated, norm_type)
    return torch.linalg.vector_norm(norms, norm_type)


@torch.no_grad()
def clip_by_norm(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients by max_norm / norm if this is below one. A norm of NaN makes them NaN; an infinite one makes
    them 0, and infinite elements NaN. Raises UserError for a max_norm that is negative or not a number."""
    if not max_norm >= 0:
        raise UserError(f"gradients are clipped to a norm of 0 or more, not {max_norm}")
    scale = torch.where(norm == 0, 1.0, max_norm / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))


def clip_local(gradients: Sequence[LocalGradient], max_norm: float, norm_type: float, group: Group) -> Tensor:
    """Clip a wrapper's gradients by their global norm; returns the norm. Every rank must call this."""
    sharded, replicated = ([each.gradient for each in gradients if each.sharded is kind] for kind in (True, False))
    norm = global_norm(sharded, replicated, norm_type, group)
    clip_by_norm([*sharded, *replicated], norm, max_norm)
    return norm
