"""Parts of a step for several plans, side by side; where a run was measured, the measured time as a mark.

Lengths are multiples of the time of the model's FLOPs at the peak of all ranks: a bar of length 2 is an MFU of 50%.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cs336_systems.cost.plots.style import new_figure, tidy
from cs336_systems.cost.runs import PUBLISHED, TrainingRun, read_runs
from cs336_systems.cost.step_time import PARTS, StepTime
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import plot_text

COLOURS = {name: each["colour"] for name, each in PARTS.items() if "colour" in each}
DARK = ("backward", "recompute", "tensor-parallel", "expert-parallel", "pipeline")  # where text is white
SHOWN, NAMED = 0.05, 0.005  # shares of a step: smaller parts have no number; are not in the legend
KORTHIKANTI = "kort22-"  # prefix of the names of the runs of arXiv:2205.05198, table 5


def published() -> list[TrainingRun]:
    """The runs of `data/published_runs.json` that arXiv:2205.05198 has in table 5."""
    runs = [run for run in read_runs(PUBLISHED) if run.id.startswith(KORTHIKANTI)]
    return [replace(run, id=run.id.removeprefix(KORTHIKANTI)) for run in runs]


def multiples(step: StepTime) -> dict[str, float]:
    """The parts of a step that are not zero, as multiples of the time of its model FLOPs at the peak."""
    ideal = step.total * step.mfu
    return {name: seconds / ideal for name, seconds in step.parts.items() if seconds}


def draw(bars: Sequence[TrainingRun]) -> Any:
    """A matplotlib Figure: a bar for each run, from the top down."""
    systems = {bar.system.name: bar.system for bar in bars}
    figure = new_figure(10.5, 1.7 + 0.42 * len(bars), list(systems.values()))
    axes, measured = figure.add_subplot(), any(bar.seconds for bar in bars)
    used = {name for bar in bars for name, time in bar.step.parts.items() if time >= NAMED * bar.step.total}
    for height, bar in enumerate(bars):
        _draw_bar(axes, height, bar)
    axes.set_yticks(range(len(bars)), [plot_text(bar.id) for bar in bars])
    axes.set(ylim=(len(bars) - 0.4, -0.6), xlim=(0, max(1 / bar.step.mfu for bar in bars) * 1.25))
    axes.set_xlabel("time of a step, as a multiple of what its model FLOPs take at the peak (2: an MFU of 50%)")
    handles = [axes.barh(0, 0, label=name, **_look(name)) for name in COLOURS if name in used]
    if measured:
        handles.append(axes.plot([], [], color="black", linewidth=2.5, label="measured")[0])
    figure.legend(handles=handles, loc="outside upper center", ncols=min(6, len(handles)), frameon=False)
    axes.axvline(1, color="black", linewidth=1, linestyle=":", zorder=0)
    compared = "; by how much it misses what was measured" if measured else ""
    tidy(axes, f"A step, its parts and its MFU as predicted{compared}", "x")
    axes.tick_params(axis="y", length=0)
    return figure


def _draw_bar(axes: Any, height: int, bar: TrainingRun) -> None:
    start, step = 0.0, bar.step
    for name, length in multiples(step).items():
        axes.barh(height, length, left=start, height=0.66, **_look(name))
        share = step.parts[name] / step.total
        if share >= SHOWN:
            look = {"ha": "center", "va": "center", "color": "white" if name in DARK else "black", "fontsize": "small"}
            back = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if name == "bubble" else None
            axes.text(start + length / 2, height, f"{share:.0%}", bbox=back, **look)
        start += length
    note, end = f"{format_seconds(step.total)}, MFU {step.mfu:.0%}", start
    if bar.seconds:
        place = bar.seconds / (step.total * step.mfu)
        for side in (-1, 1):
            ends = [height + side * 0.34, height + side * 0.48]
            axes.plot([place, place], ends, color="black", linewidth=2.5, solid_capstyle="butt")
        note, end = f"{note} ({step.total / bar.seconds - 1:+.1%})", max(start, place)
    axes.annotate(note, (end, height), (8, 0), textcoords="offset points", va="center", fontsize="small")


def _look(name: str) -> dict[str, Any]:
    idle = {"hatch": "////", "edgecolor": "#888888"} if name == "bubble" else {"edgecolor": "white"}
    return {"color": COLOURS[name], "linewidth": 0.5, **idle}
