"""Files and log of a run while it trains, also on a full disk."""

import math
from pathlib import Path

import pytest

from cs336_systems.checkpoint.disk import list_checkpoints
from tests.support import ranks
from tests.support.resume_cases import attempt, complete, figures, log_of, newest, tiny

ONE = {"num_layers": 1, "steps": 3, "batch_size": 4, "context": 8}


def test_a_log_that_cannot_be_written_ends_every_rank(tmp_path):
    recipe = tiny(tmp_path / "run", **ONE, log_file=str(tmp_path))
    line = attempt(2, recipe, timeout=ranks.COLLECTIVE_TIMEOUT).line
    assert line == f"cannot write the log {tmp_path}: Is a directory; name another with --log-file FILE"


def saved(out: Path) -> list[int]:
    """The steps that the log says are saved."""
    assert all(line["save_seconds"] > 0 for line in log_of(out) if "saved" in line)
    return [line["step"] for line in log_of(out) if "saved" in line]


@pytest.mark.parametrize(("rank", "background"), [(0, False), (1, True)])
def test_a_save_that_fails_is_said_and_training_goes_on(tmp_path, rank, background):
    recipe = tiny(tmp_path, num_layers=1, steps=6, save_every=2, background_save=background)
    outcome = complete(2, recipe, {"rank": rank, "step": 2, "what": "full", "when": "write"})
    (said,) = [line for line in outcome.shown.splitlines() if "not saved" in line]
    assert said.startswith(
        f"step 2: {tmp_path}/checkpoints/step-00000002 was not saved: rank {rank}: No space left on device, "
    )
    assert said.endswith("; earlier checkpoints are as they were")
    (failed,) = [line for line in log_of(tmp_path) if "save_failed" in line]
    assert f"step {failed['step']}: {failed['save_failed']}" == said
    assert saved(tmp_path) == [4, 6]
    lines = log_of(tmp_path)  # beside training it is found out when the next save begins
    assert (lines.index(failed) > [line.get("loss") and line["step"] for line in lines].index(4)) == background
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert [row[0] for row in figures(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("background", [False, True])
def test_the_last_save_must_not_fail(tmp_path, background):
    recipe = tiny(tmp_path, num_layers=1, steps=4, save_every=2, background_save=background)
    outcome = attempt(2, recipe, {"rank": 1, "step": 4, "what": "full", "when": "write"}, timeout=20.0)
    assert outcome.line.startswith(f"{tmp_path}/checkpoints/step-00000004 was not saved: rank 1: No space left")
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]
    assert log_of(tmp_path)[-1] == {"step": 4, "save_failed": outcome.line}
    assert saved(tmp_path) == [2]


def test_a_save_beside_training_that_failed_does_not_cost_the_last(tmp_path):
    recipe = tiny(tmp_path, num_layers=1, steps=4, save_every=3, background_save=True)
    outcome = complete(2, recipe, {"rank": 1, "step": 3, "what": "full", "when": "write"})
    assert "step 3: " in outcome.shown
    assert saved(tmp_path) == [4]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000004"]


def test_every_line_of_the_log_has_the_figures_and_rank_0_alone_writes(tmp_path):
    complete(2, tiny(tmp_path, **ONE | {"steps": 4, "log_every": 2, "save_every": 4}))
    header, *lines, final = log_of(tmp_path)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [2, 4]
    for line in steps:
        figures_of_it = [line[key] for key in ("loss", "grad_norm", "tokens_per_s", "mfu", "peak_memory", "lr")]
        assert all(math.isfinite(each) and each >= 0 for each in figures_of_it)
        assert line["tokens_per_s"] > 0 < line["mfu"]
        assert isinstance(line["peak_memory"], int)
    assert "resumed" not in header
    assert header["recipe"]["out"] == str(tmp_path)
    assert final["steps"] == 4


def test_a_full_disk_costs_lines_of_the_log_and_not_the_run(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no device that is always full")
    outcome = complete(2, tiny(tmp_path, **ONE, log_file=str(full)))
    assert set(outcome.results[0]["warnings"]) == {"the log cannot be written: No space left on device"}
    assert newest(tmp_path).step == 3
