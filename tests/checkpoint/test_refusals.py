"""Refusals: a run names whatever is wrong with a checkpoint, and goes back to the one before."""

import errno
import itertools
import json
import os
import random
import re
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.checkpoint.disk import RefusedError, require
from cs336_systems.checkpoint.folder import NAME, open_checkpoint, open_newest, save
from cs336_systems.checkpoint.tensors import VALUE, Box, Checkpoint, Piece
from cs336_systems.comm import agree
from cs336_systems.errors import UserError
from tests.support.checkpoint_cases import FILE, bits, flip, is_step, rewrite, save_step, save_steps, sign, tensors
from tests.support.checkpoint_damage import DAMAGES, HUGE, NEW, OLD, described, in_head, linked, with_head
from tests.support.garble import inner, places
from tests.support.ranks import run, run_alone


@pytest.fixture(scope="module")
def saved(group, tmp_path_factory):
    """A folder with the checkpoints of two steps, to copy."""
    parent = tmp_path_factory.mktemp("saved")
    save_steps(group, str(parent), [1, 2])
    return parent


@pytest.fixture
def parent(saved, tmp_path):
    """A folder of one's own with the checkpoints of two steps."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def disk_full(group, parent: str, full_rank: int, after: int) -> dict[str, Any]:
    """The disk of one rank takes no more after some calls of os.write, then it does again."""
    folder, real, count = Path(parent), os.write, itertools.count()
    save_steps(group, parent, [1, 2])

    def write(file: int, data: memoryview) -> int:
        if group.rank() == full_rank and next(count) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    os.write = write
    try:
        save_step(folder, 3, group)
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    os.write = real
    agree("looked", "", group)
    names = sorted(path.name for path in folder.iterdir())
    agree("looked", "", group)
    whole = is_step(open_newest(folder, group, lambda _: None, print), 2, group.size())
    save_step(folder, 4, group)
    after = is_step(open_newest(folder, group, lambda _: None, print), 4, group.size())
    return {"said": said, "names": names, "whole": whole, "after": after}


def file_too_large(group, parent: str) -> dict[str, Any]:
    """The system itself refuses a file of more than 64 KiB."""
    folder = Path(parent)
    save_steps(group, parent, [1, 2])
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = [Piece("w", VALUE, Box.whole((1 << 15,)), 0, torch.ones(1 << 15))]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        save(folder, 3, large, {}, {}, group)
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    names = sorted(path.name for path in folder.iterdir())
    save(folder, 3, large, {}, {}, group)
    return {"said": said, "names": names, "next": sorted(path.name for path in folder.iterdir())}


def open_in_little_memory(rank: int, world_size: int, folder: str, checkpoints: Sequence[str]) -> list[str]:
    """Message of opening in a process that may allocate at most 64 MiB more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 26)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    said = []
    for each in checkpoints:
        try:
            checkpoint = open_checkpoint(Path(each))
            for name, kinds in checkpoint.tensors.items():
                for kind, entry in kinds.items():
                    checkpoint.read(name, kind, Box.whole(entry.shape))
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


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
        for place in sorted(draw.sample(range(len(good)), 100)):
            flip(parent / NEW / file, place, draw.randrange(8))
            with pytest.raises(RefusedError):
                open_checkpoint(parent / NEW)
            (parent / NEW / file).write_bytes(good)
    assert is_step(open_checkpoint(parent / NEW), 2)


def mutate(body: dict, draw: random.Random) -> None:
    """Drop something, double it, move it, or put something else in its place."""
    strange = [None, True, False, -1, 0, 1, 7, 1.5, 1e308, 2**62, 2**70]
    strange += ["", "x", "../x", "a\0b", "\ud800", [], {}, [[]]]
    *above, last = draw.choice(list(places(body)))
    inside = inner(body, above)
    other = draw.choice(list(inside if isinstance(inside, dict) else range(len(inside))))
    match draw.randrange(5):
        case 0:
            del inside[last]
        case 1:
            inside[last], inside[other] = inside[other], inside[last]
        case 2 if isinstance(inside, list):
            inside.append(inside[last])
        case 3 if isinstance(inside[last], int):
            inside[last] += draw.choice([-1, 1, 4])
        case _:
            inside[last] = draw.choice(strange)


def test_a_manifest_or_a_head_that_lies_gives_no_wrong_tensor(parent):
    draw, wanted, outcomes = random.Random(1), tensors(2), []
    manifest, data = (parent / NEW / NAME).read_bytes(), (parent / NEW / FILE).read_bytes()

    def mutations(value: dict) -> None:
        for _ in range(draw.choice([1, 1, 2, 3])):
            mutate(value, draw)

    def mutate_head(head: dict, pieces: dict) -> None:
        metadata = head.pop("__metadata__")
        mutations({"head": head, "pieces": pieces})
        head["__metadata__"] = metadata

    for number in range(600):
        (parent / NEW / FILE).write_bytes(data)
        body = json.loads(manifest)["manifest"]
        if number % 3 == 0:
            mutations(body)
        sign(parent / NEW, body)
        if number % 3:
            in_head(mutate_head)(parent / NEW)
        try:
            checkpoint = open_checkpoint(parent / NEW)
        except RefusedError as error:
            outcomes.append(str(error)[: len(NEW)])
            continue
        outcomes.append("opened")
        for (name, kind), tensor in wanted.items() if number % 3 == 0 else ():
            assert bits(checkpoint.read(name, kind, Box.whole(tensor.shape))) == bits(tensor), body
        for name, kinds in checkpoint.tensors.items():  # signed as it is, another tensor is nobody's mistake but whole
            for kind, entry in kinds.items():
                assert checkpoint.read(name, kind, Box.whole(entry.shape)).shape == entry.shape
    assert outcomes.count(NEW) > 400
    assert outcomes.count("opened") > 10
    assert outcomes.count("opened") + outcomes.count(NEW) == 600


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
    (said,) = run_alone(open_in_little_memory, 1, checkpoints=[str(tmp_path / name) for name in lies])
    assert [text.partition(":")[0] for text in said] == ["RefusedError"] * len(lies), said


@pytest.mark.parametrize(("full_rank", "after"), [(0, 0), (1, 0), (0, 6)], ids=["rank 0", "rank 1", "the manifest"])
def test_a_full_disk_leaves_what_was(full_rank, after, tmp_path):
    zero, one = run(disk_full, 2, parent=str(tmp_path), full_rank=full_rank, after=after)
    assert zero == one
    assert zero["names"] == [OLD, NEW]
    assert zero["whole"]
    assert zero["after"]
    who = "" if after else rf"rank {full_rank}: "
    needed = "" if after else r", \d+ B to write"
    words = rf"SaveError: .*step-00000003 was not saved: {who}No space left on device, [\d.]+ \w+ free{needed}; earlier"
    assert re.match(words, zero["said"]), zero["said"]


def test_a_file_that_may_not_grow(tmp_path):
    (found,) = run(file_too_large, 1, parent=str(tmp_path))
    assert re.match(r"SaveError: .* was not saved: rank 0: File too large; earlier", found["said"]), found["said"]
    assert found["names"] == [OLD, NEW]
    assert found["next"] == [NEW, "step-00000003"]
