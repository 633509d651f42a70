"""Files that have changed since a commit, as git knows them."""

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STALE = "†"  # beside a test or file that has changed since the report of tests


@cache
def _changes(commit: str) -> frozenset[str] | None:
    """Every file that differs from a commit, also if nobody has committed the change; None if git cannot tell."""
    if not re.fullmatch("[0-9a-f]{7,40}", commit):
        return None
    try:
        done = subprocess.run(
            ["git", "diff", "--name-only", "--no-renames", "--relative", commit, "--"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(done.stdout.splitlines())


def changed_since(commit: str, files: Iterable[str]) -> list[str] | None:
    """List the files, relative to the project's root, that have changed since a commit.

    None if that cannot be known: there is no git, or no such commit here, as in a shallow clone.
    """
    changes = _changes(commit)
    return None if changes is None else [file for file in files if file in changes]
