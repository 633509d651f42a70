"""Saving a checkpoint: every rank writes its part, all vote, and one rename makes it real.

    rank 0   make .saving-step-...  |  write  |  vote  |  manifest, fsync, rename, fsync  |  vote  |  delete the oldest
    others                          |  write  |  vote  |                                  |  vote  |

Nothing that exists is written to, and nothing is deleted before the new one has its name. Votes go through the store:
a save may run beside training, whose collectives it must not meet.
"""

import errno
import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.checkpoint import disk
from cs336_systems.checkpoint.disk import SaveError, on_rank_0, remove_folders, together
from cs336_systems.checkpoint.load import FORMAT, NAME, VERSION, read_manifest, to_text
from cs336_systems.checkpoint.tensors import Piece, Scalars, list_tensors, write_tensors
from cs336_systems.comm import Group
from cs336_systems.errors import UserError

State = dict[str, Any]  # JSON without NaN


def save(
    parent: Path, step: int, pieces: Sequence[Piece], scalars: Scalars, state: State, group: Group, keep: int = 2
) -> Path:
    """Write the checkpoint of a step to parent/step-..., and keep the newest `keep` (2 or more) up to it. Every rank
    calls it. `pieces` are what this rank is to write; those of all ranks must cover every tensor once. `state` is rank
    0's. A checkpoint of the same step is left as it is. Raises SaveError on every rank, with the reason, if any rank
    cannot write or the step's name is taken by what is no checkpoint."""
    if keep < 2:
        raise UserError(f"of {keep} checkpoint the last could be the one that is damaged: keep 2 or more")
    final = parent / disk.step_name(step)
    folder = parent / f".saving-{final.name}-{secrets.token_hex(4)}"  # only rank 0's is made

    def prepare() -> str:
        disk.make_folder(parent)
        if final.exists():
            read_manifest(final)  # what only has the name must not count as saved
            return final.name
        os.mkdir(folder)
        return folder.name

    try:
        folder = parent / on_rank_0("checkpoint", prepare, parent, group)
        if folder == final:
            return final
        rank, needed = group.rank(), sum(piece.tensor.nbytes for piece in pieces)
        write = partial(write_tensors, folder, rank, pieces, scalars)
        written = together("checkpoint written", write, folder, group, f"rank {rank}: ", needed)
        files = {name: file for each in written for name, file in each.items()}
        body = {"format": FORMAT, "version": VERSION, "step": step, "files": files, "state": state}
        on_rank_0("checkpoint", lambda: publish(folder, final, body), folder, group)
    except UserError as error:
        if group.rank() == 0 and folder != final:
            remove_folders([folder])
        raise SaveError(f"{final} was not saved: {error}; earlier checkpoints are as they were") from None
    if group.rank() == 0:
        with suppress(OSError, ValueError):  # gone already, or the next save tries again
            saved = disk.list_checkpoints(parent)
            remove_folders(saved[: saved.index(final) + 1][:-keep])
    return final


def publish(folder: Path, final: Path, body: dict[str, Any]) -> None:
    """Rank 0's part once all have written: the manifest, and the name. Raises UserError and OSError."""
    if missing := [name for name in body["files"] if not (folder / name).exists()]:
        raise UserError(f"rank 0 does not see {missing[0]}: all machines must share the folder")
    # Read headers and manifest as a reader would, before the folder gets its name.
    list_tensors(folder / name for name in body["files"])
    disk.write_file(folder / NAME, [to_text(body)])
    read_manifest(folder)
    if os.path.lexists(final):  # rename would replace an empty folder
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    disk.sync_folder(folder)
    os.rename(folder, final)
    disk.sync_folder(final.parent)


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
        copies = [piece._replace(tensor=piece.tensor.detach().to("cpu", copy=True)) for piece in pieces]
        rest = deepcopy((scalars, state))

        def work() -> None:
            try:
                save(self.parent, step, copies, *rest, self.group, self.keep)
            except BaseException as error:
                self.error = error

        # A daemon: were another rank gone, its vote would hold up this one's end.
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait for the save under way. Raises what it has raised: SaveError, or CommError for a rank that is gone."""
        if self.thread is not None:
            self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error is not None:
            raise error
