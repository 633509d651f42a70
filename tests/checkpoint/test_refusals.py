"""Refusals: a run names whatever is wrong with a checkpoint in one line, and goes back to the one before."""

import errno
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from cs336_systems.checkpoint.disk import LONGEST, RefusedError, SaveError, require
from cs336_systems.checkpoint.folder import NAME, open_checkpoint, open_newest, open_plain
from cs336_systems.checkpoint.tensors import MOST_BOXES, VALUE, Box, Checkpoint, Entry, Stored, check_cover
from cs336_systems.comm import agree
from cs336_systems.errors import UserError
from tests.support.checkpoint_cases import FILE, bits, flip, is_step, rewrite, save_step, save_steps, sign, tensors
from tests.support.checkpoint_damage import DAMAGES, HUGE, NEW, OLD, described, in_head, linked, with_head
from tests.support.garble import VALUES, garbled
from tests.support.ranks import run, run_alone


def disk_full(group, parent: str, full_rank: int, after: int) -> str:
    """The disk of one rank takes no more after some calls of os.write, then it does again; what was said."""
    folder, real, count = Path(parent), os.write, itertools.count()
    save_steps(group, parent, [1, 2])

    def write(file: int, data: memoryview) -> int:
        if group.rank() == full_rank and next(count) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    os.write = write
    with pytest.raises(SaveError) as error:
        save_step(folder, 3, group)
    os.write = real
    agree("looked", "", group)
    assert sorted(path.name for path in folder.iterdir()) == [OLD, NEW]
    agree("looked", "", group)
    assert is_step(open_newest(folder, group, lambda _: None, print), 2, group.size())
    save_step(folder, 4, group)
    assert is_step(open_newest(folder, group, lambda _: None, print), 4, group.size())
    return str(error.value)


