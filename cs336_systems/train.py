"""Train a language model: `python -m cs336_systems.train --size tiny`.

The recipe, alone or on each rank under torchrun: build the model, shard it as the ZeRO stage says, and take this rank's
rows of every batch. The global batch is the same for every number of ranks, and so is what is learned.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import click
import torch
from torch import Tensor

from cs336_systems import console
from cs336_systems.comm import Group, Place, all_reduce, distributed
from cs336_systems.comm.launch import run_in_one_voice, start_ranks
from cs336_systems.comm.startup import TIMEOUT, Backend
from cs336_systems.console import format_count, format_seconds, setting
from cs336_systems.cost import Hardware, backward_flops, count_parameters, forward_flops
from cs336_systems.cost.fit import require_fit
from cs336_systems.cost.probe import probe
from cs336_systems.data import check_length, lm_batch, load_corpus
from cs336_systems.errors import UserError
from cs336_systems.evaluate import sample_text, validation_loss
from cs336_systems.machine import choose_device, device_name, environment, out_of_memory, usable_memory
from cs336_systems.model import TransformerLM, lm_loss
from cs336_systems.optim import AdamW, decay_groups, learning_rate
from cs336_systems.precision import autocast, set_matmul_precision
from cs336_systems.presets import COURSE_YEARS, DEFAULT_YEAR, Attention, Kernels, ModelConfig, Norm, Recompute, preset
from cs336_systems.zero import zero


@dataclass(frozen=True)
class Recipe:
    """What a training run is made of; every field is an option of the command line."""

    size: str = setting("tiny", "Model preset.")
    year: int = setting(
        DEFAULT_YEAR, f"Edition of the course that the size is from, {COURSE_YEARS[0]} to {COURSE_YEARS[-1]}."
    )
    data: tuple[str, ...] = setting((), "Text files, or `random`.  [default: Python's standard library]")
    steps: int = setting(300, "Optimizer steps of this run.", type=click.IntRange(1))
    batch_size: int | None = setting(None, "Sequences in a step.  [default: the preset's]", type=click.IntRange(1))
    context: int | None = setting(None, "Tokens in a sequence.  [default: the preset's]", type=click.IntRange(1))
    lr: float = setting(2e-3, "Peak learning rate.", type=click.FloatRange(min=0))
    min_lr: float = setting(2e-4, "Learning rate from --decay-steps on.", type=click.FloatRange(min=0))
    warmup_steps: int = setting(20, "Steps of linear warm-up.", type=click.IntRange(0))
    decay_steps: int = setting(1000, "Step at which the learning rate reaches --min-lr.", type=click.IntRange(1))
    decay: Literal["cosine", "linear"] = setting("cosine", "Shape of the learning rate's decay.")
    weight_decay: float = setting(0.1, "AdamW's decay of matrices.", type=click.FloatRange(min=0))
    clip: float = setting(1.0, "Largest global norm of the gradient.", type=click.FloatRange(min=0, min_open=True))
    dropout: float | None = setting(None, "Probability of dropping an activation.  [default: the preset's]")
    norm: Norm | None = setting(None, "Normalisation.  [default: the preset's]")
    attention: Attention | None = setting(None, "Implementation of attention.  [default: the preset's]")
    kernels: Kernels | None = setting(None, "Fused kernels for norm, gate and loss.  [default: the preset's]")
    recompute: Recompute = setting("none", "What backward recomputes instead of keeping it.")
    recompute_every: int = setting(1, "Blocks in a recomputed segment.", type=click.IntRange(1))
    # fp16 is missing because its gradients need loss scaling, which this loop does not have.
    precision: Literal["fp32", "tf32", "bf16"] = setting("fp32", "Precision of matrix products.")
    seed: int = setting(0, "Seed of weights, batches and sample.", type=click.IntRange(0, 2**32 - 1))
    zero: int = setting(0, "ZeRO stage: what the ranks shard.", type=click.IntRange(0, 3))
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 1]", type=click.IntRange(1))
    device: Literal["cpu", "cuda"] | None = setting(None, "Where to run.  [default: cuda if there is one]")
    backend: Backend | None = setting(None, "Who moves tensors between ranks.  [default: nccl on cuda, gloo on cpu]")
    timeout: float = setting(
        TIMEOUT, "Seconds that ranks wait for each other.", type=click.FloatRange(0, min_open=True)
    )
    log_file: Path = setting(Path("runs/train.jsonl"), "Where the log goes, one JSON line a record; written anew.")
    log_every: int = setting(10, "Steps between two log lines.", type=click.IntRange(1))
    prompt: str = setting("def ", "Start of the sample.")
    sample_bytes: int = setting(300, "Length of the sample.", type=click.IntRange(0))

    def model_config(self) -> ModelConfig:
        """The preset with this recipe's changes. Raises UserError for a model that this loop cannot train."""
        config = preset(self.size, self.year).model.override(
            context_length=self.context,
            dropout=self.dropout,
            norm=self.norm,
            attention=self.attention,
            kernels=self.kernels,
            recompute=self.recompute,
            recompute_every=self.recompute_every,
        )
        if not config.causal:
            raise UserError(f"{self.size} is an encoder; this command trains decoders, such as --size tiny")
        return config


