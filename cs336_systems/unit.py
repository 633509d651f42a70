"""A unit of fully sharded data parallelism: one weight, of which a rank keeps some rows and borrows the rest.

    resting       `shard` (rows/N columns), the fp32 master that the optimizer steps; `full` has an empty storage
    unsharded     `full` (rows columns) in the compute dtype, gathered from all ranks; the module sees it as its weight

The storage of `full` is resized, not replaced: autograd keeps `full` for backward, and would keep its memory, too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.bucket import GradBucket
from cs336_systems.comm import Group, Work, all_gather, fault, reduce_scatter
from cs336_systems.flat import FlatLayout
from cs336_systems.marks import mark
from cs336_systems.structure import replaced


class Lender(dict[str, nn.Parameter | None]):
    """A layer's parameters by name. Who reads the weight from outside while it rests (a tied head, a slice of a table
    of positions) would get some rows without noticing; `lend` gives the whole weight instead, or None to decline."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], lend: Callable[[], nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.lend = lend

    def __getitem__(self, name: str) -> nn.Parameter | None:
        lent = self.lend() if name == "weight" else None
        return super().__getitem__(name) if lent is None else lent


class Unit:
    """One 2-D weight, known to its modules (several if it is tied) as their `weight`."""

    def __init__(
        self, weight: nn.Parameter, modules: Sequence[nn.Module], name: str, dtype: torch.dtype, group: Group
    ) -> None:
        self.modules, self.name, self.group, self.shape = modules, name, group, weight.shape
        columns = weight.shape[1]
        self.layout = FlatLayout.pack([weight], group.size(), granule=columns)
        first, last = (
            min(cut // columns, weight.shape[0]) for cut in self.layout.cuts[group.rank() : group.rank() + 2]
        )
        self.rows = (first, last)
        rows = weight.detach()[first:last].clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(rows, weight.requires_grad)
        self.trainable = weight.requires_grad
        self.version = self.shard._version  # of the weight that was last gathered
        self.awaited: tuple[Tensor, int] | None = None  # a gradient that nobody may touch, and its version
        flat = torch.empty(self.layout.numel, dtype=dtype, device=weight.device)
        self.full = nn.Parameter(self.layout.view(flat, 0), weight.requires_grad)
        # An alias with a version counter of its own: refilling is no in-place change that autograd must refuse.
        self.flat = flat.data
        self.nbytes = flat.untyped_storage().nbytes()
        self.work: Work | None = None
        self.unsharded = False
        label = f"gradient of {name}"
        self.gradients = GradBucket([self.full], group, reduce_scatter, label, True, weight.dtype, columns)
        self.reshard()

    @torch.no_grad()
    def launch_unshard(self) -> None:
        """Start gathering the weight, if it is not there or on its way."""
        if self.unsharded or self.work is not None:
            return
        if self.shard._version != self.version:  # a graph from before the last step must not go on with new weights
            self.version = self.shard._version
            torch.autograd.graph.increment_version(self.full)
        self.flat.untyped_storage().resize_(self.nbytes)
        mark("parameters", self.flat)
        mine = self.layout.shard(self.flat, self.group.rank())
        mine[: self.shard.numel()].copy_(self.shard.view(-1))
        mine[self.shard.numel() :].zero_()
        self.work = all_gather(self.flat, self.group, self.name)

    def unshard(self) -> None:
        """Let the modules see the whole weight, gathering it unless that has begun."""
        self.launch_unshard()
        if self.work is not None:
            self.work.wait()
            self.work, self.unsharded = None, True
        self.full.requires_grad_(self.shard.requires_grad)
        for module in self.modules:
            module._parameters["weight"] = self.full

    def reshard(self) -> None:
        """Free the whole weight; the modules see the shard."""
        if self.work is not None:
            self.work.wait()
        self.work, self.unsharded = None, False
        self.flat.untyped_storage().resize_(0)
        for module in self.modules:
            module._parameters["weight"] = self.shard

    def await_gradient(self) -> None:
        """From now on `forgotten` tells whether zero_grad of an optimizer came before the gradient is delivered."""
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.awaited = (self.shard.grad, self.shard.grad._version)

    @property
    def forgotten(self) -> bool:
        return self.awaited is not None and (
            self.shard.grad is not self.awaited[0] or self.awaited[0]._version != self.awaited[1]
        )

    @torch.no_grad()
    def deliver_gradient(self) -> None:
        """Add this rank's rows of the mean gradient to the shard's, unless no rank has any."""
        reduced, self.gradients.shard, self.awaited = self.gradients.shard, None, None
        if not self.shard.numel():  # a scaler would find an empty gradient finite although the other ranks' are not
            self.shard.grad = None
        elif reduced is not None and self.gradients.used:
            rows = reduced[: self.shard.numel()].view(self.shard.shape)
            if self.shard.grad is None:
                self.shard.grad = rows
            else:
                self.shard.grad.add_(rows)
        self.gradients.used = set()

    @torch.no_grad()
    def gather(self) -> Tensor:
        """The master weight (rows columns) on every rank. Every rank must call this."""
        flat = torch.zeros(self.layout.numel, dtype=self.shard.dtype, device=self.shard.device)
        self.layout.shard(flat, self.group.rank())[: self.shard.numel()].copy_(self.shard.view(-1))
        all_gather(flat, self.group, f"{self.name} in full").wait()
        return self.layout.view(flat, 0)


def tensors_with_gradient(tree: Any, source: str = "") -> list[Tensor]:
    """The tensors that want a gradient in nested tuples, lists, dicts and dataclasses.

    Raises TypeError, naming the source, where another kind of object hides them: their backward would not be seen.
    """
    leaves = tree_leaves(tree)
    for leaf in leaves:
        if is_dataclass(leaf):
            leaves += tree_leaves([getattr(leaf, field.name) for field in fields(leaf)])
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    opaque = [type(leaf).__name__ for leaf in leaves if hasattr(leaf, "__dict__") and not is_dataclass(leaf)]
    if source and opaque and not found and torch.is_grad_enabled():
        raise TypeError(f"{source} returns a {opaque[0]}, in which FSDP finds no tensor: return a tuple or dataclass")
    return [tensor for tensor in found if tensor.requires_grad]


def refuse_hooks(weight: nn.Parameter, name: str, group: Group) -> None:
    """Raises UserError for a hook on the gradient of a sharded weight, which autograd never gives one."""
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        raise fault(f"{name} has a gradient hook, which would never run since the weight is sharded: remove it")


def shard_weights(
    module: nn.Module, compute_dtype: torch.dtype | None, group: Group, ignored: Collection[nn.Parameter] = ()
) -> tuple[list[Unit], list[tuple[nn.Module, Unit]]]:
    """Replace the 2-D `weight` of every layer by this rank's rows: the units, and each layer's, in order."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    left_out = set(ignored)
    for name, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        if weight in left_out:
            continue
        if isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.numel() and weight.is_floating_point():
            owners.setdefault(weight, []).append((f"{name}.weight".lstrip("."), layer))
            refuse_hooks(weight, owners[weight][0][0], group)
    units = {
        weight: Unit(weight, [layer for _, layer in named], named[0][0], compute_dtype or weight.dtype, group)
        for weight, named in owners.items()
    }
    for weight, unit in units.items():
        replaced(weight, unit.name)
    unit_of = {layer: units[weight] for weight, named in owners.items() for _, layer in named}
    return list(units.values()), [(layer, unit_of[layer]) for layer in module.modules() if layer in unit_of]
