"""Fixtures of the tests of checkpoints."""

import shutil

import pytest

from cs336_systems.comm import distributed
from tests.support.checkpoint_cases import save_steps


@pytest.fixture(scope="module")
def group():
    """A group of this process alone."""
    with distributed("cpu", timeout=20) as joined:
        yield joined


@pytest.fixture(scope="module")
def saved(group, tmp_path_factory):
    """A folder with the checkpoints of two steps, to copy."""
    parent = tmp_path_factory.mktemp("saved")
    save_steps(group, str(parent), [1, 2])
    return parent


@pytest.fixture
def parent(saved, tmp_path):
    """A folder of one's own with the checkpoints of two steps."""
    return shutil.copytree(saved, tmp_path / "checkpoints")
