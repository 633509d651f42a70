"""The one exception that command lines turn into a single line and exit code 2."""

from numbers import Integral


class UserError(ValueError):
    """A mistake that the user can correct: what is wrong, with the numbers, and what to do, in one line.

    Any other exception is a defect of this library and keeps its traceback.
    """


def require_count(name: str, value: object, least: int = 1) -> None:
    """Raises UserError unless a value is an integer of at least `least`."""
    if not isinstance(value, Integral):
        raise UserError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise UserError(f"{name} must be at least {least}, not {value}")
