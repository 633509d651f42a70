"""Train a language model: `python -m cs336_systems.train --size tiny`.

One process so far. The recipe is written where the parallel one will stand: build the model, wrap it, make the
optimizer, and take this rank's rows of every batch.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import click
import torch
from torch import Tensor

from cs336_systems import console
from cs336_systems.console import format_count, format_seconds, setting
from cs336_systems.cost import Hardware, backward_flops, forward_flops
from cs336_systems.cost.fit import require_fit
from cs336_systems.cost.probe import probe
from cs336_systems.data import Corpus, check_length, lm_batch, load_corpus
from cs336_systems.errors import UserError
from cs336_systems.machine import choose_device, device_name, environment, out_of_memory, usable_memory
from cs336_systems.model import TransformerLM, lm_loss
from cs336_systems.optim import AdamW, clip_gradients, decay_groups, learning_rate
from cs336_systems.precision import autocast, set_matmul_precision
from cs336_systems.presets import COURSE_YEARS, DEFAULT_YEAR, Attention, ModelConfig, Norm, Recompute, preset


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
    recompute: Recompute = setting("none", "What backward recomputes instead of keeping it.")
    recompute_every: int = setting(1, "Blocks in a recomputed segment.", type=click.IntRange(1))
    # fp16 is missing because its gradients need loss scaling, which this loop does not have.
    precision: Literal["fp32", "tf32", "bf16"] = setting("fp32", "Precision of matrix products.")
    seed: int = setting(0, "Seed of weights, batches and sample.", type=click.IntRange(0, 2**32 - 1))
    device: Literal["cpu", "cuda"] | None = setting(None, "Where to run.  [default: cuda if there is one]")
    log: Path = setting(Path("runs/train.jsonl"), "Where the log goes, one JSON line a record; written anew.")
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
            recompute=self.recompute,
            recompute_every=self.recompute_every,
        )
        if not config.causal:
            raise UserError(f"{self.size} is an encoder; this command trains decoders, such as --size tiny")
        return config


@contextmanager
def open_log(path: Path) -> Iterator[IO[str]]:
    """The log file, its folders made. Raises UserError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(f"cannot write the log {path}: {error.strerror}; name another with --log FILE") from None
    with file:
        yield file


@torch.no_grad()
def validation_loss(
    model: torch.nn.Module, corpus: Corpus, seed: int, batch: int, context: int, device: torch.device
) -> float:
    """Mean loss in nats a token over eight batches of the corpus, without dropout."""
    model.eval()
    batches = [lm_batch(corpus, step, seed, batch, context) for step in range(8)]
    losses = [lm_loss(model, tokens.to(device), targets.to(device)) for tokens, targets in batches]
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def sample_text(model: TransformerLM, prompt: str, length: int, seed: int, temperature: float = 0.8) -> str:
    """`length` bytes drawn from the model after the prompt, as text that is safe to print."""
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode(errors="surrogateescape") or b"\n")], device=device)
    for _ in range(length):
        logits = model(tokens[:, -model.config.context_length :])[:, -1, :256] / temperature
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
    model.train()
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


