"""The state of a fully sharded module: whole, for any module and number of ranks, or this rank's rows of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336_systems.errors import UserError
from cs336_systems.unit import Unit


@dataclass(frozen=True)
class Shard:
    """Rows [first, first + len(tensor)) of a tensor (rows ...) of `shape`; the whole of one that is replicated."""

    tensor: Tensor
    first: int
    shape: tuple[int, ...]


def gather_full(module: nn.Module, units: Sequence[Unit]) -> dict[str, Tensor]:
    """A copy of every tensor of the module's state by name; tied ones are one tensor under each name."""
    unit_of = {unit.shard: unit for unit in units}
    full: dict[str, Tensor] = {}
    copies: dict[Tensor, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if value not in copies:
            copies[value] = unit_of[value].gather() if value in unit_of else value.detach().clone()
        full[name] = copies[value]
    return full


def sharded_state(module: nn.Module, units: Sequence[Unit]) -> dict[str, Shard]:
    """This rank's shard of every tensor of the module's state by name; the tensors are those that it trains."""
    unit_of = {unit.shard: unit for unit in units}
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        unit = unit_of.get(value)
        state[name] = Shard(value.detach(), unit.rows[0] if unit else 0, tuple(unit.shape if unit else value.shape))
    return state


@torch.no_grad()
def load_full(module: nn.Module, units: Sequence[Unit], full: Mapping[str, Tensor]) -> None:
    """Copy this rank's rows of a whole state. Raises UserError for other names or shapes than the module has."""
    state = sharded_state(module, units)
    if full.keys() != state.keys():
        raise UserError(f"the state has other names than the module, first {sorted(full.keys() ^ state.keys())[0]}")
    for name, shard in state.items():
        if tuple(full[name].shape) != shard.shape:
            raise UserError(f"{name} has shape {tuple(full[name].shape)}, the module's is {shard.shape}")
        whole = shard.tensor.shape == full[name].shape
        shard.tensor.copy_(full[name] if whole else full[name][shard.first : shard.first + len(shard.tensor)])
