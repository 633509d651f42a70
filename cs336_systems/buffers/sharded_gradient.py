"""Stand-in for a sharded gradient in a parameter's `.grad`: the shape of the whole, and this rank's piece of it.

    a norm                                         of the whole gradient; every rank must ask for it
    in place: * or / by a number, clamp, zero      on the piece, so that all ranks together do it to the whole
    anything else                                  an error that names the parameter, and the wrapper's own methods

So torch's clip_grad_norm_ and clip_grad_value_ are right, and other uses get an error that says what to call.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336_systems.comm import Group, fault
from cs336_systems.optim.grad_norm import gather_norms

# Names of torch's operators without `_foreach_`.
NORMS = {"linalg_vector_norm", "norm"}
IN_PLACE = {"mul_", "div_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "_amp_foreach_non_finite_check_and_unscale_"}


class ShardedGradient(Tensor):
    """The gradient of a parameter that is called `label`, without storage. `piece` are this rank's elements, perhaps
    none, as a view of a bucket's shard; None until the synchronisation ends."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    label: str
    group: Group
    piece: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, label: str, group: Group, piece: Tensor | None = None) -> "ShardedGradient":
        new = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device, storage_size=0)
        new.label, new.group, new.piece = label, group, piece
        return new

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.label}, {tuple(self.shape)}, {self.dtype}; on this rank {self.piece})"

    def local(self) -> Tensor:
        """This rank's piece. Raises UserError before the synchronisation has ended."""
        if self.piece is None:
            raise fault(
                f"{self.label}.grad was used before finish_gradient_synchronization(), while it is reduced: call that "
                "first, or zero_grad() of the wrapper to drop it"
            )
        return self.piece

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first, rest, kwargs = args[0], args[1:], kwargs or {}
        name = function.overloadpacket.__name__.removeprefix("_foreach_")
        if name == "detach":
            return cls(first, first.label, first.group, first.piece)
        others = [each for each in tree_leaves((rest, kwargs)) if isinstance(each, Tensor)]
        if name in IN_PLACE and all(each.dim() == 0 and not isinstance(each, cls) for each in others):
            function(tree_map_only(cls, cls.local, first), *rest, **kwargs)
            return None if isinstance(first, list) else first
        if name in NORMS and len(rest) < 2 and (not rest or rest[0] > 0):  # no axes; no count or minimum
            found = norms(tree_leaves(first), *rest, **kwargs)
            return found if isinstance(first, list) else found[0]
        named = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        named.local()  # raises what to call first, if it is being reduced
        raise fault(
            f"{function} of {named.label}.grad, which rests sharded over {named.group.size()} ranks: norms work, and "
            "scaling or clamping in place; else use the wrapper's clip_grad_norm() or kept_gradients() (this rank's "
            "pieces), its ShardedOptimizer, or stage 1, whose gradients are whole"
        )


def norms(gradients: Sequence[Tensor], order: float = 2.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Norms of whole gradients, equal on every rank, by one collective for all that are sharded over one group."""
    whole: dict[int, Tensor] = {}
    for group in dict.fromkeys(each.group for each in gradients if isinstance(each, ShardedGradient)):
        ours = [each for each in gradients if isinstance(each, ShardedGradient) and each.group is group]
        gathered = gather_norms([[each.local()] for each in ours], order, group, ours[0].device)
        whole |= zip(map(id, ours), torch.linalg.vector_norm(gathered, order, dim=0), strict=True)
    return [
        whole[id(each)].to(dtype or each.dtype.to_real())
        if id(each) in whole
        else torch.linalg.vector_norm(each, order, dtype=dtype)
        for each in gradients
    ]


# As torch does for its DTensor: clip_grad_norm_ then asks for all norms at once.
_foreach_supported_types.append(ShardedGradient)  # type: ignore[arg-type]
