"""Train a model: `python -m cs336_systems.train --size tiny`, alone or on each rank under torchrun.

`Recipe` says what, `Trainer` lays it out and takes the steps; here are the loop, its log, and the command line.
"""

import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click
import torch
from torch import Tensor

from cs336_systems import console
from cs336_systems.comm import Place, agree, all_gather, current_place, distributed, find_place
from cs336_systems.comm.launch import run_in_one_voice, start_ranks
from cs336_systems.console import format_bytes, format_count, format_seconds
from cs336_systems.cost import Hardware, count_parameters
from cs336_systems.cost.flops import model_flops
from cs336_systems.cost.probe import probe
from cs336_systems.data import Batch
from cs336_systems.dry_run import dry_run
from cs336_systems.errors import UserError
from cs336_systems.machine import PeakMemory, choose_device, device_name, environment, out_of_memory
from cs336_systems.megatron_options import translate
from cs336_systems.recipe import Recipe
from cs336_systems.run_log import iteration_line, open_log, write_line
from cs336_systems.sampling import sample_text
from cs336_systems.trainer import Step, Trainer


class Loop:
    """All steps of a recipe, with a log line every `log_every` of them and an evaluation every `eval_interval`."""

    def __init__(self, trainer: Trainer, hardware: Hardware, log: IO[str]) -> None:
        self.trainer, self.log, self.recipe = trainer, log, trainer.recipe
        self.peak = hardware.matmul_flops * devices(trainer)
        config, seq = trainer.config, trainer.seq
        self.out = console.console(quiet=trainer.mesh.world.rank() > 0)
        # Of microbatches, since a capacity is a group's.
        self.flops = model_flops(config, trainer.micro_batch, seq) * (trainer.batch // trainer.micro_batch)
        self.since: list[Step] = []  # the last log line
        self.start = time.perf_counter()
        self.note = ""

    def run(self) -> None:
        """Raises UserError when the loss is no longer a number."""
        ranks = self.trainer.mesh.world
        expected = self.recipe.steps * self.flops / self.peak
        with console.progress("training", self.recipe.steps, expected, quiet=ranks.rank() > 0) as advance:
            agree("ready for the first step", "", ranks)  # who is late now must not seem slow in it
            self.trainer.timers.reset()
            self.start = time.perf_counter()
            for number in range(1, self.recipe.steps + 1):
                self.since.append(self.trainer.step(number - 1))
                if number % self.recipe.log_every == 0 or number == self.recipe.steps:
                    self._report(number)
                if self.recipe.eval_interval and number % self.recipe.eval_interval == 0:
                    self._evaluate(number)
                advance(self.note)

    def _report(self, number: int) -> None:
        trainer, steps, batch = self.trainer, len(self.since), self.trainer.batch
        taken = [step for step in self.since if not step.skipped]  # an overflow's loss may be no number
        lm, pair = trainer.mean_losses(taken)
        norm, seconds = self.since[-1].norm.item(), (time.perf_counter() - self.start) / steps
        if taken:
            require_finite(lm + pair + taken[-1].norm.item(), number, self.recipe)
        mfu = self.flops / seconds / self.peak
        tokens = batch * trainer.seq / seconds
        line: dict[str, Any] = {"step": number, "loss": lm + pair if taken else None, "lr": self.since[-1].rate}
        line |= {"grad_norm": norm if math.isfinite(norm) else None, "tokens_per_s": tokens, "mfu": mfu}
        if self.recipe.is_bert:
            line |= {"lm_loss": lm, "sop_loss": pair} if taken else {}
        line |= (routing := trainer.routing())
        if self.recipe.precision == "fp16":
            line |= {"loss_scale": trainer.scaler.scale, "skipped": steps - len(taken)}
        kind = trainer.timers_shown
        if kind != "none":
            line["step_ms"] = 1e3 * seconds
            line["timers_ms"] = {  # of each rank, in order; None where it does not use the timer
                name: [None if math.isnan(each) else each / steps for each in values]
                for name, values in trainer.timers.by_rank().items()
            }
            last = trainer.timers.line(steps, "minmax" if kind == "minmax" else "max")
            self.out.print(iteration_line(line, self.recipe.steps, batch), markup=False, soft_wrap=True)
            self.out.print(last, markup=False, soft_wrap=True)
        write_line(line, self.log)
        loss = f"lm {lm:.3f} + sop {pair:.3f}" if self.recipe.is_bert else f"loss {lm:.3f}"
        loss += f"  balance {routing['balance']:.2f}" if routing else ""
        loss += f", {routing['dropped']:.0%} dropped" if routing.get("dropped") else ""
        self.note = f"{loss}  {format_count(tokens)} tokens/s  MFU {mfu:.0%}"
        self.since, self.start = [], time.perf_counter()

    def _evaluate(self, number: int) -> None:
        began = time.perf_counter()
        losses = self.trainer.validate()
        if losses is None:
            return
        line = {"step": number, "validation_loss": losses[0]}
        line |= {"validation_sop_loss": losses[1]} if self.recipe.is_bert else {}
        write_line(line, self.log)
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in line.items() if name != "step")
        self.out.print(f"step {number}: {shown}", markup=False)
        self.start += time.perf_counter() - began


