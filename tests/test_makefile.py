"""The Makefile's targets, in an empty folder: what they remove, and the commands that they would run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def make(tmp_path):
    """Run make in a folder that has nothing but the Makefile."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def run(*words: str, **variables: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name not in ("VENV", "MAKEFLAGS")}
        where = {"cwd": tmp_path, "env": inherited | variables}
        done = subprocess.run(["make", *words], **where, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_clean_leaves_the_users_runs(tmp_path, make):
    kept = tmp_path / "runs/mine/checkpoints/step-00000010"
    gone = [tmp_path / name for name in ("runs/demo", ".venv", "build", "cs336_systems.egg-info")]
    for folder in (kept, *gone):
        folder.mkdir(parents=True)
    make("clean")
    assert kept.is_dir()
    assert not any(folder.exists() for folder in gone)
    shutil.rmtree(tmp_path / "runs/mine")
    make("clean")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile", "pyproject.toml"]


def test_clean_leaves_an_environment_that_is_named(tmp_path, make):
    """Other projects may use it; `.ci/run` runs the tests themselves from one."""
    (tmp_path / "elsewhere").mkdir()
    make("clean", VENV=str(tmp_path / "elsewhere"))
    make("clean", f"VENV={tmp_path / 'elsewhere'}")
    assert (tmp_path / "elsewhere").is_dir()


def test_what_the_demo_writes_is_removed_and_what_develops_is_installed_apart(make):
    demo, test, writeup = (make("--dry-run", target) for target in ("demo", "test", "writeup"))
    commands = [line.split() for line in demo.splitlines()]
    assert [words[-1] for words in commands if words[1:2] == ["-m"]][-2:] == ["runs/demo/train.jsonl", "runs/demo"]
    assert "--editable . " in demo
    assert "dev" not in "".join(line for line in demo.splitlines() if "pip install" in line)
    assert "--editable '.[dev,writeup]'" in test  # so that the same tests run before and after `make writeup`
    assert "--editable '.[writeup]'" in writeup
    assert "--editable '.[dev" not in writeup
    assert " -m writeup --out build/writeup" in writeup
    lines = make("--dry-run", "demo", "TORCH_INDEX=file:///nowhere").splitlines()
    first, second = (line for line in lines if "pip install" in line)
    assert "--index-url file:///nowhere torch" in first
    assert "--index-url" not in second
