"""Shared fixtures: one seed for every test, and fresh memory poisoned with NaN so that an unwritten element is seen."""

import gc
import os

import pytest
import torch

from tests.leftovers import pytest_configure, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401, hooks
from tests.machine import made_up

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need on a GPU


def pytest_collection_finish():
    """What is imported stays, and need not be searched by every collection of garbage, of which benchmarks have one for
    each candidate: torch alone is a million objects."""
    torch.use_deterministic_algorithms(False)  # imports the compiler
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded_and_poisoned():
    """Every test starts from seed 0; torch.empty returns NaN (deterministic mode fills what is not initialised)."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def where_triton_runs():
    """New tensors are made on the GPU if there is one: Triton compiles for it, and interprets where there is none."""
    if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture
def quick_probe(monkeypatch):
    """Commands that this process runs do not measure the machine's speed."""
    for name in ("cs336_systems.train.probe", "benchmarks.plan.measure_once", "benchmarks.profiling_run.probe"):
        monkeypatch.setattr(name, made_up)


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Run in an empty folder, so that nothing a command writes lands in the project."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