def devices(trainer: Trainer) -> float:
    """How many times what one rank can compute all ranks can: as many as there are, unless they share cores."""
    ranks = trainer.mesh.world.size()
    if trainer.device.type == "cuda":
        return ranks
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ranks * min(1.0, cores / (torch.get_num_threads() * current_place().local_world_size))


def require_finite(value: float, step: int, recipe: Recipe) -> None:
    """Raises UserError when the loss or the gradient is no longer a number."""
    if not math.isfinite(value):
        raise UserError(f"the loss or its gradient is {value} after {step} steps; lower --lr (now {recipe.lr:g})")


def over_ranks(value: float, trainer: Trainer) -> list[float]:
    """(least, most) of a number over all ranks. Every rank must call this."""
    group = trainer.mesh.world
    values = torch.zeros(group.size(), dtype=torch.float64, device=trainer.device)
    values[group.rank()] = value
    all_gather(values, group, "a number of each rank").wait()
    return [values.min().item(), values.max().item()]


def sample(trainer: Trainer) -> str | None:
    """What the model would write; None for what is not text, and where no rank has the whole pipeline.

    Every rank must call this.
    """
    recipe = trainer.recipe
    if recipe.is_bert or list(recipe.data) == ["random"] or trainer.stage.stages > 1:
        return None

    def logits(tokens: Tensor) -> Tensor:
        # The sequence is split evenly. What comes after a token does not change its logits, or hardly: padding may
        # take an expert's slots.
        short = -tokens.shape[1] % trainer.pipeline.sequence
        padded = torch.nn.functional.pad(tokens, (0, short))
        return trainer.model(Batch(padded, None))[:, : tokens.shape[1]]

    trainer.model.eval()
    return sample_text(logits, trainer.device, trainer.seq, recipe.prompt, recipe.sample_bytes, recipe.seed)


def introduce(trainer: Trainer, hardware: Hardware) -> None:
    """Print what is about to be trained, and on what."""
    recipe, mesh = trainer.recipe, trainer.mesh
    config, parameters = trainer.config, format_count(sum(count_parameters(trainer.config).values()), billion="B")
    experts = f", {config.num_experts} experts in {config.expert_layers} layers" if config.num_experts else ""
    ranks = mesh.world.size()
    layout = f", {ranks} ranks ({mesh}), ZeRO stage {recipe.zero}" if ranks > 1 else ""
    stages = mesh.pp.size()
    count = trainer.batch // mesh.data.size() // trainer.micro_batch
    micro = f", {count} microbatch{'es' * (count > 1)} of {trainer.micro_batch}" if count > 1 or stages > 1 else ""
    micro += f", schedule {recipe.schedule_name}" if stages > 1 else ""
    console.console(quiet=mesh.world.rank() > 0).print(
        f"{recipe.name}{' (BERT)' if recipe.is_bert else ''}: {parameters} parameters{experts}, batch "
        f"{trainer.batch} x {trainer.seq}{layout}{micro}\n"
        f"{trainer.feed.name}: {format_count(trainer.feed.tokens)} tokens\n"
        f"{hardware.name}: {format_count(hardware.matmul_flops)}FLOP/s at best in {recipe.precision}",
        markup=False,
    )


