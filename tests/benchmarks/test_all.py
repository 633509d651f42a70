"""The command that measures everything: its time limits, what it leaves running (nothing), where it goes on."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from benchmarks import all as everything
from benchmarks import attention, norms
from benchmarks.lib import running
from benchmarks.lib.running import EDITIONS, GPU, AllSettings, Benchmark, arguments
from cs336_systems.host.console import run_command
from tests.support import ranks

FAKE = """
import json, os, subprocess, sys, time
what, *options = sys.argv[1:]
print("this is", what, json.dumps(options))
if what in ("hang", "orphan"):
    child = subprocess.Popen(["sleep", "60"])
    open(os.environ["PIDS"], "a").write(f"{child.pid}\\n")
if what == "hang":
    time.sleep(60)
if what == "record":
    folder = options[options.index("--results") + 1]
    os.makedirs(folder, exist_ok=True)
    open(folder + "/fake.jsonl", "w").write("{}")
sys.exit(7 if what == "fail" else 0)
"""


@pytest.fixture
def fakes(in_tmp, monkeypatch):
    """A machine with one GPU, and a module `fake` whose first argument says how it goes."""
    (in_tmp / "fake.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(in_tmp))
    monkeypatch.setenv("PIDS", str(in_tmp / "pids"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    stamp = {"dirty": False, "device": "NVIDIA H200", "date": "2025-01-01T00:00:00+00:00"}
    monkeypatch.setattr(everything, "environment", lambda device, commit: {"commit": commit, **stamp})

    def install(*runs):
        monkeypatch.setitem(EDITIONS, "gpu", runs)
        monkeypatch.setitem(EDITIONS, "cpu", runs)
        return in_tmp

    return install


def fake(what, seconds=20.0, gpus=1, **kinds):
    return Benchmark(what, (what,), seconds / 60, gpus=gpus, module="fake", **kinds)


def suite(*options):
    return run_command(everything.main, ["--results", "out", "--logs", "logs", *options])


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def assert_all_gone(folder):
    for pid in map(int, (folder / "pids").read_text().split()):
        deadline = time.monotonic() + 5
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(pid)


def await_child(folder):
    """Wait until the number of the child of `hang` can be read."""
    deadline = time.monotonic() + ranks.patience(60)
    while not (folder / "pids").exists() or not (folder / "pids").read_text().endswith("\n"):
        assert time.monotonic() < deadline, "its child never started"
        time.sleep(0.02)


def log(folder, name):
    (path,) = folder.glob(f"logs/*_{name}.log")
    return path.read_text()


def test_what_fails_is_named_and_the_others_still_run(fakes, capsys):
    folder = fakes(fake("ok"), fake("fail"), fake("record"), fake("orphan"))
    assert suite() == 2
    assert_all_gone(folder)  # what a command left running is ended
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["error: 1 of 4 commands went wrong: python -m fake fail (failed)"]
    assert "this is fail" in captured.out  # the end of its output
    assert "exit code 7" in captured.out
    assert (folder / "out/fake.jsonl").exists()
    assert log(folder, "ok").startswith("this is ok")


def test_it_says_how_long_first_and_goes_on_where_it_stopped(fakes, capsys):
    folder = fakes(fake("ok", seconds=100.0), fake("fail", seconds=20.0))
    assert suite("--list", "--commit", "abc") == 0
    said = capsys.readouterr().out
    assert "2 of 2 commands to measure, about 2 min 0 s" in said
    assert not (folder / "logs").exists()
    assert suite("--commit", "abc") == 2
    took = json.loads((folder / "out/commands.json").read_text())
    assert list(took) == ["python -m fake ok"]  # not what failed
    assert took["python -m fake ok"].items() >= {"commit": "abc", "device": "NVIDIA H200"}.items()
    took["python -m fake ok"]["seconds"] = 7.0
    (folder / "out/commands.json").write_text(json.dumps(took))
    capsys.readouterr()
    assert suite("--commit", "abc") == 2
    said = capsys.readouterr().out
    assert "1 of 2 commands to measure, about 20.0 s" in said
    assert "[1/1] about 20.0 s left: python -m fake fail" in said
    assert "^C stops, the same command goes on\n" in said.replace(" \n", "\n")
    for options in (("--commit", "another"), ("--commit", "abc", "--again")):  # as long as it took
        assert suite("--list", *options) == 0
        assert "2 of 2 commands to measure, about 27.0 s" in capsys.readouterr().out
    for other in ({"dirty": True}, {"device": "a device"}):  # then what was measured is not this
        (folder / "out/commands.json").write_text(json.dumps({"python -m fake ok": took["python -m fake ok"] | other}))
        assert suite("--list", "--commit", "abc") == 0
        assert "2 of 2 commands to measure, about 27.0 s" in capsys.readouterr().out
    assert suite() == 2  # without a commit
    assert "the same command begins anew, as the code has changes or no commit" in capsys.readouterr().out
    (folder / "out/commands.json").write_text('{"python -m fake ok": {"seconds": "long"}}')
    assert suite("--list") == 2
    assert "commands.json is no list of commands with their seconds" in capsys.readouterr().err


@pytest.mark.parametrize("sigterm", [False, True])
def test_what_hangs_or_is_under_way_at_sigterm_is_ended_with_all_it_started(sigterm, fakes, monkeypatch, capsys):
    folder, begun = fakes(fake("hang", seconds=20.0 if sigterm else 0.3), fake("ok")), time.monotonic()
    wait, handler = running.subprocess.Popen.wait, signal.getsignal(signal.SIGTERM)

    def late(process, seconds=None):
        if seconds is not None:
            await_child(folder)
            if sigterm:
                os.kill(os.getpid(), signal.SIGTERM)
        return wait(process, seconds)

    monkeypatch.setattr(running.subprocess.Popen, "wait", late)
    assert suite() == (130 if sigterm else 2)
    assert_all_gone(folder)
    assert time.monotonic() - begun < 50  # of the 60 that it would sleep
    stopped = "error: 1 of 2 commands went wrong: python -m fake hang (stopped)"
    assert capsys.readouterr().err.splitlines()[-1] == ("interrupted" if sigterm else stopped)
    assert len(list(folder.glob("logs/*ok.log"))) == (not sigterm)
    assert (folder / "out/commands.json").exists() == (not sigterm)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_what_lacks_gpus_root_or_time_is_left_out(fakes, monkeypatch, capsys):
    folder = fakes(fake("two", gpus=2), fake("ok", seconds=40.0), fake("net", root=True))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert suite("--minutes", "0.2") == 2
    captured = capsys.readouterr()
    reasons = "needs 2 GPUs, 1 here; the 0.2 minutes do not suffice; needs root on Linux, to make a network"
    assert captured.err.splitlines() == [f"error: nothing to measure: {reasons}"]
    assert "fake two │ left out │ 20.0 s │ needs 2 GPUs, 1 here" in " ".join(captured.out.split())
    assert list((folder / "logs").iterdir()) == []


def test_on_a_cpu_time_is_only_limited_where_it_is_hopeless(fakes, capsys):
    folder = fakes(fake("ok", seconds=0.001, gpus=0), fake("record", seconds=90.0, gpus=0))
    assert suite("--edition", "cpu", "--minutes", "1") == 0  # the first is no faster than a process starts
    assert "the 1 minutes do not suffice" in capsys.readouterr().out
    assert len(list(folder.glob("logs/*"))) == 1
    assert AllSettings(edition="cpu").seconds == float("inf")


def test_a_budget_leaves_time_to_finish(fakes):
    folder = fakes(fake("budget", seconds=65.0, takes_budget=True))
    assert suite("--commit", "abc", "--minutes", "0.5") == 0
    options = json.loads(log(folder, "budget").split(maxsplit=3)[3])
    common = ["--results", str(folder / "out"), "--commit", "abc"]
    assert options == [*common, "--budget", "10", "--patience", "5"]
    for seconds, budget in ((65.0, "45"), (15.0, "1")):
        words = arguments(fake("x", takes_budget=True), AllSettings(), Path("/out"), seconds)
        assert words[-4:] == ["--budget", budget, "--patience", "5"]


def test_the_gpu_edition_fits_into_eight_minutes_and_writes_no_caches():
    assert 60 * sum(run.minutes for run in GPU if run.gpus == 1) <= AllSettings(edition="gpu").seconds == 480
    tests = [word for word in GPU[0].options if word.startswith("tests/")]
    assert all((running.ROOT / name).exists() for name in tests)
    assert "no:cacheprovider" in arguments(GPU[0], AllSettings(), Path("/out"), 9.0)
    assert "PYTHONDONTWRITEBYTECODE=1" in running.surroundings()


@pytest.mark.parametrize("edition", EDITIONS)
def test_every_command_is_one_with_options_that_exist(edition):
    assert len({run.command for run in EDITIONS[edition]}) == len(EDITIONS[edition])
    for run in EDITIONS[edition]:
        if run.source == "pytest":
            continue
        command = __import__(run.source, fromlist=["main"]).main
        given = arguments(run, AllSettings(commit="abc"), Path("/out"), 30.0)
        assert given[3 : 3 + len(run.options)] == list(run.options)
        context = command.make_context(run.source, given[3:])
        if run.root:  # the command that it runs as well
            named, inner = context.params["command"][0] == "-m", list(context.params["command"])
            module = inner[1] if named else "benchmarks.allreduce"
            context = __import__(module, fromlist=["main"]).main.make_context(module, inner[1 + named :])
        if run.records:
            assert str(context.params["results"]) == "/out"
            assert context.params["commit"] == "abc"
        assert ("/out/profile" in given) == (run.leaves == "profile")
        for name in context.params.get("candidate") or ():
            known = {"benchmarks.norms": norms.NORM.candidates, "benchmarks.attention": attention.CANDIDATES}
            assert run.name == "fused" or name in known[run.source]


def test_kernels_are_compiled_where_there_is_a_gpu(fakes, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for has_gpu, interpreted in ((True, b"\n"), (False, b"1\n")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=has_gpu: there)
        assert subprocess.check_output([*running.surroundings(), "sh", "-c", "echo $TRITON_INTERPRET"]) == interpreted


def test_a_smoke_run_needs_no_gpu(fakes, monkeypatch):
    folder = fakes(Benchmark("correctness", module="pytest"), fake("ok"), fake("two", gpus=2), fake("net", root=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert suite("--smoke") == 0
    assert log(folder, "ok") == 'this is ok ["--smoke"]\n'
    assert [path.name for path in folder.glob("logs/*")] == ["02_ok.log"]
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("options", "has_gpu", "line"),
    [
        (("--edition", "gpu"), False, "error: --edition gpu needs a CUDA device, and torch finds none here; --smoke "),
        (("--only", "everything"), True, "error: --only everything is no benchmark; there are ok, two"),
        (("--only", "two", "--smoke"), True, "error: --smoke leaves out two: it is for benchmarks on one device"),
        (("--logs", "file"), True, "error: cannot write "),
        (("--minutes", "-1"), True, "error: Invalid value for '--minutes': -1.0 is not in the range 0<=x<="),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_run(options, has_gpu, line, fakes, monkeypatch, capsys):
    folder = fakes(fake("ok"), fake("two", gpus=2))
    (folder / "file").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert suite(*options) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith(line)
    assert not list(folder.glob("logs/*"))
