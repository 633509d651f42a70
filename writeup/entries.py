"""Entries of a TOML file: each has the fields that its kind needs, of their types, and no others."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cs336_systems.errors import UserError

Fields = dict[str, Any]
TYPES = {str: "text", int: "a whole number", list: "a list", dict: "settings in braces, {ranks = 2}"}


def read_entries(path: Path, *kinds: str, parse_float: Any = float) -> dict[str, list[tuple[str, Fields]]]:
    """The entries `[[kind]]` of a file by kind, each with its place in words, as `course.toml, problem 3 (ddp)`.

    Raises UserError for a file that cannot be read or has anything else.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"), parse_float=parse_float)
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} cannot be read: {error}") from None
    if unknown := sorted(content.keys() - {*kinds}):
        only = " and ".join(f"[[{kind}]]" for kind in kinds)
        raise UserError(f"{path.name}: {', '.join(unknown)}: there are only {only}")
    found: dict[str, list[tuple[str, Fields]]] = {}
    for kind in kinds:
        listed = content.get(kind, [])
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise UserError(f"{path.name}: every {kind} begins with a line [[{kind}]]")
        names = [fields.get("id") or fields.get("name") or "no name" for fields in listed]
        places = [f"{path.name}, {kind} {number} ({name})" for number, name in enumerate(names, 1)]
        found[kind] = list(zip(places, listed, strict=True))
    return found


def check_fields(entry: str, fields: Fields, needed: Mapping[str, type], more: Mapping[str, type]) -> None:
    """Raise UserError with the entry's place for a field that is missing, not known, or of another type."""
    if missing := [name for name in needed if name not in fields]:
        raise UserError(f"{entry}: {', '.join(missing)} missing")
    kinds = {**needed, **more}
    for name, value in fields.items():
        if name not in kinds:
            raise UserError(f"{entry}: {name} not known; there are {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            raise UserError(f"{entry}: {name} must be {TYPES[kinds[name]]}, not {value!r}")


def check_texts(entry: str, fields: Fields, *names: str) -> None:
    """Raise UserError with the entry's place if one of these lists has anything but text."""
    for name in names:
        if wrong := [each for each in fields[name] if not isinstance(each, str) or not each]:
            raise UserError(f"{entry}: {name} has {wrong[0]!r}, which is no text")
