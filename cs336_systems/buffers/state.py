"""State that is divided over the ranks, gathered and sliced: FSDP's parameters, and a sharded optimizer's state.

Whole state has the names or numbers of the unsharded module or optimizer, so it loads at any number of ranks. Of an
optimizer's state, a tensor that is shaped like its part of a parameter is sharded as the parameter is; any other (a
step count, a factor) belongs to the parameter as a whole and comes from the first rank that has it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.buffers.param_buffer import ParameterBuffer, Part
from cs336_systems.buffers.sharded_parameter import ShardedParameter
from cs336_systems.comm import agree, broadcast
from cs336_systems.errors import UserError

State = dict[int, dict[str, Any]]
DTYPES = {
    str(each): each
    for each in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8)
} | {str(torch.bool): torch.bool, str(torch.uint8): torch.uint8}  # of state, by name


@dataclass(frozen=True)
class Shard:
    """Rows [first, first + len(tensor)) of a tensor (rows ...) of `shape`, or the whole of a replicated one."""

    tensor: Tensor
    first: int
    shape: tuple[int, ...]


def gather_full(module: nn.Module, sharded: Sequence[ShardedParameter]) -> dict[str, Tensor]:
    """A copy of every tensor of the module's state by name; tied ones are one tensor under each name."""
    sharded_of = {weight.shard: weight for weight in sharded}
    full: dict[str, Tensor] = {}
    copies: dict[Tensor, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if value not in copies:
            copies[value] = sharded_of[value].gather() if value in sharded_of else value.detach().clone()
        full[name] = copies[value]
    return full


def sharded_state(module: nn.Module, sharded: Sequence[ShardedParameter]) -> dict[str, Shard]:
    """This rank's shard of every tensor of the module's state by name; the tensors are those that it trains."""
    sharded_of = {weight.shard: weight for weight in sharded}
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        weight = sharded_of.get(value)
        first, shape = (weight.rows[0], weight.shape) if weight else (0, value.shape)
        state[name] = Shard(value.detach(), first, tuple(shape))
    return state


@torch.no_grad()
def load_full(module: nn.Module, sharded: Sequence[ShardedParameter], full: Mapping[str, Tensor]) -> None:
    """Copy this rank's rows of a whole state. Raises UserError for other names or shapes than the module has."""
    state = sharded_state(module, sharded)
    if full.keys() != state.keys():
        raise UserError(f"the state has other names than the module, first {sorted(full.keys() ^ state.keys())[0]}")
    for name, shard in state.items():
        if tuple(full[name].shape) != shard.shape:
            raise UserError(f"{name} has shape {tuple(full[name].shape)}, the module's is {shard.shape}")
        whole = shard.tensor.shape == full[name].shape
        shard.tensor.copy_(full[name] if whole else full[name][shard.first : shard.first + len(shard.tensor)])


def _describe(value: Any, part: Part) -> list[Any]:
    """A state value as JSON: ["value", it], or ["sharded" or "whole", dtype, shape, device type] of a tensor."""
    if not isinstance(value, Tensor):
        return ["value", value]
    kind = "sharded" if value.shape == part.tensor.shape else "whole"
    return [kind, str(value.dtype), list(value.shape), value.device.type]


@torch.no_grad()
def gather_state(
    inner: torch.optim.Optimizer, buffers: Sequence[ParameterBuffer], numbers: Mapping[nn.Parameter, int]
) -> State:
    """The whole state of every parameter by its number, on every rank. Every rank must call this."""
    gathered: State = {}
    for buffer in buffers:
        parts = {numbers[part.owner]: part for part in buffer.parts if inner.state.get(part.tensor)}
        states = {number: inner.state[part.tensor] for number, part in parts.items()}
        mine = {n: {key: _describe(value, parts[n]) for key, value in state.items()} for n, state in states.items()}
        sharded: dict[str, tuple[str, set[int]]] = {}  # the dtype of a key, and the parameters that have it
        for source, text in enumerate(agree("optimizer state", json.dumps(mine, allow_nan=False), buffer.group)):
            for number, described in ((int(number), described) for number, described in json.loads(text).items()):
                first = number not in gathered
                state = gathered.setdefault(number, {})
                for key, (kind, *words) in described.items():
                    if kind == "sharded":
                        sharded.setdefault(key, (words[0], set()))[1].add(number)
                    elif first and kind == "value":
                        state[key] = words[0]
                    elif first:
                        local = states[number][key] if source == buffer.group.rank() else None
                        state[key] = _from_source(local, words, buffer, source)
        for key, (dtype, having) in sorted(sharded.items()):
            flat = buffer.new_buffer(DTYPES[dtype]).zero_()
            for number, part in parts.items():
                value = states[number].get(key)
                if isinstance(value, Tensor) and value.shape == part.tensor.shape:
                    part.slice_of(buffer.view(flat, part.owner)).copy_(value)
            buffer.all_gather(flat, "optimizer state")
            for parameter in (parameter for parameter in buffer.parameters if numbers[parameter] in having):
                gathered[numbers[parameter]][key] = buffer.view(flat, parameter).clone()
    return gathered


def _from_source(local: Tensor | None, words: list[Any], buffer: ParameterBuffer, source: int) -> Tensor:
    """Broadcast a tensor that is not sharded from its source rank, where it is `local`."""
    (dtype, shape, device), here = words, buffer.flat.device
    tensor = torch.empty(shape, dtype=DTYPES[dtype], device=here) if local is None else local.to(here).clone()
    broadcast(tensor, source, buffer.group, "optimizer state").wait()
    return tensor.to(device)


@torch.no_grad()
def slice_state(
    inner: torch.optim.Optimizer,
    buffers: Sequence[ParameterBuffer],
    numbers: Mapping[nn.Parameter, int],
    whole: Mapping[int, Mapping[str, Any]],
) -> None:
    """Replace the inner optimizer's state by this rank's slices of the whole state."""
    inner.state.clear()
    for part in (part for buffer in buffers for part in buffer.parts):
        state = whole.get(numbers[part.owner])
        if state is None:
            continue
        mine: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                mine[key] = value
            elif value.shape == part.owner.shape:
                like = part.tensor if key != "step" and value.is_floating_point() else value
                # Like torch, in the parameter's dtype; FusedAdamW, for one, keeps wider moments than that.
                dtype = torch.promote_types(like.dtype, getattr(inner, "moments_dtype", like.dtype))
                mine[key] = part.slice_of(value).to(like.device, dtype, copy=True)
            else:
                mine[key] = value.clone()
        inner.state[part.tensor] = mine
