"""Published runs beside the cost model's predictions: its errors by family and by run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any

from cs336_systems.cost.runs import PUBLISHED, TrainingRun, read_run
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.host.text import markdown_text, plot_text
from writeup.book import Book
from writeup.figures import COLOURS, Figure, draw
from writeup.tables import Table

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
