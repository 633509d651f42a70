"""The manifest of a checkpoint: its tensors, where they lie, and checksums that every reader compares first.

    {"manifest": {"format": ..., "version": 1, "step": 120,
                  "files":   {"rank-00000-00.safetensors": {"bytes": 5120, "sha256": "..."}, ...},
                  "tensors": {"head.weight": {"value": {"shape": [256, 64], "dtype": "F32", "pieces": [
                                 {"file": "rank-00000-00.safetensors", "key": "head.weight", "offsets": [0, 65536],
                                  "start": [0, 0], "size": [256, 64], "first": 0, "count": 16384}, ...]},
                              "exp_avg": ...}, ...},
                  "scalars": {"head.weight": {"step": 120}, ...},
                  "state":   {...}},
     "sha256": "..."}

The last line is the checksum of the rest. A manifest may come from an untrusted place: nothing in it is used unchecked,
and no size in it leads to more memory than its files have bytes.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cs336_systems.checkpoint.disk import kind_of
from cs336_systems.checkpoint.pieces import Box
from cs336_systems.errors import UserError

NAME = "manifest.json"
FORMAT, VERSION = "cs336_systems checkpoint", 1
LARGEST = 1 << 28  # bytes of a manifest
FILE = re.compile(r"rank-[0-9]{5}-[0-9]{2,6}\.safetensors")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

State = dict[str, Any]
Scalars = dict[str, dict[str, float | int]]


class RefusedError(UserError):
    """A checkpoint that is not whole, not what it says it is, or not of this project; the message names the file."""


@dataclass(frozen=True)
class Stored:
    """A piece of a tensor in a file: elements [first, first + count) of a box, at bytes `offsets` of its data."""

    file: str
    key: str
    offsets: tuple[int, int]
    box: Box
    first: int
    count: int


@dataclass(frozen=True)
class Entry:
    """One kind of a tensor, whole: its pieces cover every element once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Stored, ...]


@dataclass(frozen=True)
class File:
    """Size and checksum of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A manifest that has been checked."""

    step: int
    files: dict[str, File]
    tensors: dict[str, dict[str, Entry]]
    scalars: Scalars
    state: State


