"""Pieces of named tensors, and a rank's files of them (safetensors): write files, and list their contents.

A piece is a rank's part of a tensor, with its position in the whole tensor. Tensor and expert parallelism give a rank a
box of a matrix; ZeRO gives it a run of consecutive elements of the box:

    whole (6 4), tensor-parallel rank 1 of 2: start (3 0), size (3 4)       . . . .
    ZeRO rank 0 of 2 in it: first 0, count 6                                . . . .
                                                                            . . . .
                                                                            x x x x
                                                                            x x . .
                                                                            . . . .

A file's metadata describes each of its tensors as a piece, so the files alone define the tensors of a checkpoint. Files
may come from an untrusted place: everything in a head is checked before use, and no size in it leads to more memory
than the file has bytes, nor its JSON to more than 700 MB.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.checkpoint.disk import refusing, require, write_file
from cs336_systems.host.text import regular

RANDOM = "random/"  # prefix of names of states of random number generators, which are no parameters
VALUE = "value"  # the kind of a parameter itself; other kinds are optimizer state, such as "exp_avg"
COPIED_BYTES = 1 << 24  # bytes of a GPU's tensor that are copied at a time
FILE_BYTES = 1 << 28  # size at which another file begins, so that several ranks can check a rank's files
LARGEST_JSON = 1 << 24  # bytes of a head or a manifest, of 50,000 pieces or files; Python takes up to 40 times as much
MOST_AXES, MOST_BOXES = 16, 4096  # limits of a tensor: every box is compared with every other
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Scalars = dict[str, dict[str, float | int]]  # optimizer state by parameter and kind, such as its count of steps


class Box(NamedTuple):
    """Elements [start, start + size) along each axis of a tensor of `shape`."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def overlap(self, other: "Box") -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Common elements, as slices of each of the two boxes; None without any."""
        axes = [(a, b, max(a, b), min(a + m, b + n)) for a, m, b, n in zip(*self[1:], *other[1:], strict=True)]
        if any(low >= high for _, _, low, high in axes):
            return None
        mine = tuple(slice(low - a, high - a) for a, _, low, high in axes)
        return mine, tuple(slice(low - b, high - b) for _, b, low, high in axes)


class Piece(NamedTuple):
    """Elements [first, first + tensor.numel()) of a flattened box of this `kind` of the tensor `name`."""

    name: str
    kind: str
    box: Box
    first: int
    tensor: Tensor

    @property
    def key(self) -> str:
        """Name of the piece in a file; a parameter keeps its own name, as in other safetensors files."""
        return self.name if self.kind == VALUE else f"{self.name}:{self.kind}"


class Stored(NamedTuple):
    """A run of a box in a file: elements [first, last), whose bytes begin at `at`."""

    first: int
    last: int
    file: str
    at: int


class Entry(NamedTuple):
    """One whole kind of a tensor: the runs of its boxes cover every element once (`check_cover`)."""

    shape: tuple[int, ...]
    dtype: str
    boxes: dict[Box, list[Stored]]


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors in files that have been checked."""

    folder: Path
    step: int
    files: dict[str, dict[str, Any]]  # size and checksum of each
    tensors: dict[str, dict[str, Entry]]  # by name and kind
    scalars: Scalars
    state: dict[str, Any]

    @torch.no_grad()
    def read(self, name: str, kind: str, target: Box) -> Tensor:
        """Read a box of a tensor to the CPU, from the pieces that overlap it. Raises KeyError for an unknown name or
        kind, and ValueError for a box of another shape."""
        shape, dtype_name, boxes = self.tensors[name][kind]
        if target.shape != shape:
            raise ValueError(f"a box of a tensor of shape {target.shape}; this one has {shape}")
        dtype = DTYPES[dtype_name]
        result = torch.empty(target.size, dtype=dtype)
        for box, runs in boxes.items():
            if (common := target.overlap(box)) is None:
                continue
            # One box at a time, so that memory is needed for the result and one rank's part only.
            part = result if box == target else torch.empty(box.size, dtype=dtype)
            data = part.view(-1).view(torch.uint8).numpy().data
            for first, last, file_name, at in runs:
                run = data[first * dtype.itemsize : last * dtype.itemsize]
                with (self.folder / file_name).open("rb") as file:
                    file.seek(at)
                    require(file.readinto(run) == len(run), f"{file_name} ends in the middle of a tensor")
            if part is not result:
                result[common[0]] = part[common[1]]
        return result

    @property
    def parameters(self) -> dict[str, dict[str, Entry]]:
        """Parameters with their optimizer state, in the order of names."""
        return {name: self.tensors[name] for name in sorted(self.tensors) if not name.startswith(RANDOM)}

    def weights(self) -> Iterator[Piece]:
        """Read the parameters' whole values, in the order of names."""
        for name, kinds in self.parameters.items():
            if VALUE in kinds:
                box = Box.whole(kinds[VALUE].shape)
                yield Piece(name, VALUE, box, 0, self.read(name, VALUE, box))


