"""Predicting a step: the cost model's error on runs left out of its fit, and what a roofline leaves out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import Any

from cs336_systems.cost.commands.notebook_page import MACHINE, compared, layer
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.notebook.tables import DIFFERENCES, SEQ, SIZES, Kind
from cs336_systems.cost.plots import roofline
from cs336_systems.cost.runs import PUBLISHED, TrainingRun, read_run, read_runs
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.host.text import markdown_text, plot_text
from writeup.book import Book
from writeup.figures import COLOURS, Figure, draw, drawn
from writeup.tables import Table

NEAR = 0.1  # an error that counts as small
FAR = 0.1  # a family's mean size of error from which on it is named
# Why a family is far off, where that is known; what is not here is not explained.
REASONS = {
    "MT-NLG": "the constants of deepspeed are those of BLOOM's trials for the most part",
    "MegaScale": "a very large machine, where some accelerators wait for others",
    "InternEvo": "another framework, with no run in any fit",
    "BloombergGPT": "another framework, with no run in any fit",
    "BLOOM": "kernels that are slow for odd shapes: heads of 64 and 128 do the same FLOPs in different times",
    "Narayanan 2021, ZeRO-3": "DeepSpeed's ZeRO 3 of 2021: each accelerator received all weights through its own port",
    "500 W": "without torch.compile; with it, within a hundredth",
    "Pythia": "narrower models than in the fit of deepspeed",
    "128 experts": "many small experts: kernels are small, rows are copied and the host does not keep up",
    "NeMo 25.02": "the software of the B200's first months",
    "GPT-NeoX": "narrower than the models that deepspeed was fitted to",
}
KINDS: tuple[Kind, ...] = ("wrong", "missing")


def content(book: Book) -> dict[str, Any]:
    """The error on runs left out of the fit, the families, and the roofline notebook beside what corrects it."""
    runs = published_runs()
    return {
        "f": left_out(),
        "families": families_table(book, runs),
        "notebook": SIZES,
        "compared": corrected(book),
        "differences": {kind: differences(book, kind) for kind in KINDS},
        "wrong": far_off(runs),
        "runs_picture": error_picture("roofline-runs", runs),
        **picture(),
    }


def left_out() -> dict[str, Any]:
    """Errors of predicted over measured time, each run predicted by constants fitted without its family."""
    found = {run.id: run.given["left_out"] for run in read_runs(PUBLISHED)}
    errors = {name: 1 / ratio - 1 for name, ratio in found.items()}
    sizes = sorted(map(abs, errors.values()))
    return {
        "count": len(errors), "mean": mean(sizes), "median": median(sizes), "near": sum(e <= NEAR for e in sizes),
        "worst": max(found.values()), "tail": sizes[int(0.9 * len(sizes))],
    }  # fmt: skip


def corrected(book: Book) -> Table:
    """One layer's sums, the notebook's and corrected."""
    rows = [
        {
            "<one layer, one GPU": each["name"], "<unit": each["unit"], "the notebook": f"{each['notebook']:.4g}",
            "corrected": f"{each['corrected']:.4g}", "ratio": f"{each['corrected'] / each['notebook']:.2f}",
        }
        for each in compared()
    ]  # fmt: skip
    return Table(book, rows)


def differences(book: Book, kind: Kind) -> Table:
    """The differences of a kind; of those missing there is nothing that the notebook has."""
    rows = []
    for each in DIFFERENCES:
        if each.kind == kind:
            says = {"<": each.name, "<the notebook": each.notebook} if kind == "wrong" else {"<left out": each.name}
            cells = says | {"<right": each.right, "<effect": each.effect}
            rows.append({head: markdown_text(cell) for head, cell in cells.items()})
    return Table(book, rows)


def picture() -> dict[str, Any]:
    """The operators of the notebook's layer under the roofs of its machine, and the least share of the attainable rate
    that those reach which memory does not limit."""
    (config, plan), system = layer(), system_preset(MACHINE)
    _, attainable = roofline.roofs(plan, system)
    found = roofline.points(config, plan, SEQ, system)
    canvas = roofline.draw(config, plan, SEQ, system)
    shown = drawn(
        "roofline-operators", canvas,
        "Every operator of the notebook's layer, and the head that it leaves out, under the roofs of its machine: "
        "dashed the data sheet's, solid the attainable one. On the slope, memory limits an operator.",
        "Operators as points of FLOP/s over FLOPs a byte, under two rooflines",
    )  # fmt: skip
    unlimited = [each.rate for each in found if each.intensity > attainable.ridge]
    return {"picture": shown, "reached": min(unlimited) / attainable.flops}


@dataclass(frozen=True)
class Published:
    """One published run, the model's prediction, and the row of the file that has it."""

    row: dict[str, Any]
    run: TrainingRun
    step: StepTime

    @property
    def seconds(self) -> float:
        """Measured, of a step."""
        assert self.run.seconds is not None, f"{self.run.id} was not measured"
        return self.run.seconds

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.step.total / self.seconds - 1

    @property
    def fitted(self) -> bool:
        """True if constants were fitted to this run."""
        return bool(self.row["fitted"])


