"""Saving a checkpoint: every rank writes its part, all vote, and one rename makes it real.

    rank 0   make .saving-step-...  |  write  |  vote  |  manifest, fsync, rename, fsync  |  vote  |  delete the oldest
    others                          |  write  |  vote  |                                  |  vote  |

Nothing that exists is written to, and nothing is deleted before the new one has its name: whoever is killed at whatever
point leaves the old checkpoint, or the new one, whole. Votes go through the store, so that a save may run beside
training, whose collectives it must not meet.
"""

import errno
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cs336_systems.checkpoint.disk import PATIENCE, give_name, make_folder, new_folder, remove_folder, write_file
from cs336_systems.checkpoint.folder import delete_oldest, step_name
from cs336_systems.checkpoint.manifest import FORMAT, NAME, VERSION, State, read_manifest, to_text
from cs336_systems.checkpoint.pieces import Piece
from cs336_systems.checkpoint.tensors import Scalars, list_pieces, write_tensors
from cs336_systems.comm import Group, agree
from cs336_systems.console import format_bytes
from cs336_systems.errors import UserError


class SaveError(UserError):
    """A checkpoint could not be written. What was there before is still there."""


def save(
    parent: Path, step: int, pieces: Sequence[Piece], scalars: Scalars, state: State, group: Group, keep: int = 2
) -> Path:
    """Write the checkpoint of a step to parent/step-...; of it and those before, the last `keep` (2 or more) stay.

    Every rank calls it. `pieces` are what this rank is to write; those of all ranks must cover every tensor once.
    `state` is rank 0's: JSON without NaN. A checkpoint of the same step is left as it is. A rank's disk may be slow:
    the others wait for ten minutes, or for the group's timeout if that is longer. Raises SaveError on every rank, with
    the reason, if any rank cannot write or the step's name is taken by what is no checkpoint.
    """
    if keep < 2:
        raise UserError(f"of {keep} checkpoint the last could be the one that is damaged: keep 2 or more")
    final = parent / step_name(step)
    folder = parent / _on_rank_0(lambda: _prepare(parent, final), final, group)
    if folder == final:
        return final
    try:
        files = write_tensors(folder, group.rank(), pieces, scalars)
        vote: dict[str, Any] = {"files": {name: asdict(file) for name, file in files.items()}}
    except Exception as error:  # whatever it is, the others wait for a vote
        vote = {"error": _reason(error, folder, sum(piece.tensor.nbytes for piece in pieces))}
    said = agree("checkpoint written", json.dumps(vote, allow_nan=False), group, counted=False, patience=PATIENCE)
    votes = [json.loads(each) for each in said]
    _on_rank_0(lambda: _commit(folder, final, step, votes, state), final, group)
    if group.rank() == 0:
        with suppress(OSError):  # the next save tries again
            delete_oldest(parent, keep, final)
    return final


def _on_rank_0(action: Callable[[], str], final: Path, group: Group) -> str:
    """What rank 0's action returns, on every rank. Raises SaveError on every rank if it fails."""
    said: dict[str, str] = {}
    if group.rank() == 0:
        try:
            said = {"done": action()}
        except Exception as error:
            said = {"error": str(error) if isinstance(error, SaveError) else _reason(error, final.parent)}
    mine = json.dumps(said, allow_nan=False)
    said = json.loads(agree("checkpoint", mine, group, counted=False, patience=PATIENCE)[0])
    if "error" in said:
        raise SaveError(f"{final} was not saved: {said['error']}; earlier checkpoints are as they were")
    return said["done"]


def _prepare(parent: Path, final: Path) -> str:
    make_folder(parent)
    if not final.exists():
        return new_folder(parent, f".saving-{final.name}").name
    read_manifest(final)  # what only has the name must not count as saved
    return final.name


def _commit(folder: Path, final: Path, step: int, votes: Sequence[dict[str, Any]], state: State) -> str:
    """Rank 0's part once all have voted: the manifest, and the name."""
    try:
        if failed := [f"rank {rank}: {vote['error']}" for rank, vote in enumerate(votes) if "error" in vote]:
            raise SaveError("; ".join(failed))
        files = {name: file for vote in votes for name, file in vote["files"].items()}
        if missing := [name for name in files if not (folder / name).exists()]:
            raise SaveError(f"rank 0 does not see {missing[0]}: all machines must share the folder")
        tensors, scalars = list_pieces(folder / name for name in files)
        head = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
        write_file(folder / NAME, [to_text(head | {"tensors": tensors, "scalars": scalars, "state": state})])
        read_manifest(folder)  # what a reader would refuse gets no name, and replaces nothing
        give_name(folder, final)
    except BaseException:
        with suppress(OSError):
            remove_folder(folder)
        raise
    return final.name


def _reason(error: Exception, folder: Path, needed: int = 0) -> str:
    """Why something could not be written, in words."""
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {str(error)[:200]}"
    text = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            text += f", {format_bytes(shutil.disk_usage(folder).free)} free"
        return f"{text}, {format_bytes(needed)} to write" if needed else text
    return f"{text} ({Path(error.filename).name})" if error.filename else text


class Saver:
    """Saves to a folder; with `background` a thread writes copies while training goes on, one save at a time."""

    def __init__(self, parent: Path, group: Group, keep: int = 2, background: bool = False) -> None:
        self.parent, self.group, self.keep, self.background = parent, group, keep, background
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, step: int, pieces: Sequence[Piece], scalars: Scalars, state: State) -> None:
        """Save, or begin to, once the save before is done. Every rank must call it. Raises SaveError, also of that."""
        self.finish()
        if not self.background:
            save(self.parent, step, pieces, scalars, state, self.group, self.keep)
            return
        copies = [replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True)) for piece in pieces]
        # A daemon: were another rank gone, its vote would hold up this one's end.
        self.thread = threading.Thread(target=self._work, args=(step, copies, *deepcopy((scalars, state))), daemon=True)
        self.thread.start()

    def _work(self, step: int, pieces: Sequence[Piece], scalars: Scalars, state: State) -> None:
        try:
            save(self.parent, step, pieces, scalars, state, self.group, self.keep)
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        """Wait for the save under way. Raises what it has raised: SaveError, or CommError for a rank that is gone."""
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error
