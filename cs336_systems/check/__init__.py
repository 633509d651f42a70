"""Equality with one process as a tool for other people's wrappers: `check(wrap)` compares a class, an optimizer or a
training step on several ranks with the reference, property by property, and names the cause of what is wrong.

The command line is `python -m cs336_systems.check --help`; docs/check.md has examples.
"""

from cs336_systems.check.report import Report, Verdict, assert_right, check

__all__ = ["Report", "Verdict", "assert_right", "check"]
