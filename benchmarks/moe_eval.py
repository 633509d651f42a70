"""How well, how fast, and where does the time go? A mixture of experts as a language model, evaluated over several
ranks: `python -m benchmarks.moe_eval --nproc 4 --device cpu`.

What fairseq's eval_lm does (branch moe): the loss in bits and the perplexity over blocks of a text, with the experts
split over the ranks. `--moe einsum` computes as it does and counts its operators beside a published profile; `--moe
both` lets the sorted formulation take turns with it. Weights are random, by --seed: only times and counts matter.
"""

import sys
from dataclasses import replace
from typing import Any

import click
import torch

from benchmarks.collect_files import collect_files
from benchmarks.moe_blocks import Blocks
from benchmarks.moe_eval_model import build
from benchmarks.moe_eval_options import DTYPES, SMOKE, MoEEvalSettings
from benchmarks.moe_eval_profile import Calls, count_calls
from benchmarks.moe_eval_rank import Outcome, Scorer, Tally
from benchmarks.moe_eval_record import make_records
from benchmarks.moe_eval_report import write_profile, write_words
from benchmarks.moe_eval_tables import show
from benchmarks.records import append_record, appended, open_records
from cs336_systems.comm import Mesh, Place, agree, backend_of, distributed, find_place
from cs336_systems.comm.launch import run_command_on_ranks, start_ranks
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_count
from cs336_systems.host.machine import choose_device, environment, usable_memory
from cs336_systems.host.text import printable
from cs336_systems.presets import Dispatch

PROFILED = 5  # batches at most under the profiler, as many as the published profile has


def take_turns(scorer: Scorer, settings: MoEEvalSettings, batches: int, quiet: bool) -> list[Tally]:
    """Every formulation's tally; they take turns batch by batch, so that what slows the machine meets all of them."""
    variants = settings.variants()
    for _ in range(settings.warmup):
        for dispatch in variants:
            scorer.take(0, scorer.new_tally(dispatch, "none"))
    tallies = [scorer.new_tally(dispatch, settings.words) for dispatch in variants]
    with console.progress("batches", batches * len(variants), quiet=quiet) as advance:
        for number in range(batches):
            for tally in tallies:
                scorer.line_up()
                scorer.take(number, tally, keep=settings.words_file is not None)
                advance(tally.dispatch)
    return tallies


def profile(scorer: Scorer, settings: MoEEvalSettings, batches: int, quiet: bool) -> dict[Dispatch, list[Calls]]:
    """Calls by formulation and rank, of the first batches once more. With --profile, traces are left as well."""
    found: dict[Dispatch, list[Calls]] = {}
    with console.progress("profile", len(settings.variants()), quiet=quiet) as advance:
        for dispatch in settings.variants():
            folder = settings.folder() / dispatch if settings.profiled else None
            about = {"size": f"{settings.size}, {dispatch}", "device": scorer.device.type}
            found[dispatch] = count_calls(scorer, dispatch, batches, settings.words, folder, about)
            advance(dispatch)
    return found


def work(place: Place, settings: MoEEvalSettings, blocks: Blocks) -> None:
    """One rank's part: the turns, the profile, and on rank 0 the tables and the record."""
    device, config = choose_device(settings.device), settings.config()
    free = usable_memory(device) // (place.local_world_size if device.type == "cpu" else 1)
    with distributed(device, settings.backend, settings.timeout, place) as group:
        quiet, sizes = group.rank() > 0, settings.sizes(config, group.size())
        mesh = Mesh(sizes["tp"], ep=sizes["ep"], dp=sizes["dp"])
        rows, dtype = settings.batch_size, DTYPES[settings.precision]
        evaluated = build(config, mesh, settings.seed, device, dtype, rows, config.context_length, free)
        scorer = Scorer(evaluated, blocks, mesh, device, rows)
        batches = settings.count(blocks, mesh.data.size())
        tallies = take_turns(scorer, settings, batches, quiet)
        outcomes = [scorer.share(tally) for tally in tallies]
        log_probs = scorer.every_log_prob(tallies[-1]) if settings.words_file else {}
        calls = profile(scorer, settings, min(batches, PROFILED), quiet)
        agree("the traces are written", "", group)
        if settings.profiled and not place.one_machine:
            for dispatch in settings.variants():
                collect_files(settings.folder() / dispatch, group, device)
        if group.rank() == 0:
            stamp = environment(device, settings.commit) | {"world_size": group.size(), "backend": backend_of(group)}
            finish(settings, scorer, outcomes, tallies[-1], calls, log_probs, stamp)


def finish(
    settings: MoEEvalSettings,
    scorer: Scorer,
    outcomes: list[Outcome],
    tally: Tally,
    calls: dict[Dispatch, list[Calls]],
    log_probs: dict[int, list[float]],
    stamp: dict[str, Any],
) -> None:
    """Print, write and record what rank 0 knows of all."""
    blocks, config, device = scorer.blocks, scorer.config, scorer.device
    weights = "random weights" if settings.seed == 0 else f"random weights, seed {settings.seed}"
    print(
        f"{settings.size}, {weights}: {config.num_layers} layers, {config.expert_layers} of them with "
        f"{config.num_experts} experts; d_model {config.d_model}, {config.vocab_size} words, {settings.precision}"
    )
    scored = len(outcomes[0].blocks)
    print(
        f"{blocks.name}: {scored} of {blocks.count} blocks of {blocks.context} tokens, {settings.batch_size} a batch "
        f"for each of {scorer.mesh.data.size()} ranks with other blocks ({scorer.mesh or 'one process'})"
    )
    records = make_records(settings, scorer, outcomes, calls, stamp)
    show(settings, scorer, outcomes, calls, records, tally)
    if settings.words_file:
        write_words(settings.words_file, blocks, log_probs)
        print(printable(f"{format_count(outcomes[-1].tokens)} words written to {settings.words_file}"))
    if settings.profiled:
        for dispatch in settings.variants():
            write_profile(settings.folder() / dispatch, dispatch, console.console())
    if not settings.smoke:
        path = settings.results_folder(device) / "moe_eval.jsonl"
        for record in records:
            append_record(record, path)
        print(appended(len(records), path))


def prepare(settings: MoEEvalSettings) -> None:
    """Make what is to be written. Raises UserError where it cannot be, before anything is measured in vain."""
    try:
        if settings.profiled:
            settings.folder().mkdir(parents=True, exist_ok=True)
        if settings.words_file:
            settings.words_file.touch()
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}; name another") from None


@click.command()
@console.options(MoEEvalSettings)
def main(**options: Any) -> None:
    """Evaluate a language model with experts: loss, perplexity, speed, balance, bytes, and where the time goes."""
    settings, here = MoEEvalSettings(**options), find_place()
    if settings.smoke:
        settings = replace(settings, **SMOKE)
    ranks = here.world_size if here.world_size > 1 else settings.nproc or 1
    name = settings.device or ("cuda" if torch.cuda.device_count() else "cpu")
    config = settings.config()
    settings.sizes(config, ranks)
    blocks = settings.blocks(config)
    if settings.words_file and settings.words == "none":
        raise UserError(f"--words none reads no words to write to {settings.words_file}; drop one of the two")
    prepare(settings)
    if here.rank == 0 and not settings.smoke:
        open_records(settings.results_folder(torch.device(name)), "moe_eval")
    start_ranks(work, settings.device, settings.nproc, settings, blocks)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
