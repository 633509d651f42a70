"""Evaluation of a mixture of experts as a language model over several ranks, with its speed and profile:
`python -m benchmarks.moe_eval --nproc 4 --device cpu`.

Like fairseq's eval_lm (branch moe), it computes loss in bits and perplexity over blocks of a text, with the experts
split over the ranks. `--moe einsum` computes as it does and counts its operators beside a published profile; `--moe
both` lets the sorted formulation take turns with it. Weights are random: only times and counts matter.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.harness import line_up, noise, take_turns
from benchmarks.lib.expert_calls import OF_WORDS, PUBLISHED, Calls, count_calls
from benchmarks.lib.expert_scores import RUN, TAGS, Blocks, How, Scorer, Tally
from benchmarks.lib.expert_tables import calls, evaluations, show
from benchmarks.lib.options import RankOptions, command
from benchmarks.lib.profiling_record import collect_files
from benchmarks.lib.scaling_record import crowded
from benchmarks.records import Record
from cs336_systems.comm import Mesh, Place, agree, backend_of, distributed, find_place, mesh_sizes
from cs336_systems.comm.launch import run_command_on_ranks, start_ranks
from cs336_systems.cost import flops as cost
from cs336_systems.data.corpus import check_length, load_corpus
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds, os_errors, setting
from cs336_systems.host.machine import environment, usable_memory
from cs336_systems.layout import check_divides, check_experts
from cs336_systems.presets import Dispatch, ModelConfig, preset
from cs336_systems.profiling import read_trace, trace_files
from cs336_systems.profiling.report import write_report
from cs336_systems.train.options import COUNT, NATURAL, ExpertOptions

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What makes a smoke run short, in place of what was said.
SMOKE: dict[str, Any] = {"d_model": 16, "vocab_size": 256, "context": 32, "batches": 1, "num_experts": 8}
KEPT = 0.1  # of the text, at its end, is what is evaluated
PROFILED = 5  # batches at most under the profiler, as many as the published profile has


@dataclass(frozen=True)
class MoEEvalSettings(ExpertOptions, RankOptions):
    """Options of the command line, one field each."""

    size: str = setting("fairseq-moe-twin", "Model preset.")
    d_model: int | None = setting(None, "Width; the MLP's hidden width is 4 times it.", type=COUNT)
    num_layers: int | None = setting(None, "Number of layers.", type=COUNT)
    vocab_size: int | None = setting(None, "Vocabulary size; 256 at least, because text is bytes.", type=COUNT)
    context: int | None = setting(None, "Tokens in a block.  [default: the preset's]", type=COUNT)
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = setting("fp32", "Dtype of weights and activations.")
    data: tuple[str, ...] = setting((), "Text files, or `random`.  [default: Python's standard library]")
    batches: int = setting(5, "Batches of each rank, a block each, or fewer if the text is short.", type=COUNT)
    warmup: int = setting(1, "Untimed batches before the timed ones.", type=NATURAL)
    moe: Literal["sort", "einsum", "both"] | None = setting(  # type: ignore[assignment]
        None, "Dispatch by a sort, by one-hot tensors, or both in turn.  [default: sort; with --profile both]"
    )
    words: How = setting("fast", "Reading words' log-probabilities: fast (a copy per batch), or slow (one by one).")
    profile: bool = setting(False, "Write traces, tables and one trace of all ranks to --out.")
    out: Path | None = setting(None, "Folder for the profile.  [default: runs/moe_eval/<size>]")
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 1]", type=COUNT)
    tp: int = setting(1, "Tensor-parallel ranks, which evaluate the same blocks.", type=COUNT)
    ep: int | None = setting(
        None, "Expert-parallel ranks.  [default: the rest, or as many as there are experts]", type=COUNT
    )

    def config(self) -> ModelConfig:
        """The model. Raises UserError for one that cannot be."""
        shape = preset(self.size).model.override(
            vocab_size=self.vocab_size, context_length=self.context, d_model=self.d_model,
            d_ff=4 * self.d_model if self.d_model else None, num_layers=self.num_layers, dropout=0.0,
        )  # fmt: skip
        if not shape.causal:
            raise UserError(f"{self.size} is no language model: it sees the words that it would be asked for")
        if not (shape.num_experts if self.num_experts is None else self.num_experts):
            raise UserError(f"{self.size} has no experts to evaluate: set --num-experts")
        return replace(self, moe=self.variants()[0]).with_experts(shape)

    def variants(self) -> tuple[Dispatch, ...]:
        """The formulations, in the order in which they take turns."""
        chosen = self.moe or ("both" if self.profile or self.out else "sort")
        return ("einsum", "sort") if chosen == "both" else (chosen,)

    @property
    def folders(self) -> dict[Dispatch, Path]:
        """Folder of each formulation's traces; none without --profile."""
        out = self.out or Path("runs/moe_eval", self.size)
        return {dispatch: out / dispatch for dispatch in self.variants()} if self.profile or self.out else {}

    def sizes(self, config: ModelConfig, ranks: int) -> dict[str, int]:
        """The mesh. Raises UserError, with the numbers, for a layout that cannot be."""
        check_divides(config, self.tp)
        ep = self.ep or min(max(1, ranks // self.tp), config.num_experts)
        check_experts(config, ep)
        return mesh_sizes(ranks, self.tp, 1, ep)

    def blocks(self, config: ModelConfig) -> Blocks:
        """The end of the text. Raises UserError where it is shorter than one block."""
        kept = load_corpus(self.data, config.vocab_size, config.context_length).split(KEPT)[1]
        check_length(kept, config.context_length)
        return Blocks(kept.tokens, config.context_length, kept.name)


def play(scorer: Scorer, settings: MoEEvalSettings, batches: int, quiet: bool) -> list[Tally]:
    """Counts of every formulation; they take turns batch by batch, so that disturbances affect all of them."""
    for _ in range(settings.warmup):
        for dispatch in settings.variants():
            scorer.take(0, Tally(dispatch), settings.words)
    tallies = [Tally(dispatch) for dispatch in settings.variants()]

    def turn(tally: Tally) -> None:
        line_up(scorer.mesh.world, scorer.device)
        scorer.take(len(tally.laps) // 4, tally, settings.words)

    take_turns({tally.dispatch: partial(turn, tally) for tally in tallies}, batches, quiet=quiet)
    return tallies


def make_record(
    scorer: Scorer, settings: MoEEvalSettings, tally: Tally, ranks: list[Calls], stamp: dict[str, Any]
) -> Record:
    """The record of a formulation, of whose calls each of `ranks` has counted its own. Every rank calls this."""
    config, mesh, sizes, mixture = scorer.config, scorer.mesh, scorer.mesh.sizes, scorer.config.mixture
    samples, metrics = scorer.share(tally)
    what = {name: getattr(settings, name) for name in ("size", "precision", "words")} | {
        "seed": 0, "in_turn_with": [each for each in settings.variants() if each != tally.dispatch],
        **{name: getattr(config, name) for name in ("d_model", "d_ff", "num_layers", "num_experts", "vocab_size")},
        **{name: getattr(mixture, name) for name in ("top_k", "eval_fraction", "capacity_factor")},
        **{name: sizes[name] for name in ("tp", "ep", "dp")}, "ranks": mesh.world.size(), "moe": tally.dispatch,
        "data": scorer.blocks.name, "context": scorer.blocks.context, "batch_size": 1,
        "batches": len(samples),
    }  # fmt: skip
    names = dict.fromkeys((*PUBLISHED, *OF_WORDS, *TAGS))
    times = [(each.get("wait all-to-all", [0, 0])[1], each[RUN][1]) for each in ranks]
    metrics["waiting"] = [wait / run for wait, run in times]  # share of the evaluation, in all-to-alls
    metrics["calls"] = {name: [each.get(name, [0, 0])[0] for each in ranks] for name in names}
    predicted: dict[str, Any] = {}
    if sizes["ep"] > 1:
        config = replace(config, mixture=replace(mixture, dispatch=tally.dispatch))
        rows = cost.computed_rows(config, scorer.blocks.context, training=False)  # of a balanced router
        predicted["bytes_per_all_to_all"] = cost.row_bytes(config, rows, DTYPES[settings.precision].itemsize)
    flags = noise(metrics)
    if scorer.device.type == "cpu" and (note := crowded(mesh.world.size())):
        flags.append(note.split(": efficiency")[0] + ": wall times and waits hold turns at the cores")
    return Record("moe_eval", what, stamp, samples, metrics, predicted, flags)


def work(place: Place, settings: MoEEvalSettings, blocks: Blocks) -> None:
    """One rank's part: the turns, the profile, and on rank 0 the tables and the record."""
    device, config = settings.on, settings.config()
    free = usable_memory(device) // (place.local_world_size if device.type == "cpu" else 1)
    with distributed(device, settings.backend, settings.timeout, place) as group:
        quiet, sizes = group.rank() > 0, settings.sizes(config, group.size())
        mesh = Mesh(sizes["tp"], ep=sizes["ep"], dp=sizes["dp"])
        scorer = Scorer(config, blocks, mesh, device, DTYPES[settings.precision], free)
        batches = min(settings.batches, ceil(blocks.count / mesh.data.size()))
        tallies = play(scorer, settings, batches, quiet)
        # The first batches once more. With --profile, traces are left as well.
        how = scorer, min(batches, PROFILED), settings.words, settings.size
        counts: dict[str, Callable[[], list[Calls]]] = {
            each: partial(count_calls, *how, each, settings.folders.get(each)) for each in settings.variants()
        }
        counted = take_turns(counts, 1, quiet=quiet)
        stamp = environment(device, settings.commit) | {"world_size": group.size(), "backend": backend_of(group)}
        records = [make_record(scorer, settings, each, counted[each.dispatch][0], stamp) for each in tallies]
        agree("the traces are written", "", group)
        for folder in settings.folders.values() if not place.one_machine else ():
            collect_files(folder, group, device)
        if quiet:
            return
        report(settings, scorer, records)
    recorder = settings.recorder("moe_eval", device)
    recorder.keep(*records)
    recorder.tell()


def report(settings: MoEEvalSettings, scorer: Scorer, records: list[Record]) -> None:
    """Print and write the results of all ranks, on rank 0."""
    blocks, config, out = scorer.blocks, scorer.config, console.console()
    scored = -(-records[0].metrics["tokens"] // blocks.context)
    print(
        f"{config.num_layers} layers of random weights, {config.expert_layers} of them with experts, width "
        f"{config.d_model}, {config.vocab_size} words, {settings.precision}; "
        f"{blocks.name}: {scored} of {blocks.count} blocks of {blocks.context} tokens, each on one of "
        f"{scorer.mesh.data.size()} data-parallel ranks ({scorer.mesh or 'one process'})"
    )
    for record in records:
        found = record.metrics
        whole, without = (
            format_seconds(found["tokens"] / found[f"tokens_per_s{end}"]) for end in ("", "_without_words")
        )
        print(
            f"{record.config['moe']}: loss (base 2) {found['loss']:.6f}, perplexity {found['perplexity']:,.2f}; "
            f"{found['tokens']:,} tokens in {whole}, without reading words {without}"
        )
    show(evaluations, records)
    for record in records:
        if record.config["moe"] == "einsum":
            out.print(calls(record).table())
    for folder in settings.folders.values():
        write_report(folder, [read_trace(path) for path in trace_files(folder)], out)


@command(MoEEvalSettings)
def main(settings: MoEEvalSettings) -> None:
    """Evaluate a language model with experts: loss, perplexity, speed, bytes sent, profile."""
    here = find_place()
    if settings.smoke:
        settings = replace(settings, **SMOKE)
    ranks = here.world_size if here.world_size > 1 else settings.nproc or 1
    config = settings.config()
    settings.sizes(config, ranks)
    blocks = settings.blocks(config)
    for folder in settings.folders.values():
        with os_errors(f"write {folder}", "name another with --out"):
            folder.mkdir(parents=True, exist_ok=True)
    if here.rank == 0:
        settings.recorder("moe_eval", settings.on)
    start_ranks(work, settings.device, settings.nproc, settings, blocks)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
