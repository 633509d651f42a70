"""The state of a sharded optimizer in the format of the unsharded one, put together from all ranks, and taken apart.

A state tensor that is shaped like its part is sharded as the parameter is; any other (a step count, a factor) belongs
to the parameter as a whole and comes from the first rank that has it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.comm import agree, broadcast
from cs336_systems.param_store import ParamStore, Part

State = dict[int, dict[str, Any]]
DTYPES = {
    str(d): d
    for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}


def _describe(value: Any, part: Part) -> list[Any]:
    """A state value in words that JSON knows: [kind, ...]."""
    if not isinstance(value, Tensor):
        return ["value", value]
    kind = "sharded" if value.shape == part.tensor.shape else "tensor"
    return [kind, str(value.dtype), list(value.shape), value.device.type]


@torch.no_grad()
def gather_state(
    inner: torch.optim.Optimizer, stores: Sequence[ParamStore], numbers: Mapping[nn.Parameter, int]
) -> State:
    """Every parameter's whole state by its number, on every rank."""
    gathered: State = {}
    for store in stores:
        mine = {
            str(numbers[part.owner]): {key: _describe(value, part) for key, value in inner.state[part.tensor].items()}
            for part in store.parts
            if inner.state.get(part.tensor)
        }
        described = [
            json.loads(text) for text in agree("optimizer state", json.dumps(mine, allow_nan=False), store.group)
        ]
        parts = {numbers[part.owner]: part for part in store.parts}
        for number in sorted({int(name) for one in described for name in one}):
            source = next(rank for rank, one in enumerate(described) if str(number) in one)
            state = gathered.setdefault(number, {})
            for key, words in described[source][str(number)].items():
                if words[0] == "value":
                    state[key] = words[1]
                elif words[0] == "tensor":
                    local = inner.state[parts[number].tensor][key] if store.group.rank() == source else None
                    state[key] = _from_source(local, words, store, source)
        _gather_sharded(inner, store, numbers, described, gathered)
    return gathered


def _from_source(local: Tensor | None, words: list[Any], store: ParamStore, source: int) -> Tensor:
    device = store.flat.device
    tensor = torch.empty(words[2], dtype=DTYPES[words[1]], device=device) if local is None else local.to(device).clone()
    broadcast(tensor, source, store.group, "optimizer state").wait()
    return tensor.to(words[3])


def _gather_sharded(
    inner: torch.optim.Optimizer,
    store: ParamStore,
    numbers: Mapping[nn.Parameter, int],
    described: Sequence[dict[str, dict[str, list[Any]]]],
    gathered: State,
) -> None:
    """Gather each sharded key of one store through a buffer of its layout."""
    kinds: dict[str, str] = {}
    owned: dict[str, set[int]] = {}
    for one in described:
        for number, state in one.items():
            for key, words in state.items():
                if words[0] == "sharded":
                    kinds[key] = words[1]
                    owned.setdefault(key, set()).add(int(number))
    for key in sorted(kinds):
        flat = store.new_buffer(DTYPES[kinds[key]]).zero_()
        for part in store.parts:
            value = inner.state.get(part.tensor, {}).get(key)
            if isinstance(value, Tensor) and value.shape == part.tensor.shape:
                index = store.index[part.owner]
                store.slice_of(part, store.layout.view(flat, index)).copy_(value)
        store.send_round(flat, "optimizer state")
        for index, parameter in enumerate(store.parameters):
            if numbers[parameter] in owned[key]:
                gathered[numbers[parameter]][key] = store.layout.view(flat, index).clone()


@torch.no_grad()
def slice_state(
    inner: torch.optim.Optimizer,
    stores: Sequence[ParamStore],
    numbers: Mapping[nn.Parameter, int],
    whole: Mapping[int, Mapping[str, Any]],
) -> None:
    """Replace the inner optimizer's state by this rank's slices of the whole state."""
    inner.state.clear()
    for part in (part for store in stores for part in store.parts):
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
                mine[key] = ParamStore.slice_of(part, value).to(like.device, dtype, copy=True)
            else:
                mine[key] = value.clone()
        inner.state[part.tensor] = mine