def my_share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Run [first, last) of `count` elements that one of several ranks with the same tensor writes."""
    return count * rank // ranks, count * (rank + 1) // ranks


def write_tensors(folder: Path, rank: int, pieces: Sequence[Piece], scalars: Scalars) -> dict[str, dict[str, Any]]:
    """Write a rank's pieces to files and fsync them; returns each file's size and checksum. Raises OSError."""
    parts: list[list[Piece]] = [[]]  # a rank without pieces has a file, too
    written, size = {}, 0
    for piece in pieces:
        size += piece.tensor.nbytes
        if parts[-1] and size > FILE_BYTES:
            parts.append([])
            size = piece.tensor.nbytes
        parts[-1].append(piece)
    for number, part in enumerate(parts):
        described = {each.key: (each.name, each.kind, *each.box, each.first) for each in part}
        if len(described) < len(part) or "__metadata__" in described:
            raise ValueError(f"two pieces of one tensor on a rank, names alike or reserved, among {list(described)}")
        part.sort(key=lambda each: -each.tensor.itemsize)  # so every tensor begins at a multiple of its elements' size
        chunks = contents(part, {"pieces": described, "scalars": {} if number else scalars})
        name = f"rank-{rank:05d}-{number:02d}.safetensors"
        written[name] = write_file(folder / name, chunks)
    return written


def contents(pieces: Sequence[Piece], metadata: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """Make a safetensors file of pieces, in chunks. The safetensors library would need all of it in memory, twice."""
    strings, end = {key: json.dumps(value, allow_nan=False) for key, value in metadata.items()}, 0
    head: dict[str, Any] = {"__metadata__": strings}
    for each in pieces:
        if (dtype := each.tensor.dtype) not in NAMES:
            raise ValueError(f"{each.key} has dtype {dtype}; known are {', '.join(map(str, NAMES))}")
        begin, end, count = end, end + each.tensor.nbytes, each.tensor.numel()
        # A whole box keeps its shape, for other readers of the format.
        shape = each.box.size if count == each.box.numel else (count,)
        head[each.key] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        flat = piece.tensor.detach().reshape(-1)
        for part in flat.split(COPIED_BYTES // flat.itemsize) if flat.numel() else ():
            yield part.cpu().contiguous().view(torch.uint8).numpy().data


def naturals(values: Any) -> tuple[int, ...]:
    """Check a list from JSON, such as a shape. Raises RefusedError unless all are integers from 0 up of 62 bits."""
    require(isinstance(values, list | tuple), f"{values!r:.40} is no list of counts")
    for value in values:  # a bool is an int, too
        require(type(value) is int and 0 <= value < 2**62, f"{value!r:.40} is no count")
    return tuple(values)


def read_head(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...], int, int]], dict[str, str]]:
    """Read the head of a safetensors file, and check its sizes: dtype, shape, number of elements and position of each
    tensor, and the strings of its metadata. Raises RefusedError for any other file."""
    size, found, runs = regular(path).stat().st_size, {}, []
    problem = f"{path.name} is no safetensors file"
    with refusing(problem, problem):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            data = size - 8 - length
            said = f"its head would have {length:,} bytes of {size:,}, of which {LARGEST_JSON:,} are read at most"
            require(size >= 8 and data >= 0 and length <= LARGEST_JSON, said)
            head = json.loads(file.read(length))
        strings = head.pop("__metadata__", {})
        require(all(isinstance(text, str) for text in strings.values()), "its metadata are not strings")
        for key, tensor in head.items():
            dtype, shape, (begin, end) = tensor["dtype"], naturals(tensor["shape"]), naturals(tensor["data_offsets"])
            require(len(shape) <= MOST_AXES, f"a tensor of {len(shape):,} axes")
            require(dtype in DTYPES, f"dtype {dtype!r:.20}; known are {', '.join(DTYPES)}")
            count = math.prod(shape)
            right = begin <= end <= data and end - begin == count * DTYPES[dtype].itemsize
            require(right, f"a tensor of {count} elements of {dtype} at {begin} to {end} of {data} bytes")
            found[key] = dtype, shape, count, size - data + begin
            runs.append((begin, end))
        for (_, end), (begin, _) in pairwise(sorted(runs)):
            require(end <= begin, f"a tensor ends at {end}, and the next begins at {begin}")
    return found, strings


def list_tensors(paths: Iterable[Path], plain: bool = False) -> tuple[dict[str, dict[str, Entry]], Scalars]:
    """List the tensors and scalars that files describe. All tensors of `plain` files are whole parameters. Raises
    RefusedError for files that do not agree, and for tensors that lack elements or have some twice."""
    tensors: dict[str, dict[str, Entry]] = {}
    scalars: Scalars = {}
    for path in paths:
        found, metadata = read_head(path)
        with refusing(path.name, f"{path.name}: it does not say what its tensors are"):
            described = {} if plain else json.loads(metadata["pieces"])
            for key, (dtype, shape, count, at) in found.items():
                whole: tuple[Any, ...] = (key, VALUE, *Box.whole(shape), 0)
                name, kind, *box_of, first = whole if plain else described.pop(key)
                require(type(name) is type(kind) is str, f"{name!r:.40} ({kind!r:.40}) is no name")
                box = Box(*map(naturals, box_of))
                entry = tensors.setdefault(name, {}).setdefault(kind, Entry(box.shape, dtype, {}))
                there = f"{name} ({kind}) is {entry.dtype} {list(entry.shape)} on one rank"
                require((entry.shape, entry.dtype) == (box.shape, dtype), f"{there}, {dtype} {list(box.shape)} here")
                entry.boxes.setdefault(box, []).append(Stored(first, naturals([first])[0] + count, path.name, at))
            for name, values in json.loads(metadata.get("scalars", "{}")).items():
                numbers = all(type(value) in (int, float) and -math.inf < value < math.inf for value in values.values())
                require(numbers, f"the scalars of {name} are not numbers")
                known = scalars.setdefault(name, values)
                require(known == values, f"the ranks disagree on the scalars of {name}: {known} and {values}")
            require(not described, f"it has no {min(described, default='')}")
    for name, kinds in tensors.items():
        for kind, entry in kinds.items():
            check_cover(f"{name} ({kind})", entry)
    return tensors, scalars


def check_cover(what: str, entry: Entry) -> None:
    """Raises RefusedError unless the runs of a tensor's boxes cover every element exactly once; sorts them."""
    shape, twice = entry.shape, f"{what} lacks elements, or has some twice"
    # An axis of size 0 would hide how large the others are.
    possible = len(shape) <= MOST_AXES and math.prod(each or 1 for each in shape) < 2**62
    require(possible, f"{what} has shape {list(shape)!s:.60}, which no tensor has")
    for box, runs in entry.boxes.items():
        inside = len(box.start) == len(box.size) == len(shape)
        inside = inside and all(start + size <= whole for whole, start, size in zip(*box, strict=True))
        require(inside, f"{what} has a piece outside its shape {list(shape)}: {list(box.size)} at {list(box.start)}")
        runs.sort()
        end = 0
        for first, last, *_ in [*runs, Stored(box.numel, 0, "", 0)]:
            where = f"of a box of {box.numel:,} the next run begins at {first:,}, not at {end:,}"
            require(first == end, f"{twice}: {where}")
            end = last
    listed = [box for box in entry.boxes if box.numel]
    require(len(listed) <= MOST_BOXES, f"{what} is in {len(listed):,} boxes; {MOST_BOXES:,} are read at most")
    covered = sum(box.numel for box in listed)
    starts = torch.tensor([box.start for box in listed])
    ends = starts + torch.tensor([box.size for box in listed])
    apart = not any(((starts[:i] < ends[i]) & (starts[i] < ends[:i])).all(1).any() for i in range(1, len(listed)))
    require(apart and covered == math.prod(shape), f"{twice}: {covered:,} of its {math.prod(shape):,}")