@cache
def published_runs() -> tuple[Published, ...]:
    """All of them, in the order of the file."""
    rows = json.loads(PUBLISHED.read_text("utf-8"))
    runs = [(row, read_run(row)) for row in rows]
    return tuple(Published(row, run, step_time(run.config, run.plan, run.seq, run.system)) for row, run in runs)


def by_family(runs: Sequence[Published]) -> dict[tuple[str, str], list[Published]]:
    """Runs by (family, machine), those that constants were fitted to first."""
    found: dict[tuple[str, str], list[Published]] = {}
    for each in sorted(runs, key=lambda run: not run.fitted):
        found.setdefault((each.row["family"], each.run.system.name), []).append(each)
    return found


def families_table(book: Book, runs: Sequence[Published]) -> Table:
    """Table of the error of each family."""
    rows = []
    for (family, machine), found in by_family(runs).items():
        errors = [each.error for each in found]
        rows.append({
            "<family": markdown_text(family), "<machine": markdown_text(machine),
            "<fitted": "yes" if found[0].fitted else "no", "runs": str(len(found)),
            "mean size of error": f"{mean(map(abs, errors)):.1%}", "mean error": f"{mean(errors):+.1%}",
            "worst": f"{max(errors, key=abs):+.1%}",
        })  # fmt: skip
    return Table(book, rows)


def far_off(runs: Sequence[Published]) -> list[str]:
    """The families whose error is 10% or more on average, each with its reason where one is known."""
    said = []
    for (family, machine), found in by_family(runs).items():
        size, sign = mean(abs(each.error) for each in found), mean(each.error for each in found)
        if size >= FAR:
            reason = next((why for name, why in REASONS.items() if name in family), "not explained")
            said.append(f"{markdown_text(family)} on {markdown_text(machine)}, {sign:+.0%}: {reason}")
    return said


def error_picture(name: str, runs: Sequence[Published]) -> Figure:
    """Predicted over published time of every run, a row for each family on a machine; hollow: not fitted."""
    families = by_family(runs)

    def into(axes: Any) -> None:
        for place, found in enumerate(families.values()):
            ratios = sorted(1 + each.error for each in found)
            # Spread by rank, so that no point hides another.
            heights = [place + 0.5 * (rank + 0.5) / len(ratios) - 0.25 for rank in range(len(ratios))]
            style = "full" if found[0].fitted else "none"
            axes.plot(ratios, heights, "o", color=COLOURS[0], fillstyle=style, markersize=3.5, markeredgewidth=0.8)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(families)), [plot_text("; ".join(name)) for name in families])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("predicted / published time of a step")

    return draw(
        name, "Predicted over published time, a point a run; hollow: not among those that constants were fitted to.",
        "Points of predicted over published time, a row for each family of runs and its machine",
        into, height=0.8 + 0.2 * len(families),
    )  # fmt: skip
