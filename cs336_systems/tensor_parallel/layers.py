"""Column- and row-parallel linear layers: a matrix split over the ranks of a group by its outputs or by its inputs.

    x (... in) ->  column parallel (... hidden/ranks)  -> row parallel: a part of a sum over the ranks -> reduce

(Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.) torch keeps a weight as (out in).

Sequence parallelism gathers the input of a column-parallel layer from the ranks' parts of the sequence. A linear layer
would keep the whole sequence for backward, on every rank, which costs the memory that sequence parallelism saves. So a
rank keeps its own part, and gathers the rest again in backward (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.comm import Group, pairs
from cs336_systems.errors import UserError


def my_part(whole: Tensor, dim: int, padded: int, group: Group) -> Tensor:
    """Pad a tensor with zeros to the size `padded` along `dim`; returns a copy of this rank's part of it."""
    size, real = padded // group.size(), whole.shape[dim]
    first = min(group.rank() * size, real)
    mine = whole.detach().narrow(dim, first, min(size, real - first))
    padding = mine.new_zeros((*mine.shape[:dim], size - mine.shape[dim], *mine.shape[dim + 1 :]))
    return torch.cat((mine, padding), dim)


def split(parameter: Tensor, dim: int, group: Group, padded: int | None = None) -> nn.Parameter:
    """Make a parameter of this rank's part along `dim`, its `partition_dim`. Raises UserError if it does not divide."""
    size = padded or parameter.shape[dim]
    if size % group.size():
        what = f"dimension {dim}, of {size}, of a parameter of shape {tuple(parameter.shape)}"
        raise UserError(f"{what} does not divide over {group.size()} tensor-parallel ranks")
    part = nn.Parameter(my_part(parameter, dim, size, group), parameter.requires_grad)
    part.partition_dim = dim  # type: ignore[attr-defined]
    return part


class ColumnParallelLinear(nn.Module):
    """Linear layer with this rank's outputs: (... in) -> (... out/ranks). It has these rows of the weight."""

    def __init__(self, linear: nn.Linear, group: Group, padded: int | None = None) -> None:
        super().__init__()
        self.weight = split(linear.weight, 0, group, padded)
        self.bias = None if linear.bias is None else split(linear.bias, 0, group, padded)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Linear layer with this rank's inputs: (batch seq in/ranks) -> the sum over the ranks (batch seq out). `sequence`:
    -> this rank's part of the sum along seq. Without `reduces`: -> this rank's term, which the caller has to add up.
    The bias is whole, and is added once: to the sum, or by the first rank."""

    def __init__(self, linear: nn.Linear, group: Group, sequence: bool = False, reduces: bool = True) -> None:
        super().__init__()
        self.group, self.sequence, self.reduces = group, sequence, reduces
        self.weight = split(linear.weight, 1, group)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if not self.reduces:
            return y if self.bias is None else y + self.bias * float(self.group.rank() == 0)
        y = pairs.reduce_sequence(y, 1, self.group, "row") if self.sequence else pairs.reduce(y, self.group, "row")
        return y if self.bias is None else y + self.bias


class GatheredSequence:
    """Saved-tensor hooks for one gathered sequence: keep this rank's part, and gather the whole again in backward."""

    def __init__(self, part: Tensor, whole: Tensor, group: Group, label: str) -> None:
        self.part, self.group, self.label = part.detach(), group, label
        self.storage = whole.untyped_storage()._cdata  # also of a tensor on the meta device, which has no address
        self.kept, self.left = 0, 0  # saved tensors, and those that this backward has not used yet
        self.again: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Replace a view of the gathered sequence, which autograd would keep, by its shape, strides and offset."""
        if tensor.untyped_storage()._cdata != self.storage:
            return tensor
        self.kept += 1
        return self, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """Make the view again. The first use in a backward gathers, on every rank; the last one frees the memory."""
        if isinstance(packed, Tensor):
            return packed
        _, shape, stride, offset = packed
        if self.again is None:
            self.again = pairs.gather(self.part, 1, self.group, f"{self.label} again")
            self.left = self.kept
        whole = self.again.as_strided(shape, stride, offset)
        self.left -= 1
        if not self.left:
            self.again = None
        return whole


def gather_input(module: nn.Module, group: Group, label: str, again: bool) -> None:
    """Make a module's forward gather its first argument, this rank's part (batch seq/ranks d_model) of the sequence.
    With `again` backward gathers it a second time, and it is not kept."""
    under_way: list[Any] = []  # a context for each forward

    def before(module: nn.Module, args: Any) -> Any:
        part, *rest = args
        whole = pairs.gather_sequence(part, 1, group, label)
        gathered = GatheredSequence(part, whole, group, label)
        hooks = torch.autograd.graph.saved_tensors_hooks(gathered.pack, gathered.unpack)
        under_way.append(hooks if again and torch.is_grad_enabled() else nullcontext())
        under_way[-1].__enter__()
        return (whole, *rest)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if under_way:
            under_way.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
