"""Cost of one expert layer, sorted and one-hot: `python -m benchmarks.moe_layer`, or under torchrun.

Both have the same weights, tokens and slots and give the same result; a layer without a capacity stands beside them.
All take turns on the same ranks. What is compared is CPU time: of all threads of a rank's process, the kernel's work
for it included. Time by the clock has also what other processes take of the cores, what ranks wait for each other, and
how many ranks share a core, which is no property of the formulation.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from rich.table import Table

from benchmarks.collective import size_name
from benchmarks.moe_layer_options import COUNT, LayerSettings
from benchmarks.moe_layer_run import DEVICE, Bench, Way, ceilings, check_ranks, predict, shape, too_large
from benchmarks.moe_layer_turns import Contender, play
from benchmarks.records import Record, append_record, appended, open_records
from cs336_systems.comm import Place, distributed, find_place
from cs336_systems.comm.launch import run_command_on_ranks, start_ranks
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, format_seconds, setting
from cs336_systems.host.machine import environment
from cs336_systems.presets import Mixture

SMOKE: dict[str, Any] = {"experts": 8, "tokens": 64, "d_model": 16, "d_ff": 32, "rounds": 2, "steps": 1}
CAPTION = (
    "one layer on one rank. CPU time: of all threads, median; in the kernel, most of it goes to new pages for large "
    "tensors. wall time: of the slowest rank. predicted: FLOPs, what is read and written, starts of operators "
    "and new pages, at what a rank was measured to need; rows and bytes exactly, unless tokens are dropped. "
    "*: noisy (standard deviation above 5% of the mean): trust the ratios, which are of pairs in one round"
)
Line = Callable[[dict[str, Any], dict[str, Any]], str]  # of a record's metrics and predictions
LINES: tuple[tuple[str, Line], ...] = (
    ("CPU time", lambda found, said: format_seconds(found["median_ms"] / 1e3)),
    ("    predicted", lambda found, said: format_seconds(said["mean_ms"] / 1e3)),
    ("    of it in the kernel", lambda found, said: format_seconds(found["system_ms"] / 1e3)),
    ("    over that of sort, median", lambda found, said: f"{found['ratio_median']:.3g}"),
    ("    quartiles", lambda found, said: f"{found['ratio_low']:.3g} to {found['ratio_high']:.3g}"),
    ("    the same without the kernel", lambda found, said: f"{found['user_ratio_median']:.3g}"),
    ("wall time", lambda found, said: format_seconds(found["wall_ms"] / 1e3)),
    ("FLOPs, predicted", lambda found, said: format_count(said["flops"])),
    ("rows in an all-to-all", lambda found, said: f"{found['rows']:,.0f}" if found["layer_bytes"] else "none"),
    ("    predicted", lambda found, said: f"{said['rows']:,}"),
    ("bytes of an all-to-all", lambda found, said: size_name(found["all_to_all_bytes"])),
    ("    predicted", lambda found, said: size_name(said["all_to_all_bytes"])),
    ("bytes of all, with counts", lambda found, said: size_name(found["layer_bytes"])),
    ("    over that of sort", lambda found, said: f"{found['bytes_ratio']:.4g}" if "bytes_ratio" in found else "none"),
    ("choices dropped", lambda found, said: f"{found['dropped_share']:.1%}"),
    ("memory, at most", lambda found, said: memory_name(found["peak_memory_bytes"])),
)


@dataclass(frozen=True)
class MoELayerSettings(LayerSettings):
    """Options of the command line, one field each."""

    experts: int = setting(512, "Experts of the layer.", type=COUNT)
    top_k: int = setting(2, "Experts of a token.", type=click.IntRange(1, 2))
    eval_fraction: float = setting(
        0.05, "An expert takes this share of a rank's tokens.", type=click.FloatRange(0, 1, min_open=True)
    )
    skew: float = setting(0.0, "How much all tokens favour the same experts; 0: hardly.", type=click.FloatRange(0, 100))
    backward: bool = setting(False, "Forward and backward, rather than forward alone.")
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 2]", type=COUNT)
    rounds: int = setting(7, "Turns of every candidate.", type=COUNT)
    steps: int = setting(3, "Passes that count in a turn.", type=COUNT)
    link: str | None = setting(None, "What joins the ranks, in words for the record, if not this machine itself.")
    smoke: bool = setting(False, "Only show that it works: small, two rounds, no record.")

    def ways(self) -> list[Way]:
        """The candidates, the baseline first. Raises UserError for a layer that cannot be."""
        mixture = Mixture(top_k=self.top_k, eval_fraction=self.eval_fraction, dispatch="einsum")
        config = shape(self.experts, self.tokens, self.d_model, self.d_ff, mixture)
        einsum = Way("einsum", config)
        return [
            einsum,
            einsum.changed("sort", dispatch="sort"),
            einsum.changed("sort, dropless", dispatch="sort", eval_fraction=0.0),
        ]


def check(bench: Bench, ways: list[Way]) -> float:
    """The gate: what is timed, as it will be timed if the one-hot formulation has room for it, and with a single slot
    an expert, which drops tokens. Returns the largest relative error. Raises WrongResultError."""
    einsum, sort, dropless = ways
    errors = [bench.check(sort, bench.tokens), bench.check(dropless)]
    # As many tokens as the gate looks at with the slots of `einsum`; a share of 1 / tokens is one slot.
    few = bench.fewer(einsum)
    errors.append(bench.check(sort.changed("sort, one slot", eval_fraction=1 / few), few))
    return max(errors)


def memory_name(count: float | None) -> str:
    """Bytes in words, where the system told them."""
    return "unknown" if count is None else format_bytes(count)


def show(records: list[Record]) -> None:
    """The table, and the two ratios in words."""
    config, where = records[0].config, records[0].environment
    passes = "forward and backward" if config["backward"] else "forward"
    title = (
        f"{config['experts']} experts of {config['d_model']} x {config['d_ff']}, {config['tokens']} tokens a rank, "
        f"top {config['top_k']}, {config['slots']} slots an expert; {passes}; {config['ranks']} {config['backend']} "
        f"ranks of {where['threads']} thread(s) on {where['device']}, {where['cores']} cores"
    )
    table = Table(title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    table.add_column("")
    for record in records:
        table.add_column(record.config["candidate"] + "*" * bool(record.flags), justify="right")
    for name, line in LINES:
        table.add_row(name, *(line(record.metrics, record.predicted) for record in records))
    einsum, sort = records[0], records[1]
    flops = einsum.predicted["flops"] / sort.predicted["flops"]
    words = f"einsum takes {einsum.metrics['ratio_median']:.3g} times the CPU time of sort"
    words += f" (and {flops:.3g} times the FLOPs)"
    if "bytes_ratio" in einsum.metrics:
        words += f", and {einsum.metrics['bytes_ratio']:.4g} times the bytes of all-to-all"
    out = console.console()
    out.print(table)
    out.print(words)


def work(place: Place, settings: MoELayerSettings) -> None:
    """One rank's part. Raises UserError, and WrongResultError for a candidate that computes something else."""
    torch.set_num_threads(settings.threads)
    ways, tokens, backward = settings.ways(), settings.tokens, settings.backward
    with distributed(DEVICE, "gloo", settings.timeout, place) as group:
        first = group.rank() == 0
        check_ranks(settings.experts, group.size())
        if reason := too_large(ways[0], tokens, backward, group):
            raise UserError(f"{reason}: choose fewer experts, tokens or slots")
        hardware = ceilings(group, 0.02 if settings.smoke else 0.3)
        bench = Bench(ways[1].config, settings.skew, group, backward)
        error = check(bench, ways)
        if first:
            print(f"gate: sort is einsum within {error:.1e}")
        contenders = [Contender(bench, way, settings.steps) for way in ways]
        said = [predict(way, tokens, group.size(), hardware, backward) for way in ways]
        expected = settings.rounds * settings.steps * sum(each["mean_ms"] for each in said) / 1e3
        turns = (1 + settings.rounds) * len(ways)
        with console.progress("taking turns", turns, expected, quiet=not first) as advance:
            play(contenders, settings.rounds, advance)
        metrics = [contender.metrics() for contender in contenders]
        if not first:
            return
        stamp = environment(DEVICE, settings.commit) | {"world_size": group.size(), "backend": "gloo"}
        about = {
            "eval_fraction": settings.eval_fraction,
            "nodes": place.world_size // place.local_world_size,
            "link": settings.link or "",
        }
        records = [
            contender.record("moe_layer", contenders[1], found, predicted, stamp, about)
            for contender, found, predicted in zip(contenders, metrics, said, strict=True)
        ]
        show(records)
        if not settings.smoke:
            path = open_records(settings.folder(), "moe_layer")
            for record in records:
                append_record(record, path)
            print(appended(len(records), path))


@click.command()
@console.options(MoELayerSettings)
def main(**options: Any) -> None:
    """Time one expert layer, sorted, one-hot and without a capacity, turn by turn, with predictions beside it."""
    settings = MoELayerSettings(**options)
    if settings.smoke:
        settings = replace(settings, **SMOKE)
    here = find_place()
    settings.ways()
    nproc = settings.nproc if here.world_size > 1 else settings.nproc or 2
    check_ranks(settings.experts, here.world_size if here.world_size > 1 else nproc or 1)
    if here.rank == 0 and not settings.smoke:
        open_records(settings.folder(), "moe_layer")
    start_ranks(work, "cpu", nproc, settings)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
