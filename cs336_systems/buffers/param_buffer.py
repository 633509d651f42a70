"""A parameter buffer: parameters in one flat buffer that is divided over the ranks, each of which updates its slice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336_systems.buffers.flat import FlatLayout
from cs336_systems.comm import Group, all_gather, broadcast
from cs336_systems.errors import UserError


@dataclass
class Part:
    """Elements [start, stop) of a flattened parameter `owner`, and `tensor`, a view of them that an optimizer steps."""

    owner: nn.Parameter
    start: int
    stop: int

    def __post_init__(self) -> None:
        self.tensor = nn.Parameter(self.slice_of(self.owner.data), requires_grad=False)

    def slice_of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor of the owner's shape: (stop - start,), or the tensor itself if it is the whole."""
        whole = self.stop - self.start == self.owner.numel()
        return tensor if whole else tensor.reshape(-1)[self.start : self.stop]


class ParameterBuffer:
    """Parameters of one dtype and device, each a view of `flat`, of which a rank updates the slice that the layout
    gives it, as `parts`. `equal`: the ranks' slices have one size."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: FlatLayout, group: Group, equal: bool) -> None:
        self.parameters, self.layout, self.group, self.equal = parameters, layout, group, equal
        self.index = {parameter: i for i, parameter in enumerate(parameters)}
        self.flat = self.new_buffer(parameters[0].dtype)
        self.parts: list[Part] = []
        with torch.no_grad():
            for parameter in parameters:
                parameter.data = self.view(self.flat, parameter).copy_(parameter)
        for piece in layout.pieces(group.rank()):
            self.parts.append(Part(parameters[piece.index], piece.start, piece.stop))

    def new_buffer(self, dtype: torch.dtype) -> Tensor:
        """A buffer of this layout (elements,), its padding zero."""
        return self.layout.new_buffer(dtype, self.parameters[0].device)

    def view(self, flat: Tensor, parameter: nn.Parameter) -> Tensor:
        """A parameter's view of a buffer of this layout."""
        return self.layout.view(flat, self.index[parameter])

    def check_in_place(self) -> None:
        """Raises UserError if a parameter has left the buffer: updates would no longer reach it."""
        for parameter in self.parameters:
            start = self.view(self.flat, parameter).data_ptr()
            if parameter.numel() and (parameter.data_ptr() != start or parameter.dtype != self.flat.dtype):
                raise UserError(
                    f"a parameter of shape {tuple(parameter.shape)} was moved or cast after the sharded optimizer was "
                    "made; move the model first, then make the optimizer"
                )

    def all_gather(self, flat: Tensor | None = None, label: str = "updated parameters") -> None:
        """Gather all ranks' slices of a buffer of this layout, by default of the parameters."""
        flat = self.flat if flat is None else flat
        if self.equal:
            all_gather(flat, self.group, label).wait()
            return
        slices = [(rank, self.layout.shard(flat, rank)) for rank in range(self.group.size())]
        works = [broadcast(slice_, rank, self.group, label) for rank, slice_ in slices if slice_.numel()]
        for work in works:
            work.wait()
