"""Log of a run: JSON lines in a file, with a sample of text at the end, and lines in Megatron-LM's form for people."""

import fcntl
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from cs336_systems.checkpoint.disk import together
from cs336_systems.comm import Group, agree
from cs336_systems.context_parallel import join_sequence, split_sequence
from cs336_systems.data.corpus import Batch
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes, format_seconds, os_errors
from cs336_systems.host.machine import PeakMemory, environment
from cs336_systems.train.trainer import Trainer

TEMPERATURE = 0.8  # of the softmax from which a sample is drawn


@contextmanager
def open_log(path: Path, group: Group, done: int = 0, named: bool = True) -> Iterator[IO[str]]:
    """Open the log file on rank 0, for this run alone, and make its folders; other ranks write nothing. Every rank
    must enter. A run that goes on after `done` steps appends, after removing lines of later steps, which it will take
    again. If another run has the file, this raises UserError if the user `named` it; otherwise this run's name gets a
    number. Also raises UserError, on every rank, if it cannot be written."""
    path, opened = path if group.rank() == 0 else Path(os.devnull), list[IO[str]]()

    def begin() -> None:
        with os_errors(f"write the log {path}", "name another with --log-file FILE"):
            path.parent.mkdir(parents=True, exist_ok=True)
            opened.append(log := _locked(path, named))
            own = Path(log.name)
            # A device, or a link to a file that is open, such as /dev/stdout: nothing there is deleted.
            if not own.is_file() or (own.is_symlink() and own.absolute().parts[1] in ("dev", "proc")):
                return
            if not _is_log(own):
                raise UserError(f"{own} exists and is no log of a run: name another with --log-file FILE")
            if not done:
                log.truncate(0)
                return
            draft = own.with_name(f".{own.name}")
            if draft.is_symlink():  # writing would overwrite its target, any file
                raise UserError(f"{draft} is a symbolic link; delete it, or name another log with --log-file FILE")
            draft.write_text(_up_to(own.read_text(errors="replace"), done))
            draft.replace(own)  # in one step, so that a log of many hours is never lost
            opened.append(_locked(own, named))

    try:
        together("log", begin, path, group)
        yield opened[-1]
    finally:
        for log in opened:
            with suppress(OSError):  # `write_line` has warned of it
                log.close()


def _locked(path: Path, named: bool) -> IO[str]:
    """Open a file to append to, and lock it for this process while it is open. If another process has locked it, take
    the next one with a number; if it was `named`, raise UserError. Raises OSError."""
    for number in count(1):
        file = (path.with_stem(f"{path.stem}-{number}") if number > 1 else path).open("a")
        try:
            if path.is_file():  # a device may be shared
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            file.close()
            if named:
                raise UserError(f"another run writes its log to {path}: name another with --log-file FILE") from None
    raise AssertionError


def _is_log(path: Path) -> bool:
    """True if a file is empty or begins like a record, also one that a full disk has cut short: it is replaced."""
    with path.open(errors="replace") as file:
        begin = file.read(16)
    records = '{"recipe":', '{"resumed":', '{"step":', '{"steps":', '{"stopped":'
    return any(begin.startswith(each[: len(begin)]) for each in records)


def _up_to(text: str, done: int) -> str:
    """Keep a log's lines about the first `done` steps, without a run's last one and those that a kill cut short."""
    lines = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError, AttributeError):  # raised by a line that is no record
            record = json.loads(line)
            step = record.get("step", record.get("resumed", 0))
            if isinstance(step, int) and step <= done and "steps" not in record:  # only the last line has it
                lines.append(f"{line}\n")
    return "".join(lines)


def write_line(record: dict[str, Any], log: IO[str]) -> None:
    """Write one JSON line at once. On a full disk the line is lost, with a warning, and the run goes on."""
    try:
        print(json.dumps(record, allow_nan=False), file=log, flush=True)
    except OSError as error:
        warnings.warn(f"the log cannot be written: {error.strerror}", stacklevel=1)


def iteration_line(record: dict[str, Any], steps: int, batch: int) -> str:
    """Format a log record like Megatron-LM v2.5, for people and programs that read its logs."""
    parts = [f"iteration {record['step']:8d}/{steps:8d}", f"consumed samples: {record['step'] * batch:12d}"]
    parts += [f"elapsed time per iteration (ms): {record['step_ms']:.1f}", f"learning rate: {record['lr']:.3E}"]
    parts.append(f"global batch size: {batch:5d}")
    if record["loss"] is not None:  # there is none if every step was skipped
        parts.append(f"lm loss: {record.get('lm_loss', record['loss']):.6E}")
    if "sop_loss" in record:
        parts.append(f"sop loss: {record['sop_loss']:.6E}")
    parts.append(f"loss scale: {record.get('loss_scale', 1.0):.1f}")
    if record["grad_norm"] is not None:
        parts.append(f"grad norm: {record['grad_norm']:.3f}")
    parts.append(f"number of skipped iterations: {record.get('skipped', 0):3d}")
    return " | ".join(parts)


