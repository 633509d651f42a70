"""`python -m writeup --run`: every benchmark in its turn, with the time left; one that fails does not stop the rest."""

import os
import subprocess
import sys

import pytest

from cs336_systems.errors import UserError
from writeup import run as running
from writeup.catalogue import RUNS, Benchmark
from writeup.freshness import ROOT

BODY = """import sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--results") + 1])
folder.mkdir(parents=True, exist_ok=True)
(folder / sys.argv[1]).touch()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Three benchmarks that only leave a file, the second of which fails."""
    (tmp_path / "fake_benchmark.py").write_text(BODY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    runs = [
        Benchmark(name, (name, code), 2.0, module="fake_benchmark") for name, code in zip("abc", "030", strict=True)
    ]
    monkeypatch.setattr(running, "RUNS", tuple(runs))
    monkeypatch.setattr(running, "own_folder", lambda machine: machine or "x")
    monkeypatch.setattr(running, "GRACE", 1.0)
    return tmp_path / "results"


def test_what_fails_is_named_and_the_rest_is_measured(fakes, capsys):
    assert running.run_all((), fakes, "some-machine") == "some-machine"
    assert {path.name for path in (fakes / "some-machine").iterdir()} == {"a", "b", "c"}
    said = capsys.readouterr().err
    assert "[1/3] about 6 min 0 s left: python -m fake_benchmark a 0" in said
    assert "[3/3] about " in said  # faster than foreseen by now
    assert "[3/3] about 2 min" not in said
    assert "left out, since it needs a GPU: python -m benchmarks.gpu_suite" in said
    assert "not measured: python -m fake_benchmark b 3: ended with exit code 3" in said


def test_only_some(fakes):
    running.run_all(("c", "a"), fakes, "x")
    assert {path.name for path in (fakes / "x").iterdir()} == {"a", "c"}
    with pytest.raises(UserError, match="--only d is no benchmark; there are a, b, c, gpu_suite"):
        running.run_all(("a", "d"), fakes, "x")
    with pytest.raises(UserError, match="no benchmark could be run"):
        running.run_all(("b",), fakes, "x")


def test_what_hangs_is_stopped(fakes):
    (fakes.parent / "fake_benchmark.py").write_text("import time; time.sleep(60)")
    assert running.measure(running.RUNS[0], fakes, minutes=0.3 / 60) == "took more than 300 ms"


def test_the_options_of_every_run_are_those_of_its_command():
    for run in RUNS:
        assert run.command.split()[:2] == ["python", "-m"]
        parser = __import__(run.source, fromlist=["main"]).main
        context = parser.make_context(run.source, [*run.options, "--results", "x"])
        if run.root:  # the options of the command that it runs as well
            assert context.params["command"][-2:] == ("--results", "x")
        else:
            assert str(context.params["results"]) == "x"


def test_only_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(running, "machine_name", lambda device: "amd-epyc")
    assert running.own_folder(None) == running.own_folder("EPYC") == "amd-epyc"
    with pytest.raises(UserError, match="--run measures this machine, whose records are in amd-epyc, not h200"):
        running.own_folder("h200")


def test_sigterm_ends_the_benchmark_too(fakes):
    (fakes.parent / "fake_benchmark.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    code = "from writeup.run import *; measure(Benchmark('a', module='fake_benchmark'), Path('x'), 1)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.terminate()
        parent.wait(30)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
