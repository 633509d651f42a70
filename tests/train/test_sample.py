"""Text from a saved model is the text that its training printed."""

import json
from pathlib import Path

from cs336_systems.checkpoint.folder import to_text
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
    path = Path("run/checkpoints/step-00000002/manifest.json")
    body = json.loads(path.read_text())["manifest"]
    for name, value, problem in (("d_model", "x", "d_model"), ("size", 5, "AttributeError"), ("num_heads", 0, "num")):
        changed = body["state"] | {"recipe": body["state"]["recipe"] | {name: value}}
        path.write_bytes(to_text(body | {"state": changed}))
        assert run_command(sample.main, ["run"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {path.parent.absolute()} does not say what model it is of: {problem}")


def test_a_model_of_no_text_writes_none(in_tmp, quick_probe, capsys):
    assert run_command(training.main, [*SHORT, "--data", "random"]) == 0
    assert run_command(sample.main, ["run"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("step-00000002 is of a model that has not learned to write text")
    assert run_command(sample.main, ["nowhere"]) == 2
    assert "nowhere is no checkpoint, and there is none in it" in capsys.readouterr().err
