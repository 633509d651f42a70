"""Fixtures of the tests of training."""

import pytest

from cs336_systems.data.corpus import random_corpus, stdlib_corpus


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """Runs of a few steps read little of the text that there is."""
    monkeypatch.setattr(random_corpus, "__defaults__", (0, 100_000))  # seed, tokens
    monkeypatch.setattr(stdlib_corpus, "__defaults__", (400_000,))  # bytes
