"""A sharded parameter: one weight of which each rank keeps some rows, and has the rest while a layer computes with it.

    resharded     `shard` (rows/N columns) in the module's dtype, which the optimizer steps; `full` has an empty storage
    unsharded     `full` (rows columns) in the compute dtype, gathered from all ranks; the module sees it as its weight

The storage of `full` is resized, not replaced: autograd keeps `full` for backward, and would keep its memory, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cs336_systems.buffers.bucket import SHARDED, GradBucket
from cs336_systems.buffers.flat import FlatLayout
from cs336_systems.buffers.guards import Guard, refuse_hooks
from cs336_systems.buffers.shard_tensor import Rows, ShardTensor, as_shard, raw
from cs336_systems.buffers.steps import replaced
from cs336_systems.comm import Group, Work, all_gather, fault
from cs336_systems.comm.events import mark

AHEAD = 2  # layers gathered before they are needed


class WeightProxy(dict[str, nn.Parameter | None]):
    """A layer's parameters by name, in place of `layer._parameters`: code outside the layer that reads its weight (a
    tied head, a slice of a table of positions) gets the whole weight from `lend`, or the rows if that gives None."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], lend: Callable[[], nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.lend = lend

    def __getitem__(self, name: str) -> nn.Parameter | None:
        lent = self.lend() if name == "weight" else None
        return super().__getitem__(name) if lent is None else lent


