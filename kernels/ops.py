"""Make a launcher an operator of torch, so that torch.compile sees one opaque box and CUDA graphs see its kernels.

`torch.library.Library` is used by hand because a call of an operator made by `torch.library.custom_op` costs the host
three times as much. Gradients are the business of the autograd.Function that calls the operator.
"""

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("cs336_kernels", "DEF")


def define(schema: str, launcher: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `cs336_kernels::name` of a schema "name(Tensor x) -> Tensor".

    `launcher` computes it on every device; `fake` makes tensors of the results' shapes, strides and dtypes without
    computing.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, launcher, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cs336_kernels::{name}", fake, lib=_library)
    return getattr(torch.ops.cs336_kernels, name).default
