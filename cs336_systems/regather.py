"""The gathered sequence: every rank's tokens for the length of a layer, which backward gathers again.

Linear layers keep their input for backward. Kept whole on every rank, it would cost what sequence parallelism saves, so
this rank's part is kept in its place (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, pairs


class Gathered:
    """A gathered tensor in the place of its copies in the graph: the part, and the whole while backward needs it."""

    def __init__(self, part: Tensor, whole: Tensor, group: Group, label: str) -> None:
        self.part, self.group, self.label = part.detach(), group, label
        self.address = whole.untyped_storage().data_ptr()
        self.kept, self.left = 0, 0  # how often it was kept for backward, and not yet used there
        self.again: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps for a tensor."""
        if tensor.untyped_storage().data_ptr() != self.address:
            return tensor
        self.kept += 1
        return self, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that was kept. The first use in a backward gathers, on every rank, and the last one lets go."""
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


class SequenceGather(pairs.SharesGroup):
    """Gives a module whose input is this rank's part (batch seq/ranks d_model) the whole sequence. With `again`,
    backward gathers it a second time."""

    def __init__(self, group: Group, label: str, again: bool) -> None:
        self.group, self.label, self.again = group, label, again
        self.open: list[Any] = []  # a context for every forward under way

    def install(self, module: nn.Module) -> None:
        """From now on the module's forward gathers its first argument."""
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> Any:
        part, *rest = args
        whole = pairs.gather_sequence(part, 1, self.group, self.label)
        if self.again and torch.is_grad_enabled():
            gathered = Gathered(part, whole, self.group, self.label)
            context = torch.autograd.graph.saved_tensors_hooks(gathered.pack, gathered.unpack)
            context.__enter__()
            self.open.append(context)
        else:
            self.open.append(None)
        return (whole, *rest)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.open and (context := self.open.pop()) is not None:
            context.__exit__(None, None, None)
