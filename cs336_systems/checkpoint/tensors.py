"""A rank's files of tensors (safetensors): writing them, listing what they hold, reading a box of a tensor back.

A file's metadata says what each of its tensors is a piece of, so that the files alone say what a checkpoint holds. They
may come from an untrusted place: nothing in a head is used unchecked, and no size in it leads to more memory than the
file has bytes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.checkpoint.disk import write_file
from cs336_systems.checkpoint.pieces import VALUE, Box, Piece
from cs336_systems.errors import UserError

COPIED_BYTES = 1 << 24  # of a tensor on a GPU, at a time
FILE_BYTES = 1 << 28  # after which another file begins, so that more ranks can share the files out to check them
LARGEST_HEADER = 100_000_000  # the format's own limit
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # JSON that has other parts than expected

State = dict[str, Any]  # JSON
Scalars = dict[str, dict[str, float | int]]


class RefusedError(UserError):
    """A checkpoint that is not whole, not what it says it is, or not of this project; the message names the file."""


class Stored(NamedTuple):
    """A run of a box in a file: elements [first, last), whose bytes begin at `at`."""

    first: int
    last: int
    file: str
    at: int


class Entry(NamedTuple):
    """One kind of a tensor, whole: the runs of its boxes cover every element once (`check_cover`)."""

    shape: tuple[int, ...]
    dtype: str
    boxes: dict[Box, list[Stored]]


Tensors = dict[str, dict[str, Entry]]  # by name and kind


def write_tensors(folder: Path, rank: int, pieces: Sequence[Piece], scalars: Scalars) -> dict[str, dict[str, Any]]:
    """Write what a rank has into files, on the disk when this returns: each one's size and checksum. Raises OSError."""
    parts: list[list[Piece]] = [[]]  # a rank with nothing of its own has a file, too
    written, size = {}, 0
    for piece in pieces:
        size += piece.tensor.nbytes
        if parts[-1] and size > FILE_BYTES:
            parts.append([])
            size = piece.tensor.nbytes
        parts[-1].append(piece)
    for number, part in enumerate(parts):
        described = {p.key: (p.name, p.kind, p.box.shape, p.box.start, p.box.size, p.first) for p in part}
        if len(described) < len(part):
            raise ValueError(f"two pieces of one tensor on a rank, or two names alike, among {list(described)}")
        metadata = {"pieces": described, "scalars": {} if number else scalars}
        name = f"rank-{rank:05d}-{number:02d}.safetensors"
        part.sort(key=lambda each: -each.tensor.itemsize)  # so every tensor begins at a multiple of its elements' size
        written[name] = write_file(folder / name, contents(part, metadata))
    return written


