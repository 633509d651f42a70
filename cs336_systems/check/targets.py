"""Names that a command line may give, kinds of candidates, and exercises, read without loading torch."""

import tomllib
from pathlib import Path
from typing import Any

from cs336_systems.check.foreign import FOREIGN, require_installed
from cs336_systems.errors import UserError

KINDS = ("ddp", "fsdp", "sharded-optimizer", "step", "tensor-parallel")
TYPED_RANKS = 64  # of a group of which one rank runs, to check types
OURS = ("ddp-naive", "ddp-flat", "ddp-overlapped", "ddp-bucketed", "zero0", "zero1", "zero2", "zero3")
FILE = Path(__file__).with_name("exercises.toml")
EXERCISES: dict[str, dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))


def require_target(target: str) -> None:
    """Raises UserError for a name that is neither a Python file nor a wrapper of this library or of another system."""
    path, _, name = target.partition(":")
    if target in FOREIGN:
        require_installed(target)
    elif path == "ours":
        if name not in OURS:
            raise UserError(f"{target} does not exist; there are {', '.join(OURS)}")
    elif not path.endswith(".py"):
        raise UserError(f"{target!r} is neither a Python file nor one of {', '.join(FOREIGN)}, ours:zero2, ...")
    elif not Path(path).is_file():
        raise UserError(f"cannot read {path}: no such file")
