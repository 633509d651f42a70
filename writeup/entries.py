"""Entries of a TOML file: each has the fields that its kind needs, and no others."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from cs336_systems.errors import UserError

Fields = dict[str, Any]
Made = TypeVar("Made")


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


def made(entry: str, kind: type[Made], fields: Fields) -> Made:
    """An entry as the dataclass of its kind. Raises UserError, with the entry's place, for a field that is missing or
    not known."""
    try:
        return kind(**fields)
    except TypeError as error:
        raise UserError(f"{entry}: {str(error).partition(' ')[2]}") from None
