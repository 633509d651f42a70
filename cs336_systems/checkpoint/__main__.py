"""Commands over checkpoints: `python -m cs336_systems.checkpoint show PATH`, `verify PATH`, `export PATH FILE`.

PATH is a checkpoint, a folder of checkpoints, or a run's folder. `show` and `export` take the newest of several.
"""

import json
import math
import sys
from pathlib import Path

import click
from rich.table import Table

from cs336_systems.checkpoint.disk import RefusedError, list_checkpoints
from cs336_systems.checkpoint.folder import NAME, export_plain, open_checkpoint, weights_hash
from cs336_systems.checkpoint.tensors import VALUE
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.text import printable

LONGEST = 100  # characters of a value that are shown
PATH = click.Path(path_type=Path)


@click.group(no_args_is_help=False)
def main() -> None:
    """Show, verify or export checkpoints. PATH is a checkpoint, a folder of them, or a run's --out folder."""


@main.command("show")
@click.argument("path", type=PATH)
def show_command(path: Path) -> None:
    """Verify the checkpoint at PATH, or the newest in it, and print its contents."""
    checkpoint = open_checkpoint(find(path)[-1])
    entries = [entry for kinds in checkpoint.tensors.values() for entry in kinds.values()]
    parameters = checkpoint.parameters.values()
    values = [math.prod(kinds[VALUE].shape) for kinds in parameters if VALUE in kinds]
    sizes = [file["bytes"] for file in checkpoint.files.values()]
    rows = {
        "checkpoint": checkpoint.folder.name,
        "step": str(checkpoint.step),
        "parameters": f"{sum(values):,} in {len(values)} tensors",
        "of the optimizer": ", ".join(sorted({kind for kinds in parameters for kind in kinds} - {VALUE})) or "nothing",
        "tensors": f"{len(entries)} in all, of {', '.join(sorted({entry.dtype for entry in entries})) or 'none'}",
        "files": f"{len(sizes)} of {console.format_bytes(sum(sizes))}",
        "SHA-256 of the weights": weights_hash(checkpoint),
    }
    for key, value in checkpoint.state.items():
        rows[f"state: {key}"] = json.dumps(value, ensure_ascii=False, allow_nan=False)
    table = Table(show_header=False)
    for key, text in rows.items():
        table.add_row(key, text if len(text) <= LONGEST else f"{text[:LONGEST]} ...")
    console.console().print(table)


@main.command("verify")
@click.argument("path", type=PATH)
def verify_command(path: Path) -> None:
    """Check every byte of the checkpoint at PATH, or of all in it. Exit code: 2 if one cannot be used."""
    folders, refused = find(path), 0
    for folder in folders:
        said = "whole"
        try:
            open_checkpoint(folder)
        except UserError as error:
            refused += 1
            said = f"{'refused: ' * isinstance(error, RefusedError)}{error}"
        print(f"{folder.name}: {said}", flush=True)
    if refused:
        raise UserError(f"{refused} of {len(folders)} checkpoints in {path} cannot be used")


@main.command("export")
@click.argument("path", type=PATH)
@click.argument("file", type=PATH)
def export_command(path: Path, file: Path) -> None:
    """Write the parameters of the checkpoint at PATH (or the newest there) to FILE, one plain safetensors file."""
    folder = find(path)[-1]
    count = export_plain(open_checkpoint(folder), file)
    print(f"{printable(str(file))}: {count} parameters of {folder.name}, {console.format_bytes(file.stat().st_size)}")


def find(path: Path) -> list[Path]:
    """Find the checkpoints at a path, the oldest first. Raises UserError if there is none, or it cannot be read."""
    path = path.absolute()  # `.` has no name
    with console.os_errors(f"read {path}"):
        if path in list_checkpoints(path.parent) or (path / NAME).exists():
            return [path]
        if found := list_checkpoints(path) or list_checkpoints(path / "checkpoints"):
            return found
    raise UserError(f"{path} is no checkpoint, and there is none in it: name a folder step-..., or that given to --out")


if __name__ == "__main__":
    sys.exit(console.run_command(main))
