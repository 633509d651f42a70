"""Parameters moved into one flat buffer that is laid out over the ranks, and the parts of them that a rank updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, all_gather, broadcast
from cs336_systems.errors import UserError
from cs336_systems.flat import FlatLayout


@dataclass
class Part:
    """Elements [start, stop) of a flattened parameter, and the view of them that an optimizer steps.

    The view has the parameter's shape if it is the whole of it, else (stop - start,).
    """

    owner: nn.Parameter
    start: int
    stop: int
    tensor: nn.Parameter

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.owner.numel()


class ParamStore:
    """Parameters of one dtype and device, each a view of `flat`; rank r updates its slice (with `equal`, all alike)."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: FlatLayout, group: Group, equal: bool) -> None:
        self.parameters, self.layout, self.group, self.equal = parameters, layout, group, equal
        self.index = {parameter: i for i, parameter in enumerate(parameters)}
        self.first = layout.cuts[group.rank()]
        self.flat = self.new_buffer(parameters[0].dtype)
        self.parts: list[Part] = []
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                view = layout.view(self.flat, index)
                view.copy_(parameter)
                parameter.data = view
        for piece in layout.pieces(group.rank()):
            owner = parameters[piece.index]
            part = Part(owner, piece.start, piece.stop, nn.Parameter(torch.empty(0), requires_grad=False))
            part.tensor = nn.Parameter(self.slice_of(part, owner.data), requires_grad=False)
            self.parts.append(part)

    def new_buffer(self, dtype: torch.dtype) -> Tensor:
        """A buffer of this layout (elements,), its padding zero."""
        flat = torch.empty(self.layout.numel, dtype=dtype, device=self.parameters[0].device)
        flat[sum(p.numel() for p in self.parameters) :].zero_()
        return flat

    @staticmethod
    def slice_of(part: Part, tensor: Tensor) -> Tensor:
        """The part's piece of a tensor that is shaped like its parameter."""
        return tensor if part.whole else tensor.reshape(-1)[part.start : part.stop]

    def check_in_place(self) -> None:
        """Raises UserError if a parameter has left the buffer: updates would no longer reach it."""
        for index, parameter in enumerate(self.parameters):
            start = self.flat.data_ptr() + self.layout.offsets[index] * self.flat.element_size()
            if parameter.numel() and (parameter.data_ptr() != start or parameter.dtype != self.flat.dtype):
                raise UserError(
                    f"a parameter of shape {tuple(parameter.shape)} was moved or cast after the sharded optimizer was "
                    "made; move the model first, then make the optimizer"
                )

    def send_round(self, flat: Tensor | None = None, label: str = "updated parameters") -> None:
        """Give every rank all slices of a buffer of this layout, by default the parameters' own."""
        flat = self.flat if flat is None else flat
        if self.equal:
            all_gather(flat, self.group, label).wait()
            return
        slices = [(rank, self.layout.shard(flat, rank)) for rank in range(self.group.size())]
        works = [broadcast(slice_, rank, self.group, label) for rank, slice_ in slices if slice_.numel()]
        for work in works:
            work.wait()
