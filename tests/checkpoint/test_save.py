"""Saving: what is kept, what is never saved, what a folder may hold, and writing in the background."""

import errno
import math
import os
import threading
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from cs336_systems.checkpoint import disk
from cs336_systems.checkpoint.disk import SaveError, clean, list_checkpoints, locked, step_name
from cs336_systems.checkpoint.folder import Saver, open_newest, save
from cs336_systems.checkpoint.tensors import VALUE, Box, Piece, my_share
from cs336_systems.comm import agree, all_reduce
from cs336_systems.comm.group import ALL, counters
from cs336_systems.errors import UserError
from tests.support.checkpoint_cases import FILE, PATIENCE, flip, is_step, pieces_of, save_step, save_steps, tensors
from tests.support.ranks import run


def test_the_last_checkpoints_are_kept(tmp_path, group):
    assert save_steps(group, str(tmp_path), [1, 2, 3, 10, 20]) == ["step-00000010", "step-00000020"]
    assert save_steps(group, str(tmp_path), [30, 40], keep=3) == ["step-00000020", "step-00000030", "step-00000040"]
    # Of later steps, which a run that began earlier comes upon, none is deleted; nor is what was saved just now.
    assert save_steps(group, str(tmp_path), [5]) == [step_name(step) for step in (5, 20, 30, 40)]
    for keep in (1, 0, -1):
        with pytest.raises(UserError, match=f"^of {keep} checkpoint"):
            save_step(tmp_path, 50, group, keep)
    (tmp_path / "step-00000040" / FILE).write_bytes(b"")
    assert [path.name[5:] for path in list_checkpoints(tmp_path)] == ["00000005", "00000020", "00000030", "00000040"]


def test_names_are_in_the_order_of_steps(tmp_path):
    names = [step_name(step) for step in (99_999_999, 7, 100_000_000, 12)]
    strange = "step-7", "step-00000007.refused-00", "a step-00000007", "step-" + 7 * "\u0660" + "\u0661"
    for name in (*names, *strange):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000001").write_text("")
    (tmp_path / "step-00000002").symlink_to(tmp_path / names[1])
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [7, 12, 99_999_999, 100_000_000]


def test_a_step_that_is_saved_already_stays(tmp_path, group):
    folder = save_step(tmp_path, 3, group)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert save(tmp_path, 3, pieces_of(tensors(9), 0, 1), {}, {}, group) == folder
    assert before == {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


WHOLE = pieces_of(tensors(3), 0, 1)
FIRST, OTHERS = WHOLE[0], WHOLE[1:]
SPOILED = {  # pieces, scalars and state that a run must not save
    "lacks elements": ([FIRST._replace(tensor=FIRST.tensor[1:]), *OTHERS], {}, {}),
    "twice": ([*WHOLE, FIRST], {}, {}),
    "a reserved name": ([*WHOLE, FIRST._replace(name="__metadata__")], {}, {}),
    "NaN in the state": (WHOLE, {}, {"loss": math.nan}),
    "no JSON": (WHOLE, {}, {"path": Path()}),
    "scalars": (WHOLE, {"a.weight": {"step": math.inf}}, {}),
    "shapes": ([FIRST._replace(box=Box.whole((5, 5))), *OTHERS], {}, {}),
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lacks elements", r"a.weight \(value\) lacks elements, .* of 24 the next run begins at 24, not at 23"),
        ("twice", "rank 0: ValueError: two pieces of one tensor on a rank"),
        ("a reserved name", "rank 0: ValueError: .*names alike or reserved, among .*'__metadata__'"),
        ("NaN in the state", "ValueError: Out of range float"),
        ("no JSON", "TypeError: .*not JSON serializable"),
        ("scalars", "rank 0: ValueError: Out of range float"),
        ("shapes", r"a.weight \(value\) lacks elements, .* of 25 the next run begins at 25, not at 24"),
    ],
)
def test_what_could_not_be_read_is_not_saved(change, said, tmp_path, group):
    save_steps(group, str(tmp_path), [1, 2])
    with pytest.raises(SaveError, match=f"step-00000003 was not saved: {said}.*; earlier checkpoints are as they were"):
        save(tmp_path, 3, *SPOILED[change], group)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_new_folders_are_on_the_disk_before_what_is_in_them(tmp_path, group, monkeypatch):
    synced, names, real_open, real_sync = [], {}, os.open, os.fsync

    def open_named(path: object, *rest: int) -> int:
        file = real_open(path, *rest)
        names[file] = str(path)
        return file

    monkeypatch.setattr(os, "open", open_named)
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(names[file]), real_sync(file)))
    save_step(tmp_path / "runs" / "one" / "checkpoints", 1, group)
    assert synced[:3] == [str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "one")]


