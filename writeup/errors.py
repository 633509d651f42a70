"""Errors that stop a build: a chapter that cites something that cannot exist."""

from cs336_systems.errors import UserError


class CitationError(UserError):
    """A chapter names a benchmark, setting, metric, source or test that does not exist: a mistake, not a gap."""


class Unmeasured(Exception):  # noqa: N818  # a state of the records, no error
    """A sentence quotes a record that this machine does not have."""
