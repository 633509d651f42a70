"""Unsafe code that the source must not contain, found by ruff, and secrets that no file of a run may contain."""

import ast
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import e2e, profiling_run
from cs336_systems.comm import Place
from cs336_systems.host.console import run_command
from cs336_systems.train import __main__ as training
from tests.support import ranks
from tests.support.machine import made_up
from tests.test_architecture import FILES, PACKAGES, ROOT, ids, nodes_of

FOLDERS = [ROOT / name for name in PACKAGES]
WITH_RUFF = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
# ruff's rules on code that runs what it reads, starts a shell, or makes a name that others can guess; and names that
# it is told to ban, most of which unpickle: files are safetensors and JSON.
RULES = "S102,S108,S301,S302,S306,S307,S506,S602,S604,S605,TID251"
BANNED = (
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch.package"),
    *("torch.load", "torch.save", "torch.serialization", "torch.distributed.checkpoint", "numpy.load", "numpy.loads"),
    *("torch.distributed.all_gather_object", "torch.distributed.gather_object", "torch.distributed.send_object_list"),
    *("torch.distributed.broadcast_object_list", "torch.distributed.scatter_object_list"),
    *("torch.distributed.recv_object_list", "code.interact", "os.execv", "os.execvp", "os.posix_spawn"),
)
# What this project is compared with may pickle: files that it has just written, in a folder of its own.
PEERS = [("benchmarks/checkpoints.py", name) for name in ("torch.save", "torch.load", "torch.distributed.checkpoint")]
PLANTED = """import numpy as xp, os as o, subprocess, torch as t, torch.distributed as dist
import pickle
from pickle import loads
import dill.source
from marshal import load
eval("1")
exec(text)
t.load(path)
read = t.load
from torch import load as safe
xp.load(path, allow_pickle=True)
dist.all_gather_object(a, b)
o.system("ls")
subprocess.run("ls", shell=True)
open("/tmp/x")
"""


def unsafe(*paths: Path) -> list[tuple[str, int, str]]:
    """(file, line, what ruff says) of unsafe code."""
    banned = ", ".join(f'"{name}".msg = "{name}"' for name in BANNED)
    options = ["--isolated", "--ignore-noqa", f"--select={RULES}", "--output-format=json", "--no-cache"]
    options += ["--config", f"lint.flake8-tidy-imports.banned-api = {{{banned}}}"]
    done = subprocess.run(["ruff", "check", *options, *paths], capture_output=True, text=True, env=WITH_RUFF)
    return [(each["filename"], each["location"]["row"], each["message"]) for each in json.loads(done.stdout)]


def test_nothing_runs_what_it_reads(tmp_path):
    found = {(Path(file).relative_to(ROOT).as_posix(), row, said) for file, row, said in unsafe(*FOLDERS)}
    assert not {each for each in found if not any(each[0] == file and name in each[2] for file, name in PEERS)}
    (tmp_path / "planted.py").write_text(PLANTED)
    assert {row for _, row, _ in unsafe(tmp_path)} == set(range(2, PLANTED.count("\n") + 1))


def test_json_has_no_nan_and_text_and_pages_one_door():
    """A plain Console of rich reads markup in foreign text and lets escape sequences through; ours does neither. A page
    of HTML needs a policy and a test like that of tests/host/test_text.py."""
    for path in FILES:
        for call in (node for node in nodes_of(path) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name in ("dump", "dumps") and getattr(call.func.value, "id", "") == "json":
                assert "allow_nan=False" in map(ast.unparse, call.keywords), f"{ids(path)}:{call.lineno}"
            if ids(path) != "cs336_systems/host/console.py":
                assert name not in ("Console", "from_markup", "from_ansi"), ids(path)
                assert getattr(getattr(call.func, "value", None), "id", "") != "rich", ids(path)
                marked = [each.value for each in call.keywords if each.arg == "markup"]
                assert all(ast.unparse(each) == "False" for each in marked), ids(path)
    users = {ids(path) for path in FILES if "<!DOCTYPE" in path.read_text() or "<html" in path.read_text()}
    assert users == {"cs336_systems/profiling/report.py"}


SECRETS = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY",
    "OPENAI_API_KEY", "GITHUB_TOKEN", "MASTER_PASSWORD",
)  # fmt: skip
STAMP = {
    "device", "device_type", "cores", "threads", "torch", "triton", "python", "world_size", "backend", "commit",
    "dirty", "date",
}  # fmt: skip
MARKER = "dont-write-me-down"


def leave(rank: int, world: int, folder: str, what: str, out: str) -> None:
    """A run's log and checkpoint, a record, or the report of a profile, in an environment full of secrets."""
    os.environ.update({name: f"{MARKER}-{number}" for number, name in enumerate(SECRETS)})
    os.chdir(out)
    training.probe = profiling_run.probe = made_up  # in the process of this case only
    size = ("--size", "tiny", "--batch-size", "1", "--context", "8", "--device", "cpu")
    if what == "run":
        assert run_command(training.main, [*size, "--data", "random", "--steps", "1", "--out", "run"]) == 0
    elif what == "record":
        timed = ("--steps", "2", "--warmup", "1", "--mode", "forward", "--results", ".")
        assert run_command(e2e.main, [*size, *timed]) == 0
    else:
        settings = profiling_run.ProfilingSettings(
            size="tiny", batch_size=1, context=8, warmup=1, steps=1, out=Path("."), results=Path(".")
        )
        profiling_run.work(Place(rank, world, rank, world, f"{folder}/store"), settings)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("run", {"train.jsonl", "lock", "manifest.json", "rank-00000-00.safetensors"}),
        ("record", {"e2e.jsonl"}),
        ("profile", {"profiling.jsonl", "index.html", "flame.svg"}),
    ],
)
def test_secrets_of_the_environment_are_in_no_file(what, expected, tmp_path):
    ranks.run_alone(leave, 1, what=what, out=str(tmp_path))
    files = {path.name: path for path in tmp_path.rglob("*") if path.is_file()}
    assert expected <= set(files)
    for name, path in files.items():
        data = path.read_bytes()
        text = gzip.decompress(data) if name.endswith(".gz") else data
        assert MARKER.encode() not in text, name
        assert not [secret for secret in SECRETS if secret.encode() in text], name
        if name.endswith(".jsonl"):
            assert set(json.loads(text.splitlines()[0])["environment"]) == STAMP
