"""Train a model: `python -m cs336_systems.train --size tiny`, alone or on each rank under torchrun.

This file checks, begins and ends a run; `Recipe` holds its options, `Trainer` takes a step, `Loop` takes them all."""

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import click
import torch

from cs336_systems.buffers.replicas import require_equal
from cs336_systems.comm import Place, agree, default_group, distributed, find_place
from cs336_systems.comm.launch import run_command_on_ranks, start_ranks
from cs336_systems.context_parallel import attention_work
from cs336_systems.cost import Hardware, Mode, capacity, count_parameters
from cs336_systems.cost.flops import model_flops
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.host import console, machine
from cs336_systems.host.console import flag, format_count
from cs336_systems.host.load import note_if_busy
from cs336_systems.host.machine import PeakMemory, choose_device, device_name, out_of_memory, usable_memory
from cs336_systems.layout import Layout
from cs336_systems.presets import ModelConfig, with_edition
from cs336_systems.train.batches import most_tokens
from cs336_systems.train.loop import STEPS_AHEAD, Loop, StopSignal
from cs336_systems.train.megatron import translate
from cs336_systems.train.observation import dry_run, fullest
from cs336_systems.train.recipe import GROUPS, OPTIONS, Recipe
from cs336_systems.train.run_folder import RunCheckpoints, load_weights, run_folder
from cs336_systems.train.run_log import conclude, final_record, header, open_log, write_line
from cs336_systems.train.run_state import seed_generators
from cs336_systems.train.trainer import Trainer

SAVE_SECONDS = 25.0  # seconds that ranks get to save after SIGTERM: schedulers give 30
OF_A_MACHINE = {"data", "vocab_file", "out", "weights", "log_file", "device", "nproc"}  # may differ between ranks


def introduce(trainer: Trainer, hardware: Hardware) -> str:
    """Describe model, layout, text and hardware in some lines, before training."""
    recipe, config, layout = trainer.recipe, trainer.config, trainer.part.layout
    text = f"{with_edition(recipe.model.name, recipe.model.year)}{' (BERT)' if recipe.model.is_bert else ''}: "
    text += f"{format_count(sum(count_parameters(config).values()), billion='B')} parameters"
    text += f", {config.num_experts} experts in {config.expert_layers} layers" if config.num_experts else ""
    text += f", batch {trainer.batch} x {trainer.seq}"
    text += f", {layout.ranks} ranks ({trainer.mesh}), ZeRO stage {layout.zero}" if layout.ranks > 1 else ""
    if (count := layout.microbatches) > 1 or layout.pp > 1:
        text += f", {count} microbatch{'es' * (count > 1)} of {layout.micro_batch}"
    text += f", schedule {layout.schedule}" if layout.pp > 1 else ""
    packed = "\npacked documents; FLOPs are counted as if every row were one" if recipe.data.pack else ""
    if layout.cp > 1:
        positions = trainer.batches.batch(0, *trainer.data_rank).positions
        work = attention_work(layout.cp, trainer.seq, positions)
        shares = " ".join(f"{share / sum(work):.1%}" for share in work)
        text += f"\ncp-type {layout.cp_type}; scores of attention by rank{', first batch' if packed else ''}: {shares}"
    text += f"{packed}\n{trainer.batches.name}: {format_count(trainer.batches.tokens)} tokens\n"
    return f"{text}{hardware.name}: {format_count(hardware.matmul_flops)}FLOP/s at best in {recipe.model.precision}"