class Trainer:
    """A model, its optimizer and its data; `step` is one optimizer step on this rank's rows of the global batch."""

    def __init__(self, recipe: Recipe, group: Group) -> None:
        self.recipe, self.config, self.group = recipe, recipe.model_config(), group
        self.device = device = choose_device(recipe.device)
        self.learning_rate(0)  # a schedule that cannot be is refused before anything is built
        self.batch = recipe.batch_size or preset(recipe.size, recipe.year).batch_size
        set_matmul_precision(device, recipe.precision)
        self.autocast = autocast(device, recipe.precision)
        context = self.config.context_length
        if self.batch % group.size():
            raise UserError(f"--batch-size {self.batch} does not divide over {group.size()} ranks")
        usable = usable_memory(device) // (group.size() if device.type == "cpu" else 1)
        rows = self.batch // group.size()
        require_fit(recipe.size, self.config, rows, context, "step", recipe.precision, usable, modes=())
        corpus = load_corpus(recipe.data, self.config.vocab_size, context)
        self.corpus, self.validation = corpus.split(0.1)
        check_length(self.corpus, context)
        self.text = list(recipe.data) != ["random"]
        torch.manual_seed(recipe.seed)
        model = TransformerLM(self.config, device)
        groups = partial(decay_groups, weight_decay=recipe.weight_decay)
        self.model, self.optimizer = zero(model, AdamW, recipe.zero, group, groups, betas=(0.9, 0.95))

    def learning_rate(self, step: int) -> float:
        r = self.recipe
        return learning_rate(step, r.lr, r.min_lr, r.warmup_steps, r.decay_steps, r.decay)

    def step(self, step: int) -> tuple[Tensor, Tensor, float]:
        """(loss on this rank's rows, gradient norm before clipping, learning rate) of one step."""
        recipe = self.recipe
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        place = self.group.rank(), self.group.size()
        tokens, targets = lm_batch(self.corpus, step, recipe.seed, self.batch, self.config.context_length, *place)
        with self.autocast:
            loss = lm_loss(self.model, tokens.to(self.device), targets.to(self.device))
        loss.backward()
        self.model.finish_gradient_synchronization()
        norm = self.model.clip_grad_norm(recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm, rate

    def validate(self) -> float | None:
        """The validation loss in nats a token; None if the text is too short to keep a context for it."""
        if len(self.validation.tokens) <= self.config.context_length:
            return None
        with self.autocast:
            context = self.config.context_length
            return validation_loss(self.model, self.validation, self.recipe.seed, self.batch, context, self.device)


def run_steps(trainer: Trainer, hardware: Hardware, log: IO[str]) -> None:
    """All steps of the recipe, a log line every `log_every`. Raises UserError when the loss is no longer a number."""
    recipe, config, batch = trainer.recipe, trainer.config, trainer.batch
    tokens = batch * config.context_length
    flops = sum(forward_flops(config, batch, config.context_length).values())
    flops += backward_flops(config, batch, config.context_length)
    losses: list[Tensor] = []
    start = time.perf_counter()
    expected = recipe.steps * flops / hardware.matmul_flops / trainer.group.size()
    with console.progress("training", recipe.steps, expected, quiet=trainer.group.rank() > 0) as advance:
        note = ""
        for step in range(recipe.steps):
            loss, norm, rate = trainer.step(step)
            losses.append(loss)
            if (step + 1) % recipe.log_every == 0 or step + 1 == recipe.steps:
                losses_mean = torch.stack(losses).mean()
                all_reduce(losses_mean, trainer.group, "loss").wait()
                mean = losses_mean.item()  # the one wait for the device in log_every steps
                seconds = (time.perf_counter() - start) / len(losses)
                require_finite(mean + norm.item(), step + 1, recipe)
                mfu = flops / seconds / hardware.matmul_flops / trainer.group.size()
                line = {"step": step + 1, "loss": mean, "lr": rate, "grad_norm": norm.item()}
                write_line(line | {"tokens_per_s": tokens / seconds, "mfu": mfu}, log)
                note = f"loss {mean:.3f}  {format_count(tokens / seconds)} tokens/s  MFU {mfu:.0%}"
                losses, start = [], time.perf_counter()
            advance(note)


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


def require_finite(value: float, step: int, recipe: Recipe) -> None:
    """Raises UserError when the loss or the gradient is no longer a number."""
    if not math.isfinite(value):
        raise UserError(f"the loss or its gradient is {value} after {step} steps; lower --lr (now {recipe.lr:g})")


def write_line(record: dict[str, Any], log: IO[str]) -> None:
    """One JSON line, on disk at once."""
    print(json.dumps(record, allow_nan=False), file=log, flush=True)


def train(recipe: Recipe, group: Group) -> dict[str, Any]:
    """Run a recipe on every rank of a group; rank 0 prints what came of it. Returns the log's last record.

    Raises UserError for a run that cannot be made, or whose loss diverges.
    """
    out = console.console(quiet=group.rank() > 0)
    trainer = Trainer(recipe, group)
    device = trainer.device
    hardware = probe(device, recipe.precision, device_name(device), budget=0.2)
    parameters = sum(count_parameters(trainer.config).values())
    context = trainer.config.context_length
    ranks = f", {group.size()} ranks, ZeRO stage {recipe.zero}" if group.size() > 1 else ""
    out.print(
        f"{recipe.size}: {format_count(parameters, billion='B')} parameters, batch {trainer.batch} x {context}{ranks}\n"
        f"{trainer.corpus.name}: {format_count(len(trainer.corpus.tokens))} tokens\n"
        f"{hardware.name}: {format_count(hardware.matmul_flops)}FLOP/s at best in {recipe.precision}"
    )
    with open_log(recipe.log_file, group) as log:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(recipe).items()}
        header = {"recipe": settings, "corpus": trainer.corpus.name, "sha256": trainer.corpus.sha256}
        stamp = environment(device) | {"world_size": group.size(), "backend": recipe.backend}
        write_line(header | {"environment": stamp}, log)
        start = time.perf_counter()
        run_steps(trainer, hardware, log)
        final: dict[str, Any] = {"steps": recipe.steps, "seconds": time.perf_counter() - start}
        final["validation_loss"] = trainer.validate()
        require_finite(final["validation_loss"] or 0.0, recipe.steps, recipe)
        if trainer.text:
            final["sample"] = sample_text(trainer.model, context, recipe.prompt, recipe.sample_bytes, recipe.seed)
        write_line(final, log)
    loss = final["validation_loss"]
    reached = "not measured, the text is too short" if loss is None else f"{loss:.3f} nats a token"
    guessing = math.log(256 if trainer.text else trainer.config.vocab_size)
    out.print(
        f"{recipe.steps} steps in {format_seconds(final['seconds'])}; validation loss {reached} "
        f"(guessing: {guessing:.3f}); log: {recipe.log_file}"
    )
    if trainer.text:
        out.print(f"\n{final['sample']}\n", markup=False)
    return final


def work(place: Place, recipe: Recipe) -> None:
    """One rank's part. Raises UserError for a run that cannot be made."""
    device = choose_device(recipe.device)
    with distributed(device, recipe.backend, recipe.timeout, place) as group:
        try:
            train(recipe, group)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError("out of memory although it was counted to fit; lower --batch-size or --context") from error


@click.command()
@console.options(Recipe)
@click.argument("more_data", nargs=-1)
def main(more_data: tuple[str, ...], **settings: Any) -> None:
    """Train a language model on text or random tokens and print a sample of what it learned."""
    if more_data and not settings["data"]:
        raise UserError(f"unexpected argument {more_data[0]!r}; text is named with --data FILE ...")
    settings["data"] = (*settings["data"], *more_data)  # --data a.txt b.txt
    recipe = Recipe(**settings)
    start_ranks(work, recipe.device, recipe.nproc, recipe)


if __name__ == "__main__":
    sys.exit(run_in_one_voice(main))
