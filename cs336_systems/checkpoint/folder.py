"""A checkpoint's folder and manifest: saved by all ranks or by none, and opened only if all checksums are right.

The protocol is drawn in docs/checkpoints.md. Votes go through the store, since a save may run beside training, whose
collectives it must not disturb. The files describe their tensors themselves (version 1 repeated this here):

    {"manifest": {"format": ..., "version": 2, "step": 120,
                  "files": {"rank-00000-00.safetensors": {"bytes": 5120, "sha256": "..."}, ...}, "state": {...}},
     "sha256": "..."}
"""

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from cs336_systems.checkpoint import disk, tensors
from cs336_systems.checkpoint.disk import RefusedError, SaveError, kind_of, on_rank_0, refusing, require, together
from cs336_systems.checkpoint.tensors import NAMES, Checkpoint, Piece, Scalars, contents, list_tensors, naturals
from cs336_systems.comm import Group
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors

NAME = "manifest.json"
FORMAT, VERSION = "cs336_systems checkpoint", 2
KEYS = {"format", "version", "step", "files", "state"}  # of a manifest, which had tensors and scalars in version 1
FILE = re.compile(r"rank-[0-9]{5}-[0-9]{2,6}\.safetensors")
State = dict[str, Any]  # JSON without NaN


def digest(manifest: dict[str, Any]) -> str:
    """Checksum of a manifest, independent of the order of its keys. Raises ValueError for NaN and infinity."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def to_text(manifest: dict[str, Any]) -> bytes:
    """Contents of a manifest's file."""
    text = json.dumps({"manifest": manifest, "sha256": digest(manifest)}, indent=1, allow_nan=False)
    return f"{text}\n".encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest, and check it and the sizes of its files, which are not read yet. Raises
    RefusedError for invalid contents, and OSError if it cannot be read, which may be no fault of the checkpoint."""
    where, path = f"{folder.name}/{NAME}", folder / NAME
    require(kind_of(folder) == "folder", f"{folder.name} is no folder")
    require(kind_of(path) == "file", f"{where} is missing: this is no checkpoint, or one that was never finished")
    size, largest = path.stat().st_size, tensors.LARGEST_JSON
    require(size <= largest, f"{where} has {size:,} bytes; no manifest has more than {largest:,}")
    with refusing(where, f"{where} is not JSON, or cut short"):
        value = json.loads(path.read_bytes())
    body: Any = value.get("manifest") if isinstance(value, dict) else {}
    require(isinstance(body, dict) and body.get("format") == FORMAT, f"{where} is of another format, not {FORMAT!r}")
    version = body.get("version")
    require(version in range(1, VERSION + 1), f"{where} has version {version!r}; this program reads 1 to {VERSION}")
    with refusing(where, f"{where} is not as this program writes it"):
        signed = digest(body) == value.get("sha256")
        require(signed, "it does not have the SHA-256 that it names: it was changed or damaged")
        naturals([body["step"], *(file["bytes"] for file in body["files"].values())])
        strange = body.keys() - KEYS - ({"tensors", "scalars"} if version == 1 else set())
        require(not strange, f"{min(strange, default='')!r:.60} is no part of it")
        for name, file in body["files"].items():  # refuses paths and hidden files
            require(FILE.fullmatch(name), f"{name!r:.60} is no name of a checkpoint's file")
            require(re.fullmatch(r"[0-9a-f]{64}", file["sha256"]), f"{name} has no SHA-256")
        require(isinstance(body["state"], dict), "the state is no object")
    for name, file in body["files"].items():
        place = f"{folder.name}/{name}"
        require(kind_of(folder / name) == "file", f"{place} is missing, or a link to somewhere else")
        size = (folder / name).stat().st_size
        require(size == file["bytes"], f"{place} has {size:,} bytes, not {file['bytes']:,}: it was cut or changed")
    for name in os.listdir(folder):
        strange = name.endswith(".safetensors") and name not in body["files"]
        require(not strange, f"{folder.name}/{name} does not belong to this checkpoint")
    return body


def save(
    parent: Path, step: int, pieces: Sequence[Piece], scalars: Scalars, state: State, group: Group, keep: int = 2
) -> Path:
    """Write the checkpoint of a step to parent/step-..., and keep the newest `keep` (2 or more) up to it. Every rank
    must call it. This rank writes `pieces`; those of all ranks must cover every tensor once. `state` is taken from rank
    0. A checkpoint of the same step is left as it is. Raises SaveError on every rank, with the reason, if any rank
    cannot write, or if something that is no checkpoint has the step's name."""
    if keep < 2:
        raise UserError(f"of {keep} checkpoint the last could be the one that is damaged: keep 2 or more")
    final = parent / disk.step_name(step)
    folder = parent / f".saving-{final.name}-{secrets.token_hex(4)}"  # only rank 0's is made

    def prepare() -> str:
        disk.make_folder(parent)
        if final.exists():
            read_manifest(final)  # anything else of this name must not count as saved
            return final.name
        os.mkdir(folder)
        return folder.name

    try:
        folder = parent / on_rank_0("checkpoint", prepare, parent, group)
        if folder == final:
            return final
        rank, needed = group.rank(), sum(piece.tensor.nbytes for piece in pieces)
        write = partial(tensors.write_tensors, folder, rank, pieces, scalars)
        written = together("checkpoint written", write, folder, group, f"rank {rank}: ", needed)
        files = {name: file for each in written for name, file in each.items()}
        body = {"format": FORMAT, "version": VERSION, "step": step, "files": files, "state": state}
        on_rank_0("checkpoint", lambda: publish(folder, final, body), folder, group)
    except UserError as error:
        if group.rank() == 0 and folder != final:
            disk.remove_folders([folder])
        raise SaveError(f"{final} was not saved: {error}; earlier checkpoints are as they were") from None
    if group.rank() == 0:
        with suppress(OSError, ValueError):  # deleted by others, or the next save tries again
            saved = disk.list_checkpoints(parent)
            disk.remove_folders(saved[: saved.index(final) + 1][:-keep])
    return final


