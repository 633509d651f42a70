"""Tests of other people's parallel wrappers: `check(wrap)` compares a class, an optimizer or a training step on
several ranks with one process, property by property, and names the cause of an error.

The command line is `python -m cs336_systems.check --help`; docs/check.md has examples.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cs336_systems.check.report import Report, Verdict, assert_right, check

__all__ = ["Report", "Verdict", "assert_right", "check"]


def __getattr__(name: str) -> Any:
    """Load torch only for names that need it, so that the command line answers at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from cs336_systems.check import report

    return getattr(report, name)
