"""Checkpoints: any box is read back from any pieces that were written, and the manifest says where each is."""

import itertools
import json
import random

import pytest
import torch

from cs336_systems.checkpoint import tensors as tensors_module
from cs336_systems.checkpoint.disk import RefusedError
from cs336_systems.checkpoint.folder import NAME, digest, open_checkpoint, save, to_text
from cs336_systems.checkpoint.tensors import DTYPES, VALUE, Box, Entry, Piece, Stored, check_cover, read_head
from tests.support.checkpoint_cases import FILE, any_tensor, bits, pieces_of, save_step, tensors


def any_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw.randint(0, length), draw.randint(0, length))) for length in shape]
    return Box(shape, tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))


def any_pieces(draw: random.Random, name: str, whole: torch.Tensor) -> list[Piece]:
    """A tensor cut into a grid of boxes, and each box into runs."""
    axes = []
    for length in whole.shape:
        cuts = sorted({0, length, *(draw.randint(0, length) for _ in range(draw.randint(0, 2)))})
        axes.append(list(itertools.pairwise(cuts)) or [(0, 0)])
    found = []
    for corner in itertools.product(*axes):
        box = Box(tuple(whole.shape), tuple(low for low, _ in corner), tuple(high - low for low, high in corner))
        flat = whole[inside(box)].reshape(-1)
        cuts = sorted({0, flat.numel(), *(draw.randint(0, flat.numel()) for _ in range(draw.randint(0, 2)))})
        for first, last in list(itertools.pairwise(cuts)) or [(0, 0)]:
            found.append(Piece(name, VALUE, box, first, flat[first:last]))
    return found


def test_any_pieces_give_any_box(tmp_path, group, monkeypatch):
    draw = random.Random(2)
    monkeypatch.setattr(tensors_module, "FILE_BYTES", -1)  # a file for each piece, as from as many ranks
    for step in range(40):
        shape = tuple(draw.choice([0, 1, 2, 3, 5]) for _ in range(draw.randint(0, 3)))
        whole = {f"t{number}": any_tensor(draw, shape) for number in range(2)}
        pieces = [piece for name, tensor in whole.items() for piece in any_pieces(draw, name, tensor)]
        draw.shuffle(pieces)
        checkpoint = open_checkpoint(save(tmp_path, step, pieces, {}, {}, group))
        assert len(checkpoint.files) == len(pieces)
        for name, tensor in whole.items():
            for box in (Box.whole(shape), *(any_box(draw, shape) for _ in range(4))):
                read = checkpoint.read(name, VALUE, box)
                assert (read.shape, read.dtype) == (box.size, tensor.dtype)
                assert bits(read) == bits(tensor[inside(box)])
    assert {dtype.itemsize for dtype in DTYPES.values()} == {1, 2, 4, 8}


def test_a_box_of_another_shape_is_not_read(tmp_path, group):
    checkpoint = open_checkpoint(save_step(tmp_path, 1, group))
    with pytest.raises(ValueError, match=r"a box of a tensor of shape \(7, 4\); this one has \(6, 4\)"):
        checkpoint.read("a.weight", VALUE, Box.whole((7, 4)))
    with pytest.raises(KeyError):
        checkpoint.read("c", VALUE, Box.whole(()))


def test_pieces_that_do_not_cover_are_refused():
    draw, outcomes = random.Random(4), set()
    for _ in range(400):
        shape = tuple(draw.randint(0, 3) for _ in range(draw.randint(0, 2)))
        counts = torch.zeros(shape, dtype=torch.int64)
        pieces = any_pieces(draw, "t", counts)
        for _ in range(draw.randint(0, 2)):  # drop, double, or shorten
            change = draw.randrange(3)
            at = draw.randrange(len(pieces)) if pieces else None
            if at is not None and change < 2:
                pieces[at : at + 1] = [pieces[at]] * (2 * change)
            elif at is not None and pieces[at].tensor.numel():
                old = pieces[at]
                pieces[at] = Piece("t", VALUE, old.box, old.first, old.tensor[1:])
        for piece in pieces:
            flat = torch.zeros(piece.box.numel, dtype=torch.int64)
            flat[piece.first : piece.first + piece.tensor.numel()] = 1
            counts[inside(piece.box)] += flat.reshape(piece.box.size)
        boxes: dict[Box, list[Stored]] = {}
        for piece in pieces:
            boxes.setdefault(piece.box, []).append(Stored(piece.first, piece.first + piece.tensor.numel(), "", 0))
        right = bool((counts == 1).all())
        outcomes.add(right)
        try:
            check_cover("t", Entry(shape, "I64", boxes))
            refused = False
        except RefusedError:
            refused = True
        assert refused != right, (shape, pieces)
    assert outcomes == {True, False}


def test_files_are_no_larger_than_they_may_be(tmp_path, group, monkeypatch):
    monkeypatch.setattr(tensors_module, "FILE_BYTES", 100)
    whole = {
        (f"t{number}", VALUE): torch.full((size,), float(number)) for number, size in enumerate([10, 15, 1, 40, 5, 20])
    }
    folder = save(tmp_path, 1, pieces_of(whole, 0, 1), {"t0": {"step": 3}}, {}, group)
    held = {path.name: [*read_head(path)[0]] for path in sorted(folder.glob("*.safetensors"))}
    assert held == {
        "rank-00000-00.safetensors": ["t0", "t1"],  # 40 + 60 bytes
        "rank-00000-01.safetensors": ["t2"],
        "rank-00000-02.safetensors": ["t3"],  # more than a file may have, and so alone
        "rank-00000-03.safetensors": ["t4", "t5"],
    }
    checkpoint = open_checkpoint(folder)
    assert checkpoint.scalars == {"t0": {"step": 3}}
    assert all(bits(checkpoint.read(*key, Box.whole(tensor.shape))) == bits(tensor) for key, tensor in whole.items())


def test_a_manifest_says_what_was_written(tmp_path, group):
    state = {"step": 1, "words": "žluťoučký\n\x1b", "deep": {"list": [1, None, True, 0.1, 2**60]}, "": {}}
    scalars = {"a.weight": {"step": 7, "scale": 0.1}, "b": {}}
    folder = save(tmp_path, 12, pieces_of(tensors(1), 0, 1), scalars, state, group)
    assert folder == tmp_path / "step-00000012"
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.step, checkpoint.scalars, checkpoint.state) == (12, scalars, state)
    ((box, (run,)),) = checkpoint.tensors["a.weight"]["exp_avg"].boxes.items()
    assert (run.file, box, run.first, run.last) == (FILE, Box.whole((6, 4)), 0, 24)
    text = (folder / NAME).read_text()
    assert text.isascii()
    body = json.loads(text)["manifest"]
    assert to_text(body).decode() == text
    assert digest(dict(reversed(body.items()))) == json.loads(text)["sha256"]
