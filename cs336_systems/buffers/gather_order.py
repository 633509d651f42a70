"""Parameters of a module that FSDP shards, the order in which their layers gather them, and the dtype of computing."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from gc import is_tracked
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cs336_systems.buffers.guards import Guard, refuse_hooks
from cs336_systems.buffers.sharded_parameter import Lend, Place, ShardedParameter, WeightProxy, parts, put
from cs336_systems.buffers.steps import replaced
from cs336_systems.comm import fault

AHEAD = 2  # weights gathered before they are needed
Call = tuple[nn.Module, ShardedParameter]  # a layer, whose forward computes with a parameter


class GatherOrder:
    """Gathers weights in the order of `calls` in forward, and of `back` in backward, AHEAD layers before their use (see
    fsdp.py). A tied weight is in both lists once for each of its layers, a layer before the layers inside it.

    Collectives match only if every rank launches the same ones in the same order. So the order is that of the list and
    not that of the calls, and a layer that this rank leaves out is gathered all the same: another rank may use it.
    """

    def __init__(self, calls: Sequence[Call], back: Sequence[Call]) -> None:
        self.calls, self.back_number = calls, {call: number for number, call in enumerate(back)}
        self.weights, self.back = [weight for _, weight in calls], [weight for _, weight in back]
        self.first = {weight: number for number, weight in reversed([*enumerate(self.back)])}
        self.gathered = 0  # layers before this one have been gathered in this forward
        self.gathered_back = self.passed_back = 0  # layers from these on have been gathered, and passed, in backward

    def forward_to(self, number: int, keep: bool) -> None:
        """Advance to a layer in forward, gathering ahead; free weights of skipped layers, unless all are to be kept."""
        coming = set(self.weights[number : max(self.gathered, number + 1)])
        for weight in self.weights[:number]:
            if weight.work and not keep and weight not in coming:  # it may be the tied weight of a layer to come
                weight.reshard()
        for weight in self.weights[self.gathered : number + 1 + AHEAD]:
            weight.launch_unshard()
        self.gathered = max(self.gathered, number + 1 + AHEAD)

    def back_to(self, number: int) -> Iterator[ShardedParameter]:
        """Go back to a layer in backward (-1: to the end), gathering ahead. Yields each weight that is passed
        and belongs to no layer further down, so that weights are reduced in this order, too."""
        while self.passed_back > max(number, 0):
            self.passed_back -= 1
            while self.gathered_back > max(self.passed_back - AHEAD, 0):
                self.gathered_back -= 1
                self.back[self.gathered_back].launch_unshard()
            weight = self.back[self.passed_back]
            if self.passed_back > number and self.first[weight] == self.passed_back:
                yield weight


def tensors_with_gradient(tree: Any, source: str = "") -> list[Tensor]:
    """The tensors that require a gradient in nested tuples, lists, dicts and dataclasses. Raises TypeError, naming the
    source, if they are in another kind of object, where FSDP cannot follow their backward."""
    leaves = tree_leaves(tree)
    for leaf in leaves:
        if is_dataclass(leaf):
            leaves += tree_leaves([getattr(leaf, field.name) for field in fields(leaf)])
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    opaque = [type(leaf).__name__ for leaf in leaves if is_tracked(leaf) and not is_dataclass(leaf)]
    if source and opaque and not found and torch.is_grad_enabled():
        raise TypeError(f"{source} returns a {opaque[0]}, in which FSDP finds no tensor: return a tuple or dataclass")
    return [tensor for tensor in found if tensor.requires_grad]


def inside_out(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield all layers, each once, and each after the layers inside it."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from inside_out(child, seen)
    yield module


def shard_weights(
    module: nn.Module, compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, guard: Guard, lend: Lend
) -> GatherOrder:
    """Replace every floating-point parameter of two or more axes by this rank's rows, except norms' and empty ones; the
    others are small and stay whole. Code outside a parameter's layer that reads it gets the result of `lend`. The order
    is that in which layers are registered; tied layers share a sharded parameter."""
    places: dict[nn.Parameter, list[Place]] = {}
    for layer in (each for each in module.modules() if not hasattr(each, "normalized_shape")):
        for key, weight in layer._parameters.items():
            if weight is None or weight in guard.ignored or weight.dim() < 2:
                continue
            if weight.numel() and weight.is_floating_point():
                if isinstance(layer, torch.jit.ScriptModule):
                    raise fault(f"{guard.names[weight]} is compiled into a ScriptModule: shard the module before that")
                places.setdefault(weight, []).append((layer, key))
                refuse_hooks(weight, guard.names[weight])
    proxies: dict[nn.Module, WeightProxy] = {}
    sharded_of: dict[nn.Parameter, ShardedParameter] = {}
    for weight, found in places.items():
        replaced[weight] = name = guard.names[weight]
        sharded_of[weight] = sharded = ShardedParameter(
            weight, found, name, guard.mark, guard.group, compute_dtype, reduce_dtype
        )
        for layer, key in found:
            layer.register_load_state_dict_pre_hook(partial(sharded.cut_loaded, key))
            layer.register_state_dict_pre_hook(sharded.refuse_saved)
            if layer not in proxies:
                layer.__dict__["_parameters"] = proxies[layer] = WeightProxy(layer, lend)
            proxies[layer].sharded[key] = sharded
    guard.remember_structure({sharded.shard: sharded.full for sharded in sharded_of.values()})

    reader = {inner: layer for layer in reversed([*module.modules()]) for inner in parts(layer)}  # the outermost

    def calls(layers: Iterable[nn.Module]) -> list[Call]:
        holders = ((layer, proxies[layer]) for layer in layers if layer in proxies)
        return list(dict.fromkeys((reader[layer], each) for layer, proxy in holders for each in proxy.sharded.values()))

    order = GatherOrder(calls(module.modules()), calls(inside_out(module, set())))
    if compute_dtype is not None:
        compute_in(compute_dtype, module, {layer for layer, _ in order.calls})
    return order


def compute_in(dtype: torch.dtype, module: nn.Module, layers: Set[nn.Module]) -> None:
    """Make `layers` compute in `dtype`, in which their sharded parameters are gathered. Other layers that have
    parameters (norms) compute in their parameters' dtype, and get inputs in it."""
    for layer in module.modules():
        own = [p for p in layer.parameters(recurse=False) if p.is_floating_point()]
        # A parametrized layer computes its weights from its parameters.
        if not layers.isdisjoint((layer, *getattr(layer, "parametrizations", {}).values())):
            layer.register_forward_pre_hook(partial(_cast_biases, dtype), with_kwargs=True)
            layer.register_forward_hook(_restore_biases, always_call=True)
        elif own:
            layer.register_forward_pre_hook(partial(_cast_inputs, own[0].dtype), with_kwargs=True)


def _cast_biases(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    masters = layer.__dict__.setdefault("_masters", {})
    for part in parts(layer):
        whole = {*part._parameters} - {*getattr(part._parameters, "sharded", ())}
        for key, parameter in part._parameters.items():
            if key in whole and parameter is not None and parameter.is_floating_point():
                masters[part, key] = parameter
                put((part, key), parameter.to(dtype))
    return _cast_inputs(dtype, layer, args, kwargs)


def _restore_biases(layer: nn.Module, args: Any, output: Any) -> None:
    for place, parameter in layer.__dict__.pop("_masters", {}).items():
        put(place, parameter)


def _cast_inputs(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast(args, dtype), cast(kwargs, dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of nested tuples, lists and dicts in a dtype."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree)
