"""Ways to damage a checkpoint, each with the expected message."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_systems.checkpoint.folder import NAME
from tests.support.checkpoint_cases import FILE, flip, rewrite

OLD, NEW = "step-00000001", "step-00000002"
HUGE = 1 << 40  # elements: 4 TiB


def changed(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """Damage of a manifest, all checksums of which are right again."""
    return lambda folder: rewrite(folder, change)


def in_head(change: Callable[[dict, dict], Any]) -> Callable[[Path], None]:
    """Damage of a file's head, of the tensors there and of what they are said to be pieces of, all checksums right."""

    def damage(folder: Path) -> None:
        data = (folder / FILE).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:end])
        metadata = head["__metadata__"]
        described = json.loads(metadata["pieces"])
        change(head, described)
        if "pieces" in metadata:
            metadata["pieces"] = json.dumps(described)
        text = json.dumps(head).encode()
        (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
        rewrite(folder, lambda body: None)

    return damage


def described(place: int, value: Any, name: str = "a.weight") -> Callable[[Path], None]:
    """Another value in what a tensor is said to be: name, kind, shape, start, size, first."""
    return in_head(lambda head, pieces: pieces[name].__setitem__(place, value))


def rename_file(name: str) -> Callable[[Path], None]:
    return changed(lambda body: body["files"].update({name: body["files"].pop(FILE)}))


def cut(name: str, count: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) + count if count < 0 else count])

    return damage


def linked(name: str) -> Callable[[Path], None]:
    """Move something away and leave a link to it."""

    def damage(folder: Path) -> None:
        path = folder / name if name else folder
        away = path.rename(folder.parent / f"away {path.name}")
        path.symlink_to(away)

    return damage


def raw(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / NAME).write_text(text)


def with_head(head: bytes) -> Callable[[Path], None]:
    """A file with a head of one's own, of which the manifest knows."""

    def damage(folder: Path) -> None:
        (folder / FILE).write_bytes(len(head).to_bytes(8, "little") + head)
        rewrite(folder, lambda body: None)

    return damage


