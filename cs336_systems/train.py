"""Train a model: `python -m cs336_systems.train --size tiny`, alone or on each rank under torchrun.

`Recipe` says what, `Trainer` lays it out and takes a step, `Loop` takes them all; here are a run's beginning and end,
and the command line. A run with a folder (`--out`) survives: see `run_folder.py`.
"""

import json
import math
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor

from cs336_systems import console
from cs336_systems.comm import Group, Place, agree, all_gather, default_group, distributed, find_place
from cs336_systems.comm.launch import run_in_one_voice, start_ranks
from cs336_systems.console import format_bytes, format_count, format_seconds
from cs336_systems.cost import Hardware, count_parameters
from cs336_systems.cost.probe import probe
from cs336_systems.data import Batch
from cs336_systems.dry_run import dry_run
from cs336_systems.errors import UserError
from cs336_systems.loop import Loop
from cs336_systems.machine import PeakMemory, choose_device, device_name, environment, out_of_memory
from cs336_systems.megatron_options import translate
from cs336_systems.random_state import seed_generators
from cs336_systems.recipe import Recipe
from cs336_systems.run_folder import RunCheckpoints, load_weights, run_folder, settings
from cs336_systems.run_log import open_log, write_line
from cs336_systems.sampling import sample_text
from cs336_systems.stop import AHEAD, StopSignal
from cs336_systems.trainer import Trainer

PATIENCE = 25.0  # seconds that ranks get to save after SIGTERM: schedulers give 30
OWN = ("data", "vocab_file", "out", "weights", "log_file", "device", "nproc")  # may differ from machine to machine


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


def require_one_recipe(recipe: Recipe, world: Group) -> None:
    """Ranks that were started one by one may have been given different options: different collectives would meet.

    Raises UserError on every rank, naming the first option that differs.
    """
    mine = {name: str(value) for name, value in asdict(recipe).items() if name not in OWN}
    first, *others = map(json.loads, agree("options", json.dumps(mine, allow_nan=False), world))
    for rank, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first.get(name):
                option = name.replace("_", "-")
                raise UserError(
                    f"rank {rank} was started with --{option} {value} and rank 0 with --{option} {first.get(name)}: "
                    "give all ranks the same options"
                )


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


def train(recipe: Recipe, restarted: bool = False) -> dict[str, Any]:
    """Run a recipe on every rank; rank 0 prints what came of it. Returns the log's last record.

    Ranks that torchrun has `restarted` go on with the run that it began. Raises UserError for a run that cannot be
    made, or whose loss diverges.
    """
    world, device = default_group(), choose_device(recipe.device)
    require_one_recipe(recipe, world)
    seed_generators(recipe.seed, world.rank())  # for whoever draws: see random_state.py
    # From the beginning, since a large model takes minutes to build and to read.
    stopping = StopSignal(world, AHEAD if device.type == "cuda" else 0, active=recipe.out is not None)
    with stopping, run_folder(recipe, world, restarted) as resume:
        trainer = Trainer(replace(recipe, resume=resume))
        return _train(trainer, console.console(quiet=world.rank() > 0), stopping)


def _train(trainer: Trainer, out: Console, stopping: StopSignal) -> dict[str, Any]:
    recipe, device, world = trainer.recipe, trainer.device, trainer.mesh.world
    hardware = probe(device, recipe.precision, device_name(device), budget=0.2)
    introduce(trainer, hardware)
    checkpoints = RunCheckpoints(trainer, partial(out.print, soft_wrap=True)) if recipe.out else None
    done = checkpoints.restore() if checkpoints and recipe.resume else 0
    if done >= recipe.steps:
        out.print(f"nothing is left to train: {done} steps are done, and --steps {recipe.steps} counts those, too")
    if checkpoints and recipe.resume and not done:
        out.print(f"no checkpoint in {checkpoints.folder}: this run begins anew", soft_wrap=True)
    if recipe.weights and not done:
        load_weights(trainer, recipe.weights)
        out.print(f"begins with the parameters of {recipe.weights}", soft_wrap=True)
    with open_log(recipe.log_path, world, done) as log:
        write_line(header(trainer, done), log)
        peak, start = PeakMemory(device), time.perf_counter()
        loop = Loop(trainer, hardware, log, peak, checkpoints, done)
        try:
            complete = loop.run(stopping)
        except UserError:  # of all ranks: let a save beside training come to its end
            loop.finish_save()
            raise
        if not complete:
            stopped = {"stopped": "SIGTERM", "step": loop.done}
            write_line(stopped, log)
            where = f"saved in {recipe.out}" if loop.done > done else "before another one, with nothing new to save"
            where = "not saved, see above" if trainer.stuck > 1 else where
            said = f"SIGTERM: stopped after {loop.done} of {recipe.steps} steps, {where}; go on with --resume"
            out.print(said, soft_wrap=True)
            return stopped
        final = finish(trainer, loop.done, time.perf_counter() - start, peak)
        write_line(final, log)
    conclude(trainer, final, done)
    return final


