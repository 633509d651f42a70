"""Corrupted manifests and headers: each is refused in one line, in little memory, or read right."""

import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from cs336_systems.checkpoint.disk import LONGEST, RefusedError
from cs336_systems.checkpoint.folder import open_checkpoint, open_plain
from cs336_systems.checkpoint.tensors import MOST_BOXES, VALUE, Box, Entry, Stored, check_cover
from cs336_systems.comm import distributed
from tests.support.checkpoint_cases import FILE, bits, rewrite, save_step
from tests.support.garble import VALUES, garbled

HEAD = {
    "__metadata__": {"author": "somebody"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "empty": {"dtype": "U8", "shape": [0, 4], "data_offsets": [26, 26]},
}
DATA = bytes(range(26))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of one rank, to copy."""
    with distributed("cpu", timeout=20) as group:
        return save_step(tmp_path_factory.mktemp("saved"), 2, group)


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / saved.name)


def file_of(head: Any) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + DATA


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


def test_any_bytes_of_a_head_are_read_right_or_refused(tmp_path):
    draw, good, said = random.Random(7), file_of(HEAD), []
    for number in range(300):
        made = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 8])):
            made[draw.randrange(len(good) - len(DATA))] = draw.choice([draw.randrange(256), *b'"[]{}:,-0129'])
        made = made[: draw.randrange(len(made))] if number % 10 == 0 else made
        said.append(refusal(partial(read_right, tmp_path / "x", bytes(made))))
    assert 10 < said.count("") < 100


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


def test_any_field_of_what_a_file_says_of_its_tensors_is_read_right_or_refused(folder):
    data, said = (folder / FILE).read_bytes(), []
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    good = {key: json.loads(text) for key, text in head["__metadata__"].items()}
    for _, _, made in [*garbled(good, ("scalars",)), *garbled(good, ("pieces", "a.weight"))]:
        head["__metadata__"] = {key: json.dumps(value) for key, value in made.items()}
        text = json.dumps(head).encode()
        (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
        rewrite(folder, lambda body: None)
        said.append(refusal(partial(open_checkpoint, folder)))
    assert (len(said), said.count("")) == (140, 7)


def test_a_tensor_in_many_boxes_is_checked_at_once():
    """Boxes are compared with each other, so that there may not be too many."""

    def cover(count: int) -> None:
        boxes = {Box((count,), (start,), (1,)): [Stored(0, 1, FILE, 0)] for start in range(count)}
        check_cover("t", Entry((count,), "U8", boxes))

    begin = time.process_time()
    cover(MOST_BOXES)
    assert refusal(partial(cover, 2 * MOST_BOXES)) == "t is in 8,192 boxes; 4,096 are read at most"
    assert time.process_time() - begin < 5
