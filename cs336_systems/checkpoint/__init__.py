"""Checkpoints that are whole or not there, verified before use, and readable in any layout."""

from cs336_systems.checkpoint.disk import RefusedError, SaveError, clean, list_checkpoints, locked, step_name
from cs336_systems.checkpoint.load import export_plain, open_checkpoint, open_newest, open_plain, weights_hash
from cs336_systems.checkpoint.save import Saver, save
from cs336_systems.checkpoint.tensors import DTYPES, NAMES, RANDOM, VALUE, Box, Checkpoint, Piece, Scalars, my_share

__all__ = [
    "DTYPES", "NAMES", "RANDOM", "VALUE", "Box", "Checkpoint", "Piece", "RefusedError", "SaveError", "Saver",
    "Scalars", "clean", "export_plain", "list_checkpoints", "locked", "my_share", "open_checkpoint", "open_newest",
    "open_plain", "save", "step_name", "weights_hash",
]  # fmt: skip