def header(trainer: Trainer, done: int) -> dict[str, Any]:
    """The log's first record: what is trained, on what; in a log that goes on, with the steps that are done."""
    recipe, world = trainer.recipe, trainer.mesh.world
    stamp = environment(trainer.device) | {"world_size": world.size(), "backend": recipe.backend}
    return ({"resumed": done} if done else {}) | {
        "recipe": settings(recipe),
        "corpus": trainer.feed.name,
        "sha256": trainer.feed.sha256,
        "model": asdict(trainer.config),
        "seq": trainer.seq,
        "batch_size": trainer.batch,
        "micro_batch_size": trainer.micro_batch,
        "mesh": trainer.mesh.sizes,
        "environment": stamp,
    }


def finish(trainer: Trainer, steps: int, seconds: float, peak: PeakMemory) -> dict[str, Any]:
    """The log's last record: what came of a run of so many steps. Every rank must call this. Raises UserError for a
    loss that is no number."""
    recipe = trainer.recipe
    final: dict[str, Any] = {"steps": steps, "seconds": seconds}
    final["peak_memory"] = over_ranks(peak.read() or 0, trainer)
    losses = trainer.validate()
    if losses and not math.isfinite(sum(losses)):
        raise UserError(f"the validation loss is {sum(losses)} after {steps} steps; lower --lr")
    final["validation_loss"] = None if losses is None else losses[0]
    if losses and recipe.is_bert:
        final["validation_sop_loss"] = losses[1]
    if (text := sample(trainer)) is not None:
        final["sample"] = text
    return final


def conclude(trainer: Trainer, final: dict[str, Any], done: int = 0) -> None:
    """Print what came of a run, which may have begun after some steps of an earlier one."""
    recipe, loss = trainer.recipe, final["validation_loss"]
    out = console.console(quiet=trainer.mesh.world.rank() > 0)
    reached = "not measured, no text is left for it" if loss is None else f"{loss:.3f} nats a token"
    if "validation_sop_loss" in final:
        reached += f" and {final['validation_sop_loss']:.3f} a sentence pair"
    text = list(recipe.data) != ["random"] and not recipe.is_bert
    guessing = math.log(256 if text else trainer.feed.vocab_size)
    least, most = final["peak_memory"]
    memory = f"peak memory of a rank {format_bytes(least)} to {format_bytes(most)}; " if most > least else ""
    steps = f"{final['steps'] - done} steps{f' after {done}' if done else ''}"
    out.print(
        f"{steps} in {format_seconds(final['seconds'])}; validation loss {reached} "
        f"(guessing: {guessing:.3f}); {memory}log: {recipe.log_path}",
        markup=False,
        soft_wrap=True,
    )
    if trainer.skipped:
        why = "their gradients were inf or NaN"
        if recipe.precision == "fp16":
            why = (
                f"their gradients overflowed fp16, and the loss scale came down to {trainer.scaler.scale:g}; take more "
                "steps, or a lower --initial-loss-scale"
            )
        out.print(
            f"{trainer.skipped} of {final['steps']} steps were skipped: {why}",
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
            train(recipe, restarted=place.attempt != "0")
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
    recipe.check_run()
    recipe.check_layout(recipe.model_config(), ranks)
    if recipe.dry_run:
        console.console().print(dry_run(recipe, ranks), markup=False)
        return
    start_ranks(work, recipe.device, recipe.nproc, recipe, patience=PATIENCE if recipe.out else 2.0)


if __name__ == "__main__":
    sys.exit(run_in_one_voice(main))
