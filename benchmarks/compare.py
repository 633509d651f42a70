"""Comparison of variants of a model: two or more take turns, A B A B; ratios of times are taken pair by pair.

`python -m benchmarks.compare --size small --mode forward norm=rmsnorm norm=layernorm precision=bf16,attention=sdpa`
"""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import click

from benchmarks import e2e
from benchmarks.harness import interleave, ratios, take_turns
from benchmarks.lib.gate import check
from benchmarks.lib.options import command
from benchmarks.lib.sheets import median, ratio, remarks, show, time
from benchmarks.lib.workload import PHASES, Bench, Case, PassSettings, Workload, make_bench
from benchmarks.records import Record
from cs336_systems.cost import Mode
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import usable_memory
from cs336_systems.host.table import Table
from cs336_systems.presets import with_edition

CHOICES = ("norm", "attention", "kernels", "precision", "compile", "recompute", "recompute-every")


def parse_variant(text: str, settings: PassSettings) -> PassSettings:
    """`norm=layernorm,compile` as a change of the settings. Raises UserError for what is no choice of a model's."""
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in CHOICES or bool(value) == (name == "compile"):
            raise UserError(f"{part!r} is no variant; write norm=layernorm or compile (choices: {', '.join(CHOICES)})")
        if (key := name.replace("-", "_")) in changes:
            raise UserError(f"{text!r} chooses {name} twice; drop one")
        changes[key] = e2e.main.make_context(text, [f"--{name}", value] if value else [f"--{name}"]).params[key]
    return replace(settings, **changes)


def compare(benches: dict[str, Bench], cases: dict[str, Case], mode: Mode) -> list[Record]:
    """Gate every variant, warm each up, let them take turns, and record each with its ratio to the first."""
    baseline, settings = next(iter(benches)), next(iter(benches.values())).settings
    for name, case in cases.items():
        error, tolerance = check(case)
        print(f"gate: {name} equals float64 within {error:.1e} (tolerance {tolerance:.1e})")
    loads = {name: Workload(case) for name, case in cases.items()}

    def once(load: Workload) -> float:
        return load.run(mode, warmup=0, steps=1).total(PHASES[mode])[0]

    turns = {name: partial(once, load) for name, load in loads.items()}
    with console.progress("warming up", settings.warmup * len(turns)) as advance:
        interleave(turns, settings.warmup, advance)
    rounds = settings.steps or 5
    expected = sum(bench.predicted(cases[name], mode)["mean_ms"] for name, bench in benches.items()) / 1e3
    samples = take_turns(turns, rounds, rounds * expected)
    records = []
    for name, bench in benches.items():
        record = bench.record(settings.size, cases[name], mode, samples[name], peak=None)  # they share the memory
        config = record.config | {"variant": name, "baseline": baseline}
        metrics = record.metrics | ratios(samples[name], samples[baseline])
        records.append(replace(record, benchmark="compare", config=config, metrics=metrics))
    return records


def sheet(records: list[Record]) -> Table:
    """Time, prediction and ratio to the first of each variant."""
    first, rows = records[0].config, []
    for record in records:
        metrics = record.metrics
        rows.append([record.config["variant"], median(record), time(record.predicted["mean_ms"]), ratio(metrics)])
    title = f"{with_edition(first['size'], first['year'])} {first['mode']}, batch {first['batch_size']} x "
    heads = ("variant", "measured", "predicted", "time / first's (quartiles)")
    notes = "\n".join(remarks(records, lambda each: each.config["variant"]))
    return Table(f"{title}{first['context']}", heads, rows, notes)


@command(PassSettings)
@click.argument("variants", nargs=-1)
def main(settings: PassSettings, variants: tuple[str, ...]) -> None:
    """Time VARIANTS of one model in turn, such as norm=rmsnorm norm=layernorm; print the ratios of their times."""
    if len(variants) < 2 or len(set(variants)) < len(variants):
        raise UserError("name two or more different variants, such as norm=rmsnorm norm=layernorm")
    if settings.all_sizes:
        raise UserError("variants of one size are compared: drop --all-sizes, and name it with --size")
    if settings.smoke:
        settings = replace(settings, size="tiny", batch_size=1, context=32, warmup=0, steps=1)
    mode, device = settings.mode or "forward-backward", settings.on
    chosen = {name: parse_variant(name, settings) for name in variants}
    cases = {name: each.case(settings.size, device) for name, each in chosen.items()}
    usable = usable_memory(device) // len(cases)
    for name, case in cases.items():
        case.require_fit(f"{settings.size} {name}", mode, usable)
    recorder = settings.recorder("compare", device)
    benches = {name: make_bench(each, device, usable) for name, each in chosen.items()}
    records = compare(benches, cases, mode)
    show([sheet(records)])
    recorder.keep(*records)
    recorder.tell()


if __name__ == "__main__":
    sys.exit(console.run_command(main))