def header(trainer: Trainer, done: int) -> dict[str, Any]:
    """Make the log's first record: recipe, text, model, machine; in a log that goes on, also the steps done so far."""
    recipe, ranks = trainer.recipe, trainer.mesh.world.size()
    stamp = environment(trainer.device) | {"world_size": ranks, "backend": recipe.launch.backend}
    record: dict[str, Any] = {"resumed": done} if done else {}
    record |= {"recipe": recipe.to_json(), "corpus": trainer.batches.name, "sha256": trainer.batches.sha256}
    record |= {"model": asdict(trainer.config), "seq": trainer.seq, "batch_size": trainer.batch}
    return record | {"micro_batch_size": trainer.micro_batch, "mesh": trainer.mesh.sizes, "environment": stamp}


def final_record(trainer: Trainer, steps: int, seconds: float, peak: PeakMemory) -> dict[str, Any]:
    """Make the last record, after `steps`. Every rank must call it. Raises UserError for an infinite or NaN loss."""
    losses = trainer.validate()
    memory = agree("peak memory", float(peak.read() or 0), trainer.mesh.world)
    if not math.isfinite(loss := sum(losses.values())):
        raise UserError(f"the validation loss is {loss} after step {steps}; lower --lr")
    final: dict[str, Any] = {"steps": steps, "seconds": seconds, "peak_memory": [min(memory), max(memory)]}
    return final | {"validation_loss": None} | losses | sample(trainer)


@torch.no_grad()
def sample_text(
    model: Callable[[Tensor], Tensor], device: torch.device, context: int, prompt: str, length: int, seed: int
) -> str:
    """Draw `length` bytes after the prompt, each from the last `context` tokens; returns text that is safe to print.
    `model` computes logits (1 seq vocab_size) of tokens (1 seq), without dropout."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode(errors="surrogateescape") or b"\n")], device=device)
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1, :256] / TEMPERATURE
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def sample(trainer: Trainer) -> dict[str, str]:
    """Draw a sample of text from the model; empty for random tokens, BERT and pipelines. Every rank must call this."""
    run, recipe = trainer.recipe.run, trainer.recipe
    if recipe.model.is_bert or recipe.data.is_random or trainer.stage.stages > 1:
        return {}

    def logits(tokens: Tensor) -> Tensor:
        # Padded, so that it splits evenly; a token's logits do not depend on later ones, except for experts' slots.
        padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % trainer.part.layout.parts))
        mine = trainer.part.wrappers[0](split_sequence(Batch(padded), trainer.mesh.cp))
        return join_sequence(mine, trainer.mesh.cp)[:, : tokens.shape[1]]

    trainer.stage.eval()
    return {"sample": sample_text(logits, trainer.device, trainer.seq, run.prompt, run.sample_bytes, run.seed)}


def conclude(trainer: Trainer, final: dict[str, Any], log: str, done: int = 0) -> str:
    """Summarise a run in some lines; it may have begun after `done` steps of an earlier one."""
    recipe, loss, (least, most) = trainer.recipe, final["validation_loss"], final["peak_memory"]
    text = f"{final['steps'] - done} steps{f' after {done}' if done else ''} in {format_seconds(final['seconds'])}; "
    text += "validation loss " + ("not measured: no text is left" if loss is None else f"{loss:.3f} nats a token")
    if "validation_sop_loss" in final:
        text += f" and {final['validation_sop_loss']:.3f} a sentence pair"
    of_bytes = not recipe.data.is_random and not recipe.model.is_bert
    text += f" (guessing: {math.log(256 if of_bytes else trainer.batches.vocab_size):.3f}); "
    if most:  # of tensors on a GPU; on a CPU of the process, which needs more than --dry-run counts
        of_tensors = "" if trainer.device.type == "cuda" else "resident "
        peaks = dict.fromkeys(map(format_bytes, (least, most)))
        text += f"peak {of_tensors}memory of a rank {' to '.join(peaks)}; "
    text += f"log: {log}"
    if trainer.skipped:
        why = "their gradients were inf or NaN"
        if recipe.model.precision == "fp16":
            why = f"their gradients overflowed fp16, and the loss scale is now {trainer.scaler.scale:g}; lower "
            why += "--loss-scale" if recipe.optimizer.loss_scale else "--initial-loss-scale, or take more steps"
        text += f"\n{trainer.skipped} of {final['steps']} steps were skipped: {why}"
    return f"{text}\n\n{final['sample']}\n" if "sample" in final else text
