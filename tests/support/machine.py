"""A machine whose speed is made up: to measure it takes a run a second on every rank, and few tests look at it."""

from cs336_systems.cost import Hardware

FAST = Hardware("fast", 1e12, 1e11, "made up")


def made_up(*_: object, **__: object) -> Hardware:
    """In place of a probe."""
    return FAST
