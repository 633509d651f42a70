"""Megatron-LM's scaling: our layouts, the published study of BERT-345M, and published runs beside predictions."""

from collections.abc import Sequence
from math import log
from statistics import fmean
from typing import Any

from benchmarks.megatron_log import read_runs
from benchmarks.records import Record
from benchmarks.scaling_anomalies import anomalies
from benchmarks.scaling_plot import PARTS, breakdown, marks
from benchmarks.scaling_plot import draw as draw_study
from benchmarks.scaling_record import study_run
from benchmarks.scaling_run import Run, bubble, efficiency, ideal_bubble, utilisation
from benchmarks.scaling_show import tables_apart
from benchmarks.scaling_table import PUBLISHED as STUDY
from benchmarks.scaling_table import find_base, percent
from cs336_systems.console import format_seconds
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.step_time import StepTime, step_time
from cs336_systems.cost.large.systems import system_preset
from cs336_systems.presets import model_preset
from cs336_systems.text import markdown_text
from writeup.book import Book, Citation, metric
from writeup.cells import NONE, STATUS, median_ms, predicted_ms, prediction, timing
from writeup.cost_runs import Published, error_picture, families_table, far_off, published_runs, runs_table
from writeup.figures import Figure, draw, drawn
from writeup.tables import Table
from writeup.words import joined, prediction_error

SYSTEM = "ThetaGPU"  # of the study
MEGATRON = ("kort22-", "mlm2020-", "mlm1.0-", "nara21-", "megascale-", "mtnlg-")  # how the names of its runs begin
ZERO3 = "nara21-zero3"  # DeepSpeed's, in the same paper
ONE_BY_ONE = "kort22-"
# The parts of a predicted step by the name that the figure has for measured ones.
PREDICTED = {
    "forward": "forward",
    "backward": "backward",
    "tensor-parallel": "tensor parallel",
    "pipeline": "sent between stages",
    "bubble": "bubble",
    "data-parallel": "gradients' all-reduce",
    "optimizer": "optimizer",
}
COLOURS = PARTS | {"tensor parallel": "#D55E00"}


def content(book: Book) -> dict[str, Any]:
    """Tables and figures of the three parts, and what the commentary is made of."""
    cited = book.cite("scaling")
    study = read_runs([STUDY])
    steps = [predicted_step(run) for run in study]
    runs = [each for each in published_runs() if each.run.id.startswith(MEGATRON) and ZERO3 not in each.run.id]
    return {
        "ours": [_ours(book, group, place) for place, group in enumerate(apart(cited))],
        "study": study_table(book, study, steps),
        "study_source": markdown_text(study[0].source),
        "findings": [markdown_text(each.text) for each in anomalies(study)],
        "study_picture": drawn(
            "megatron-study", draw_study(study, find_base(study)),
            "The published study: throughput, efficiency, and what an iteration is made of. In brackets: the findings.",
            "Three panels of the published scaling study of BERT-345M",
        ),
        "host": host(study, steps),
        "families": families_table(book, runs),
        "korthikanti": runs_table(book, [each for each in runs if each.run.id.startswith(ONE_BY_ONE)]),
        "runs_picture": error_picture("megatron-runs", runs),
        "wrong": far_off(runs),
        "best": closest(runs),
    }  # fmt: skip


def apart(cited: Citation) -> list[Citation]:
    """The records that one table can show, each as a citation; the whole one if there are none."""
    groups = tables_apart(list(cited))
    return [Citation(cited.benchmark, cited.command, tuple(group), cited.keys) for group in groups] or [cited]


def _ours(book: Book, cited: Citation, place: int) -> dict[str, Any]:
    return {
        "layouts": layouts(book, cited),
        "parts": parts(cited, f"megatron-parts{f'-{place}' * bool(place)}") if cited.measured else None,
        "said": ours(cited),
    }


