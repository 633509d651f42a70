"""A sharded parameter: each rank keeps some rows (of the first axis), and has the rest while a layer computes with it.

    resharded     `shard` (rows/N ...) in the module's dtype, which the optimizer steps; `full` has an empty storage
    unsharded     `full` (rows ...) in the compute dtype, gathered from all ranks; the module sees it as its parameter

The storage of `full` is resized, not replaced: autograd keeps `full` for backward, and would keep its memory, too.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.buffers.bucket import SHARDED, GradBucket
from cs336_systems.buffers.flat import FlatLayout
from cs336_systems.buffers.shard_tensor import Rows, as_shard, raw, saved_rows
from cs336_systems.buffers.sharded_gradient import ShardedGradient
from cs336_systems.comm import Group, Work, all_gather, fault
from cs336_systems.comm.events import mark

Place = tuple[nn.Module, str]  # a layer, and the name of one of its own parameters
Lend = Callable[["ShardedParameter"], nn.Parameter | None]


class WeightProxy(dict[str, nn.Parameter | None]):
    """A layer's parameters by name, in place of `layer._parameters`: code outside the layer that reads a sharded one (a
    tied head, a slice of a table of positions) gets the whole from `lend`, or the rows if that gives None."""

    def __init__(self, layer: nn.Module, lend: Lend) -> None:
        super().__init__(layer._parameters)
        self.lend, self.sharded = lend, dict[str, ShardedParameter]()

    def __getitem__(self, name: str) -> nn.Parameter | None:
        lent = self.lend(self.sharded[name]) if name in self.sharded else None
        return super().__getitem__(name) if lent is None else lent

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        if name in self.sharded:
            raise fault(
                f"what takes the place of {self.sharded[name].name} is not the parameter that was wrapped, and FSDP "
                "would not compute with it; change the module first, then wrap it anew (functional_call takes modules "
                "that are not sharded)"
            )
        super().__setitem__(name, parameter)


def put(place: Place, parameter: Any) -> None:
    """Let a layer see a parameter in its place, and a recurrent one in the list that it computes from."""
    layer, name = place
    layer._parameters.update({name: parameter})  # a proxy does not see it
    if name in (names := layer.__dict__.get("_flat_weights_names", ())):
        layer._flat_weights[names.index(name)] = parameter  # type: ignore[operator]


def parts(layer: nn.Module) -> Iterable[nn.Module]:
    """The layers whose parameters a layer's forward reads: its own, and those of layers inside that it never calls."""
    return layer.modules() if isinstance(layer, nn.MultiheadAttention) else (layer,)


