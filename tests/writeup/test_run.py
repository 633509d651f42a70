"""`python -m writeup --run`: the benchmarks of this machine, before its write-up; `tests/benchmarks/test_all.py` has
how they are run."""

import pytest

from benchmarks.lib.running import EDITIONS, Benchmark
from cs336_systems.errors import UserError
from writeup import run as running

BODY = """import sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--results") + 1])
folder.mkdir(parents=True, exist_ok=True)
(folder / sys.argv[1]).touch()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def fakes(in_tmp, monkeypatch):
    """Three benchmarks that only leave a file, the second of which fails."""
    (in_tmp / "fake_benchmark.py").write_text(BODY)
    monkeypatch.setenv("PYTHONPATH", str(in_tmp))
    runs = [
        Benchmark(name, (name, code), 2.0, module="fake_benchmark") for name, code in zip("abc", "030", strict=True)
    ]
    monkeypatch.setitem(EDITIONS, "cpu", tuple(runs))
    monkeypatch.setattr(running, "own_folder", lambda machine: machine or "x")
    return in_tmp / "results"


def test_what_fails_is_named_and_the_rest_is_measured(fakes, capsys):
    assert running.run_all((), fakes, "some-machine") == "some-machine"
    assert {path.name for path in (fakes / "some-machine").iterdir()} == {"a", "b", "c", "commands.json"}
    said = capsys.readouterr().out
    assert "[1/3] about 6 min 0 s left: python -m fake_benchmark a 0" in said
    assert "[3/3] about " in said  # faster than foreseen by now
    assert "[3/3] about 2 min" not in said
    assert "failed" in said


def test_only_some(fakes):
    running.run_all(("c", "a"), fakes, "x")
    assert {path.name for path in (fakes / "x").iterdir()} == {"a", "c", "commands.json"}
    with pytest.raises(UserError, match="--only d is no benchmark; there are a, b, c"):
        running.run_all(("a", "d"), fakes, "x")
    with pytest.raises(UserError, match="no benchmark could be run"):
        running.run_all(("b",), fakes, "x")


def test_only_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(running, "machine_name", lambda device: "amd-epyc")
    assert running.own_folder(None) == running.own_folder("EPYC") == "amd-epyc"
    with pytest.raises(UserError, match="--run measures this machine, whose records are in amd-epyc, not h200"):
        running.own_folder("h200")
