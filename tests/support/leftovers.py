"""A run of the suite leaves nothing behind: no process, no temporary file, no shared memory, nothing in the project.

Processes that the run started carry its mark in their environment, and what it makes for the moment lies in a folder of
its own, so that whatever else goes on at this machine is not mistaken for ours. With pytest-xdist it is the controller
that looks, after its workers have ended.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "CS336_TEST_RUN"
SHARED = Path("/dev/shm")
WATCHED = ("docs", "benchmarks/results", "runs", "tests/data")  # what commands write to; of the root its own entries
# What torch leaves: torchrun's folder of logs and the error of a rank that it has ended, and the compiler's folder.
OF_TORCH = re.compile(r"torch(elastic|inductor)_|pytorch-errorfile-")
PATIENCE = 10.0  # seconds that processes get to end; they take milliseconds


class Run:
    """Files, processes and memory before the first test, and those added after the last."""

    def __init__(self) -> None:
        usual = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="suite-"))
        # Of these one wants the next run to have them: pytest's folders, to look into, and what torch has compiled.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{os.getuid()}")
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        os.environ[MARK] = self.folder.name
        self.shared, self.project = shared_memory(), project_files()

    def leftovers(self) -> list[str]:
        """A line for each thing that is still there."""
        deadline = time.monotonic() + PATIENCE
        while (alive := processes(self.folder.name)) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [f"process {pid}: {command}" for pid, command in alive.items()]
        made = [path for path in sorted(self.folder.iterdir()) if not OF_TORCH.match(path.name)]
        found += [f"temporary file: {path}" for path in made]
        shared = shared_memory() - self.shared
        found += [f"shared memory: {SHARED / name}" for name in sorted(shared - mapped() if shared else shared)]
        return found + [f"in the project: {name}" for name in sorted(project_files() - self.project)]

    def end(self) -> None:
        """Make room."""
        shutil.rmtree(self.folder, ignore_errors=True)


def processes(mark: str) -> dict[int, str]:
    """The command of each process that descends from this one or has a run's mark, dead ones and this one apart."""
    parents, marked, commands = {}, set(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            state, parent = re.sub(r"^.*\) ", "", (folder / "stat").read_text(), flags=re.DOTALL).split()[:2]
            commands[pid] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:150]
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        if state not in "ZX":
            parents[pid] = int(parent)
            marked |= {pid} if f"{MARK}={mark}".encode() in environment else set()
    ours = {os.getpid()}
    while children := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= children
    return {pid: commands[pid] for pid in sorted((ours | marked) - {os.getpid()})}


def shared_memory() -> set[str]:
    """This user's files in /dev/shm whose process has ended: names have its number in them."""
    found = set()
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        try:
            mine = path.stat().st_uid == os.getuid()
        except OSError:
            continue
        if mine and not any(Path(f"/proc/{number}").exists() for number in re.findall(r"\d{2,}", path.name)):
            found.add(path.name)
    return found


def mapped() -> set[str]:
    """Files in /dev/shm that processes have mapped, such as a browser's: those of a run have ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is somebody else's
            found |= set(re.findall(rf" {SHARED}/(\S+)", path.read_text(errors="replace")))
    return found


def project_files() -> set[str]:
    """Files at the project's top and in the folders that its commands write to; those of tools begin with a dot."""
    paths = [*ROOT.iterdir(), *(path for name in WATCHED for path in (ROOT / name).rglob("*"))]
    names = {path.relative_to(ROOT).as_posix() for path in paths}
    return {name for name in names if not re.search(r"(^|/)(\.|__pycache__)|\.egg-info", name)}


RUN = pytest.StashKey[Run]()
LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Before workers start: they inherit the environment."""
    if sys.platform == "linux" and not hasattr(config, "workerinput"):
        config.stash[RUN] = Run()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the last test; pytest-xdist has ended its workers by now."""
    if (run := session.config.stash.get(RUN, None)) is None:
        return
    if (ranks := sys.modules.get("tests.support.ranks")) and ranks.server.cache_info().currsize:
        ranks.server().stop()  # which would else be done at exit
    session.config.stash[LEFT] = left = run.leftovers()
    run.end()
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left."""
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("the tests left something behind", red=True)
        for line in left:
            terminalreporter.line(line)
