"""Tests that the drawings in docs/ are those that the code draws."""

from pathlib import Path

import pytest

from cs336_systems.schedule import schedule, simulate
from cs336_systems.schedule.lists import TURNING

PAGE = (Path(__file__).resolve().parents[1] / "docs/model_parallelism.md").read_text()


@pytest.mark.parametrize(
    ("name", "chunks", "width"),
    [("gpipe", 1, 74), ("1f1b", 1, 74), ("interleaved", 2, 122), ("zb-h1", 1, 89), ("zbv", 2, 112)],
)
def test_the_drawings_are_the_schedules(name, chunks, width):
    simulation = simulate(schedule(name, 4, 8, chunks), turn=name in TURNING)
    assert simulation.drawing(width) in PAGE
    assert f"idle {simulation.bubble:.0%}, at most {simulation.peak_live[0]} " in PAGE
