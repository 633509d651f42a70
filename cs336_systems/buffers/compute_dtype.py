"""Computing in another dtype than that of the master weights: inputs and small parameters are cast for each layer."""

from collections.abc import Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cs336_systems.buffers.sharded_parameter import parts, put


def compute_in(dtype: torch.dtype, module: nn.Module, layers: Set[nn.Module]) -> None:
    """Make `layers` compute in `dtype`, in which their sharded parameters are gathered. Other layers that have
    parameters (norms) compute in their parameters' dtype, and get inputs in it."""
    for layer in module.modules():
        own = [p for p in layer.parameters(recurse=False) if p.is_floating_point()]
        # A parametrized layer computes with what is computed from its parameters.
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
