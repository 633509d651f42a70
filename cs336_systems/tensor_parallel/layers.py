"""Column- and row-parallel linear layers: a matrix split over the ranks of a group by its outputs or by its inputs.

    x (... in) ->  column parallel (... hidden/ranks)  -> row parallel: a part of a sum over the ranks -> reduce

(Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.) torch keeps a weight as (out in).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.comm import Group, pairs
from cs336_systems.errors import UserError


def my_part(whole: Tensor, dim: int, padded: int, group: Group) -> Tensor:
    """Copy this rank's part along `dim` of a tensor that is first padded with zeros to the size `padded` there."""
    size, real = padded // group.size(), whole.shape[dim]
    first = min(group.rank() * size, real)
    mine = whole.detach().narrow(dim, first, min(size, real - first))
    padding = mine.new_zeros((*mine.shape[:dim], size - mine.shape[dim], *mine.shape[dim + 1 :]))
    return torch.cat((mine, padding), dim)


def split(parameter: Tensor, dim: int, group: Group, what: str, padded: int | None = None) -> nn.Parameter:
    """This rank's part of a parameter along `dim`. Raises UserError if its size, of `what`, does not divide."""
    size = padded or parameter.shape[dim]
    if size % group.size():
        raise UserError(f"{size} {what} do not divide over {group.size()} tensor-parallel ranks")
    return nn.Parameter(my_part(parameter, dim, size, group), parameter.requires_grad)


class ColumnParallelLinear(nn.Module):
    """Some outputs of a linear layer: (... in) -> (... out/ranks), rows of its weight."""

    def __init__(self, linear: nn.Linear, group: Group, padded: int | None = None) -> None:
        super().__init__()
        self.weight = split(linear.weight, 0, group, "outputs of a linear layer", padded)
        self.bias = None if linear.bias is None else split(linear.bias, 0, group, "outputs of a linear layer", padded)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(pairs.SharesGroup, nn.Module):
    """Some inputs of a linear layer: (batch seq in/ranks) -> the sum over the ranks (batch seq out), or with `sequence`
    this rank's part of it along seq, or unless it `reduces` what this rank adds to a sum that the caller takes. The
    bias is whole, and is added once: to the sum, or by the first rank."""

    def __init__(self, linear: nn.Linear, group: Group, sequence: bool = False, reduces: bool = True) -> None:
        super().__init__()
        self.group, self.sequence, self.reduces = group, sequence, reduces
        self.weight = split(linear.weight, 1, group, "inputs of a linear layer")
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if not self.reduces:
            return y if self.bias is None else y + self.bias * float(self.group.rank() == 0)
        y = pairs.reduce_sequence(y, 1, self.group, "row") if self.sequence else pairs.reduce(y, self.group, "row")
        return y if self.bias is None else y + self.bias
