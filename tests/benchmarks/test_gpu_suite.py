"""The command that runs everything on a GPU: its time limits, what it leaves running (nothing), what it packs."""

import json
import os
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu_suite import STEPS, GPUStep, SuiteSettings, arguments
from cs336_systems.host.console import run_command

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

    def install(*steps):
        monkeypatch.setattr(gpu_suite, "STEPS", steps)
        return in_tmp

    return install


def fake(what, seconds=20.0, **kinds):
    return GPUStep(what, ("fake", what), seconds, **kinds)


def suite(*options):
    return run_command(gpu_suite.main, ["--results", "out", "--logs", "logs", *options])


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def assert_all_gone(folder):
    for pid in map(int, (folder / "pids").read_text().split()):
        deadline = time.monotonic() + 5
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(pid)


def test_a_step_that_fails_is_named_and_the_others_still_run(fakes, capsys):
    folder = fakes(fake("ok"), fake("fail"), fake("record"))
    assert suite() == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["error: 1 of 3 steps went wrong: fail (failed)"]
    assert "this is fail" in captured.out  # the end of its output
    assert "exit code 7" in captured.out
    assert (folder / "out/fake.jsonl").exists()
    assert (folder / "logs/ok.log").read_text().startswith("this is ok")


def test_all_well_is_exit_code_0_and_the_results_are_packed(fakes, capsys):
    folder = fakes(fake("record"), fake("ok"))
    (folder / "logs").mkdir()
    (folder / "logs/older.log").write_text("of another run")
    assert suite("--pack", "new/all.tar.gz") == 0
    with tarfile.open(folder / "new/all.tar.gz") as archive:
        files = sorted(member.name for member in archive if member.isfile())
    assert files == ["logs/ok.log", "logs/record.log", "results/out/fake.jsonl"]
    assert "packed into new/all.tar.gz" in capsys.readouterr().out


def test_the_table_has_remarks_only_where_there_are_any(fakes, capsys):
    fakes(fake("ok"))
    assert suite() == 0
    assert [line.count("┃") for line in capsys.readouterr().out.splitlines() if "outcome" in line] == [4]
    fakes(fake("ok"), fake("two", gpus=2))
    assert suite() == 0
    (head,) = (line for line in capsys.readouterr().out.splitlines() if "outcome" in line)
    assert "remark" in head


def test_no_time_at_all_is_one_line_and_exit_code_2(fakes, capsys):
    folder = fakes(fake("ok"))
    assert suite("--minutes", "0") == 2
    assert capsys.readouterr().err.splitlines() == ["error: nothing to measure: the 0 minutes are used up"]
    assert not list(folder.glob("logs/*"))


def test_a_step_that_hangs_is_stopped_with_all_it_started(fakes, capsys):
    folder = fakes(fake("hang", seconds=1.0), fake("ok"))
    begun = time.monotonic()
    assert suite("--pack", "all.tar.gz") == 2
    assert time.monotonic() - begun < 10
    assert_all_gone(folder)
    assert capsys.readouterr().err.splitlines() == ["error: 1 of 2 steps went wrong: hang (stopped)"]
    assert (folder / "logs/ok.log").exists()


def test_what_a_step_leaves_running_is_ended(fakes):
    folder = fakes(fake("orphan"))
    assert suite() == 0
    assert_all_gone(folder)