def train(recipe: Recipe, place: Place | None = None) -> dict[str, Any]:
    """Run a recipe on every rank; rank 0 prints the outcome. Returns the log's last record. Ranks that torchrun has
    restarted (see `place`) resume. Raises UserError for a recipe that cannot be run, and for a loss that diverges."""
    place = place or find_place()
    world, device = default_group(), choose_device(recipe.launch.device)
    # With different options the ranks' collectives would not match.
    options = [f"{flag(name)} {value}" for name, value in recipe.options().items() if name not in OF_A_MACHINE]
    require_equal("options", options, world, ": start all ranks with the same")
    seed_generators(recipe.run.seed, world.rank())  # for user code, see run_state.py
    # SIGTERM is caught from here on, since a large model takes minutes to build and to read.
    stopping = StopSignal(world, STEPS_AHEAD if device.type == "cuda" else 0, active=recipe.run.out is not None)
    with stopping, run_folder(recipe, world, restarted=place.attempt != "0") as resume:
        return _train(Trainer(recipe.change(resume=resume)), stopping, place.local_world_size)


def _train(trainer: Trainer, stopping: StopSignal, ranks_here: int) -> dict[str, Any]:
    recipe, run, device, world = trainer.recipe, trainer.recipe.run, trainer.device, trainer.mesh.world
    say = partial(console.console(quiet=world.rank() > 0).print, soft_wrap=True)
    # Rank 0 measures for all ranks, undisturbed by them.
    found = asdict(probe(device, recipe.model.precision, device_name(device), budget=0.2)) if world.rank() == 0 else {}
    hardware = Hardware(**agree("rates of the device", found, world)[0])
    say(introduce(trainer, hardware))
    checkpoints = RunCheckpoints(trainer, say) if run.out else None
    done = checkpoints.restore() if checkpoints and run.resume else 0
    if done >= run.steps:
        say(f"nothing is left to train: {done} steps are done, and --steps {run.steps} counts those, too")
    if run.weights and not done:
        load_weights(trainer, run.weights)
        say(f"begins with the parameters of {run.weights}")
    with open_log(run.log_path, world, done, named=bool(run.log_file or run.out)) as log:
        write_line(header(trainer, done), log)
        peak, start = PeakMemory(device), time.perf_counter()
        # On a CPU the ranks of one machine share its cores.
        share = machine.allowed_cores() / (torch.get_num_threads() * ranks_here) if device.type == "cpu" else 1.0
        # FLOPs are counted by microbatch, since an expert's capacity depends on it.
        flops = model_flops(trainer.config, trainer.micro_batch, trainer.seq) * (trainer.batch // trainer.micro_batch)
        least_seconds = flops / (hardware.matmul_flops * world.size() * min(1.0, share))
        loop = Loop(trainer, log, say, peak, least_seconds, checkpoints, done)
        try:
            complete = loop.run(stopping)
        except UserError:  # raised on all ranks: a background save can still end
            loop.finish_save()
            raise
        if not complete:
            write_line(stopped := {"stopped": "SIGTERM", "step": loop.done}, log)
            where = f"saved in {run.out}" if loop.done > done else "before another one, with nothing new to save"
            where = "not saved, see above" if trainer.overflows > 1 else where
            say(f"SIGTERM: stopped after {loop.done} of {run.steps} steps, {where}; go on with --resume")
            return stopped
        final = final_record(trainer, loop.done, time.perf_counter() - start, peak)
        write_line(final, log)
    say(conclude(trainer, final, log.name, done))
    return final


def usable_by_rank(recipe: Recipe, ranks: int) -> int:
    """Bytes that each of `ranks` ranks could use now; ranks on a CPU share its memory."""
    if recipe.launch.device == "cpu" or not torch.cuda.device_count():
        return usable_memory(torch.device("cpu")) // ranks
    # A child process asks the GPU: after that, this process could not fork ranks any more.
    with ProcessPoolExecutor(1, get_context("fork")) as child:
        return child.submit(usable_memory, torch.device("cuda", find_place().local_rank)).result()


def least_memory(recipe: Recipe, config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Lower bound of a rank's memory, in bytes by part: an equal share of the whole model's state."""
    parameters = sum(count_parameters(config).values()) // (layout.tp * layout.pp * layout.ep)
    width, state = (2, 12) if recipe.model.half else (4, 8)  # bytes per parameter
    parts = {"parameters": (width, 3), "gradients": (width, 2), "optimizer state": (state, 1)}  # bytes, ZeRO stage
    shares = {part: size / (layout.data if layout.zero >= stage else 1) for part, (size, stage) in parts.items()}
    return {part: int(parameters * share) for part, share in shares.items()} | {"activations": 0}


def require_fit(recipe: Recipe, ranks: int, usable: int) -> None:
    """Raises UserError, with settings that would fit, if the run needs more than a rank's `usable` bytes."""
    config, layout = recipe.model_config(most_tokens(recipe)), recipe.layout(ranks)
    name, seq = recipe.model.name, recipe.seq(config)

    def needs(config: ModelConfig, batch: int, seq: int, mode: Mode = "step") -> dict[str, int]:
        # Observing a huge model takes long, so it is not done if the state alone does not fit.
        if sum((least := least_memory(recipe, config, layout)).values()) > usable:
            return least
        sized = replace(layout, micro_batch=batch, global_batch=batch * layout.rows * layout.microbatches)
        return fullest(recipe.change(context=seq), config, sized)

    if ranks == 1:
        capacity.require_fit(name, config, layout.micro_batch, seq, "step", needs, usable, modes=())
    else:
        capacity.require_layout_fits(name, config, layout, seq, needs(config, layout.micro_batch, seq), usable)


def work(place: Place, recipe: Recipe) -> None:
    """Run one rank's part. Raises UserError for a recipe that cannot be run."""
    with distributed(choose_device(recipe.launch.device), recipe.launch.backend, recipe.launch.timeout, place):
        try:
            train(recipe, place)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            reason = "out of memory although it was counted to fit; lower --micro-batch-size or --context, or recompute"
            raise UserError(reason) from error


class TrainCommand(click.Command):
    """A command that lists its options by group, and also understands Megatron-LM's names of them. See click."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words, notes = translate(args)
        for note in notes:
            click.echo(f"note: {note}", err=True)
        try:
            return super().parse_args(ctx, list(words))
        except click.NoSuchOption:
            known = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
            typed = (word.partition("=")[0] for word in words if word.startswith("--"))
            unknown = [name for name in dict.fromkeys(typed) if name not in known]
            if len(unknown) < 2:
                raise
            raise UserError(f"no such options: {', '.join(unknown)}; train --help lists those that exist") from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {each.name: record for each in self.get_params(ctx) if (record := each.get_help_record(ctx))}
        for group in GROUPS:
            with formatter.section(f"Options: {group}"):
                formatter.write_dl([records.pop(name) for name, its in OPTIONS.items() if its == group])
        with formatter.section("Options"):
            formatter.write_dl(list(records.values()))


@click.command(cls=TrainCommand)
@console.options(*GROUPS.values())
@click.argument("stray", nargs=-1, metavar="")
def main(stray: tuple[str, ...], **settings: Any) -> None:
    """Train a language model on text or random tokens and print a sample of what it learned.

    Megatron-LM's option names work, too: options of its pretraining scripts can be pasted here unchanged.
    """
    if stray:
        raise UserError(f"unexpected argument {stray[0]!r}; text is named with --data FILE ...")
    recipe = Recipe.of(**settings)
    # A run that cannot be laid out or does not fit is refused here, before any rank is started or joins.
    ranks = max(find_place().world_size, recipe.launch.nproc or 1)
    recipe.check(recipe.model_config(most_tokens(recipe)), ranks)
    if recipe.launch.dry_run:
        console.console().print(dry_run(recipe, ranks))
        return
    require_fit(recipe, ranks, usable_by_rank(recipe, ranks))
    note_if_busy()
    patience = SAVE_SECONDS if recipe.run.out else 2.0
    start_ranks(work, recipe.launch.device, recipe.launch.nproc, recipe, patience=patience)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
