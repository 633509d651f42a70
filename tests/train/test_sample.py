"""Text from a saved model is the text that its training printed."""

import pytest

from cs336_systems.host.console import run_command
from cs336_systems.train import __main__ as training
from cs336_systems.train import sample

SHORT = ["--device", "cpu", "--batch-size", "2", "--context", "32", "--eval-iters", "1", "--steps", "2"]
SHORT += ["--num-layers", "1", "--out", "run"]


def test_a_saved_model_writes_what_it_wrote_after_training(in_tmp, quick_probe, capsys):
    assert run_command(training.main, [*SHORT, "--sample-bytes", "40", "--prompt", "if "]) == 0
    said = capsys.readouterr().out.split("\n\n", 1)[1].strip("\n")
    for path in ("run", "run/checkpoints", "run/checkpoints/step-00000002"):
        assert run_command(sample.main, [path, "--prompt", "if ", "--bytes", "40", "--device", "cpu"]) == 0
        assert capsys.readouterr().out.strip("\n") == said
    assert run_command(sample.main, ["run", "--prompt", "if ", "--bytes", "40", "--seed", "1", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip("\n") != said


@pytest.mark.parametrize("more", [("--data", "random")])
def test_a_model_of_no_text_writes_none(in_tmp, quick_probe, capsys, more):
    assert run_command(training.main, [*SHORT, *more]) == 0
    assert run_command(sample.main, ["run"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("step-00000002 is of a model that has not learned to write text")
    assert run_command(sample.main, ["nowhere"]) == 2
    assert "nowhere is no checkpoint, and there is none in it" in capsys.readouterr().err