def layouts(book: Book, cited: Citation) -> Table:
    """A row for each of our layouts: time, efficiency and bubble, each with what was predicted."""
    base = next((predicted_ms(r) for r in cited if r.config["layout"] == r.config["base"]), None)
    rows = []
    for record in cited:
        config = record.config
        name = [config["layout"], str(config["ranks"]), str(config["global_batch_size"])]
        if record.status != "ok":
            rows.append([*name, STATUS[record.status], *[NONE] * 7])
            continue
        cells = [timing(book, record), prediction(record)]
        cells += [_range(record, "efficiency"), _efficiency(record, cited, base)]
        cells += [percent(metric(record, "bubble")), percent(record.predicted.get("bubble"))]
        memory = [each / 2**20 for each in metric(record, "memory_bytes") if each is not None]
        cells += [f"{min(memory):.0f} to {max(memory):.0f} MiB" if memory else NONE, percent(metric(record, "mfu"))]
        rows.append(name + cells)
    columns = (
        "<layout", "ranks", "batch", "step, median (quartiles)", "predicted (of measured)", "efficiency",
        "predicted", "bubble", "ideal", "peak memory", "MFU",
    )  # fmt: skip
    caption = f"{cited.records[0].config['size']}, {cited.records[0].config['precision']}" if cited else ""
    return Table(book, columns, rows, cited, caption=caption)


def _range(record: Record, prefix: str) -> str:
    middle, low, high = (metric(record, f"{prefix}_{name}") for name in ("median", "low", "high"))
    return f"{middle:.0%} ({low:.0%} to {high:.0%})"


def _efficiency(record: Record, cited: Citation, base: float | None) -> str:
    """Predicted throughput of a rank over that of the base."""
    first = next((each for each in cited if each.config["layout"] == record.config["base"]), None)
    expected = predicted_ms(record)
    if not (first and base and expected):
        return NONE
    speeds = [r.config["global_batch_size"] / r.config["ranks"] / ms for r, ms in ((record, expected), (first, base))]
    return f"{speeds[0] / speeds[1]:.0%}"


def parts(cited: Citation, name: str) -> Figure:
    """What a step is made of: the last rank's timers, and beside each bar the prediction."""
    records = [record for record in cited.measured if record.predicted.get("parts_ms")]

    def into(axes: Any) -> None:
        for place, record in enumerate(records):
            said = {PREDICTED.get(name, "other timers"): value for name, value in record.predicted["parts_ms"].items()}
            for shift, found in ((-0.2, breakdown(study_run(record))), (0.2, said)):
                _stack(axes, place + shift, found)
        for name, colour in COLOURS.items():
            style = {"hatch": "///", "edgecolor": "#555555"} if name == "bubble" else {}
            axes.bar(0, 0, color=colour, label=name, **style)
        axes.set_xticks(range(len(records)), [record.config["layout"] for record in records])
        axes.set_xlabel("tp x pp x dp; left bar measured, right bar predicted")
        axes.set_ylabel("ms")
        axes.grid(axis="x", visible=False)
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(
        name,
        "Parts of a step. Left: timers of the last rank, whose forward and backward hold tensor-parallel sums. Right: "
        "predicted.",
        "Stacked bars of the parts of a step for each layout, measured beside predicted", into, width=8.0, height=3.6,
    )  # fmt: skip


def _stack(axes: Any, place: float, found: dict[str, float]) -> None:
    bottom = 0.0
    for name, value in found.items():
        style = {"hatch": "///", "edgecolor": "#555555"} if name == "bubble" else {"edgecolor": "white"}
        axes.bar(place, value, 0.36, bottom, color=COLOURS[name], linewidth=0.5, **style)
        bottom += value


def ours(cited: Citation) -> list[str]:
    """What the records of our layouts say, a sentence each without a full stop."""
    records = [record for record in cited.measured if predicted_ms(record) and record.predicted.get("parts_ms")]
    if not records:
        return []
    said = [f"Of a step's time, {prediction_error([(predicted_ms(r) or 0.0, median_ms(r)) for r in records])}"]
    pairs = [record for record in cited.measured if record.config["ranks"] == 2]
    if len(pairs) > 1:
        order = sorted(pairs, key=lambda record: -float(metric(record, "efficiency_median")))
        named = (f"{r.config['layout']} ({metric(r, 'efficiency_median'):.0%})" for r in order)
        said.append(f"Of the ways to use two ranks, by efficiency: {joined(named)}")
    piped = [record for record in cited.measured if record.config["pp"] > 1]
    if piped:
        gaps = (f"{r.config['layout']} {metric(r, 'bubble') - r.predicted['bubble']:+.1%}" for r in piped)
        said.append(f"The measured bubble less the ideal one: {joined(gaps)}")
    crowded = [r for r in cited.measured if r.config["ranks"] > r.environment["cores"]]
    if crowded:
        names = joined(r.config["layout"] for r in crowded)
        said.append(
            f"Where there are more ranks than cores ({names}), a timer also holds the wait for a core: no speed is to "
            "be read from it"
        )
    worst = max(records, key=lambda r: abs(log((predicted_ms(r) or 1.0) / median_ms(r))))
    parts_ms = worst.predicted["parts_ms"]
    name = max(parts_ms, key=lambda part: float(parts_ms[part]))
    said.append(
        f"The prediction is furthest off for {worst.config['layout']}; "
        f"{parts_ms[name] / sum(parts_ms.values()):.0%} of it is {PREDICTED.get(name, name)}"
    )
    return said


