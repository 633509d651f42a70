"""A set of constants in a file: what `fit` writes and the other commands read, JSON that a person can edit."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from cs336_systems.cost.large.efficiency import Constants
from cs336_systems.cost.large.machine_file import MAY_BE_ZERO
from cs336_systems.cost.large.step_time import CONSTANTS
from cs336_systems.errors import UserError

NAMES = tuple(each.name for each in fields(Constants))


def save_constants(path: Path, constants: Constants, about: Mapping[str, Any] | None = None) -> None:
    """Write the constants, and beside them whatever else is to be kept of where they are from.

    Raises UserError for a file that cannot be written.
    """
    text = json.dumps({"constants": asdict(constants), **(about or {})}, indent=2, allow_nan=False)
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file with --out") from None


def load_constants(path: Path) -> Constants:
    """The constants of a file; those that it does not have keep their values of `CONSTANTS`.

    Raises UserError for a file that cannot be read, a name that is none, and a value below
    zero, or zero where it is of a share.
    """
    try:
        found = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no file of constants, which is JSON: {error}") from None
    values = found.get("constants") if isinstance(found, dict) else None
    if not isinstance(values, dict) or not values:
        raise UserError(f'{path} is no file of constants: it needs {{"constants": {{"product": 0.9, ...}}}}')
    if unknown := sorted(set(values) - set(NAMES)):
        raise UserError(f"{path} has {', '.join(unknown)}, but the constants are {', '.join(NAMES)}")
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
            raise UserError(f"{path}: {name} must be a number above zero, not {value!r}")
    return replace(CONSTANTS, **{name: float(value) for name, value in values.items()})
