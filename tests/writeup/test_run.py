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
name, code = sys.argv[1]
(folder / name).touch()
sys.exit(int(code))
"""


def test_what_fails_is_named_and_the_rest_or_some_is_measured(in_tmp, monkeypatch, capsys):
    """Of three benchmarks that only leave a file, the second fails."""
    (in_tmp / "fake_benchmark.py").write_text(BODY)
    monkeypatch.setenv("PYTHONPATH", str(in_tmp))
    runs = [Benchmark(each[0], (each,), 2.0, module="fake_benchmark") for each in ("a0", "b3", "c0")]
    monkeypatch.setitem(EDITIONS, "cpu", tuple(runs))
    monkeypatch.setattr(running, "own_folder", lambda machine: machine or "x")
    for only, left in (((), "abc"), (("c", "a"), "ac")):
        folder = in_tmp / left
        assert running.run_all(only, folder, "some-machine") == "some-machine"
        assert {path.name for path in (folder / "some-machine").iterdir()} == {*left, "commands.json"}
        assert ("failed" in capsys.readouterr().out) == ("b" in left)
    with pytest.raises(UserError, match="--only d is no benchmark; there are a, b, c"):
        running.run_all(("a", "d"), in_tmp, "x")
    with pytest.raises(UserError, match="no benchmark could be run"):
        running.run_all(("b",), in_tmp, "x")


def test_only_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(running, "machine_name", lambda device: "amd-epyc")
    assert running.own_folder(None) == running.own_folder("EPYC") == "amd-epyc"
    with pytest.raises(UserError, match="--run measures this machine, whose records are in amd-epyc, not h200"):
        running.own_folder("h200")
