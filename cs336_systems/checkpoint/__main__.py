"""Commands over checkpoints: `python -m cs336_systems.checkpoint show PATH`, `verify PATH`, `export PATH FILE`.

PATH is a checkpoint, a folder of checkpoints, or a run's folder. Where one is wanted of several, it is the newest.
"""

import json
import sys
from pathlib import Path

import click
from rich.table import Table

from cs336_systems.checkpoint.folder import list_checkpoints
from cs336_systems.checkpoint.load import Checkpoint, export_plain, open_checkpoint, weights_hash
from cs336_systems.checkpoint.manifest import NAME, RefusedError
from cs336_systems.checkpoint.pieces import RANDOM, VALUE, Box
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.text import printable

LONGEST = 100  # characters of a value that are shown


@click.group(no_args_is_help=False)
def main() -> None:
    """Look at the checkpoints of a run: a checkpoint, a folder of them, or the folder given to --out."""


@main.command("show")
@click.argument("path", type=click.Path(path_type=Path))
def show_command(path: Path) -> None:
    """Verify the checkpoint at PATH (or the newest there) and print its contents."""
    table = Table(show_header=False)
    for what, value in facts(open_checkpoint(find(path)[-1])):
        table.add_row(what, value)
    console.console().print(table)


@main.command("verify")
@click.argument("path", type=click.Path(path_type=Path))
def verify_command(path: Path) -> None:
    """Check every byte of the checkpoint at PATH, or of all there. The exit status is 2 if one cannot be used."""
    folders, refused = find(path), 0
    for folder in folders:
        try:
            open_checkpoint(folder)
            print(f"{folder.name}: whole", flush=True)
        except UserError as error:
            refused += 1
            print(f"{folder.name}: {'refused: ' * isinstance(error, RefusedError)}{error}", flush=True)
    if refused:
        raise UserError(f"{refused} of {len(folders)} checkpoints in {path} cannot be used")


@main.command("export")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
def export_command(path: Path, file: Path) -> None:
    """Write the parameters of the checkpoint at PATH (or the newest there) to FILE, one plain safetensors file."""
    folder = find(path)[-1]
    count = export_plain(open_checkpoint(folder), file)
    print(f"{printable(str(file))}: {count} parameters of {folder.name}, {console.format_bytes(file.stat().st_size)}")


def find(path: Path) -> list[Path]:
    """The checkpoints that a path means, the oldest first. Raises UserError if there is none, or it cannot be read."""
    path = path.absolute()  # `.` has no name
    try:
        if list_checkpoints(path.parent).count(path) or (path / NAME).exists():
            return [path]
        if found := list_checkpoints(path) or list_checkpoints(path / "checkpoints"):
            return found
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    raise UserError(f"{path} is no checkpoint, and there is none in it: name a folder step-..., or that given to --out")


def facts(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """The rows of `show`: name and text."""
    manifest, tensors = checkpoint.manifest, checkpoint.tensors
    entries = [(name, kind, entry) for name, kinds in tensors.items() for kind, entry in kinds.items()]
    values = [entry for name, kind, entry in entries if kind == VALUE and not name.startswith(RANDOM)]
    size, dtypes = sum(file.bytes for file in manifest.files.values()), {entry.dtype for _, _, entry in entries}
    kinds = sorted({kind for name, kind, _ in entries if not name.startswith(RANDOM)} - {VALUE})
    found = {
        "checkpoint": checkpoint.folder.name,
        "step": str(manifest.step),
        "parameters": f"{sum(Box.whole(entry.shape).numel for entry in values):,} in {len(values)} tensors",
        "of the optimizer": ", ".join(kinds) or "nothing",
        "tensors": f"{len(entries)} in all, of {', '.join(sorted(dtypes)) or 'none'}",
        "files": f"{len(manifest.files)} of {console.format_bytes(size)}",
        "SHA-256 of the weights": weights_hash(checkpoint),
    }
    for key, value in manifest.state.items():
        found[f"state: {key}"] = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return [(what, text if len(text) <= LONGEST else f"{text[:LONGEST]} ...") for what, text in found.items()]


if __name__ == "__main__":
    sys.exit(console.run_command(main))
