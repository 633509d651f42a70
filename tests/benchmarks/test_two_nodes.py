"""Two simulated nodes: what is refused, what is built, that nothing of it stays, and the template for real ones."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks import two_nodes
from benchmarks.two_nodes import TwoNodesSettings, namespaces, start, tool
from cs336_systems.comm import Place
from cs336_systems.comm.startup import find_place
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from tests.benchmarks.test_all import is_running

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@cache
def able() -> bool:
    """True if this process may make network namespaces and limit rates in them."""
    if os.geteuid() != 0 or not all(map(shutil.which, two_nodes.TOOLS)):
        return False
    try:
        with namespaces(1) as names:
            two_nodes.limit(names[0], "lo", TwoNodesSettings())
    except UserError:
        return False
    return True


needs_root = pytest.mark.skipif(not able(), reason="needs root, iproute2 and network namespaces with tbf")


def namespaces_of(pid: int) -> list[str]:
    """Namespaces that a process has made; other workers of the suite may have theirs at the same time."""
    return [line for line in tool("ip", "netns", "list").splitlines() if line.split()[0].endswith(f"-{pid}")]


def refused(arguments: list[str], capsys) -> str:
    assert run_command(two_nodes.main, arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    return errors[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "error: no command; after -- comes what torchrun runs"),
        (["--", "nowhere.py"], "error: nowhere.py is no file; after -- comes what torchrun runs"),
        (["--rate", "fast", "--", "-m", "this"], "error: --rate fast is no rate; write 1gbit"),
        (["--nproc", "0", "--", "-m", "this"], "error: Invalid value for '--nproc': 0 is not in the range x>=1."),
        (["--", "-m", "this"], "error: only root may make network namespaces"),
    ],
)
def test_bad_input_and_a_plain_user_are_one_line(arguments, line, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert refused(arguments, capsys).startswith(line)


def test_a_missing_tool_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(two_nodes.shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    assert refused(["--", "-m", "this"], capsys) == "error: there is no tc here; install iproute2"


def test_records_will_say_what_joined_the_ranks():
    assert TwoNodesSettings().describe() == "2 nodes simulated on one machine, 1gbit tbf"
    assert TwoNodesSettings(rate="100mbit", one_node=True).describe() == "loopback of one node, 100mbit tbf"


@needs_root
def test_both_ends_of_the_wire_are_limited():
    with namespaces(2) as names:
        two_nodes.join(names, TwoNodesSettings(rate="123mbit"))
        for name in names:
            assert "qdisc tbf" in (shape := tool("tc", "-n", name, "qdisc", "show", "dev", two_nodes.DEVICE))
            assert "rate 123Mbit" in shape
            assert "lat 50ms" in shape
    assert namespaces_of(os.getpid()) == []


@needs_root
def test_nothing_stays_when_the_inside_breaks():
    def breaks() -> None:
        with namespaces(2) as names:
            two_nodes.join(names, TwoNodesSettings())
            # Like torchrun's ranks, the sleeper has a session of its own and does not hear what its parent does.
            script = "setsid sleep 1000 & echo $MARK $!; wait"
            process = start(names[1], ["sh", "-c", script], {"MARK": "here"}, subprocess.PIPE)
            started.append(process)
            mark, pid = process.stdout.readline().split()
            pids.append(int(pid))
            assert mark == b"here"
            assert is_running(pids[0])
            with pytest.raises(UserError, match=r"ip netns del nowhere: Cannot remove .*No such file"):
                tool("ip", "netns", "del", "nowhere")
            raise KeyError("broken")

    started, pids = [], []
    with pytest.raises(KeyError, match="broken"):
        breaks()
    started[0].stdout.close()
    assert started[0].wait(10) == -9
    assert not is_running(pids[0])
    assert namespaces_of(os.getpid()) == []


def test_the_first_failure_ends_the_others_after_a_moment(monkeypatch):
    monkeypatch.setattr(two_nodes, "GRACE", 0.1)
    words = (["sleep", "100"], [sys.executable, "-c", "raise SystemExit(3)"])
    processes = [subprocess.Popen(each, start_new_session=True) for each in words]
    assert two_nodes.finish(processes) == 1
    assert (processes[0].poll(), processes[1].poll()) == (None, 3)
    processes[0].kill()
    processes[0].wait(10)
    assert two_nodes.finish([subprocess.Popen(["true"])]) is None


@needs_root
def test_a_benchmark_runs_on_two_nodes_and_its_records_say_so(in_tmp, capfd):
    command = ["--rate", "2gbit", "--", str(FOLDER / "allreduce.py"), "--device", "cpu", "--timeout", "60"]
    command += ["--sizes", "40KB", "--steps", "2", "--warmup", "1", "--results", "out"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        code = run_command(two_nodes.main, command)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    shown = capfd.readouterr()
    assert code == 0, shown.err
    [record] = [json.loads(line) for line in (in_tmp / "out/allreduce.jsonl").read_text().splitlines()]
    config = record["config"]
    assert (config["ranks"], config["nodes"]) == (2, 2)
    assert config["link"] == "2 nodes simulated on one machine, 2gbit tbf"
    assert record["status"] == "ok"
    assert shown.out.count("All-reduce (mean) of float32") == 1
    # What was probed is the wire: 250 MB/s and not the loopback's several times that.
    assert record["metrics"]["link_bytes_per_s"] < 1.1 * 2e9 / 8
    assert namespaces_of(os.getpid()) == []


STUBS = {
    "srun": 'for task in 0 1; do SLURM_PROCID=$task SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NNODES=2 "${@:2}"; done',
    "scontrol": "echo first; echo second",
    "python": 'env -0 >"$OUT/$SLURM_PROCID"; echo "$@"',
}


def test_the_template_for_slurm_tells_each_task_its_place(tmp_path, monkeypatch):
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    job = {"SLURM_JOB_ID": "10042", "SLURM_JOB_NODELIST": "first,second", "SLURM_CPUS_PER_TASK": "3"}
    job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    for words, command in ((), "benchmarks/allreduce.py --backend nccl"), (("-m", "x"), "-m x"):
        start = ["bash", FOLDER / "two_nodes.sbatch", *words]
        done = subprocess.run(start, env=os.environ | job, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"{command}\n" * 2), done.stderr
    for task in (0, 1):  # tests/comm/test_startup.py has ranks that meet so
        seen = dict(each.split("=", 1) for each in (tmp_path / str(task)).read_text().split("\0") if each)
        with monkeypatch.context() as patched:
            patched.setattr(os, "environ", seen)
            assert find_place() == Place(task, 2, 0, 1, "first:20042")
        assert seen["OMP_NUM_THREADS"] == "3"
