"""Errors and slowness of the file system, told apart from damage to a checkpoint, and reported to every rank."""

import errno
import fcntl
import hashlib
import json
import os
import random
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from cs336_systems.checkpoint import disk
from cs336_systems.checkpoint.__main__ import main
from cs336_systems.checkpoint.disk import SaveError, list_checkpoints, locked
from cs336_systems.checkpoint.folder import open_newest
from cs336_systems.checkpoint.tensors import VALUE, Box, Checkpoint, Piece, write_tensors
from cs336_systems.comm import agree, agreement, default_group
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from tests.support.checkpoint_cases import FILE, any_tensor, bits, is_step, save_step, save_steps
from tests.support.ranks import run, run_alone

OLD, NEW = "step-00000001", "step-00000002"
READING = [(os, "lstat"), (os, "listdir"), (Path, "stat"), (Path, "open")]


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def failing(code: int) -> Callable[..., Any]:
    """A function that the system always refuses."""

    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def opened_with_failure(parent: Path, group, number: int, error: OSError) -> tuple[str, int, list[str]]:
    """How a run begins if the call that reads the newest checkpoint for the n-th time fails; how many there were."""
    calls, said = 0, []

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            nonlocal calls
            if Path(path).is_relative_to(parent / NEW):
                calls += 1
                if calls == number:
                    raise error
            return real(path, *rest, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for where, name in READING:
            patch.setattr(where, name, wrapped(getattr(where, name)))
        try:
            found = open_newest(parent, group, lambda _: None, said.append).folder.name
        except UserError as caught:
            found = f"{type(caught).__name__}: {caught}"
    return found, calls, said


def test_what_cannot_be_read_now_is_not_refused_but_what_is_missing_is(tmp_path, group):
    save_steps(group, str(tmp_path), [1, 2])
    found, total, _ = opened_with_failure(tmp_path, group, 0, OSError())
    assert (found, total) == (NEW, 12)
    codes = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.ENOMEM]
    for number in range(1, total + 1):
        code = codes[number % len(codes)]
        where = [str(tmp_path / NEW / FILE)] if number % 2 else []  # a file that is open no longer knows its name
        found, _, said = opened_with_failure(tmp_path, group, number, OSError(code, os.strerror(code), *where))
        assert found.startswith("UserError: cannot read "), (number, found)
        assert f"{NEW}: {os.strerror(code)}" in found or f"{tmp_path}: {os.strerror(code)}" in found, (number, found)
        assert (f"({FILE})" in found) == bool(where)
        assert said == []
        assert names(tmp_path) == [OLD, NEW]
    assert opened_with_failure(tmp_path, group, 0, OSError())[0] == NEW
    # A file that vanishes is missing.
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(tmp_path / NEW / FILE))
    found, _, (said,) = opened_with_failure(tmp_path, group, 11, gone)
    assert found == OLD
    assert "No such file or directory" in said
    assert f"{NEW}/{FILE}" in said


def test_verify_goes_on_after_what_cannot_be_read(tmp_path, group, monkeypatch, capsys):
    save_steps(group, str(tmp_path), [1, 2])
    real = hashlib.file_digest
    broken = failing(errno.EIO)
    monkeypatch.setattr(hashlib, "file_digest", lambda file, sum: (broken if OLD in file.name else real)(file, sum))
    assert run_command(main, ["verify", str(tmp_path)]) == 2
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{OLD}: cannot read {tmp_path / OLD}: Input/output error")
    assert second == f"{NEW}: whole"
    monkeypatch.setattr(os, "listdir", failing(errno.EACCES))
    assert run_command(main, ["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: cannot read {tmp_path}: Permission denied\n"


def refuse_new(checkpoint: Checkpoint) -> None:
    disk.require(checkpoint.folder.name != NEW, "too new")


REFUSED = {
    "read": "cannot read {}/step-00000002: Stale file handle; nothing was changed: try again, or move it away",
    "list": "cannot read {}: Permission denied",
    "rename": "cannot rename {}/step-00000002, refused as step-00000002: too new: Permission denied",
}


def one_rank_cannot(group, parent: str) -> None:
    """A call fails on the rank that makes it, or on rank 1 if both do."""
    for what, said in REFUSED.items():
        folder = Path(parent, what)
        save_steps(group, str(folder), [1, 2])
        with pytest.MonkeyPatch.context() as patch:
            if what == "read" and group.rank() == 1:
                patch.setattr(hashlib, "file_digest", failing(errno.ESTALE))
                patch.setattr("cs336_systems.checkpoint.folder.list_tensors", failing(errno.ESTALE))
            if what == "list":
                patch.setattr(disk, "list_checkpoints", failing(errno.EACCES))
            if what == "rename":
                patch.setattr(os, "rename", failing(errno.EACCES))
            with pytest.raises(UserError) as caught:
                open_newest(folder, group, refuse_new, print)
        agree("seen", "", group)
        assert str(caught.value) == said.format(folder)
        assert names(folder) == [OLD, NEW]


def test_what_one_rank_may_not_ends_all(tmp_path):
    run(one_rank_cannot, 2, parent=str(tmp_path))


def slow_disks(group, parent: str) -> list[str]:
    """Each rank's disk takes far longer for a call than the group's timeout, in a save, a load and a refusal."""
    folder, said = Path(parent), []
    save_step(folder, 1, group)

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *each: (time.sleep(0.8), real(*each))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "group_timeout", lambda _: timedelta(seconds=0.5))
        where, name = ((os, "rename"), (os, "fsync"))[group.rank()]
        patch.setattr(where, name, slow(getattr(where, name)))
        if group.rank() == 1:
            patch.setattr(hashlib, "file_digest", slow(hashlib.file_digest))
        save_step(folder, 2, group)
        found = open_newest(folder, group, refuse_new, said.append)
    assert is_step(found, 1, group.size())
    return said


def test_a_slow_disk_is_no_lost_rank(tmp_path):
    zero, one = run(slow_disks, 2, parent=str(tmp_path))
    assert zero == one
    assert zero[0].startswith(f"refused {NEW}: too new; going back to {OLD}")


def test_a_file_system_without_locks_is_not_in_use(tmp_path, monkeypatch):
    for code in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO):
        monkeypatch.setattr(fcntl, "flock", failing(code))
        said = f"^cannot lock a file on the file system of {tmp_path}: {os.strerror(code)}; name a folder on another"
        with pytest.raises(UserError, match=said), locked(tmp_path):
            pass


