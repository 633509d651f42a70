"""What a layout and a plan have in common: degrees, and a batch cut over them, checked in the same words."""

from typing import Protocol

from cs336_systems.errors import UserError
from cs336_systems.schedule import bubble_fraction


class Spread(Protocol):
    """Degrees of parallelism and a batch in sequences."""

    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def global_batch(self) -> int: ...


def check_spread(spread: Spread, counts: tuple[str, ...]) -> None:
    """Raises UserError, with the numbers, for one of the `counts` below one, a stage of ZeRO that does not exist, and a
    batch or a schedule that does not divide."""
    for name in counts:
        if getattr(spread, name) < 1:
            raise UserError(f"{name} must be at least 1, not {getattr(spread, name)}")
    if spread.zero not in (0, 1, 2, 3):
        raise UserError(f"ZeRO has stages 0 to 3, not {spread.zero}")
    batch, together = spread.global_batch, spread.micro_batch * spread.dp * spread.ep
    if batch % together:
        below = batch // together * together
        near = f"{below} or {below + together}" if below else str(together)
        raise UserError(
            f"a global batch of {batch} sequences is not a multiple of micro-batch {spread.micro_batch} x dp "
            f"{spread.dp}{f' x ep {spread.ep}' if spread.ep > 1 else ''} = {together}: use {near}"
        )
    if spread.chunks > 1 and spread.pp == 1:
        raise UserError(f"{spread.chunks} chunks are of no use on one stage: set chunks to 1, or pp above 1")
    bubble_fraction(spread.schedule, spread.pp, batch // together, spread.chunks)  # which checks that they fit
