"""Ways to damage a checkpoint, each with what is then said of it."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_systems.checkpoint import VALUE
from cs336_systems.checkpoint.manifest import NAME
from tests.support.checkpoint_cases import FILE, flip, rewrite

OLD, NEW = "step-00000001", "step-00000002"
HUGE = 1 << 40  # elements: 4 TiB


def entry(body: dict, name: str = "a.weight", kind: str = VALUE) -> dict:
    return body["tensors"][name][kind]


def piece(body: dict, name: str = "a.weight") -> dict:
    return entry(body, name)["pieces"][0]


def changed(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """Damage of a manifest, all checksums of which are right again."""
    return lambda folder: rewrite(folder, change)


def in_file(old: bytes, new: bytes, also: Callable[[dict], Any] = lambda body: None) -> Callable[[Path], None]:
    """Damage of a file's head, and of the manifest to go with it."""

    def damage(folder: Path) -> None:
        data = (folder / FILE).read_bytes()
        assert len(old) == len(new)
        assert old in data
        (folder / FILE).write_bytes(data.replace(old, new, 1))
        rewrite(folder, also)

    return damage


def retype(body: dict) -> None:
    entry(body)["dtype"] = "I32"


def rename_file(name: str) -> Callable[[Path], None]:
    def change(body: dict) -> None:
        body["files"][name] = body["files"].pop(FILE)
        for kinds in body["tensors"].values():
            for each in kinds.values():
                for part in each["pieces"]:
                    part["file"] = name

    return changed(change)


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


def with_head(head: bytes, length: int | None = None) -> Callable[[Path], None]:
    """A file with a head of one's own, of which the manifest knows."""

    def damage(folder: Path) -> None:
        (folder / FILE).write_bytes((len(head) if length is None else length).to_bytes(8, "little") + head)
        rewrite(folder, lambda body: body["tensors"].clear())

    return damage


def halves(first: tuple[int, int], second: tuple[int, int]) -> Callable[[Path], None]:
    """The tensor a.weight in two runs (first, count) of its 24 elements, from two tensors of the file."""

    def change(body: dict) -> None:
        parts = entry(body)["pieces"]
        parts.append(dict(parts[0], key="a.weight:exp_avg"))
        body["tensors"]["a.weight"].pop("exp_avg")
        for part, (begin, count) in zip(parts, (first, second), strict=True):
            part.update(first=begin, count=count, offsets=[part["offsets"][0], part["offsets"][0] + 4 * count])

    return changed(change)


def boxes(first: dict, second: dict) -> Callable[[Path], None]:
    """The same in two boxes."""

    def change(body: dict) -> None:
        halves_of = entry(body)["pieces"]
        halves_of.append(dict(halves_of[0], key="a.weight:exp_avg"))
        body["tensors"]["a.weight"].pop("exp_avg")
        for part, box in zip(halves_of, (first, second), strict=True):
            count = box["size"][0] * box["size"][1]
            part.update(box, first=0, count=count, offsets=[part["offsets"][0], part["offsets"][0] + 4 * count])

    return changed(change)