FOREIGN = f"{NEW}/{FILE} is damaged, or of another checkpoint: its SHA-256 begins with"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of the data": (lambda f: flip(f / FILE, -1), FOREIGN),
    "a bit of the manifest": (
        lambda f: flip(f / NAME, (f / NAME).read_bytes().index(b'"step": 2') + 8),
        f"{NEW}/{NAME}: it does not have the SHA-256 that it names: it was changed or damaged",
    ),
    "a file cut by a byte": (cut(FILE, -1), f"{NEW}/{FILE} has .* bytes, not .*: it was cut or changed"),
    "a byte more": (lambda f: (f / FILE).write_bytes(bytes(1189)), f"{NEW}/{FILE} has 1,189 bytes, not 1,188"),
    "a file missing": (lambda f: (f / FILE).unlink(), f"{NEW}/{FILE} is missing, or a link to somewhere else"),
    "a file of another checkpoint": (lambda f: shutil.copy(f.parent / OLD / FILE, f / FILE), FOREIGN),
    "the files of another checkpoint": (
        lambda f: [shutil.copy(path, f) for path in (f.parent / OLD).iterdir()],
        f"{NEW}/{NAME} is of another checkpoint, that of step 1",
    ),
    "a file too many": (
        lambda f: shutil.copy(f / FILE, f / "rank-00001-00.safetensors"),
        f"{NEW}/rank-00001-00.safetensors does not belong to this checkpoint",
    ),
    "a file that is a link": (linked(FILE), f"{NEW}/{FILE} is missing, or a link to somewhere else"),
    "a file that is a folder": (
        lambda f: ((f / FILE).unlink(), (f / FILE).mkdir()),
        f"{NEW}/{FILE} is missing, or a link to somewhere else",
    ),
    "no manifest": (lambda f: (f / NAME).unlink(), f"{NEW}/{NAME} is missing: this is no checkpoint, or one that"),
    "a manifest that is a link": (linked(NAME), f"{NEW}/{NAME} is missing"),
    "a manifest cut": (cut(NAME, 300), f"{NEW}/{NAME} is not JSON, or cut short: "),
    "a manifest with NaN": (raw('{"manifest": NaN}'), f"{NEW}/{NAME} is of another format"),
    "a number beyond all": (
        raw('{"manifest": {"format": "cs336_systems checkpoint", "version": 1, "step": 1e999}}'),
        f"{NEW}/{NAME} is not as this program writes it: .*Out of range float",
    ),
    "a manifest that is deep": (raw("[" * 100_000), f"{NEW}/{NAME} is not JSON, or cut short: maximum recursion"),
    "another format": (changed(lambda b: b.update(format="torch")), f"{NEW}/{NAME} is of another format, not 'cs336"),
    "another version": (
        changed(lambda b: b.update(version=3)),
        f"{NEW}/{NAME} has version 3; this program reads 1 to 2",
    ),
    "another key": (changed(lambda b: b.update(extra=1)), f"{NEW}/{NAME}: 'extra' is no part of it"),
    "a manifest too large": (raw("[[" + "[]," * (6 << 20) + "[]]]"), f"{NEW}/{NAME} has 18,874,374 bytes; no manifest"),
    "no step": (changed(lambda b: b.pop("step")), f"{NEW}/{NAME} is not as this program writes it: KeyError"),
    "a step that is negative": (changed(lambda b: b.update(step=-1)), f"{NEW}/{NAME}: -1 is no count"),
    "a state that is a list": (changed(lambda b: b.update(state=[])), f"{NEW}/{NAME}: the state is no object"),
    "a checksum that is none": (
        changed(lambda b: b["files"][FILE].update(sha256="0")),
        f"{NEW}/{NAME}: {FILE} has no SHA-256",
    ),
    "another dtype as wide": (
        in_head(lambda head, _: head["a.weight"].update(dtype="I32")),
        f"{NEW}: a.weight is I32 there",
    ),
    "a shape that is huge": (
        in_head(lambda _, pieces: pieces["a.weight"].__setitem__(slice(2, 5), [[HUGE, 4], [0, 0], [HUGE, 4]])),
        rf"a.weight \(value\) lacks elements, or has some twice: of a box of {4 * HUGE:,} the next run begins at",
    ),
    "a huge shape with nothing in it": (
        described(2, [1 << 61, 1 << 61, 0], "empty"),
        r"empty \(value\) has shape .*, which no tensor has",
    ),
    "a shape of other axes": (described(2, [24]), r"a.weight \(value\) has a piece outside its shape \[24\]: \[6, 4\]"),
    "a piece of too few words": (
        in_head(lambda _, pieces: pieces.update({"a.weight": []})),
        f"{NEW}: {FILE}: it does not say what its tensors are: ValueError",
    ),
    "a tensor that is not there": (in_head(lambda head, _: head.pop("b")), f"{NEW}: {FILE}: it has no b"),
    "a tensor that is not described": (
        in_head(lambda _, pieces: pieces.pop("b")),
        f"{NEW}: {FILE}: it does not say what its tensors are: KeyError\\('b'\\)",
    ),
    "a name that is not Unicode": (
        in_head(lambda _, pieces: pieces.update({"\ud800\x1b": 0})),
        rf"{NEW}: {FILE}: it has no \\ud800\\x1b",
    ),
    "a file that does not describe itself": (
        in_head(lambda head, _: head["__metadata__"].pop("pieces")),
        f"{NEW}: {FILE}: it does not say what its tensors are: KeyError\\('pieces'\\)",
    ),
    "scalars that are words": (
        in_head(lambda head, _: head["__metadata__"].update(scalars='{"a.weight": {"step": "3"}}')),
        f"{NEW}: {FILE}: the scalars of a.weight are not numbers",
    ),
    **{
        f"a file called {name!r}": (
            rename_file(name),
            re.escape(f"{NEW}/{NAME}: {name!r} is no name of a checkpoint's"),
        )
        for name in ("../x.safetensors", "/etc/passwd", "a/b.safetensors", f"{FILE}\0", "", ".", "manifest.json")
    },
    "a head that is no JSON": (
        with_head(b"{]"),
        f"{FILE} is no safetensors file: Expecting",
    ),
}