def test_the_oldest_go_whatever_is_in_them_and_one_that_stays_holds_up_no_other(tmp_path, group, monkeypatch):
    save_steps(group, str(tmp_path), [1, 2])
    (tmp_path / OLD / "notes" / "more").mkdir(parents=True)
    (tmp_path / OLD / "notes" / "file").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("")
    (tmp_path / OLD / "link").symlink_to(tmp_path / "elsewhere")
    save_step(tmp_path, 3, group)
    assert names(tmp_path) == ["elsewhere", NEW, "step-00000003"]
    assert names(tmp_path / "elsewhere") == ["kept"]
    real = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (failing(errno.EACCES) if a.name == NEW else real)(a, b))
    save_steps(group, str(tmp_path), [4, 5])
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["2", "4", "5"]
    monkeypatch.setattr(os, "rename", real)
    save_step(tmp_path, 6, group)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["5", "6"]


@pytest.mark.parametrize(
    ("take", "said"),
    [
        (lambda path: path.write_text(""), "is no folder"),
        (lambda path: path.mkdir(), "manifest.json is missing"),
        (lambda path: path.symlink_to("nowhere"), "File exists"),
        (lambda path: (save_step_at(path), (path / FILE).write_bytes(b"")), "has 0 bytes, not"),
    ],
)
def test_a_name_alone_does_not_count_as_saved(take, said, tmp_path, group):
    save_steps(group, str(tmp_path), [1, 2])
    take(tmp_path / "step-00000003")
    with pytest.raises(SaveError, match=f"step-00000003 was not saved: .*{said}.*; earlier checkpoints are as they"):
        save_step(tmp_path, 3, group)
    assert names(tmp_path) == [OLD, NEW, "step-00000003"]


def save_step_at(path: Path) -> None:
    save_step(path.parent, int(path.name[5:]), default_group(), keep=9)


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    draw = random.Random(6)
    for number in range(12):
        shapes = [tuple(draw.choice([0, 1, 3, 5]) for _ in range(draw.randint(0, 3))) for _ in range(6)]
        wanted = {f"ž{i}": any_tensor(draw, shape) for i, shape in enumerate(shapes)}
        wanted |= {"turned": torch.arange(12.0).reshape(3, 4).T, "every other": torch.arange(9, dtype=torch.int16)[::2]}
        pieces = [Piece(name, VALUE, Box.whole(tensor.shape), 0, tensor) for name, tensor in wanted.items()]
        draw.shuffle(pieces)
        folder = tmp_path / str(number)
        folder.mkdir()
        assert [*write_tensors(folder, 0, pieces, {"ž0": {"step": 3}})] == [FILE]
        with safe_open(folder / FILE, "pt") as theirs:
            assert set(theirs.keys()) == wanted.keys()
            assert json.loads(theirs.metadata()["scalars"]) == {"ž0": {"step": 3}}
            for name, tensor in wanted.items():
                read = theirs.get_tensor(name)
                assert (read.shape, read.dtype, bits(read)) == (tensor.shape, tensor.dtype, bits(tensor))
        data = (folder / FILE).read_bytes()
        size = int.from_bytes(data[:8], "little")
        assert size % 8 == 0
        for name, each in json.loads(data[8 : 8 + size]).items():
            assert name == "__metadata__" or each["data_offsets"][0] % wanted[name].itemsize == 0


def write_in_little_memory(rank: int, world_size: int, folder: str, into: str) -> int:
    """Write 96 MiB with no more than 80 MiB of memory for it."""
    large = torch.ones(3 << 23)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (80 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    (file,) = write_tensors(Path(into), 0, [Piece("w", VALUE, Box.whole(large.shape), 0, large)], {}).values()
    return file["bytes"] - large.nbytes


def test_a_large_tensor_is_not_copied_to_be_saved(tmp_path):
    (head,) = run_alone(write_in_little_memory, 1, into=str(tmp_path))
    assert 0 < head < 1000


def test_a_dtype_that_no_reader_knows_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^w has dtype torch.complex64; known are torch.float64, "):
        write_tensors(tmp_path, 0, [Piece("w", VALUE, Box.whole((1,)), 0, torch.zeros(1, dtype=torch.complex64))], {})
