"""Fixtures of the tests of checkpoints."""

import pytest

from cs336_systems.comm import distributed


@pytest.fixture(scope="module")
def group():
    """A group of this process alone."""
    with distributed("cpu", timeout=20) as joined:
        yield joined