FOREIGN = f"{NEW}/{FILE} is damaged, or of another checkpoint: its SHA-256 begins with"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of the data": (lambda f: flip(f / FILE, -1), FOREIGN),
    "a bit of the file's head": (lambda f: flip(f / FILE, 20), FOREIGN),
    "a bit of the head's length": (lambda f: flip(f / FILE, 7), FOREIGN),
    "a bit of the manifest": (
        lambda f: flip(f / NAME, (f / NAME).read_bytes().index(b'"step": 2') + 8),
        f"{NEW}/{NAME}: it does not have the SHA-256 that it names: it was changed or damaged",
    ),
    "a file cut by a byte": (cut(FILE, -1), f"{NEW}/{FILE} has .* bytes, not .*: it was cut or changed"),
    "a file of no bytes": (cut(FILE, 0), f"{NEW}/{FILE} has 0 bytes, not .*: it was cut or changed"),
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
    "a manifest of other bytes": (lambda f: (f / NAME).write_bytes(b"\x80\x04\xff"), f"{NEW}/{NAME} is not JSON"),
    "a manifest with NaN": (raw('{"manifest": NaN}'), f"{NEW}/{NAME} is not JSON, or cut short: NaN is no number"),
    "a number beyond all": (
        raw('{"manifest": {"format": "cs336_systems checkpoint", "version": 1, "step": 1e999}}'),
        f"{NEW}/{NAME} is not as this program writes it: .*Out of range float",
    ),
    "a manifest that is deep": (raw("[" * 100_000), f"{NEW}/{NAME} is not JSON, or cut short: maximum recursion"),
    "a manifest that is a list": (raw("[]"), f"{NEW}/{NAME} is of another format"),
    "another format": (changed(lambda b: b.update(format="torch")), f"{NEW}/{NAME} is of another format, not 'cs336"),
    "another version": (
        changed(lambda b: b.update(version=2)),
        f"{NEW}/{NAME} has version 2; this program reads version 1",
    ),
    "no step": (changed(lambda b: b.pop("step")), f"{NEW}/{NAME} is not as this program writes it: KeyError"),
    "a step that is negative": (changed(lambda b: b.update(step=-1)), f"{NEW}/{NAME}: -1 is no count"),
    "a step that is a word": (changed(lambda b: b.update(step="2")), f"{NEW}/{NAME}: '2' is no count"),
    "a step that is true": (changed(lambda b: b.update(step=True)), f"{NEW}/{NAME}: True is no count"),
    "a state that is a list": (changed(lambda b: b.update(state=[])), f"{NEW}/{NAME}: the state is no object"),
    "scalars that are words": (
        changed(lambda b: b.update(scalars={"a.weight": {"step": "3"}})),
        f"{NEW}/{NAME}: the scalars of a.weight are not numbers",
    ),
    "a checksum that is none": (
        changed(lambda b: b["files"][FILE].update(sha256="0")),
        f"{NEW}/{NAME}: {FILE} has no SHA-256",
    ),
    "a tensor half as wide": (
        changed(lambda b: entry(b).update(dtype="F16")),
        rf"{NEW}/{NAME}: a.weight \(value\) has a piece of 24 elements of F16 in 96 bytes",
    ),
    "another dtype as wide": (
        changed(retype),
        f"{FILE}: a.weight has dtype F32, the manifest says I32",
    ),
    "another dtype everywhere": (
        in_file(b'"a.weight":{"dtype":"F32"', b'"a.weight":{"dtype":"I32"', retype),
        f"{NEW}: a.weight is I32 there",
    ),
    "a dtype that is unknown": (
        changed(lambda b: entry(b).update(dtype="F128")),
        rf"{NEW}/{NAME}: a.weight \(value\) has dtype 'F128'; known are F64",
    ),
    "a shape that is huge": (
        changed(lambda b: (entry(b).update(shape=[HUGE, 4]), piece(b).update(size=[HUGE, 4]))),
        rf"{NEW}/{NAME}: a.weight \(value\) lacks elements: a box of {4 * HUGE:,} has 24",
    ),
    "a shape and a count that are huge": (
        changed(
            lambda b: (entry(b).update(shape=[HUGE, 4]), piece(b).update(size=[HUGE, 4], count=4 * HUGE)),
        ),
        rf"{NEW}/{NAME}: a.weight \(value\) has a piece of {4 * HUGE:,} elements of F32 in 96 bytes",
    ),
    "a huge shape with nothing in it": (
        changed(lambda b: entry(b, "empty").update(shape=[1 << 61, 1 << 61, 0], pieces=[])),
        rf"{NEW}/{NAME}: empty \(value\) has shape .*, which no tensor has",
    ),
    "a shape of 17 axes": (
        changed(lambda b: entry(b).update(shape=[1] * 17)),
        rf"{NEW}/{NAME}: \[1, 1, .* is no shape",
    ),
    "a shape of other axes": (
        changed(lambda b: entry(b).update(shape=[24])),
        rf"{NEW}/{NAME}: a.weight \(value\) has a piece with other axes",
    ),
    "a shape that is negative": (changed(lambda b: entry(b).update(shape=[-6, -4])), f"{NEW}/{NAME}: -6 is no count"),
    "a run that begins at false": (
        changed(lambda b: piece(b, "b").update(first=False)),
        "manifest.json: False is no count",
    ),
    "a size of too many digits": (
        changed(lambda b: entry(b).update(shape=[1 << 70, 4])),
        "1180591620717411303424 is no",
    ),
    "runs that overlap": (
        halves((0, 16), (8, 16)),
        r"a.weight \(value\) lacks elements, or has some twice: a run begins at 8",
    ),
    "runs with a gap": (
        halves((0, 8), (16, 8)),
        r"a.weight \(value\) lacks elements, or has some twice: a run begins at 16",
    ),
    "runs that end early": (halves((0, 8), (8, 8)), r"a.weight \(value\) lacks elements: a box of 24 has 16"),
    "boxes that overlap": (
        boxes({"start": [0, 0], "size": [6, 3]}, {"start": [0, 2], "size": [6, 1]}),
        r"a.weight \(value\) has elements twice",
    ),
    "boxes with a gap": (
        boxes({"start": [0, 0], "size": [6, 2]}, {"start": [0, 3], "size": [6, 1]}),
        r"a.weight \(value\) has 18 of its 24 elements",
    ),
    "a box outside": (
        boxes({"start": [0, 0], "size": [6, 3]}, {"start": [1, 3], "size": [6, 1]}),
        r"a.weight \(value\) has a piece outside its shape \(6, 4\)",
    ),
    "no pieces": (changed(lambda b: entry(b).update(pieces=[])), r"a.weight \(value\) has 0 of its 24 elements"),
    "a piece of another's bytes": (
        changed(lambda b: entry(b).update(pieces=entry(b, kind="exp_avg")["pieces"])),
        r"a.weight \(exp_avg\) has a piece 'a.weight:exp_avg' of .* that is another's, or no name",
    ),
    "a key that is a list": (
        changed(lambda b: piece(b).update(key=["a.weight"])),
        r"a.weight \(value\) has a piece \['a.weight'\] of .* that is another's, or no name",
    ),
    "a key that is not there": (changed(lambda b: piece(b).update(key="c")), f"{NEW}/{FILE} has no c"),
    "a name that is not Unicode": (
        changed(lambda b: b["tensors"].update({"\ud800\x1b": {"value": {"shape": [], "dtype": "X"}}})),
        rf"{NEW}/{NAME}: \\ud800\\x1b \(value\) has dtype 'X'",
    ),
    "a key that is not Unicode": (changed(lambda b: piece(b).update(key="\ud800\x1b")), rf"{FILE} has no \\ud800\\x1b"),
    "two tensors' names changed": (
        changed(lambda b: (b["tensors"].update({"a.weight": {"exp_avg": entry(b), VALUE: entry(b, kind="exp_avg")}}),)),
        rf"{NEW}/{FILE}: a.weight is \['a.weight', 'value', .* there, another in the manifest",
    ),
    "a tensor that is not listed": (
        changed(lambda b: b["tensors"].pop("b")),
        f"{NEW}/{FILE} has b, which the manifest does not list",
    ),
    "a file that does not describe itself": (
        in_file(b'"pieces":', b'"peices":'),
        f"{NEW}/{FILE} does not say what its tensors are pieces of",
    ),
    "offsets outside the file": (
        changed(lambda b: piece(b).update(offsets=[1 << 40, (1 << 40) + 96])),
        rf"a.weight \(value\) has a piece outside its file '{FILE}'",
    ),
    "offsets of something else": (
        changed(lambda b: piece(b).update(offsets=[each + 4 for each in piece(b)["offsets"]])),
        f"{FILE}: a.weight lies elsewhere than the manifest says",
    ),
    "a piece of a file that is not listed": (
        changed(lambda b: piece(b).update(file="rank-00009-00.safetensors")),
        r"a.weight \(value\) has a piece outside its file 'rank-00009-00.safetensors'",
    ),
    **{
        f"a file called {name!r}": (
            rename_file(name),
            re.escape(f"{NEW}/{NAME}: {name!r} is no name of a checkpoint's"),
        )
        for name in ("../x.safetensors", "/etc/passwd", "a/b.safetensors", f"{FILE}\0", "", ".", "manifest.json")
    },
    "a head longer than the file": (
        with_head(b"{}", 1 << 50),
        f"{FILE} is no safetensors file: its head would have {1 << 50:,} bytes of 10",
    ),
    "a file shorter than a length": (
        lambda f: ((f / FILE).write_bytes(b"1234567"), rewrite(f, lambda b: [b["tensors"].clear()])),
        f"{FILE} is no safetensors file: its head would have .* bytes of 7",
    ),
    "a head that is no JSON": (
        with_head(b"{]"),
        f"{FILE} is no safetensors file: Expecting",
    ),
}