def save_beside_collectives(group, parent: str) -> None:
    """A save in the background that cannot end before the main thread has done its collectives and agreements."""
    finished, real, before = threading.Event(), os.write, counters(group)[ALL]

    def write(file: int, data: memoryview) -> int:
        assert threading.current_thread() is not threading.main_thread()
        assert group.rank() == 0 or finished.wait(PATIENCE)
        return real(file, data)

    os.write = write
    saver = Saver(Path(parent), group, background=True)
    state, scalars, whole = {"step": 5}, {"a.weight": {"step": 5}}, tensors(5, group.rank())
    saver.start(5, pieces_of(whole, group.rank(), group.size()), scalars, state)
    for tensor in whole.values():
        tensor.zero_()
    state["step"] = scalars["a.weight"]["step"] = 6
    for number in range(20):
        flat = torch.full((3,), float(number + group.rank()))
        all_reduce(flat, group, reduction="sum").wait()
        assert flat.eq(2 * number + 1).all()
        assert agree("step", f"{number} of {group.rank()}", group) == [f"{number} of {rank}" for rank in range(2)]
    assert not saver.saving.done()
    finished.set()
    saver.finish()
    os.write = real
    assert counters(group)[ALL] - before == 40, "what the thread does is not counted"
    assert is_step(open_newest(Path(parent), group, lambda _: None, print), 5, group.size())


def background_errors(group, parent: str) -> list[str]:
    """Saves in the background fail on rank 1; both ranks hear of it when they come back, and can go on."""
    saver, real, said = Saver(Path(parent), group, background=True), os.write, []
    pieces = pieces_of(tensors(1, group.rank()), group.rank(), group.size())

    def write(file: int, data: memoryview) -> int:
        if group.rank() == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, data)

    for come_back in (lambda: saver.start(2, pieces, {}, {}), saver.finish):
        os.write = write
        saver.start(1, pieces, {}, {})
        with pytest.raises(SaveError) as error:
            come_back()
        os.write = real
        said.append(str(error.value))
    saver.start(3, pieces, {}, {})
    saver.finish()
    saver.finish()
    return [*said, *sorted(path.name for path in Path(parent).iterdir())]


def test_a_save_in_the_background_meets_no_collective(tmp_path):
    run(save_beside_collectives, 2, parent=str(tmp_path))


def test_an_error_in_the_background_is_raised_at_the_next_call(tmp_path):
    zero, one = run(background_errors, 2, parent=str(tmp_path))
    assert zero == one
    for said in zero[:2]:
        assert said.startswith(f"{tmp_path}/step-00000001 was not saved: rank 1: Input/output error; earlier")
    assert zero[2:] == ["step-00000003"]


def ranks_that_differ(group, parent: str) -> list[str]:
    """Messages about a dtype that differs on rank 1, and about damage to each rank's file in turn."""
    folder, said = Path(parent), []
    low, high = my_share(7, group.rank(), group.size())
    mine = torch.zeros(high - low, dtype=(torch.float32, torch.int32)[group.rank()])
    with pytest.raises(SaveError) as error:
        save(folder, 9, [Piece("w", VALUE, Box.whole((7,)), low, mine)], {}, {}, group)
    said.append(str(error.value))
    for step in (2, 3):
        save_steps(group, parent, [1, step])
        if group.rank() == 0:
            flip(folder / step_name(step) / f"rank-{step - 2:05d}-00.safetensors", -1)
        agree("damaged", "", group)
        assert is_step(open_newest(folder, group, lambda _: None, said.append), 1, group.size())
    return said


def test_ranks_see_what_is_wrong_on_any_of_them(tmp_path):
    zero, one = run(ranks_that_differ, 2, parent=str(tmp_path))
    assert zero == one
    assert "rank-00001-00.safetensors: w (value) is F32 [7] on one rank, I32 [7] here" in zero[0]
    assert zero[1].startswith("refused step-00000002/rank-00000-00.safetensors is damaged")
    assert zero[2].startswith("refused step-00000003/rank-00001-00.safetensors is damaged")


def test_a_file_is_written_whole_to_a_name_that_is_free(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))  # an almost full disk takes a part
    together = b"some bytes of a file" + bytes(range(9))
    written = disk.write_file(tmp_path / "x", [together[:20], memoryview(bytearray(together[20:])), b""])
    assert written == {"bytes": len(together), "sha256": sha256(together).hexdigest()}
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("x", "link"):
        with pytest.raises(FileExistsError):
            disk.write_file(tmp_path / name, [b"other"])
    assert (tmp_path / "x").read_bytes() == together
    assert not (tmp_path / "nowhere").exists()


def test_what_is_unfinished_is_removed_and_nothing_else(tmp_path, group):
    save_step(tmp_path, 1, group)
    for name in (".saving-step-00000002-aa", ".deleting-step-00000000-bb", ".hidden", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / ".saving-link").symlink_to(tmp_path / "notes")
    clean(tmp_path)
    clean(tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", ".saving-link", "notes", "step-00000001"]
    assert (tmp_path / "notes" / "file").exists()


def test_a_folder_has_one_run_at_a_time(tmp_path):
    folder = tmp_path / "runs" / "one"
    for before, signed in (("of an unknown process", "process 7"), ("process 7", "8")):
        with locked(folder) as lock:
            with pytest.raises(UserError, match=rf"in use by another run \({before}\); wait"), locked(folder):
                pass
            lock.truncate(0)
            print(signed, file=lock, flush=True)
    with locked(folder) as lock:
        assert lock.read() == "8\n"
    (tmp_path / "file").write_text("")
    said = rf"cannot write to {tmp_path}/file/x: File exists; name another folder with --out DIR"
    with pytest.raises(UserError, match=said), locked(tmp_path / "file" / "x"):
        pass
