"""Compute dtype of sharded layers: inputs and biases are cast on the way in, and the master biases put back after."""

from collections.abc import Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def compute_in(dtype: torch.dtype, module: nn.Module, layers: Set[nn.Module]) -> None:
    """Make `layers` compute in `dtype`; their `weight`, which is gathered in it, is left alone. Other layers that have
    parameters (norms) compute in those' dtype, and get inputs in it."""
    for layer in module.modules():
        own = [p for p in layer.parameters(recurse=False) if p.is_floating_point()]
        if layer in layers:
            layer.register_forward_pre_hook(partial(_begin, dtype), with_kwargs=True)
            layer.register_forward_hook(_end, always_call=True)
        elif own:
            layer.register_forward_pre_hook(partial(_cast_inputs, own[0].dtype), with_kwargs=True)


def _begin(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    for name, parameter in layer._parameters.items():
        if name != "weight" and parameter is not None and parameter.is_floating_point():
            layer.__dict__.setdefault("_masters", {})[name] = parameter
            layer._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]
    return _cast_inputs(dtype, layer, args, kwargs)


def _end(layer: nn.Module, args: Any, output: Any) -> None:
    layer._parameters.update(layer.__dict__.pop("_masters", {}))


def _cast_inputs(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast(args, dtype), cast(kwargs, dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of nested tuples, lists and dicts in a dtype."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree)
