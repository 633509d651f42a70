"""Checkpoints that survive: whole or not there, verified before they are believed, readable by any layout."""

from cs336_systems.checkpoint.folder import clean, list_checkpoints, locked, step_name
from cs336_systems.checkpoint.load import Checkpoint, open_checkpoint, open_newest
from cs336_systems.checkpoint.manifest import RefusedError
from cs336_systems.checkpoint.pieces import RANDOM, VALUE, Box, Piece, my_share
from cs336_systems.checkpoint.plain import export_plain, open_plain, weights_hash
from cs336_systems.checkpoint.save import SaveError, Saver, save
from cs336_systems.checkpoint.tensors import Scalars

__all__ = [
    "RANDOM",
    "VALUE",
    "Box",
    "Checkpoint",
    "Piece",
    "RefusedError",
    "SaveError",
    "Saver",
    "Scalars",
    "clean",
    "export_plain",
    "list_checkpoints",
    "locked",
    "my_share",
    "open_checkpoint",
    "open_newest",
    "open_plain",
    "save",
    "step_name",
    "weights_hash",
]