def test_sigterm_ends_the_step_under_way_and_still_packs(fakes, monkeypatch, capsys):
    folder, handler = fakes(fake("hang"), fake("ok")), signal.getsignal(signal.SIGTERM)
    wait = gpu_suite.subprocess.Popen.wait

    def interrupted(process, seconds=None):
        if seconds is None:
            return wait(process)
        while not (folder / "pids").exists() or not (folder / "pids").read_text().endswith("\n"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        return wait(process, seconds)

    monkeypatch.setattr(gpu_suite.subprocess.Popen, "wait", interrupted)
    assert suite("--pack", "all.tar.gz") == 130
    assert_all_gone(folder)
    assert (folder / "all.tar.gz").stat().st_size > 0
    assert not (folder / "logs/ok.log").exists()
    assert signal.getsignal(signal.SIGTERM) == handler
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_steps_without_gpus_or_time_are_left_out(fakes, capsys):
    folder = fakes(fake("two", gpus=2), fake("ok", seconds=40.0))
    assert suite("--minutes", "0.2") == 2
    captured = capsys.readouterr()
    reasons = "needs 2 GPUs, 1 here; the 0.2 minutes are used up"
    assert captured.err.splitlines() == [f"error: nothing to measure: {reasons}"]
    shown = " ".join(captured.out.split())
    assert "two: left out (0 ms) needs 2 GPUs, 1 here" in shown
    assert "ok: left out (0 ms) the 0.2 minutes are used up" in shown
    assert list((folder / "logs").iterdir()) == []


def test_a_budget_leaves_a_step_time_to_finish(fakes):
    folder = fakes(fake("budget", seconds=65.0, takes_budget=True))
    assert suite("--commit", "abc", "--minutes", "0.5") == 0
    options = json.loads((folder / "logs/budget.log").read_text().split(maxsplit=3)[3])
    common = ["--results", str(folder / "out"), "--commit", "abc"]
    assert options == [*common, "--budget", "10", "--patience", "5"]
    whole = arguments(fake("x", takes_budget=True), SuiteSettings(), Path("/out"), 65.0)
    assert whole[-4:] == ["--budget", "45", "--patience", "5"]
    assert arguments(fake("x", takes_budget=True), SuiteSettings(), Path("/out"), 15.0)[-3] == "1"
    assert arguments(fake("x", takes_budget=True), SuiteSettings(smoke=True), Path("/out"), 65.0)[-1] == "--smoke"


def test_the_real_steps_fit_into_the_eight_minutes_and_write_no_caches():
    assert sum(step.seconds for step in STEPS if step.gpus == 1) <= 60 * SuiteSettings().minutes
    assert [step.name for step in STEPS[:2]] == ["correctness", "norms fp32"]
    assert len({step.name for step in STEPS}) == len(STEPS)
    tests = [word for word in STEPS[0].command if word.startswith("tests/")]
    assert all((gpu_suite.ROOT / name).exists() for name in tests)
    assert "no:cacheprovider" in arguments(STEPS[0], SuiteSettings(), Path("/out"), 9.0)
    assert "PYTHONDONTWRITEBYTECODE=1" in gpu_suite.surroundings()
    assert all(step.seconds > gpu_suite.MARGIN for step in STEPS if step.takes_budget)


def test_every_real_step_is_a_command_with_options_that_exist():
    for step in STEPS:
        module, *options = step.command
        if module != "pytest":
            command = __import__(module, fromlist=["main"]).main
            given = arguments(step, SuiteSettings(commit="abc"), Path("/out"), 30.0)
            assert given[3 : 3 + len(options)] == list(options)
            assert ("/out/profile" in given) == (module == "benchmarks.profiling_run")
            context = command.make_context(module, given[3:])
            for name in context.params.get("candidate") or ():
                assert step.name == "fused" or name in __import__(module, fromlist=["CANDIDATES"]).CANDIDATES


def test_kernels_are_compiled_where_there_is_a_gpu(fakes, monkeypatch):
    def interpreted() -> str:
        show = [*gpu_suite.surroundings(), "sh", "-c", "echo $TRITON_INTERPRET"]
        return subprocess.run(show, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert interpreted() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert interpreted() == "1"


def test_a_smoke_run_needs_no_gpu(fakes, monkeypatch):
    folder = fakes(GPUStep("correctness", ("pytest",), 9), fake("ok"), fake("two", gpus=2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert suite("--smoke") == 0
    assert (folder / "logs/ok.log").read_text() == 'this is ok ["--smoke"]\n'
    assert [log.name for log in (folder / "logs").iterdir()] == ["ok.log"]


@pytest.mark.parametrize(
    ("options", "has_gpu", "line"),
    [
        ((), False, "error: gpu_suite needs a CUDA device, and torch finds none here; --smoke shows that it works"),
        (("--only", "everything"), True, "error: no step 'everything'; choose from ok, two"),
        (("--only", "two", "--smoke"), True, "error: --smoke leaves out two: it is for benchmarks on one device"),
        (("--pack", "file/all.tar.gz"), True, "error: cannot write file: "),
        (("--pack", "."), True, "error: cannot write .: Is a directory; choose another --pack"),
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