class ShardedParameter:
    """One 2-D weight, which its modules (several if it is tied) know as their `weight`. `rows` are [first, last) of
    this rank, `gradients` the bucket that reduce-scatters its gradient in the weight's own dtype."""

    def __init__(
        self, weight: nn.Parameter, modules: Sequence[nn.Module], name: str, dtype: torch.dtype, group: Group
    ) -> None:
        self.modules, self.name, self.group, self.shape = modules, name, group, weight.shape
        num_rows, columns = weight.shape
        self.layout = FlatLayout.pack([weight], group.size(), granule=columns)
        self.rows = [min(cut // columns, num_rows) for cut in self.layout.cuts[group.rank() :][:2]]
        rows = weight.detach()[slice(*self.rows)].clone(memory_format=torch.contiguous_format)
        if group.size() > 1 and type(rows) is Tensor:  # on one rank, rows are all; a fake tensor is a kind by itself
            first, last = self.rows
            rows = as_shard(rows, Rows(name, first, last, num_rows, group))
        self.shard = nn.Parameter(rows, weight.requires_grad)
        self.trainable = weight.requires_grad
        self.version = self.shard._version  # of the weight that was last gathered
        flat = torch.empty(self.layout.numel, dtype=dtype, device=weight.device)
        self.full = nn.Parameter(self.layout.view(flat, 0), weight.requires_grad)
        # An alias with a version counter of its own: refilling is no in-place change that autograd must refuse.
        self.flat = flat.data
        self.nbytes = flat.untyped_storage().nbytes()
        self.work: Work | None = None  # from `launch_unshard` to `unshard`
        self.unsharded = False
        self.gradients = GradBucket([self.full], group, f"gradient of {name}", SHARDED, weight.dtype, columns)
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
        self._fill(self.flat)
        self.work = all_gather(self.flat, self.group, self.name)

    def _fill(self, flat: Tensor) -> None:
        """Copy this rank's rows to their place in a buffer, with zeros behind them where the slice is padded."""
        mine = self.layout.shard(flat, self.group.rank())
        with raw():
            mine[: self.shard.numel()].copy_(self.shard.view(-1))
        mine[self.shard.numel() :].zero_()

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

    @torch.no_grad()
    def deliver_gradient(self) -> None:
        """Add this rank's rows of the mean gradient to the shard's, unless no rank has any."""
        reduced, self.gradients.shard = self.gradients.shard, None
        if reduced is not None and self.gradients.used:
            rows = reduced[: self.shard.numel()].view(self.shard.shape)
            self.shard.grad = rows if self.shard.grad is None else self.shard.grad.add_(rows)
        self.gradients.used = set()

    def mark_saved(self, layer: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        """Note in a state dict which rows it has (a state-dict hook of each module)."""
        metadata["rows"] = self.rows

    def cut_loaded(
        self, layer: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any
    ) -> None:
        """Take this rank's rows of a whole weight that is loaded (a load hook of each module). Raises UserError for
        rows that are, or may be, another rank's."""
        loaded = state.get(f"{prefix}weight")
        if not isinstance(loaded, Tensor):
            return
        if isinstance(loaded, ShardTensor):
            metadata = {"rows": [*loaded.rows[1:3]]}
        if loaded.shape == self.shape:
            with raw():
                state[f"{prefix}weight"] = loaded[slice(*self.rows)]
        elif loaded.shape[1:] == self.shape[1:] and (saved := metadata.get("rows")) != self.rows:
            whose = f"are rows {saved[0]} to {saved[1]}" if saved else "do not say which they are"
            raise fault(
                f"{len(loaded)} of {self.shape[0]} rows of {self.name} are loaded that {whose}, and this rank has rows "
                f"{self.rows[0]} to {self.rows[1]}: load whole weights, as gather_full_params() gives them"
            )

    @torch.no_grad()
    def gather(self) -> Tensor:
        """The master weight (rows columns) on every rank. Every rank must call this."""
        flat = torch.empty(self.layout.numel, dtype=self.shard.dtype, device=self.shard.device)
        self._fill(flat)
        all_gather(flat, self.group, f"{self.name} in full").wait()
        return self.layout.view(flat, 0)


class GatherOrder:
    """Weights are gathered up the list of layers in forward, down it in backward, AHEAD of their use (see fsdp.py); a
    tied weight stands in it once for each of its layers.

    Collectives match only if every rank launches the same ones in the same order. So the order is that of the list and
    not that of the calls, and a layer that this rank leaves out is gathered all the same: another rank may use it.
    """

    def __init__(self, layers: Sequence[nn.Module], weights: Sequence[ShardedParameter]) -> None:
        self.layers, self.weights = layers, weights
        self.first = {weight: number for number, weight in reversed([*enumerate(weights)])}
        self.gathered = 0  # layers before this one have been gathered in this forward
        self.gathered_back = self.passed_back = 0  # layers from these on have been gathered, and passed, in backward

    def forward_to(self, number: int) -> None:
        """Come to a layer in forward (the number of layers: to the end), gathering ahead, and free the weights of
        layers that were left out before it."""
        coming = set(self.weights[number : max(self.gathered, number + 1)])
        for weight in self.weights[:number]:
            if weight.work and weight not in coming:  # it may be the tied weight of a layer to come
                weight.reshard()
        for weight in self.weights[self.gathered : number + 1 + AHEAD]:
            weight.launch_unshard()
        self.gathered = max(self.gathered, number + 1 + AHEAD)

    def back_to(self, number: int) -> Iterator[ShardedParameter]:
        """Come to a layer in backward (-1: to the end), gathering ahead. Yields each weight that is passed on the way
        and belongs to no layer further down, for its reduction to take place in this order, too."""
        while self.passed_back > max(number, 0):
            self.passed_back -= 1
            while self.gathered_back > max(self.passed_back - AHEAD, 0):
                self.gathered_back -= 1
                self.weights[self.gathered_back].launch_unshard()
            weight = self.weights[self.passed_back]
            if self.passed_back > number and self.first[weight] == self.passed_back:
                yield weight


def tensors_with_gradient(tree: Any, source: str = "") -> list[Tensor]:
    """The tensors that want a gradient in nested tuples, lists, dicts and dataclasses. Raises TypeError, naming the
    source, where another kind of object hides them: their backward would not be seen."""
    leaves = tree_leaves(tree)
    for leaf in leaves:
        if is_dataclass(leaf):
            leaves += tree_leaves([getattr(leaf, field.name) for field in fields(leaf)])
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    opaque = [type(leaf).__name__ for leaf in leaves if hasattr(leaf, "__dict__") and not is_dataclass(leaf)]
    if source and opaque and not found and torch.is_grad_enabled():
        raise TypeError(f"{source} returns a {opaque[0]}, in which FSDP finds no tensor: return a tuple or dataclass")
    return [tensor for tensor in found if tensor.requires_grad]


def shard_weights(
    module: nn.Module,
    compute_dtype: torch.dtype | None,
    guard: Guard,
    lend: Callable[[ShardedParameter], nn.Parameter | None],
) -> GatherOrder:
    """Replace the 2-D `weight` of every layer by this rank's rows, and let code outside the layer that reads it get
    what `lend` gives. The order is that in which layers are registered, and tied layers share a sharded parameter."""
    layers_of: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in module.modules():
        weight = layer._parameters.get("weight")
        if not isinstance(weight, nn.Parameter) or weight in guard.ignored or weight.dim() != 2:
            continue
        if weight.numel() and weight.is_floating_point():
            layers_of.setdefault(weight, []).append(layer)
            refuse_hooks(weight, guard.names[weight])
    sharded_of: dict[nn.Module, ShardedParameter] = {}
    for weight, layers in layers_of.items():
        replaced[weight] = name = guard.names[weight]
        sharded = ShardedParameter(weight, layers, name, compute_dtype or weight.dtype, guard.group)
        for layer in layers:
            sharded_of[layer] = sharded
            layer.register_state_dict_post_hook(partial(sharded.mark_saved))
            layer.register_load_state_dict_pre_hook(sharded.cut_loaded)
            layer.__dict__["_parameters"] = WeightProxy(layer._parameters, partial(lend, sharded))
    guard.remember_structure({sharded.shard: sharded.full for sharded in sharded_of.values()})
    if compute_dtype is not None:
        compute_in(compute_dtype, module, sharded_of.keys())
    ordered = [layer for layer in module.modules() if layer in sharded_of]
    return GatherOrder(ordered, [sharded_of[layer] for layer in ordered])


def compute_in(dtype: torch.dtype, module: nn.Module, layers: Set[nn.Module]) -> None:
    """Make `layers` compute in `dtype`; their `weight`, which is gathered in it, is left alone. Other layers that have
    parameters (norms) compute in those' dtype, and get inputs in it."""
    for layer in module.modules():
        own = [p for p in layer.parameters(recurse=False) if p.is_floating_point()]
        if layer in layers:
            layer.register_forward_pre_hook(partial(_cast_biases, dtype), with_kwargs=True)
            layer.register_forward_hook(_restore_biases, always_call=True)
        elif own:
            layer.register_forward_pre_hook(partial(_cast_inputs, own[0].dtype), with_kwargs=True)


def _cast_biases(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    masters = layer.__dict__.setdefault("_masters", {})
    for name, parameter in layer._parameters.items():
        if name != "weight" and parameter is not None and parameter.is_floating_point():
            masters[name], layer._parameters[name] = parameter, parameter.to(dtype)  # type: ignore[assignment]
    return _cast_inputs(dtype, layer, args, kwargs)


def _restore_biases(layer: nn.Module, args: Any, output: Any) -> None:
    layer._parameters.update(layer.__dict__.pop("_masters", {}))


def _cast_inputs(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast(args, dtype), cast(kwargs, dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of nested tuples, lists and dicts in a dtype."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree)
