"""Check that an optimizer is element-wise, so that it can be given pieces of parameters."""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from cs336_systems.errors import UserError


def _updates(optimizer_cls: type[torch.optim.Optimizer], in_pieces: bool, options: dict[str, Any]) -> torch.Tensor:
    """Elements (24,) of a 4 x 6 parameter after three steps; the optimizer gets it whole or as two flat pieces."""
    whole = torch.linspace(-1, 1, 24, dtype=torch.float32).cos()
    gradient = torch.linspace(-2, 3, 24, dtype=torch.float32).sin()
    views = [(each[:11], each[11:]) if in_pieces else (each.view(4, 6),) for each in (whole, gradient)]
    parameters = [nn.Parameter(view, requires_grad=False) for view in views[0]]
    optimizer = optimizer_cls(parameters, **options)
    for step in range(3):
        for parameter, piece in zip(parameters, views[1], strict=True):
            parameter.grad = piece * (step + 1)
        optimizer.step()
    return whole


def require_elementwise(
    optimizer_cls: type[torch.optim.Optimizer], options: dict[str, Any], advice: str = 'use layout="whole"'
) -> None:
    """Try the optimizer on 24 numbers, whole and in two pieces. Raises UserError with its name if the results differ.
    Muon, Adafactor and LARS use a whole matrix or its norm, and would silently update a slice of it differently."""
    # A learning rate of zero would hide every difference; optimizers with `capturable` need a GPU.
    has_lr = "lr" in options or "lr" in inspect.signature(optimizer_cls).parameters
    options = {key: value for key, value in options.items() if key != "capturable"} | ({"lr": 0.1} if has_lr else {})
    optimizer_cls([nn.Parameter(torch.zeros(1, 1))], **options)  # raises for a wrong option
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # whatever the default device is
        name, why, pieces = getattr(optimizer_cls, "__name__", optimizer_cls), "", None
        try:
            whole = _updates(optimizer_cls, False, options)
        except Exception as error:
            why = f" (its step without arguments ended in {type(error).__name__}: {error})"
        with suppress(RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            pieces = None if why else _updates(optimizer_cls, True, options)
    if pieces is None or not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-7, equal_nan=True):
        found = f"{name} does not treat every element by itself{why}"
        raise UserError(f"{found}, so a parameter cannot be cut for it; {advice}")
