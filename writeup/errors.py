"""What stops a build: a chapter that cites what there cannot be."""

from cs336_systems.errors import UserError


class CitationError(UserError):
    """A chapter names a benchmark, setting, metric, source or test that does not exist: a mistake, not a gap."""
