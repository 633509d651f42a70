"""Two lessons on mixed precision: `python -m benchmarks.mixed_precision accumulation`, and `dtypes`.

The first explains the sum of a thousand additions of 0.01 in each number format, the second lists the dtype of every
part of a model under autocast. Both are facts, not timings: a record has no samples.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

import click
import torch

from benchmarks.lib.mixed_precision_parts import (
    DTYPES,
    PROBES,
    TOY,
    Format,
    Parts,
    documented_for_cuda,
)
from benchmarks.lib.options import RecordOptions, command
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.console import setting
from cs336_systems.host.machine import choose_device, environment
from cs336_systems.host.table import Table

COUNT, TERM = 1000, 0.01
ACCUMULATION, DTYPES_LESSON = "accumulation", "dtypes"
SUM_COLUMNS = ("sum += term", "result", "error", "of which the term", "of which additions")
SUM_CAPTION = (
    f"{COUNT} additions of {TERM}. the term: {COUNT} times what the format changes {TERM} by. additions: what rounding "
    "each partial sum to the sum's format changes. Rows of bf16 are not part of the course's exercise"
)
PART_CAPTION = (
    "forward: the output of each part (the parameters themselves); backward: its gradient (of parameters: .grad, cast "
    "to their own dtype before it is stored or added up). Below the loss, what ran inside, by operator. The logits are "
    "what fc2 or head gives"
)
CUDA_CAPTION = ". CUDA, documented: what torch's lists of autocast's operators say of forward there, not measured"


@dataclass(frozen=True)
class MixedPrecisionSettings(RecordOptions):
    """Every field is an option of the command line."""

    device: Literal["cpu", "cuda"] | None = setting(None, "Device to run on.  [default: cuda if there is one]")


@dataclass(frozen=True)
class Sum:
    """`COUNT` terms added to a sum in place, each of them cast to the sum's format before that or not."""

    total: Format
    term: Format
    cast: bool = False

    def __str__(self) -> str:
        return f"{self.total} += {self.term}" + f" cast to {self.total}" * self.cast


SUMS = (
    Sum("fp32", "fp32"), Sum("fp16", "fp16"), Sum("fp32", "fp16"), Sum("fp32", "fp16", cast=True),
    Sum("bf16", "bf16"), Sum("fp32", "bf16"), Sum("fp32", "bf16", cast=True),
)  # fmt: skip


def accumulate(case: Sum, device: torch.device) -> float:
    """The sum, by COUNT additions in place on the device."""
    total = torch.tensor(0.0, dtype=DTYPES[case.total], device=device)
    term = torch.tensor(TERM, dtype=DTYPES[case.term], device=device)
    for _ in range(COUNT):
        total += term.to(DTYPES[case.total]) if case.cast else term
    return total.item()


def account(case: Sum, result: float) -> dict[str, float]:
    """The error of a result, split without remainder; and the format's spacing there with what an addition there adds.

    All of it is exact in Python's floats: a float32 times a thousand needs 34 bits of their 53.
    """
    term = torch.tensor(TERM, dtype=DTYPES[case.term]).item()
    spacing = torch.finfo(DTYPES[case.total]).eps * 2.0 ** (math.frexp(result)[1] - 1)
    return {
        "sum": result,
        "error": result - COUNT * TERM,
        "error_of_term": COUNT * term - COUNT * TERM,
        "error_of_additions": result - COUNT * term,
        "term": term,
        "spacing": spacing,
        "added": round(term / spacing) * spacing,  # the sum is a multiple of the spacing, so this is what rounding does
    }