def publish(folder: Path, final: Path, body: dict[str, Any]) -> None:
    """Write the manifest and rename the folder, on rank 0, after all ranks' files. Raises UserError and OSError."""
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
    """Saves checkpoints, one at a time; with `background` a thread writes copies while training goes on."""

    def __init__(self, parent: Path, group: Group, keep: int = 2, background: bool = False) -> None:
        self.parent, self.group, self.keep, self.background = parent, group, keep, background
        self.saving: Future[Path] | None = None

    def start(self, step: int, pieces: Sequence[Piece], scalars: Scalars, state: State) -> None:
        """Finish the save before, then save, or begin to. Every rank must call it. Raises SaveError of either."""
        self.finish()
        if not self.background:
            save(self.parent, step, pieces, scalars, state, self.group, self.keep)
            return
        copies = [piece._replace(tensor=piece.tensor.detach().to("cpu", copy=True)) for piece in pieces]
        rest, saving = deepcopy((scalars, state)), Future[Path]()

        def work() -> None:
            try:
                saving.set_result(save(self.parent, step, copies, *rest, self.group, self.keep))
            except BaseException as error:
                saving.set_exception(error)

        # A daemon thread: if another rank is gone, the wait for its vote must not keep this process alive.
        Thread(target=work, daemon=True).start()
        self.saving = saving

    def finish(self) -> None:
        """Wait for the save under way, and raise its error: SaveError, or CommError for a rank that is gone."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()


def open_checkpoint(folder: Path, group: Group | None = None) -> Checkpoint:
    """Check all of a checkpoint, each file's SHA-256 on one rank of the group, and open it. Every rank must call this.
    Raises on every rank RefusedError for invalid contents, UserError if a rank cannot read it, perhaps only now."""
    opened: list[Checkpoint] = []
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)

    def verify() -> None:
        try:
            body = read_manifest(folder)
            step, files, named = body["step"], body["files"], disk.STEP.fullmatch(folder.name)
            same = not named or int(named[1]) == step
            require(same, f"{folder.name}/{NAME} is of another checkpoint, that of step {step}")
            for name in list(files)[rank::ranks]:
                with (folder / name).open("rb") as file:
                    found, wanted = hashlib.file_digest(file, "sha256").hexdigest(), files[name]["sha256"]
                damaged = f"{folder.name}/{name} is damaged, or of another checkpoint"
                require(found == wanted, f"{damaged}: its SHA-256 begins with {found[:12]}, not {wanted[:12]}")
            with refusing(folder.name):
                listed = list_tensors(folder / name for name in files)
            opened.append(Checkpoint(folder, step, files, *listed, body["state"]))
        except FileNotFoundError as error:
            raise RefusedError(str(error)) from None
        except OSError as error:
            why = f"cannot read {folder}: {disk.reason(error, folder)}"
            raise UserError(f"{why}; nothing was changed: try again, or move it away") from None

    together("checkpoint read", verify, folder, group)
    return opened[0]


def open_newest(
    parent: Path, group: Group, check: Callable[[Checkpoint], object], say: Callable[[str], object]
) -> Checkpoint | None:
    """Open the newest whole checkpoint of a folder that `check` does not refuse; None if there are none. Every rank
    must call this. Refused ones are renamed, and `say` gets the reason, on every rank. Raises UserError if all are
    refused, if one cannot be read, if one that is refused cannot be renamed, and if `check` raises it."""
    refused: dict[str, str] = {}

    def names() -> list[str]:
        return [folder.name for folder in reversed(disk.list_checkpoints(parent))]

    def fits(checkpoint: Checkpoint) -> None:
        with refusing(checkpoint.folder.name):
            check(checkpoint)

    def rename(folder: Path) -> str:
        return folder.rename(f"{folder}.refused-{secrets.token_hex(2)}").name

    for name in on_rank_0("checkpoints", names, parent, group, f"cannot read {parent}: "):
        try:
            checkpoint = open_checkpoint(parent / name, group)
            together("checkpoint fits", partial(fits, checkpoint), parent, group)
        except RefusedError as error:
            refused[name] = str(error)
            continue
        for other, problem in refused.items():  # free their names: the run will save those steps again
            failed = f"cannot rename {parent / other}, refused as {problem}: "
            aside = on_rank_0("set aside", partial(rename, parent / other), parent, group, failed)
            say(f"refused {problem}; going back to {name} ({other} is now called {aside})")
        return checkpoint
    if refused:
        raise UserError(f"no checkpoint in {parent} can be used: {'; '.join(refused.values())}")
    return None


def weights_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 of all parameters: equal if and only if every bit is, whatever layout wrote them."""
    found = hashlib.sha256()
    for each in checkpoint.weights():
        found.update(f"{each.name} {NAMES[each.tensor.dtype]} {list(each.tensor.shape)}\n".encode())
        found.update(each.tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def export_plain(checkpoint: Checkpoint, path: Path) -> int:
    """Write all parameters to a new file, with the whole model in memory; returns the number of parameters. Raises
    UserError if the file exists or cannot be written."""
    temporary = path.parent / f".{path.name}-{secrets.token_hex(4)}"
    try:
        with os_errors(f"write {path}"):
            if path.exists():
                raise UserError(f"{path} exists already; name another file")
            disk.write_file(temporary, contents(weights := list(checkpoint.weights()), {}))
            os.rename(temporary, path)
            disk.sync_folder(path.parent)
    finally:
        with suppress(OSError):  # gone, if all went well
            temporary.unlink()
    return len(weights)


def open_plain(path: Path) -> Checkpoint:
    """Open a plain safetensors file, which has whole parameters alone and no checksum, as a checkpoint from which a run
    in any layout may begin. Raises UserError for any other file."""
    with os_errors(f"read {path}"):
        return Checkpoint(path.parent, 0, {}, *list_tensors([path], plain=True), {})