class Trainer:
    """A model, its optimizer and its data; `step` is one optimizer step on this rank's rows of the global batch."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.config = recipe, recipe.model_config()
        self.device = device = choose_device(recipe.device)
        self.learning_rate(0)  # a schedule that cannot be is refused before anything is built
        self.batch = recipe.batch_size or preset(recipe.size, recipe.year).batch_size
        set_matmul_precision(device, recipe.precision)
        self.autocast = autocast(device, recipe.precision)
        context = self.config.context_length
        usable = usable_memory(device)
        require_fit(recipe.size, self.config, self.batch, context, "step", recipe.precision, usable, modes=())
        corpus = load_corpus(recipe.data, self.config.vocab_size, context)
        self.corpus, self.validation = corpus.split(0.1)
        check_length(self.corpus, context)
        self.text = list(recipe.data) != ["random"]
        torch.manual_seed(recipe.seed)
        self.model = TransformerLM(self.config, device)
        self.optimizer = AdamW(decay_groups(self.model, recipe.weight_decay), betas=(0.9, 0.95))

    def learning_rate(self, step: int) -> float:
        r = self.recipe
        return learning_rate(step, r.lr, r.min_lr, r.warmup_steps, r.decay_steps, r.decay)

    def step(self, step: int) -> tuple[Tensor, Tensor, float]:
        """(loss, gradient norm before clipping, learning rate) of one step."""
        recipe = self.recipe
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens, targets = lm_batch(self.corpus, step, recipe.seed, self.batch, self.config.context_length)
        with self.autocast:
            loss = lm_loss(self.model, tokens.to(self.device), targets.to(self.device))
        loss.backward()
        norm = clip_gradients(self.model.parameters(), recipe.clip)
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
    with console.progress("training", recipe.steps, recipe.steps * flops / hardware.matmul_flops) as advance:
        note = ""
        for step in range(recipe.steps):
            loss, norm, rate = trainer.step(step)
            losses.append(loss)
            if (step + 1) % recipe.log_every == 0 or step + 1 == recipe.steps:
                mean = torch.stack(losses).mean().item()  # the one wait for the device in log_every steps
                seconds = (time.perf_counter() - start) / len(losses)
                require_finite(mean + norm.item(), step + 1, recipe)
                mfu = flops / seconds / hardware.matmul_flops
                line = {"step": step + 1, "loss": mean, "lr": rate, "grad_norm": norm.item()}
                write_line(line | {"tokens_per_s": tokens / seconds, "mfu": mfu}, log)
                note = f"loss {mean:.3f}  {format_count(tokens / seconds)} tokens/s  MFU {mfu:.0%}"
                losses, start = [], time.perf_counter()
            advance(note)


def require_finite(value: float, step: int, recipe: Recipe) -> None:
    """Raises UserError when the loss or the gradient is no longer a number."""
    if not math.isfinite(value):
        raise UserError(f"the loss or its gradient is {value} after {step} steps; lower --lr (now {recipe.lr:g})")


def write_line(record: dict[str, Any], log: IO[str]) -> None:
    """One JSON line, on disk at once."""
    print(json.dumps(record, allow_nan=False), file=log, flush=True)


def train(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe and print what came of it; returns the log's last record.

    Raises UserError for a run that cannot be made, or whose loss diverges.
    """
    out = console.console()
    trainer = Trainer(recipe)
    device = trainer.device
    hardware = probe(device, recipe.precision, device_name(device), budget=0.2)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    context = trainer.config.context_length
    out.print(
        f"{recipe.size}: {format_count(parameters, billion='B')} parameters, batch {trainer.batch} x {context}\n"
        f"{trainer.corpus.name}: {format_count(len(trainer.corpus.tokens))} tokens\n"
        f"{hardware.name}: {format_count(hardware.matmul_flops)}FLOP/s at best in {recipe.precision}"
    )
    with open_log(recipe.log) as log:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(recipe).items()}
        header = {"recipe": settings, "corpus": trainer.corpus.name, "sha256": trainer.corpus.sha256}
        write_line(header | {"environment": environment(device)}, log)
        start = time.perf_counter()
        run_steps(trainer, hardware, log)
        final: dict[str, Any] = {"steps": recipe.steps, "seconds": time.perf_counter() - start}
        final["validation_loss"] = trainer.validate()
        require_finite(final["validation_loss"] or 0.0, recipe.steps, recipe)
        if trainer.text:
            final["sample"] = sample_text(trainer.model, recipe.prompt, recipe.sample_bytes, recipe.seed)
        write_line(final, log)
    loss = final["validation_loss"]
    reached = "not measured, the text is too short" if loss is None else f"{loss:.3f} nats a token"
    guessing = math.log(256 if trainer.text else trainer.config.vocab_size)
    out.print(
        f"{recipe.steps} steps in {format_seconds(final['seconds'])}; validation loss {reached} "
        f"(guessing: {guessing:.3f}); log: {recipe.log}"
    )
    if trainer.text:
        out.print(f"\n{final['sample']}\n", markup=False)
    return final


@click.command()
@console.options(Recipe)
@click.argument("more_data", nargs=-1)
def main(more_data: tuple[str, ...], **settings: Any) -> None:
    """Train a language model on text or random tokens and print a sample of what it learned."""
    if more_data and not settings["data"]:
        raise UserError(f"unexpected argument {more_data[0]!r}; text is named with --data FILE ...")
    settings["data"] = (*settings["data"], *more_data)  # --data a.txt b.txt
    try:
        train(Recipe(**settings))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise UserError("out of memory although it was counted to fit; lower --batch-size or --context") from error


if __name__ == "__main__":
    sys.exit(console.run_command(main))
