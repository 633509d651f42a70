"""What a run says while it trains: JSON lines in a file, and Megatron-LM's two lines for people."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from cs336_systems.comm import Group, agree
from cs336_systems.errors import UserError


@contextmanager
def open_log(path: Path, group: Group, done: int = 0) -> Iterator[IO[str]]:
    """Rank 0's log file, its folders made; nowhere on other ranks. Every rank must enter.

    It is written anew, or for a run that goes on after `done` steps appended to, less what was written of later steps,
    which will be taken again. Raises UserError, on every rank, where it cannot be written.
    """
    file, problem = None, ""
    try:
        file = _open(path, done) if group.rank() == 0 else _open(Path(os.devnull), 0)
    except OSError as error:
        problem = f"cannot write the log {path}: {error.strerror}; name another with --log-file FILE"
    if problem := agree("log", problem, group)[0]:
        raise UserError(problem)
    assert file is not None
    try:
        yield file
    finally:
        with suppress(OSError):  # said already
            file.close()


def _open(path: Path, done: int) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if done and path.is_file():
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(_up_to(path.read_text(errors="replace"), done))
        temporary.replace(path)  # a log of many hours is never half there
    return path.open("a" if done else "w")


def _up_to(text: str, done: int) -> str:
    """The lines of a log that tell of the first `done` steps; one that was cut short by a kill is left out, or is no
    record at all, and so is the last one of a run, and where an earlier one went on after more steps."""
    lines = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = record.get("step", record.get("resumed", 0)) if isinstance(record, dict) else None
        if isinstance(step, int) and step <= done and "steps" not in record:  # which the last line has
            lines.append(f"{line}\n")
    return "".join(lines)


def write_line(record: dict[str, Any], log: IO[str]) -> None:
    """One JSON line, on disk at once. A disk that is full costs lines, with a warning, and not the run."""
    try:
        print(json.dumps(record, allow_nan=False), file=log, flush=True)
    except OSError as error:
        warnings.warn(f"the log cannot be written: {error.strerror}", stacklevel=1)


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
