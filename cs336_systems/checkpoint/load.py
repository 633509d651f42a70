"""A checkpoint that has been verified, and finding the newest that can be."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from cs336_systems.checkpoint.disk import PATIENCE, hash_file
from cs336_systems.checkpoint.folder import STEP, list_checkpoints, set_aside
from cs336_systems.checkpoint.manifest import NAME, Entry, Manifest, RefusedError, Stored, read_manifest
from cs336_systems.checkpoint.pieces import Box
from cs336_systems.checkpoint.tensors import Header, Scalars, check_header, read_box
from cs336_systems.comm import Group, agree
from cs336_systems.errors import UserError
from cs336_systems.text import printable

Answer = TypeVar("Answer", str, list[str])


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors in files that are what their manifest says; `read` gives any box of any of them."""

    folder: Path
    manifest: Manifest
    headers: dict[str, Header]

    @property
    def tensors(self) -> dict[str, dict[str, Entry]]:
        """What there is, by name and kind."""
        return self.manifest.tensors

    @property
    def scalars(self) -> Scalars:
        """Numbers of an optimizer's state that belong to a parameter, such as its count of steps."""
        return self.manifest.scalars

    def read(self, name: str, kind: str, box: Box) -> Tensor:
        """A box of a tensor, on the CPU. Raises KeyError for what is not there."""
        return read_box(self.folder, self.headers, self.tensors[name][kind], box)


def open_checkpoint(folder: Path, group: Group | None = None) -> Checkpoint:
    """Check everything, each file's SHA-256 on one rank of the group, and open it. Every rank must call this.

    Raises, the same on every rank, RefusedError for what it holds, and UserError if a rank cannot read it: that may
    pass, and is no reason to give it up.
    """
    checkpoint, refused, unread = None, "", ""
    try:
        checkpoint = _open(folder, group.rank() if group else 0, group.size() if group else 1)
    except (RefusedError, FileNotFoundError) as error:
        refused = printable(str(error))  # names from a file may not even be Unicode
    except OSError as error:
        unread = _why(f"cannot read {folder}", error) + "; nothing was changed: try again, or move it away"
    vote = json.dumps([unread, refused], allow_nan=False)
    votes = [json.loads(each) for each in (_hear("checkpoint read", vote, group) if group else [vote])]
    if problem := next((each for each, _ in votes if each), ""):
        raise UserError(problem)
    if problem := next((each for _, each in votes if each), ""):
        raise RefusedError(problem)
    assert checkpoint is not None
    return checkpoint


def _hear(topic: str, value: str, group: Group) -> list[str]:
    return agree(topic, value, group, patience=PATIENCE)


def _why(problem: str, error: OSError) -> str:
    where = f" ({Path(error.filename).name})" if error.filename else ""
    return printable(f"{problem}: {error.strerror or error}{where}")


def _open(folder: Path, rank: int, ranks: int) -> Checkpoint:
    manifest = read_manifest(folder)
    if (named := STEP.fullmatch(folder.name)) and int(named[1]) != manifest.step:
        raise RefusedError(f"{folder.name}/{NAME} is of another checkpoint, that of step {manifest.step}")
    for number, (name, file) in enumerate(manifest.files.items()):
        if number % ranks == rank and (found := hash_file(folder / name)) != file.sha256:
            raise RefusedError(
                f"{folder.name}/{name} is damaged, or of another checkpoint: its SHA-256 begins with {found[:12]}, "
                f"not {file.sha256[:12]}"
            )
    pieces: dict[str, dict[str, tuple[str, str, Entry, Stored]]] = {name: {} for name in manifest.files}
    for name, kinds in manifest.tensors.items():
        for kind, entry in kinds.items():
            for piece in entry.pieces:
                pieces[piece.file][piece.key] = name, kind, entry, piece
    try:
        headers = {name: check_header(folder / name, pieces[name]) for name in pieces}
    except RefusedError as error:
        raise RefusedError(f"{folder.name}/{error}") from None
    return Checkpoint(folder, manifest, headers)


def open_newest(
    parent: Path, group: Group, accept: Callable[[Checkpoint], str], say: Callable[[str], object]
) -> Checkpoint | None:
    """The newest checkpoint of a folder that is whole and that `accept` gives no reason against; None if there is none.

    Every rank must call this. What is refused is renamed, and `say` is told the reason, on every rank. Raises UserError
    if there are checkpoints but all are refused, if one cannot be read, and if one that is refused keeps its name.
    """
    names = _on_rank_0("checkpoints", lambda: [path.name for path in list_checkpoints(parent)], f"read {parent}", group)
    reasons = []
    for name in reversed(names):
        try:
            checkpoint = open_checkpoint(parent / name, group)
            problems = _hear("checkpoint fits", printable(accept(checkpoint)), group)
            if problem := next((each for each in problems if each), ""):
                raise RefusedError(f"{name}: {problem}")
        except RefusedError as error:
            reasons.append(str(error))
            continue
        _explain(parent, names[names.index(name) + 1 :], reasons, name, group, say)
        return checkpoint
    if reasons:
        raise UserError(f"no checkpoint in {parent} can be used: {'; '.join(reasons)}")
    return None


def _explain(
    parent: Path, refused: Iterable[str], reasons: list[str], taken: str, group: Group, say: Callable[[str], object]
) -> None:
    """Say what was refused and why, and free its name: the run will come to that step again."""
    for name, reason in zip(reversed(list(refused)), reasons, strict=True):
        aside = _on_rank_0(
            "set aside", partial(set_aside, parent / name), f"rename {parent / name}, refused as {reason}", group
        )
        say(f"refused {reason}; going back to {taken} ({name} is now called {aside})")


def _on_rank_0(topic: str, action: Callable[[], Answer], what: str, group: Group) -> Answer:
    """What rank 0's action returns, on every rank. Raises UserError on every rank if the system does not let it."""
    answer, problem = None, ""
    if group.rank() == 0:
        try:
            answer = action()
        except OSError as error:
            problem = _why(f"cannot {what}", error)
    answer, problem = json.loads(_hear(topic, json.dumps([answer, problem], allow_nan=False), group)[0])
    if problem:
        raise UserError(problem)
    assert answer is not None
    return answer
