"""Whether an optimizer may be given pieces of parameters: only if it treats every element by itself."""

from typing import Any

import torch
from torch import nn

from cs336_systems.errors import UserError

ROWS, COLUMNS, CUT = 4, 6, 11


def _updates(optimizer_cls: type[torch.optim.Optimizer], in_pieces: bool, options: dict[str, Any]) -> torch.Tensor:
    """A 4 x 6 parameter (24,) after three steps, given whole or as two flat pieces."""
    start = torch.linspace(-1, 1, ROWS * COLUMNS, dtype=torch.float32).cos()
    whole = start.view(ROWS, COLUMNS).clone()
    views = [whole.view(-1)[:CUT], whole.view(-1)[CUT:]] if in_pieces else [whole]
    parameters = [nn.Parameter(view, requires_grad=False) for view in views]
    optimizer = optimizer_cls(parameters, **options)
    for step in range(3):
        gradient = torch.linspace(-2, 3, ROWS * COLUMNS, dtype=torch.float32).sin() * (step + 1)
        pieces = [gradient[:CUT], gradient[CUT:]] if in_pieces else [gradient.view(ROWS, COLUMNS)]
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.clone()
        optimizer.step()
    return whole.view(-1)


def require_elementwise(optimizer_cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Try the optimizer on 24 numbers, whole and in two pieces. Raises UserError by name if that makes a difference.

    Muon, Adafactor or LARS look at a matrix or its norm; a slice of it would be updated differently, silently.
    """
    # A learning rate of zero would hide every difference; capturable optimizers want a GPU.
    options = {key: value for key, value in options.items() if key != "capturable"} | {"lr": 0.1}
    optimizer_cls([nn.Parameter(torch.zeros(1, 1))], **options)  # a wrong option speaks for itself
    with torch.random.fork_rng(devices=[]):
        try:
            whole, pieces = (_updates(optimizer_cls, in_pieces, options) for in_pieces in (False, True))
            same = torch.allclose(whole, pieces, rtol=1e-5, atol=1e-7, equal_nan=True)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            same = False
    if not same:
        raise UserError(
            f"{optimizer_cls.__name__} does not treat every element by itself, so a parameter cannot be cut for it; "
            'use layout="whole"'
        )
