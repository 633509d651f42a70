"""Sequence parallelism's gather: the whole sequence as input of a layer, gathered again in backward.

Linear layers keep their input for backward. A whole sequence on every rank would cost the memory that sequence
parallelism saves, so this rank's part is kept instead (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, pairs


class GatheredSequence:
    """Saved-tensor hooks of one gather: autograd keeps this rank's part, and backward gathers the whole again."""

    def __init__(self, part: Tensor, whole: Tensor, group: Group, label: str) -> None:
        self.part, self.group, self.label = part.detach(), group, label
        self.storage = whole.untyped_storage()._cdata  # also of a tensor on the meta device, which has no address
        self.kept, self.left = 0, 0  # saved tensors, and those that this backward has not used yet
        self.again: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Replace a view of the gathered sequence, which autograd would keep, by its place in it."""
        if tensor.untyped_storage()._cdata != self.storage:
            return tensor
        self.kept += 1
        return self, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The view again. The first use in a backward gathers, on every rank, and the last one frees."""
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
    """Make a module's forward gather its first argument, this rank's part (batch seq/ranks d_model) of the sequence;
    with `again`, a second time in backward instead of keeping it. Closures: a copied module shares the group."""
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
