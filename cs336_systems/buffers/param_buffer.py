"""A parameter buffer: parameters in one flat buffer that is divided over the ranks, each of which updates its slice,
and the state of the optimizer that does so, gathered and sliced.

Whole state has the numbers of the unsharded optimizer, so it loads at any number of ranks. A tensor that is shaped like
its part of a parameter is sharded as the parameter is; any other value (a step count, a factor) belongs to the
parameter as a whole and comes from the first rank that has it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs336_systems.buffers.flat import FlatLayout, FlatPiece, refuse_shared_memory
from cs336_systems.comm import Group, agree, all_gather, broadcast
from cs336_systems.errors import UserError

State = dict[int, dict[str, Any]]  # by the number of the parameter, then by key
PartsState = dict[Tensor, dict[str, Any]]  # of this rank's parts, by the parameters that they are parts of


class Part(NamedTuple):
    """A rank's piece of a parameter `owner`, and `tensor`, a view of it that an optimizer steps."""

    owner: nn.Parameter
    piece: FlatPiece
    tensor: nn.Parameter


class ParameterBuffer:
    """Parameters of one dtype and device, each a view of `flat`, of which a rank updates its slice, as `parts`."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: FlatLayout, group: Group) -> None:
        self.parameters, self.layout, self.group = parameters, layout, group
        refuse_shared_memory((each, f"a parameter of shape {tuple(each.shape)}") for each in parameters)
        self.flat = layout.new_buffer(parameters[0].dtype, parameters[0].device, group)
        self.parts = list[Part]()
        with torch.no_grad():
            for i, parameter in enumerate(parameters):
                parameter.data = layout.view(self.flat, i).copy_(parameter)
        for piece in layout.pieces(group.rank()):
            owner = parameters[piece.index]
            self.parts.append(Part(owner, piece, nn.Parameter(piece.of(owner.data), requires_grad=False)))

    def check_in_place(self) -> None:
        """Raises UserError if a parameter has left the buffer: updates would no longer reach it."""
        for i, p in enumerate(self.parameters):
            if p.numel() and (p.data_ptr() != self.layout.view(self.flat, i).data_ptr() or p.dtype != self.flat.dtype):
                raise UserError(
                    f"a parameter of shape {tuple(p.shape)} was moved or cast after the sharded optimizer was "
                    "made; move the model first, then make the optimizer"
                )

    def all_gather(self, label: str) -> None:
        """Gather the slices that all ranks have updated."""
        slices = [self.layout.shard(self.flat, r) for r in range(self.group.size())]
        if all(each.numel() == slices[0].numel() for each in slices):
            all_gather(self.flat, self.group, label).wait()
            return
        for work in [broadcast(each, rank, self.group, label) for rank, each in enumerate(slices) if each.numel()]:
            work.wait()

    @torch.no_grad()
    def gather_state(self, state: PartsState, numbers: Mapping[nn.Parameter, int], to: int | None = None) -> State:
        """The whole state of every parameter by its number, on every rank or on rank `to` alone: each rank tells the
        others what it has, and broadcasts it. Every rank must call this."""
        gathered, me = State(), self.group.rank()
        parts = [part for part in self.parts if part.owner in numbers]  # not those taken out of their group
        mine = {numbers[part.owner]: (part, state.get(part.owner, {})) for part in parts}
        told = [[n, key, *_describe(value, part)] for n, (part, kept) in mine.items() for key, value in kept.items()]
        for source, theirs in enumerate(agree("optimizer state", told, self.group)):
            piece_of = {numbers.get(self.parameters[piece.index]): piece for piece in self.layout.pieces(source)}
            for number, key, kind, *about in theirs:
                whole = gathered.setdefault(number, {})
                if kind != "sharded" and key in whole:
                    continue
                if kind == "value":
                    whole[key] = about[0]
                    continue
                dtype, shape, device = about
                new = partial(torch.zeros, dtype=getattr(torch, dtype), device=self.flat.device)
                keeps = kind == "whole" or to in (None, me)
                if key not in whole:
                    whole[key] = new(shape if keeps else 0)
                piece = FlatPiece(0, 0, whole[key].numel()) if kind == "whole" else piece_of[number]
                sent = piece.of(whole[key]) if keeps else new(piece.numel)
                if source == me:
                    sent.copy_(mine[number][1][key].reshape(sent.shape))
                broadcast(sent, source, self.group, "optimizer state").wait()
                if kind == "whole":
                    whole[key] = whole[key].to(device)
        return gathered

    @torch.no_grad()
    def slice_state(
        self, whole: State, numbers: Mapping[nn.Parameter, int], moments_dtype: torch.dtype | None
    ) -> PartsState:
        """This rank's slices of a whole state; like torch's, in the parameter's dtype, or that of moments if wider."""
        sliced: PartsState = {}
        for part in (part for part in self.parts if numbers.get(part.owner) in whole):
            mine = sliced[part.owner] = {}
            for key, value in whole[numbers[part.owner]].items():
                mine[key] = value.clone() if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and value.shape == part.owner.shape:
                    like = part.tensor if key != "step" and value.is_floating_point() else value
                    dtype = torch.promote_types(like.dtype, moments_dtype or like.dtype)
                    mine[key] = part.piece.of(value).to(like.device, dtype, copy=True)
        return sliced


def _describe(value: Any, part: Part) -> list[Any]:
    """A state value as JSON: ["value", it], or ["sharded" or "whole", dtype, whole shape, device type] of a tensor."""
    if not isinstance(value, Tensor):
        return ["value", value]
    kind, whole = ("sharded", part.owner) if value.shape == part.tensor.shape else ("whole", value)
    return [kind, str(value.dtype).removeprefix("torch."), list(whole.shape), value.device.type]