def train(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe on every rank; rank 0 prints what came of it. Returns the log's last record.

    Raises UserError for a run that cannot be made, or whose loss diverges.
    """
    trainer = Trainer(recipe)
    device, world = trainer.device, trainer.mesh.world
    hardware = probe(device, recipe.precision, device_name(device), budget=0.2)
    introduce(trainer, hardware)
    with open_log(recipe.log_file, world) as log:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(recipe).items()}
        header: dict[str, Any] = {"recipe": settings, "corpus": trainer.feed.name, "sha256": trainer.feed.sha256}
        header |= {"model": asdict(trainer.config), "seq": trainer.seq}
        header |= {"batch_size": trainer.batch, "micro_batch_size": trainer.micro_batch}
        stamp = environment(device) | {"world_size": world.size(), "backend": recipe.backend}
        write_line(header | {"mesh": trainer.mesh.sizes, "environment": stamp}, log)
        peak, start = PeakMemory(device), time.perf_counter()
        Loop(trainer, hardware, log).run()
        final: dict[str, Any] = {"steps": recipe.steps, "seconds": time.perf_counter() - start}
        final["peak_memory"] = over_ranks(peak.read() or 0, trainer)
        losses = trainer.validate()
        final["validation_loss"] = None if losses is None else losses[0]
        if losses and recipe.is_bert:
            final["validation_sop_loss"] = losses[1]
        require_finite(sum(losses or ()), recipe.steps, recipe)
        if (text := sample(trainer)) is not None:
            final["sample"] = text
        write_line(final, log)
    conclude(trainer, final)
    return final


def conclude(trainer: Trainer, final: dict[str, Any]) -> None:
    """Print what came of a run."""
    recipe, loss = trainer.recipe, final["validation_loss"]
    out = console.console(quiet=trainer.mesh.world.rank() > 0)
    reached = "not measured, no text is left for it" if loss is None else f"{loss:.3f} nats a token"
    if "validation_sop_loss" in final:
        reached += f" and {final['validation_sop_loss']:.3f} a sentence pair"
    text = list(recipe.data) != ["random"] and not recipe.is_bert
    guessing = math.log(256 if text else trainer.feed.vocab_size)
    least, most = final["peak_memory"]
    memory = f"peak memory of a rank {format_bytes(least)} to {format_bytes(most)}; " if most > least else ""
    out.print(
        f"{recipe.steps} steps in {format_seconds(final['seconds'])}; validation loss {reached} "
        f"(guessing: {guessing:.3f}); {memory}log: {recipe.log_file}",
        markup=False,
        soft_wrap=True,
    )
    if trainer.skipped:
        out.print(
            f"{trainer.skipped} of {recipe.steps} steps were skipped: their gradients overflowed fp16, and the loss "
            f"scale came down to {trainer.scaler.scale:g}; take more steps, or a lower --initial-loss-scale",
            markup=False,
            soft_wrap=True,
        )
    if "sample" in final:
        out.print(f"\n{final['sample']}\n", markup=False)


def work(place: Place, recipe: Recipe) -> None:
    """One rank's part. Raises UserError for a run that cannot be made."""
    device = choose_device(recipe.device)
    with distributed(device, recipe.backend, recipe.timeout, place):
        try:
            train(recipe)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                "out of memory although it was counted to fit; lower --micro-batch-size or --context, or recompute"
            ) from error


class TranslatedCommand(click.Command):
    """A command that also understands Megatron-LM's option names, and says what it made of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        translation = translate(args)
        for note in translation.notes:
            click.echo(f"note: {note}", err=True)
        return super().parse_args(ctx, list(translation.arguments))


@click.command(cls=TranslatedCommand)
@console.options(Recipe)
@click.argument("more_data", nargs=-1)
def main(more_data: tuple[str, ...], **settings: Any) -> None:
    """Train a language model on text or random tokens and print a sample of what it learned.

    Megatron-LM's names of the options work, too: an option string of its pretraining scripts trains here as it stands.
    """
    if more_data and not settings["data"]:
        raise UserError(f"unexpected argument {more_data[0]!r}; text is named with --data FILE ...")
    settings["data"] = (*settings["data"], *more_data)  # --data a.txt b.txt
    recipe = Recipe(**settings)
    # What cannot be laid out is refused here, before any rank is started or joins.
    ranks = max(find_place().world_size, recipe.nproc or 1)
    recipe.check_layout(recipe.model_config(), ranks)
    if recipe.dry_run:
        console.console().print(dry_run(recipe, ranks), markup=False)
        return
    start_ranks(work, recipe.device, recipe.nproc, recipe)


if __name__ == "__main__":
    sys.exit(run_in_one_voice(main))
