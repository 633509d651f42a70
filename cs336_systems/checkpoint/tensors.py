"""A rank's file of tensors (safetensors), and reading a piece of one back.

Metadata of the file says what each tensor is a piece of, so that rank 0 can make the manifest from the files alone.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.checkpoint.disk import WRITE_BYTES, write_file
from cs336_systems.checkpoint.manifest import DTYPES, Entry, File, RefusedError, Scalars, Stored, is_possible
from cs336_systems.checkpoint.pieces import Box, Piece

FILE_BYTES = 1 << 28  # after which another file begins, so that more ranks can share the files out to check them
LARGEST_HEADER = 100_000_000  # the format's own limit
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Header(NamedTuple):
    """The head of a safetensors file: where its data begin, its tensors, and the strings that go with them."""

    data: int
    tensors: dict[str, dict[str, Any]]
    metadata: dict[str, str]


def write_tensors(folder: Path, rank: int, pieces: Sequence[Piece], scalars: Scalars) -> dict[str, File]:
    """Write what a rank has into files, on the disk when this returns. Raises OSError."""
    written = {}
    for number, part in enumerate(_in_files(pieces)):
        described = {
            each.key: [each.name, each.kind, each.box.shape, each.box.start, each.box.size, each.first] for each in part
        }
        if len(described) < len(part):
            raise ValueError(f"two pieces of one tensor on a rank, or two names alike, among {list(described)}")
        said = {"pieces": described, "scalars": scalars if number == 0 else {}}
        metadata = {key: json.dumps(value, allow_nan=False) for key, value in said.items()}
        part.sort(key=lambda each: -each.tensor.itemsize)  # so every tensor begins at a multiple of its elements' size
        name = f"rank-{rank:05d}-{number:02d}.safetensors"
        written[name] = File(*write_file(folder / name, contents(part, metadata)))
    return written


def contents(pieces: Sequence[Piece], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file of pieces, in chunks. Own code, as the library wants all of it in memory, twice."""
    head: dict[str, Any] = {"__metadata__": metadata}
    end = 0
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
        for part in flat.split(WRITE_BYTES // flat.itemsize) if flat.numel() else ():
            yield part.cpu().contiguous().view(torch.uint8).numpy().data


def _in_files(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    part: list[Piece] = []
    size = 0
    for piece in pieces:
        if part and size + piece.tensor.nbytes > FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(piece)
        size += piece.tensor.nbytes
    yield part  # a rank with nothing of its own has a file, too


def read_header(path: Path) -> Header:
    """The head of a safetensors file, its sizes checked. Raises RefusedError for what is none."""

    def checked(tensor: dict[str, Any], size: int) -> dict[str, Any]:
        shape, (begin, end), dtype = tensor["shape"], tensor["data_offsets"], tensor["dtype"]
        if any(type(each) is not int or each < 0 for each in (*shape, begin, end)):  # a bool is an int, too
            raise ValueError(f"shape {shape} at {begin} to {end}")
        if not is_possible(shape):
            raise ValueError(f"shape {shape}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r:.20}")
        count = math.prod(shape)
        if not begin <= end <= size or end - begin != count * DTYPES[dtype].itemsize:
            raise ValueError(f"a tensor of {count} elements of {dtype} at {begin} to {end} of {size} bytes")
        return tensor

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise RefusedError(f"{path.name} is no safetensors file: its head would have {length:,} bytes of {size:,}")
        try:
            value = json.loads(file.read(length))
            metadata = {str(key): str(text) for key, text in value.pop("__metadata__", {}).items()}
            tensors = {str(key): checked(each, size - 8 - length) for key, each in value.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RefusedError(f"{path.name} is no safetensors file: {str(error)[:80]}") from None
    return Header(8 + length, tensors, metadata)


def list_pieces(paths: Iterable[Path]) -> tuple[dict[str, Any], Scalars]:
    """The parts of a manifest that files of tensors say: "tensors" and "scalars". Raises RefusedError."""
    tensors: dict[str, Any] = {}
    scalars: Scalars = {}
    for path in paths:
        header = read_header(path)
        for key, (name, kind, shape, start, size, first) in json.loads(header.metadata["pieces"]).items():
            tensor = header.tensors[key]
            begin, end = tensor["data_offsets"]
            new = {"shape": shape, "dtype": tensor["dtype"], "pieces": []}
            entry = tensors.setdefault(name, {}).setdefault(kind, new)
            if (entry["shape"], entry["dtype"]) != (shape, tensor["dtype"]):
                one = f"{name} ({kind}) is {entry['dtype']} {entry['shape']} on one rank"
                raise RefusedError(f"{one}, another in {path.name}")
            count = (end - begin) // DTYPES[tensor["dtype"]].itemsize
            where = {"file": path.name, "key": key, "offsets": [begin, end]}
            entry["pieces"].append(where | {"start": start, "size": size, "first": first, "count": count})
        for name, values in json.loads(header.metadata["scalars"]).items():
            if scalars.setdefault(name, values) != values:
                raise RefusedError(f"the ranks disagree on the scalars of {name}: {scalars[name]} and {values}")
    return tensors, scalars


def check_header(path: Path, pieces: Mapping[str, tuple[str, str, Entry, Stored]]) -> Header:
    """The head of a file, if what it says of its tensors is what the manifest says, by key: name, kind, tensor, piece.
    Raises RefusedError that names what differs."""
    header = read_header(path)
    try:
        described = dict(json.loads(header.metadata["pieces"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RefusedError(f"{path.name} does not say what its tensors are pieces of") from None
    for key, (name, kind, entry, piece) in pieces.items():
        if (tensor := header.tensors.get(key)) is None:
            raise RefusedError(f"{path.name} has no {key}")
        if tensor["dtype"] != entry.dtype:
            raise RefusedError(f"{path.name}: {key} has dtype {tensor['dtype']}, the manifest says {entry.dtype}")
        if tuple(tensor["data_offsets"]) != piece.offsets:
            raise RefusedError(f"{path.name}: {key} lies elsewhere than the manifest says")
        box = piece.box
        if described.get(key) != [name, kind, *map(list, (box.shape, box.start, box.size)), piece.first]:
            raise RefusedError(f"{path.name}: {key} is {described.get(key)!r:.100} there, another in the manifest")
    if unlisted := sorted(header.tensors.keys() - pieces):
        raise RefusedError(f"{path.name} has {unlisted[0]}, which the manifest does not list")
    return header


@torch.no_grad()
def read_box(folder: Path, headers: Mapping[str, Header], entry: Entry, target: Box) -> Tensor:
    """A box of a tensor, put together from the pieces that touch it. The checkpoint must have been checked.

    Raises ValueError for a box of a tensor of another shape.
    """
    if target.shape != entry.shape:
        raise ValueError(f"a box of a tensor of shape {target.shape}; this one has {entry.shape}")
    dtype = DTYPES[entry.dtype]
    result = torch.empty(target.size, dtype=dtype)
    if not target.numel:
        return result
    boxes: dict[Box, list[Stored]] = {}
    for piece in entry.pieces:
        boxes.setdefault(piece.box, []).append(piece)
    for box, pieces in boxes.items():
        if (common := target.overlap(box)) is None:
            continue
        # One box at a time: the memory is that of what is read and of one rank's part.
        part = result if box == target else torch.empty(box.size, dtype=dtype)
        data = part.view(-1).view(torch.uint8).numpy().data
        for piece in pieces:
            run = data[piece.first * dtype.itemsize : (piece.first + piece.count) * dtype.itemsize]
            with (folder / piece.file).open("rb") as file:
                file.seek(headers[piece.file].data + piece.offsets[0])
                if file.readinto(run) < len(run):
                    raise RefusedError(f"{piece.file} ends in the middle of {piece.key}")
        if part is not result:
            result[common[0]] = part[common[1]]
    return result
