"""What a run says while it trains: JSON lines in a file, and Megatron-LM's two lines for people."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cs336_systems.comm import Group
from cs336_systems.errors import UserError


@contextmanager
def open_log(path: Path, group: Group) -> Iterator[IO[str]]:
    """Rank 0's log file, its folders made; nowhere on other ranks. Raises UserError where it cannot be written."""
    path = path if group.rank() == 0 else Path(os.devnull)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(f"cannot write the log {path}: {error.strerror}; name another with --log-file FILE") from None
    with file:
        yield file


def write_line(record: dict[str, Any], log: IO[str]) -> None:
    """One JSON line, on disk at once."""
    print(json.dumps(record, allow_nan=False), file=log, flush=True)


def iteration_line(record: dict[str, Any], steps: int, batch: int) -> str:
    """A log record in the form of Megatron-LM v2.5, for whoever reads its logs by eye or program."""
    parts = [
        f"iteration {record['step']:8d}/{steps:8d}",
        f"consumed samples: {record['step'] * batch:12d}",
        f"elapsed time per iteration (ms): {record['step_ms']:.1f}",
        f"learning rate: {record['lr']:.3E}",
        f"global batch size: {batch:5d}",
    ]
    if record["loss"] is not None:  # there is none where every step was skipped
        parts.append(f"lm loss: {record.get('lm_loss', record['loss']):.6E}")
    if "sop_loss" in record:
        parts.append(f"sop loss: {record['sop_loss']:.6E}")
    parts.append(f"loss scale: {record.get('loss_scale', 1.0):.1f}")
    if record["grad_norm"] is not None:
        parts.append(f"grad norm: {record['grad_norm']:.3f}")
    parts.append(f"number of skipped iterations: {record.get('skipped', 0):3d}")
    return " | ".join(parts)
