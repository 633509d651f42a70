"""Killed at any call to the file system, a save leaves the old or the new checkpoint, whole.

The calls of one save are counted, and Python's own record of what it changes must agree with the count. Then a process
is killed before, in the middle of and after each of them, with SIGKILL, and another one looks at what is there.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.checkpoint.disk import clean, list_checkpoints
from cs336_systems.checkpoint.folder import open_checkpoint, open_newest
from cs336_systems.comm import Place, agree, agreement, distributed
from tests.support.checkpoint_cases import FILE, PATIENCE, is_step, save_step
from tests.support.ranks import run_alone

CHANGING = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir")
SOON = 20.0  # seconds that a rank waits for one that lives; of one that was killed it hears at once


def forked(function: Callable[..., Any], *arguments: Any) -> Callable[[], tuple[int, Any]]:
    """Begin to run a function in a process of its own; what is returned waits for (exit code, result or traceback)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(int(PATIENCE))
            result = json.dumps(function(*arguments))
            code = 0
        except BaseException:
            result = json.dumps(traceback.format_exc())
        try:
            os.write(writing, result.encode())
        finally:
            os._exit(code)
    os.close(writing)

    def wait() -> tuple[int, Any]:
        with open(reading) as pipe:
            text = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(text) if text else None

    return wait