def why(case: Sum, facts: dict[str, float], uncast: float | None) -> str:
    """One sentence on a sum, of its numbers; `uncast` is the result of the same without the cast."""
    held = f"{case.term} holds {TERM} as {facts['term']:.8g}"
    there = f"{case.total} is spaced {facts['spacing']:.5g} at {facts['sum']:.5g}"
    if case.cast and facts["sum"] == uncast:
        return f"equal to the last bit to the sum without the cast: += itself casts the term to {case.total}"
    if facts["error_of_additions"] == 0:
        return f"{held}, and {case.total} holds every multiple of it exactly up to {COUNT}: no addition rounds"
    if facts["added"] == 0:
        return f"stuck: {there}, the term is less than half of that, and an addition adds nothing"
    return f"{held}; {there}, so an addition there adds {facts['added']:.8g}"


def run_accumulation(device: torch.device, stamp: dict[str, Any]) -> list[Record]:
    """Add, print the table with a sentence on each sum, and return the record."""
    rows, sums = [], dict[str, dict[str, Any]]()
    for case in SUMS:
        facts = account(case, accumulate(case, device))
        uncast = sums.get(str(Sum(case.total, case.term)), {}).get("sum")
        sums[str(case)] = facts | {"why": why(case, facts, uncast)}
        errors = [facts[name] for name in ("error", "error_of_term", "error_of_additions")]
        rows.append([str(case), f"{facts['sum']:.4f}", *(f"{error:+.2e}" if error else "0" for error in errors)])
    out = console.console()
    out.print(Table("accumulation", SUM_COLUMNS, rows, SUM_CAPTION).table())
    for name, found in sums.items():
        out.print(f"{name}: {found['why']}.", markup=False, soft_wrap=True)
    config = {"lesson": ACCUMULATION, "terms": COUNT, "term": TERM}
    return [Record("mixed_precision", config, stamp, metrics={"sums": sums})]


def show_parts(title: str, tables: dict[Format, Parts], documented: dict[Format, dict[str, str]]) -> None:
    """One table of a model: for each precision forward and backward, and where known what is documented for CUDA."""
    heads, rows = ["part"], []
    for precision in tables:
        heads += [f"{precision}: forward", "backward"] + ["CUDA, documented"] * (precision in documented)
    for name in next(iter(tables.values())):
        cells = [name]
        for precision, parts in tables.items():
            cells += [parts[name].forward, parts[name].backward]
            cells += [documented[precision].get(name, "")] if precision in documented else []
        rows.append(cells)
    note = PART_CAPTION + CUDA_CAPTION * bool(documented)
    console.console().print(Table(title, heads, rows, note, names=True).table())


def run_dtypes(device: torch.device, stamp: dict[str, Any]) -> list[Record]:
    """Probe both models, print a table of each, and return a record of each model and precision."""
    records, formats = list[Record](), get_args(Format)
    for model, run_probe in PROBES.items():
        measured = {precision: run_probe(device, precision) for precision in formats}
        known = [precision for precision in formats if model == TOY and precision != "fp32"]
        documented = {precision: documented_for_cuda(precision) for precision in known}
        show_parts(f"{model}, under autocast on {stamp['device']}, torch {stamp['torch']}", measured, documented)
        for precision, parts in measured.items():
            metrics: dict[str, Any] = {"parts": {name: vars(part) for name, part in parts.items()}}
            if precision in documented:
                metrics["documented_for_cuda"] = documented[precision]
            config = {"lesson": DTYPES_LESSON, "model": model, "precision": precision}
            records.append(Record("mixed_precision", config, stamp, metrics=metrics))
    return records


@command(MixedPrecisionSettings)
@click.argument("lesson", type=click.Choice([ACCUMULATION, DTYPES_LESSON, "both"]), default="both")
def main(settings: MixedPrecisionSettings, lesson: str) -> None:
    """Print the results of the course's sums in each number format, and the dtype of every part under autocast."""
    device = choose_device(settings.device)
    recorder = settings.recorder("mixed_precision", device)
    stamp = environment(device, settings.commit)
    if lesson != DTYPES_LESSON:
        recorder.keep(*run_accumulation(device, stamp))
    if lesson != ACCUMULATION:
        recorder.keep(*run_dtypes(device, stamp))
    recorder.tell()


if __name__ == "__main__":
    sys.exit(console.run_command(main))