def contents(pieces: Sequence[Piece], metadata: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """A safetensors file of pieces, in chunks. Own code, as the library wants all of it in memory, twice."""
    strings, end = {key: json.dumps(value, allow_nan=False) for key, value in metadata.items()}, 0
    head: dict[str, Any] = {"__metadata__": strings}
    for each in pieces:
        if (dtype := each.tensor.dtype) not in NAMES:
            raise ValueError(f"{each.key} has dtype {dtype}; known are {', '.join(map(str, NAMES))}")
        begin, end, count = end, end + each.tensor.nbytes, each.tensor.numel()
        # A tensor that is whole keeps its shape, so that other readers of the format find what they expect.
        shape = each.box.size if count == each.box.numel else (count,)
        head[each.key] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        flat = piece.tensor.detach().reshape(-1)
        for part in flat.split(COPIED_BYTES // flat.itemsize) if flat.numel() else ():
            yield part.cpu().contiguous().view(torch.uint8).numpy().data


def naturals(*values: Any) -> tuple[int, ...]:
    """Numbers out of JSON, such as a shape. Raises RefusedError unless they are integers from 0 up that fit 62 bits."""
    for value in values:
        if type(value) is not int or not 0 <= value < 2**62:  # a bool is an int, too
            raise RefusedError(f"{value!r:.40} is no count")
    return values


def read_head(path: Path) -> tuple[dict[str, tuple[str, list[int], int, int]], dict[str, str]]:
    """The head of a safetensors file, its sizes checked: the dtype, shape, number of elements and place of each tensor,
    and the strings that go with them. Raises RefusedError for what is none."""

    def checked(tensor: dict[str, Any]) -> tuple[str, list[int], int, int]:
        dtype, shape, (begin, end) = tensor["dtype"], tensor["shape"], naturals(*tensor["data_offsets"])
        count = math.prod(naturals(*shape))
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r:.20}; known are {', '.join(DTYPES)}")
        if not begin <= end <= data or end - begin != count * DTYPES[dtype].itemsize:
            raise ValueError(f"a tensor of {count} elements of {dtype} at {begin} to {end} of {data} bytes")
        return dtype, shape, count, size - data + begin

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        data = size - 8 - length
        if size < 8 or data < 0 or length > LARGEST_HEADER:
            raise RefusedError(f"{path.name} is no safetensors file: its head would have {length:,} bytes of {size:,}")
        try:
            value = json.loads(file.read(length))
            metadata = {str(key): str(text) for key, text in value.pop("__metadata__", {}).items()}
            return {key: checked(each) for key, each in value.items()}, metadata
        except MALFORMED as error:
            raise RefusedError(f"{path.name} is no safetensors file: {str(error)[:80]}") from None


def list_tensors(paths: Iterable[Path], plain: bool = False) -> tuple[Tensors, Scalars]:
    """The tensors and scalars in files, by what these say. The tensors of `plain` files are whole parameters. Raises
    RefusedError for files that do not agree, and for tensors that lack elements or have some twice."""
    tensors: Tensors = {}
    scalars: Scalars = {}
    for path in paths:
        found, metadata = read_head(path)
        try:
            described = {} if plain else json.loads(metadata["pieces"])
            for key, (dtype, shape, count, at) in found.items():
                whole: list[Any] = [key, VALUE, shape, [0] * len(shape), shape, 0]
                name, kind, shape, start, size, first = whole if plain else described.pop(key)
                box = Box(naturals(*shape), naturals(*start), naturals(*size))
                entry = tensors.setdefault(str(name), {}).setdefault(str(kind), Entry(box.shape, dtype, {}))
                if (entry.shape, entry.dtype) != (box.shape, dtype):
                    there = f"{name} ({kind}) is {entry.dtype} {list(entry.shape)} on one rank"
                    raise RefusedError(f"{there}, {dtype} {list(box.shape)} here")
                entry.boxes.setdefault(box, []).append(Stored(first, naturals(first)[0] + count, path.name, at))
            for name, values in json.loads(metadata.get("scalars", "{}")).items():
                if not all(isinstance(value, int | float) for value in values.values()):
                    raise RefusedError(f"the scalars of {name} are not numbers")
                if scalars.setdefault(name, values) != values:
                    raise RefusedError(f"the ranks disagree on the scalars of {name}: {scalars[name]} and {values}")
            if described:
                raise RefusedError(f"it has no {min(described)}")
        except MALFORMED as error:
            said = error if isinstance(error, RefusedError) else f"it does not say what its tensors are: {error!r:.80}"
            raise RefusedError(f"{path.name}: {said}") from None
    for name, kinds in tensors.items():
        for kind, entry in kinds.items():
            check_cover(f"{name} ({kind})", entry)
    return tensors, scalars


def check_cover(what: str, entry: Entry) -> None:
    """Raises RefusedError unless the runs of a tensor's boxes cover every element exactly once; sorts them."""
    shape, covered = entry.shape, 0
    if len(shape) > 16 or math.prod(each or 1 for each in shape) >= 2**62:  # a 0 would hide how large the others are
        raise RefusedError(f"{what} has shape {list(shape)!s:.60}, which no tensor has")
    for box, runs in entry.boxes.items():
        if not len(box.start) == len(box.size) == len(shape) or any(
            start + size > whole for start, size, whole in zip(box.start, box.size, shape, strict=True)
        ):
            place = f"{list(box.size)} at {list(box.start)}"
            raise RefusedError(f"{what} has a piece outside its shape {list(shape)}: {place}")
        runs.sort()
        end = 0
        for run in (*runs, Stored(box.numel, box.numel, "", 0)):
            if run.first != end:
                where = f"of a box of {box.numel:,} the next run begins at {run.first:,}, not at {end:,}"
                raise RefusedError(f"{what} lacks elements, or has some twice: {where}")
            end = run.last
        covered += box.numel
    listed = [box for box in entry.boxes if box.numel]
    if covered != math.prod(shape) or any(a.overlap(b) for i, a in enumerate(listed) for b in listed[:i]):
        raise RefusedError(f"{what} lacks elements, or has some twice: {covered:,} of its {math.prod(shape):,}")


@torch.no_grad()
def read_box(folder: Path, entry: Entry, target: Box) -> Tensor:
    """A box of a tensor, put together from the pieces that touch it. The checkpoint must have been checked. Raises
    ValueError for a box of a tensor of another shape."""
    if target.shape != entry.shape:
        raise ValueError(f"a box of a tensor of shape {target.shape}; this one has {entry.shape}")
    dtype = DTYPES[entry.dtype]
    result = torch.empty(target.size, dtype=dtype)
    for box, runs in entry.boxes.items():
        if not target.numel or (common := target.overlap(box)) is None:
            continue
        # One box at a time: the memory is that of what is read and of one rank's part.
        part = result if box == target else torch.empty(box.size, dtype=dtype)
        data = part.view(-1).view(torch.uint8).numpy().data
        for first, last, name, at in runs:
            run = data[first * dtype.itemsize : last * dtype.itemsize]
            with (folder / name).open("rb") as file:
                file.seek(at)
                if file.readinto(run) < len(run):
                    raise RefusedError(f"{name} ends in the middle of a tensor")
        if part is not result:
            result[common[0]] = part[common[1]]
    return result
