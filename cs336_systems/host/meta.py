"""Operators on the meta device, each computed once for each kind of arguments.

Torch finds a result's shape there by decompositions in Python, which take 0.1 ms an operator and more. Results of the
same operator with tensors of the same sizes, strides and dtypes are alike, so that looking one up takes a fifth.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
aten = torch.ops.aten
UNALIKE = {aten.set_, aten.resize_}  # they change what their tensor is


class _Result(NamedTuple):
    """New tensors as (size, stride, dtype), or the first argument where there are none; `alone` if not in a tuple."""

    new: tuple[tuple[Any, ...], ...] = ()
    alone: bool = True


_results: dict[Any, _Result | None] = {}  # None where torch must be asked


class QuickMeta(TorchDispatchMode):
    """Runs operators on the meta device by `run`."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`function(*args, **kwargs)`, whose result is only looked up where it is on the meta device and known."""
    if function.namespace != "aten" or function.is_view or function.overloadpacket in UNALIKE:
        return function(*args, **kwargs)
    try:
        key = function, torch.get_default_dtype(), _kind(args), _kind(tuple(kwargs.items()))
    except TypeError:
        return function(*args, **kwargs)
    if key not in _results:
        result = function(*args, **kwargs)
        _results[key] = _describe(result, (args, kwargs), key[2])
        return result
    if (known := _results[key]) is None:
        return function(*args, **kwargs)
    if not known.new:
        return args[0]
    made = tuple([torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in known.new])
    return made[0] if known.alone else made


def _kind(value: Any) -> Any:
    """Key of a result. Raises TypeError for a tensor with numbers and for what is neither one nor constant."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.is_meta:
            return value.shape, value.stride(), value.dtype
    elif kind is tuple or kind is list:
        return tuple([_kind(each) for each in value])
    elif kind in CONSTANTS:
        return kind, value
    raise TypeError


def _describe(result: Any, given: tuple[Any, Any], kinds: tuple[Any, ...]) -> _Result | None:
    """A result that is the unchanged first argument, or new tensors that share no storage with the arguments."""
    if given[0] and result is given[0][0]:
        return _Result() if _kind(result) == kinds[0] else None
    results = result if isinstance(result, tuple) else (result,)
    used = {each.untyped_storage()._cdata for each in tree_leaves(given) if isinstance(each, Tensor)}
    for each in results:
        if type(each) is not Tensor or not each.is_meta or each.untyped_storage()._cdata in used:
            return None
    return _Result(tuple(_kind(each) for each in results), not isinstance(result, tuple))