def predicted_step(run: Run) -> StepTime:
    """The model's step for a row of the study."""
    config = model_preset("bert-345m").override(recompute="segments")
    system = system_preset(SYSTEM)
    plan = Plan(
        tp=run.tp, pp=run.pp, dp=run.dp, micro_batch=run.micro_batch_size, global_batch=run.global_batch_size,
        overlap=system.overlap,
    )  # fmt: skip
    return step_time(config, plan, run.seq_length or config.context_length, system)


def study_table(book: Book, study: Sequence[Run], steps: Sequence[StepTime]) -> Table:
    """The published rows with the model's step beside them."""
    base, found = find_base(study), marks(study)
    rows = []
    for index, (run, step) in enumerate(zip(study, steps, strict=True)):
        scaled = percent(efficiency(run, base) if run.world >= base.world else None)
        cells = [str(run.world), run.layout, str(run.global_batch_size), f"{run.ms_per_sample:g} ms"]
        cells += [
            f"{run.iteration_ms:.1f} ms",
            f"{step.total * 1e3:.0f} ms ({step.total * 1e3 / run.iteration_ms:.2f})",
        ]
        cells += [scaled, percent(bubble(run)), percent(ideal_bubble(run)), percent(utilisation(run, model_only=True))]
        cells += [NONE if run.gpu_util is None else f"{run.gpu_util:.0f}%", found.get(index, "")]
        rows.append(cells)
    columns = (
        "GPUs", "tp/pp/dp", "batch", "a sample", "iteration", "predicted (of it)", f"efficiency vs {base.world}",
        "bubble", "ideal", "MFU", "nvidia-smi", "see",
    )  # fmt: skip
    return Table(book, columns, rows, always=True)


def host(study: Sequence[Run], steps: Sequence[StepTime]) -> list[str]:
    """Why the model is wrong for the study: what the same work took on different numbers of GPUs."""
    starved = {index for each in anomalies(study) if each.kind == "starved" for index in each.runs}
    pairs = [pair for index, pair in enumerate(zip(study, steps, strict=True)) if index not in starved]
    ratios = [run.iteration_ms / (step.total * 1e3) for run, step in pairs]
    aside = f" (without {len(starved)} of starved hosts)" if starved else ""
    said = [f"the study's iterations take {min(ratios):.2g} to {max(ratios):.2g} times as long as predicted{aside}"]
    alike = [(run, step) for run, step in pairs if (run.tp, run.pp) == (study[-1].tp, study[-1].pp)]
    if len(alike) > 1:
        # Of three passes over a block (forward, again, backward) each has as many tensor-parallel sums.
        alone = fmean(step.parts["forward"] + step.parts["tensor-parallel"] / 3 for _, step in alike)
        seen = [run.timers["forward-compute"] / 1e3 for run, _ in alike]
        said.append(
            f"the rows that are split alike give a GPU the same forward pass, predicted at {format_seconds(alone)}; "
            f"their timers have {format_seconds(min(seen))} to {format_seconds(max(seen))} for it, so what decides is "
            "not computing"
        )
    return said


def closest(runs: Sequence[Published]) -> str:
    """How many of the runs are predicted within 5%."""
    near = sum(abs(each.error) <= 0.05 for each in runs)
    return f"{near} of these {len(runs)} runs are predicted within 5%"
