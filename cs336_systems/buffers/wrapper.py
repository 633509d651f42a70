"""The base of the data-parallel wrappers: equal values on all ranks to begin with, and one gradient norm for them."""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from cs336_systems.buffers.bucket import REPLICATED, GradBucket, Placement
from cs336_systems.buffers.guards import Guard
from cs336_systems.comm import Group, broadcast, default_group
from cs336_systems.errors import UserError
from cs336_systems.optim.grad_norm import LocalGradient, clip_local

Parameters = Collection[nn.Parameter]


class Wrapper(nn.Module):
    """A module that a group of ranks trains together, beginning with rank 0's parameters and buffers. Raises UserError,
    on every rank, if the ranks' modules or the `kind` of wrapper differ."""

    gradients: Placement = REPLICATED  # how the mean comes to rest
    buckets: list[GradBucket]
    bucket_of: dict[nn.Parameter, GradBucket]

    def __init__(self, kind: str, module: nn.Module, group: Group | None, ignored: Parameters = ()) -> None:
        super().__init__()
        self.module, self.group = module, default_group(group)
        self.after_synchronisation: list[Callable[[], None]] = []  # called when the gradients are complete
        self.guard = Guard(type(self).__name__, kind, module, self.group, set(ignored), self.gradients)
        for tensor in (*self.guard.names, *module.buffers()):
            broadcast(tensor.data, 0, self.group, "initial value").wait()

    def end_synchronisation(self) -> None:
        """Give every rank the buffers of rank 0, so that one rank may evaluate alone, and let optimizers step."""
        for name, buffer in self.module.named_buffers():
            broadcast(buffer, 0, self.group, f"buffer {name}").wait()
        self.guard.finished()
        for act in self.after_synchronisation:
            act()

    def __deepcopy__(self, memo: Any) -> Any:
        name = type(self).__name__
        raise UserError(f"copy the module before it is wrapped: {name} belongs to its group and parameters")

    def kept_gradients(self) -> list[LocalGradient]:
        """This rank's part of every parameter's synchronised gradient, as views."""
        raise NotImplementedError

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most max_norm; returns the norm before, equal on every rank."""
        self.guard.require_finished("clip_grad_norm()")
        return clip_local(self.kept_gradients(), max_norm, norm_type, self.group)