def open_in_little_memory(rank: int, world_size: int, folder: str, checkpoints: Sequence[str]) -> None:
    """Each is refused by a process that may allocate at most 64 MiB more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 26)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for each in checkpoints:
        with pytest.raises(RefusedError):
            open_checkpoint(Path(each))


def accept(checkpoint: Checkpoint) -> None:
    """A run refuses a tensor with another dtype than its own."""
    dtype = checkpoint.tensors["a.weight"][VALUE].dtype
    require(dtype == "F32", f"a.weight is {dtype} there")


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(name, parent, group):
    damage, reason = DAMAGES[name]
    damage(parent / NEW)
    said = []
    found = open_newest(parent, group, accept, said.append)
    assert found.folder.name == OLD
    assert is_step(found, 1)
    (text,) = said
    assert text.startswith(f"refused {NEW}")
    assert re.search(reason, text), text
    (aside,) = [path.name for path in parent.iterdir() if path.name.startswith(f"{NEW}.refused-")]
    assert text.endswith(f"; going back to {OLD} ({NEW} is now called {aside})")
    assert not os.path.lexists(parent / NEW)
    assert text.isprintable()


def test_a_folder_that_is_a_link_is_no_checkpoint(parent, group):
    linked("")(parent / NEW)
    assert open_newest(parent, group, accept, print).folder.name == OLD
    with pytest.raises(RefusedError, match=f"{NEW} is no folder"):
        open_checkpoint(parent / NEW)


def test_when_all_are_refused_every_reason_is_said(parent, group):
    flip(parent / NEW / FILE, -1)
    (parent / OLD / NAME).unlink()
    reasons = f"{NEW}/{FILE} is damaged.*; {OLD}/{NAME} is missing"
    with pytest.raises(UserError, match=f"^no checkpoint in {parent} can be used: {reasons}"):
        open_newest(parent, group, accept, print)
    assert sorted(path.name for path in parent.iterdir()) == [OLD, NEW]


def test_no_checkpoint_is_no_error(tmp_path, group):
    assert open_newest(tmp_path / "nowhere", group, accept, print) is None
    (tmp_path / "step-1").mkdir()
    (tmp_path / ".saving-step-00000001-00").mkdir()
    assert open_newest(tmp_path, group, accept, print) is None


def test_every_bit_that_flips_is_seen(parent):
    draw = random.Random(0)
    for file in (FILE, NAME):
        good = (parent / NEW / file).read_bytes()
        for place in sorted(draw.sample(range(len(good)), 50)):
            flip(parent / NEW / file, place, draw.randrange(8))
            with pytest.raises(RefusedError):
                open_checkpoint(parent / NEW)
            (parent / NEW / file).write_bytes(good)
    assert is_step(open_checkpoint(parent / NEW), 2)


def test_sizes_that_lie_take_no_memory(parent, tmp_path):
    whole = [[HUGE, 4], [0, 0], [HUGE, 4]]
    lies = {
        "huge": in_head(lambda head, pieces: pieces["a.weight"].__setitem__(slice(2, 5), whole)),
        "count": in_head(lambda head, pieces: head["a.weight"].update(shape=[HUGE, 4])),
        "hidden": described(2, [1 << 61, 0], "empty"),
        "overflow": described(2, [1 << 40, 1 << 40, 0], "empty"),
        "bytes": lambda folder: rewrite(folder, lambda b: b["files"][FILE].update(bytes=HUGE)),
        "box": described(3, [HUGE, 0]),
        "manifest": lambda folder: os.truncate(folder / NAME, 180_000_000),
        "head": with_head(b"[" * 80_000_000),
    }
    for name, lie in lies.items():
        lie(shutil.copytree(parent / NEW, tmp_path / name))
    run_alone(open_in_little_memory, 1, checkpoints=[str(tmp_path / name) for name in lies])


@pytest.mark.parametrize(("full_rank", "after"), [(1, 0), (0, 6)], ids=["rank 1", "the manifest"])
def test_a_full_disk_leaves_what_was(full_rank, after, tmp_path):
    zero, one = run(disk_full, 2, parent=str(tmp_path), full_rank=full_rank, after=after)
    assert zero == one
    who, needed = ("", "") if after else (rf"rank {full_rank}: ", r", \d+ B to write")
    words = rf".*step-00000003 was not saved: {who}No space left on device, [\d.]+ \w+ free{needed}; earlier"
    assert re.match(words, zero), zero


HEAD = {
    "__metadata__": {"author": "somebody"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "empty": {"dtype": "U8", "shape": [0, 4], "data_offsets": [26, 26]},
}
DATA = bytes(range(26))


def file_of(head: Any, data: bytes = DATA) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def refusal(open_it: Callable[[], object]) -> str:
    """The line that refuses something; empty where it is opened."""
    said = ""
    try:
        open_it()
    except RefusedError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) <= LONGEST
    return said


def read_right(path: Path, data: bytes) -> None:
    """Open a plain file. What is opened has the bits that the library of the format reads."""
    path.write_bytes(data)
    ours = open_plain(path)
    theirs = load(data)
    assert ours.tensors.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours.tensors[name][VALUE].shape == tuple(tensor.shape)
        assert bits(ours.read(name, VALUE, Box.whole(tensor.shape))) == bits(tensor)


def test_any_field_of_a_head_is_read_right_or_refused(tmp_path):
    values = [each for each in VALUES if each != "\ud800<b>|`*"]  # which the library takes in no text
    said = [refusal(partial(read_right, tmp_path / "x", file_of(made))) for _, _, made in garbled(HEAD, values=values)]
    assert (len(said), said.count("")) == (216, 3)


def test_tensors_share_no_bytes(tmp_path):
    draw, said = random.Random(8), []
    for _ in range(200):
        runs = [(begin := draw.randint(0, 24), begin + draw.choice([-1, 0, 1, 3, 6])) for _ in range(3)]
        tensors = {f"t{a}-{b}": {"dtype": "U8", "shape": [max(0, b - a)], "data_offsets": [a, b]} for a, b in runs}
        (tmp_path / "x").write_bytes(file_of(tensors))
        said.append(refusal(partial(open_plain, tmp_path / "x")))
        runs = sorted({*runs})
        inside = all(0 <= begin <= end <= len(DATA) for begin, end in runs)
        apart = not any(a < d and c < b for i, (a, b) in enumerate(runs) for c, d in runs[:i])
        assert (not said[-1]) == (inside and apart), (runs, said[-1])
    assert 20 < said.count("") < 180


def read_saved(folder: Path) -> None:
    """Open a checkpoint. What is opened has the tensors that were saved, bit for bit, or says another kind of them."""
    checkpoint, wanted = open_checkpoint(folder), tensors(2)
    for name, kinds in checkpoint.tensors.items():
        for kind, entry in kinds.items():
            read = checkpoint.read(name, kind, Box.whole(entry.shape))
            assert read.shape == entry.shape
            assert (name, kind) not in wanted or bits(read) == bits(wanted[name, kind])


def test_any_field_of_a_manifest_or_of_what_a_file_says_of_its_tensors_is_read_right_or_refused(parent):
    folder, said, values = parent / NEW, [], [*VALUES, 0, 1, 2, 1 << 62]
    manifest, data = json.loads((folder / NAME).read_bytes())["manifest"], (folder / FILE).read_bytes()
    for _, _, made in garbled(manifest, values=[each for each in values if each != math.inf]):  # which has no checksum
        sign(folder, made)
        said.append(refusal(partial(read_saved, folder)))
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    good = {key: json.loads(text) for key, text in head["__metadata__"].items()}
    for _, _, made in [*garbled(good, ("scalars",), values), *garbled(good, ("pieces", "a.weight"), values)]:
        head["__metadata__"] = {key: json.dumps(value) for key, value in made.items()}
        (folder / FILE).write_bytes(file_of(head, data[end:]))
        rewrite(folder, lambda body: None)
        said.append(refusal(partial(read_saved, folder)))
    assert (len(said), said.count("")) == (313, 32)


def test_a_tensor_in_many_boxes_is_checked_at_once():
    """Boxes are compared with each other, so that there may not be too many."""

    def cover(count: int) -> None:
        boxes = {Box((count,), (start,), (1,)): [Stored(0, 1, FILE, 0)] for start in range(count)}
        check_cover("t", Entry((count,), "U8", boxes))

    begin = time.process_time()
    cover(MOST_BOXES)
    assert refusal(partial(cover, 2 * MOST_BOXES)) == "t is in 8,192 boxes; 4,096 are read at most"
    assert time.process_time() - begin < 5
