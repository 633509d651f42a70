"""The manifest of a checkpoint: its step, its files with their checksums, and the run's state.

    {"manifest": {"format": ..., "version": 2, "step": 120,
                  "files": {"rank-00000-00.safetensors": {"bytes": 5120, "sha256": "..."}, ...},
                  "state": {...}},
     "sha256": "..."}

The last line is the checksum of the rest. The files themselves say which tensors they hold (`tensors.py`); version 1
repeated that here.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from cs336_systems.checkpoint.disk import kind_of
from cs336_systems.checkpoint.tensors import MALFORMED, RefusedError, naturals

NAME = "manifest.json"
FORMAT, VERSION = "cs336_systems checkpoint", 2
LARGEST = 1 << 28  # bytes of a manifest
FILE = re.compile(r"rank-[0-9]{5}-[0-9]{2,6}\.safetensors")


def digest(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest, whatever the order of its keys. Raises ValueError for NaN and infinity."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def to_text(manifest: dict[str, Any]) -> bytes:
    """The file that a manifest becomes."""
    text = json.dumps({"manifest": manifest, "sha256": digest(manifest)}, indent=1, allow_nan=False)
    return f"{text}\n".encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked by itself and against the sizes of its files, which are not yet read.
    Raises RefusedError for what it holds, and OSError if it cannot be read, which says nothing of what it holds."""
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
    if body.get("version") not in range(1, VERSION + 1):
        raise RefusedError(f"{where} has version {body.get('version')!r}; this program reads 1 to {VERSION}")
    try:
        if digest(body) != value.get("sha256"):
            raise RefusedError("it does not have the SHA-256 that it names: it was changed or damaged")
        naturals(body["step"], *(file["bytes"] for file in body["files"].values()))
        for name, file in body["files"].items():
            if not FILE.fullmatch(name):  # no path, no link, nothing hidden
                raise RefusedError(f"{name!r:.60} is no name of a checkpoint's file")
            if not re.fullmatch(r"[0-9a-f]{64}", file["sha256"]):
                raise RefusedError(f"{name} has no SHA-256")
        if not isinstance(body["state"], dict):
            raise RefusedError("the state is no object")
    except MALFORMED as error:
        said = f": {error}" if isinstance(error, RefusedError) else f" is not as this program writes it: {error!r:.80}"
        raise RefusedError(f"{where}{said}") from None
    for name, file in body["files"].items():
        if kind_of(folder / name) != "file":
            raise RefusedError(f"{folder.name}/{name} is missing, or a link to somewhere else")
        if (size := (folder / name).stat().st_size) != file["bytes"]:
            raise RefusedError(f"{folder.name}/{name} has {size:,} bytes, not {file['bytes']:,}: it was cut or changed")
    for name in os.listdir(folder):
        if name.endswith(".safetensors") and name not in body["files"]:
            raise RefusedError(f"{folder.name}/{name} does not belong to this checkpoint")
    return body


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")