class ShardedParameter:
    """One parameter of two or more axes, and its `places` in layers (several if it is tied). `rows` are [first, last)
    of this rank, `gradients` the bucket that reduce-scatters its gradient. `compute_dtype` and `reduce_dtype` are those
    of the whole and of the reduction (default: the parameter's own)."""

    def __init__(
        self, weight: nn.Parameter, places: Sequence[Place], name: str, mark: str, group: Group,
        compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.places, self.name, self.group, self.shape = places, name, group, weight.shape
        self.label = f"{name}{mark}"
        num_rows, columns = len(weight), weight[0].numel()
        self.layout = FlatLayout.pack([weight], group.size(), granule=columns)
        first, last = (min(cut // columns, num_rows) for cut in self.layout.cuts[group.rank() :][:2])
        self.rows, self.numel = (first, last), (last - first) * columns
        rows = weight.detach()[slice(*self.rows)].clone(memory_format=torch.contiguous_format)
        if group.size() > 1 and type(rows) is Tensor:  # on one rank, rows are all; a fake tensor is a kind by itself
            rows = as_shard(rows, Rows(name, self.rows, num_rows, group))
        self.shard = nn.Parameter(rows, weight.requires_grad)
        self.trainable = weight.requires_grad
        self.version = self.shard._version  # version of the shard at the last gather
        flat = torch.empty(self.layout.numel, dtype=compute_dtype or weight.dtype, device=weight.device)
        self.full = nn.Parameter(self.layout.view(flat, 0), weight.requires_grad)
        for each in (self.shard, self.full):
            vars(each).update(vars(weight) | vars(each))  # what a user has set, such as `_no_weight_decay`
        # An alias with a version counter of its own: refilling is no in-place change that autograd must refuse.
        self.flat = flat.data
        self.work: Work | None = None  # from `launch_unshard` to `unshard`
        self.unsharded = True  # until `reshard` below
        label, reduced = f"gradient of {self.label}", reduce_dtype or weight.dtype
        self.gradients = GradBucket([self.full], group, label, SHARDED, reduced, columns)
        self.gradients.resting_dtype = weight.dtype
        self.promised = False  # true while a stand-in is the shard's gradient
        self.earlier: Tensor | None = None  # the gradient that the stand-in replaces
        self.reshard()

    @torch.no_grad()
    def launch_unshard(self) -> None:
        """Start gathering the weight, if it is not there or on its way."""
        version = self.shard._version
        if version != self.version:  # what a forward of the bare module has left is from before the last step
            self.reshard()
        if self.unsharded or self.work is not None:
            return
        if version != self.version:  # a graph from before the last step must not go on with new weights
            self.version = version
            torch.autograd.graph.increment_version(self.full)
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        mark("parameters", self.flat)
        self._fill(self.flat)
        self.work = all_gather(self.flat, self.group, self.label)

    def _fill(self, flat: Tensor) -> None:
        """Copy this rank's rows to their place in a buffer. Nobody reads what is behind them in a padded slice."""
        with raw():
            self.layout.shard(flat, self.group.rank())[: self.numel].copy_(self.shard.reshape(-1))

    def unshard(self) -> None:
        """Let the layers see the whole weight, gathering it unless that has begun."""
        self.launch_unshard()
        if self.work is not None:
            self.work.wait()
            self.work, self.unsharded = None, True
        self.full.requires_grad_(self.shard.requires_grad)
        for place in self.places:
            put(place, self.full)

    def reshard(self, keep: bool = False) -> None:
        """Let the layers see the shard, and free the whole weight, unless it is there and to be kept for backward."""
        if not self.unsharded and self.work is None:
            return
        if self.work is not None:
            self.work.wait()
        self.work, self.unsharded = None, keep
        if not keep:
            self.flat.untyped_storage().resize_(0)
        for place in self.places:
            put(place, self.shard)

    def lies_in(self, tree: Any) -> bool:
        """True if a tensor in nested tuples, lists and dicts is the whole weight or a view of it."""
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
        return any(each.untyped_storage()._cdata == self.flat.untyped_storage()._cdata for each in tensors)

    def promise_gradient(self, _: Tensor | None = None) -> None:
        """Put a stand-in into `.grad` until the mean is delivered; dropping it drops the gradient under way."""
        self.forget_dropped()
        with raw():
            if self.trainable and not isinstance(self.shard.grad, ShardedGradient):
                self.earlier, self.promised = self.shard.grad, True
                self.shard.grad = ShardedGradient(self.shard, self.name, self.group)

    def take_back_promise(self) -> None:
        """Put back the gradient from before the promise, for autograd to add to it."""
        self.forget_dropped()
        with raw():
            if isinstance(self.shard.grad, ShardedGradient):
                self.shard.grad = self.earlier
        self.earlier, self.promised = None, False

    def forget_dropped(self) -> None:
        """Forget the gradient if its stand-in was dropped. Raises UserError if it was replaced."""
        with raw():
            found = self.shard.grad
        if self.promised and found is None:
            self.gradients.reset()
            self.earlier, self.promised = None, False
        elif self.promised and not isinstance(found, ShardedGradient):
            raise fault(
                f"{self.name}.grad was assigned before finish_gradient_synchronization() had delivered it: call that "
                "first, or zero_grad() of the wrapper to drop it"
            )

    @torch.no_grad()
    def deliver_gradient(self) -> None:
        """Add this rank's rows of the mean gradient to the shard's, unless no rank has any."""
        self.take_back_promise()
        reduced, self.gradients.shard = self.gradients.shard, None
        if self.gradients.used:
            if reduced is None:
                raise fault(f"the gradient of {self.name} was dropped on this rank, and others have theirs")
            with raw():
                rows = reduced[: self.numel].view(self.shard.shape)
                self.shard.grad = rows if self.shard.grad is None else self.shard.grad.add_(rows)
        self.gradients.used = set()

    def cut_loaded(
        self, key: str, layer: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any
    ) -> None:
        """Take this rank's rows of a whole parameter that is loaded (a load hook of each layer). Raises UserError for
        rows that are, or may be, another rank's."""
        loaded = state.get(f"{prefix}{key}")
        if not isinstance(loaded, Tensor):
            return
        if metadata.get("assign_to_params_buffers"):
            raise fault(f"{self.name} is sharded, and takes values, but no other tensor: load without assign=True")
        if loaded.shape == self.shape:
            with raw():
                state[f"{prefix}{key}"] = loaded[slice(*self.rows)]
        elif loaded.shape[1:] == self.shape[1:] and (saved := saved_rows(loaded)) != self.rows:
            whose = f"are rows {saved[0]} to {saved[1]}" if saved else "do not say which they are"
            raise fault(
                f"{len(loaded)} of {self.shape[0]} rows of {self.name} are loaded that {whose}, and this rank has rows "
                f"{self.rows[0]} to {self.rows[1]}: load whole weights, as gather_full_params() gives them"
            )

    def refuse_saved(self, layer: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raise UserError for state_dict(), which would save these rows alone (a hook); not with keep_vars=True."""
        if self.group.size() > 1 and not keep_vars:
            raise fault(
                f"state_dict() would have rows {self.rows[0]} to {self.rows[1]} of {self.shape[0]} of {self.name}: "
                "call gather_full_params() on every rank, and save what it returns (in save_pretrained: state_dict=)"
            )

    @torch.no_grad()
    def gather(self) -> Tensor:
        """The master weight (rows ...) on every rank. Every rank must call this."""
        flat = torch.empty(self.layout.numel, dtype=self.shard.dtype, device=self.shard.device)
        self._fill(flat)
        all_gather(flat, self.group, f"{self.label} in full").wait()
        return self.layout.view(flat, 0)