def digest(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest, whatever the order of its keys. Raises ValueError for NaN and infinity."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def to_text(manifest: Mapping[str, Any]) -> bytes:
    """The file that a manifest becomes: JSON with a line for every file and tensor, for whoever looks into it."""
    parts = []
    for key, value in manifest.items():
        text = json.dumps(value, allow_nan=False)
        if key in ("files", "tensors", "scalars"):
            lines = [json.dumps({name: each}, allow_nan=False)[1:-1] for name, each in value.items()]
            text = "{\n" + ",\n".join(lines) + "\n}"
        parts.append(f'"{key}": {text}')
    body = ",\n".join(parts)
    return f'{{"manifest": {{\n{body}}},\n"sha256": "{digest(manifest)}"}}\n'.encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked by itself and against the sizes of its files.

    Raises RefusedError for what it holds, and OSError if it cannot be read, which says nothing of what it holds.
    """
    where = f"{folder.name}/{NAME}"
    if kind_of(folder) != "folder":
        raise RefusedError(f"{folder.name} is no folder")
    if kind_of(folder / NAME) != "file":
        raise RefusedError(f"{where} is missing: this is no checkpoint, or one that was never finished")
    if (size := (folder / NAME).stat().st_size) > LARGEST:
        raise RefusedError(f"{where} has {size:,} bytes; no manifest has more than {LARGEST:,}")
    data = (folder / NAME).read_bytes()
    try:
        value = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{where} is not JSON, or cut short: {str(error)[:80]}") from None
    body = value.get("manifest") if isinstance(value, dict) else None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise RefusedError(f"{where} is of another format, not {FORMAT!r}")
    if body.get("version") != VERSION:
        raise RefusedError(f"{where} has version {body.get('version')!r}; this program reads version {VERSION}")
    try:
        if digest(body) != value.get("sha256"):
            raise RefusedError("it does not have the SHA-256 that it names: it was changed or damaged")
        manifest = _parse(body)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, RefusedError):
            raise RefusedError(f"{where}: {error}") from None
        raise RefusedError(f"{where} is not as this program writes it: {error!r:.80}") from None
    for name, file in manifest.files.items():
        if kind_of(folder / name) != "file":
            raise RefusedError(f"{folder.name}/{name} is missing, or a link to somewhere else")
        if (size := (folder / name).stat().st_size) != file.bytes:
            raise RefusedError(f"{folder.name}/{name} has {size:,} bytes, not {file.bytes:,}: it was cut or changed")
    for name in os.listdir(folder):
        if name.endswith(".safetensors") and name not in manifest.files:
            raise RefusedError(f"{folder.name}/{name} does not belong to this checkpoint")
    return manifest


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise RefusedError(f"{value!r:.40} is no count")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > 16:
        raise RefusedError(f"{values!r:.40} is no shape")
    return tuple(_natural(each) for each in values)


def _parse(body: Mapping[str, Any]) -> Manifest:
    files = {}
    for name, file in body["files"].items():
        if not FILE.fullmatch(name):  # no path, no link, nothing hidden
            raise RefusedError(f"{name!r:.60} is no name of a checkpoint's file")
        if not re.fullmatch(r"[0-9a-f]{64}", file["sha256"]):
            raise RefusedError(f"{name} has no SHA-256")
        files[name] = File(_natural(file["bytes"]), file["sha256"])
    used: set[tuple[str, str]] = set()
    tensors = {
        name: {kind: _entry(f"{name} ({kind})", entry, files, used) for kind, entry in kinds.items()}
        for name, kinds in body["tensors"].items()
    }
    scalars = {name: dict(each) for name, each in body["scalars"].items()}
    for name, each in scalars.items():
        if not all(isinstance(value, int | float) for value in each.values()):
            raise RefusedError(f"the scalars of {name} are not numbers")
    if not isinstance(body["state"], dict):
        raise RefusedError("the state is no object")
    return Manifest(_natural(body["step"]), files, tensors, scalars, body["state"])


def is_possible(shape: Sequence[int]) -> bool:
    """True if a tensor can have the shape; a zero in it would hide how large the others are."""
    return math.prod(each or 1 for each in shape) < 2**62


def _entry(what: str, entry: Mapping[str, Any], files: Mapping[str, File], used: set[tuple[str, str]]) -> Entry:
    shape, dtype = _naturals(entry["shape"]), entry["dtype"]
    if dtype not in DTYPES:
        raise RefusedError(f"{what} has dtype {dtype!r:.20}; known are {', '.join(DTYPES)}")
    if not is_possible(shape):
        raise RefusedError(f"{what} has shape {shape}, which no tensor has")
    pieces = []
    for each in entry["pieces"]:
        box = Box(shape, _naturals(each["start"]), _naturals(each["size"]))
        begin, end = _naturals(each["offsets"])
        piece = Stored(each["file"], each["key"], (begin, end), box, _natural(each["first"]), _natural(each["count"]))
        if not len(box.start) == len(box.size) == len(shape):
            raise RefusedError(f"{what} has a piece with other axes")
        if piece.file not in files or not begin <= end <= files[piece.file].bytes:
            raise RefusedError(f"{what} has a piece outside its file {piece.file!r:.60}")
        if end - begin != piece.count * DTYPES[dtype].itemsize:
            raise RefusedError(f"{what} has a piece of {piece.count:,} elements of {dtype} in {end - begin:,} bytes")
        if not isinstance(piece.key, str) or (piece.file, piece.key) in used:
            raise RefusedError(f"{what} has a piece {piece.key!r:.60} of {piece.file} that is another's, or no name")
        used.add((piece.file, piece.key))
        pieces.append(piece)
    check_cover(what, shape, pieces)
    return Entry(shape, dtype, tuple(pieces))


def check_cover(what: str, shape: tuple[int, ...], pieces: Iterable[Stored]) -> None:
    """Raises RefusedError unless the pieces cover every element of a tensor exactly once."""
    boxes: dict[Box, list[tuple[int, int]]] = {}
    for piece in pieces:
        boxes.setdefault(piece.box, []).append((piece.first, piece.first + piece.count))
    for box, runs in boxes.items():
        if any(start + size > whole for start, size, whole in zip(box.start, box.size, shape, strict=True)):
            raise RefusedError(f"{what} has a piece outside its shape {shape}")
        end = 0
        for first, last in sorted(runs):
            if first != end:
                twice = f"{what} lacks elements, or has some twice"
                raise RefusedError(f"{twice}: a run begins at {first:,}, not at {end:,}")
            end = last
        if end != box.numel:
            raise RefusedError(f"{what} lacks elements: a box of {box.numel:,} has {end:,}")
    listed = [box for box in boxes if box.numel]
    covered = sum(box.numel for box in listed)
    if any(a.overlap(b) for i, a in enumerate(listed) for b in listed[:i]):
        raise RefusedError(f"{what} has elements twice")
    if covered != math.prod(shape):
        raise RefusedError(f"{what} has {covered:,} of its {math.prod(shape):,} elements")