class Calls:
    """Counts the calls that may change a file system, in order, and kills this process at one of them if told.

    `kill` is the number of a call and "before", "middle" (half of what it writes is written) or "after".
    """

    def __init__(self, kill: tuple[int, str] | None = None) -> None:
        self.kill, self.log, self.names = kill, [], {}
        self.written: dict[str, int] = {}
        self.real = {name: getattr(os, name) for name in CHANGING}

    def __enter__(self) -> "Calls":
        for name in CHANGING:
            setattr(os, name, self.wrapped(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(os, name, function)

    def wrapped(self, name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            number, real = len(self.log), self.real[name]
            what = self.names.get(first) if isinstance(first, int) else os.fspath(first)
            self.log.append([name, what, *(str(each) for each in rest if name in ("rename", "open"))])
            for moment in ("before", "middle"):
                if self.kill == (number, moment):
                    if moment == "middle":
                        real(first, rest[0][: len(rest[0]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            result = real(first, *rest, **named)
            if name == "open":
                self.names[result] = what
            if name == "write":
                self.written[what] = self.written.get(what, 0) + result
            if self.kill == (number, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def audited() -> list[list[str]]:
    """A list to which Python itself adds every change of the file system that it makes from now on."""
    seen: list[list[str]] = []
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, details: tuple) -> None:
        if event == "open" and isinstance(details[0], str | os.PathLike) and details[2] & writing:
            seen.append(["open", os.fspath(details[0])])
        elif event == "shutil.rmtree":
            pass  # it consists of others
        elif event.startswith(("os.", "shutil.")) and event not in ("os.listdir", "os.scandir", "os.fork"):
            seen.append([event.removeprefix("os.").replace("remove", "unlink"), os.fspath(details[0])])

    sys.addaudithook(hook)
    return seen


def save_as(
    rank: int, world: int, folder: str, kill: tuple[int, str] | None = None, steps: Sequence[int] = (3,)
) -> dict[str, Any]:
    """Save as one of the ranks, which may be killed or left behind; the calls of the last save in order, what Python's
    own record says of them, the bytes that went through os.write, and how the rank ended."""
    begin = 0.0
    place = Place(rank, world, rank, world, f"{folder}/store-{steps[0]}")
    calls = Calls(kill)
    try:
        with distributed("cpu", timeout=PATIENCE, place=place) as group:
            agree("ready", "", group)
            agreement.group_timeout = lambda _: timedelta(seconds=SOON if steps == (3,) else PATIENCE)
            begin, seen = time.monotonic(), [] if kill else audited()
            with calls:
                for step in steps:
                    saved = save_step(Path(folder) / "checkpoints", step, group)
                audit = list(seen)
            agree("next step", "", group)  # training would go on
    except Exception as error:
        return {"said": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - begin}
    sizes = {path.name: path.stat().st_size for path in saved.iterdir()}
    return {"said": "", "log": calls.log, "audit": audit, "written": calls.written, "sizes": sizes}


def found_after(parents: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """What a run finds in each folder: the newest step, which is whole as are all others, at least two; nothing was
    refused, and nothing unfinished is left."""
    results = []
    with distributed("cpu", timeout=PATIENCE) as group:
        for parent in map(Path, parents):
            clean(parent)
            said: list[str] = []
            newest = open_newest(parent, group, lambda _: None, said.append)
            whole = [is_step(open_checkpoint(path), int(path.name[5:]), ranks) for path in list_checkpoints(parent)]
            names = [path.name for path in parent.iterdir()]
            right = is_step(newest, newest.step, ranks) and all(whole) and len(whole) >= 2 and not said
            right = right and all(name.startswith("step-") and len(name) == 13 for name in names)
            results.append({"step": newest.step, "right": right, "names": names, "said": said})
    return results


def together(world: int, folder: str, *rest: Any) -> list[Callable[[], tuple[int, Any]]]:
    """Begin to save as each rank; `rest` is the same for all, or a list with each rank's."""
    return [forked(save_as, rank, world, folder, *(each[rank] for each in rest)) for rank in range(world)]


def sweep(rank: int, world_size: int, store: str, folder: str, world: int) -> dict[str, Any]:
    """Kill each rank in the third save before each of its calls and after its last (between two nothing changes), and
    one alone also in the middle of writes; each time in a copy of a folder with two checkpoints."""
    template, watched = f"{folder}/template", f"{folder}/watched"
    os.mkdir(template)
    saves = [wait() for wait in together(world, template, [None] * world, [(1, 2)] * world)]
    shutil.copytree(template, watched)
    saves += [wait() for wait in together(world, watched)]
    assert all(code == 0 and not result["said"] for code, result in saves), saves
    logs, points = [result["log"] for _, result in saves[world:]], []
    for victim, log in enumerate(logs):
        points += [(victim, number, "before") for number in range(len(log))] + [(victim, len(log) - 1, "after")]
        points += [(victim, number, "middle") for number, call in enumerate(log) if world == 1 and call[0] == "write"]
    places, ended = [f"{folder}/{victim}-{number}-{moment}" for victim, number, moment in points], []
    for begin in range(0, len(points), 14):  # a few at a time
        waits = []
        for place, (victim, *kill) in [*zip(places, points, strict=True)][begin : begin + 14]:
            shutil.copytree(template, place)
            waits.append(together(world, place, [tuple(kill) if each == victim else None for each in range(world)]))
        ended += [[wait() for wait in each] for each in waits]
    code, found = forked(found_after, [f"{place}/checkpoints" for place in places], world)()
    assert code == 0, found
    return {"watched": saves[world][1], "logs": logs, "points": points, "ended": ended, "found": found}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The sweep over the saves of a single process."""
    return run_alone(sweep, 1, folder=str(tmp_path_factory.mktemp("alone")), world=1)[0]


def test_no_change_of_the_file_system_escapes_the_count(alone):
    watched = alone["watched"]
    writing = [call for call in watched["log"] if call[0] == "open" and int(call[2]) & (os.O_WRONLY | os.O_CREAT)]
    names = ("rename", "mkdir", "unlink", "rmdir")
    counted = [call[:2] for call in watched["log"] if call[0] in names or call in writing]
    assert counted == watched["audit"]
    # Nor does a byte: what is in the files went through os.write.
    assert {Path(name).name: count for name, count in watched["written"].items()} == watched["sizes"]
    kinds = [call[0] for call in watched["log"]]
    assert {kind: kinds.count(kind) for kind in CHANGING} == {
        "mkdir": 1, "open": 5, "write": 8, "fsync": 4, "close": 5, "rename": 2, "unlink": 2, "rmdir": 1,
    }  # fmt: skip


def test_killed_anywhere_one_process_leaves_old_or_new(alone):
    assert len(alone["points"]) == 28 + 1 + 8
    names = [call[:3] for call in alone["watched"]["log"]]
    (commit,) = [i for i, call in enumerate(names) if call[0] == "rename" and call[2].endswith("step-00000003")]
    for point, [(code, _)], after in zip(alone["points"], alone["ended"], alone["found"], strict=True):
        assert code == -signal.SIGKILL
        assert after["right"], (point, after)
        assert after["step"] == (3 if point[1] > commit else 2), (point, after)


def test_what_a_loss_of_power_may_not_reorder(alone):
    log = [tuple(call) for call in alone["watched"]["log"]]
    (new,) = [i for i, call in enumerate(log) if call[0] == "rename" and call[2].endswith("step-00000003")]
    hidden, name = log[new][1:3]
    (folder_synced,) = [i for i, call in enumerate(log) if call[:2] == ("fsync", hidden)]
    (parent_synced,) = [i for i, call in enumerate(log) if call[:2] == ("fsync", str(Path(name).parent))]
    for file in (FILE, "manifest.json"):
        last_write = max(i for i, call in enumerate(log) if call[:2] == ("write", f"{hidden}/{file}"))
        (synced,) = [i for i, call in enumerate(log) if call[:2] == ("fsync", f"{hidden}/{file}")]
        assert last_write < synced < folder_synced < new < parent_synced
    deletions = [i for i, call in enumerate(log) if call[0] in ("unlink", "rmdir") or ".deleting" in str(call)]
    assert [log[i][0] for i in deletions] == ["rename", "open", "unlink", "unlink", "close", "rmdir"]
    assert parent_synced < min(deletions)


def test_killed_anywhere_one_of_two_ranks_leaves_old_or_new(tmp_path):
    (two,) = run_alone(sweep, 1, folder=str(tmp_path), world=2)
    assert [len(log) for log in two["logs"]] == [28, 10]
    for (victim, *point), pair, after in zip(two["points"], two["ended"], two["found"], strict=True):
        assert pair[victim][0] == -signal.SIGKILL, (victim, point, pair)
        code, survivor = pair[1 - victim]
        assert code == 0
        assert survivor["said"].startswith("CommError: "), (victim, point, survivor)
        assert f"rank {victim} of 2 did not answer; rank {victim} died" in survivor["said"]
        assert survivor["seconds"] < SOON
        assert after["right"], (victim, point, after)
        assert victim == 0 or after["step"] == 2
    assert {after["step"] for after in two["found"]} == {2, 3}
