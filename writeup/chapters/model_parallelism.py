"""Tensor and pipeline parallelism: our layouts, a published study, and the arithmetic of their limits."""

from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

from benchmarks.lib.scaling_anomalies import anomalies, marks
from benchmarks.lib.scaling_logs import ScalingRun, bubble, default_base, efficiency, ideal_bubble, read_runs
from benchmarks.lib.scaling_plot import PARTS, breakdown
from benchmarks.lib.scaling_plot import draw as draw_study
from benchmarks.lib.scaling_record import study_run
from benchmarks.lib.scaling_tables import PUBLISHED as STUDY
from benchmarks.lib.scaling_tables import percent, tables_apart, utilisation
from benchmarks.records import Record
from cs336_systems.cost.course import Answer, question
from cs336_systems.cost.course.answers import quantity
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import model_preset
from writeup.book import Book, Citation, facts, metric
from writeup.cells import NONE, predicted_ms, prediction, span, timing
from writeup.figures import Figure, draw, drawn
from writeup.layer_schematics import split_block
from writeup.schematics import schedules
from writeup.tables import Table

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
SYSTEM = "ThetaGPU"
NAMES = (
    "rings", "data-parallel", "fsdp", "tensor-parallel", "fsdp-tensor-parallel", "xxl-memory", "xxl-fsdp", "xxl-batch",
)  # fmt: skip


def content(book: Book) -> dict[str, Any]:
    """Our layouts, the published study, the arithmetic of the limits, and what its sentences quote."""
    study, answers = read_runs([STUDY]), {name: question(name) for name in NAMES}
    steps, base = [predicted_step(run) for run in study], default_base(study)
    ours = [
        {"layouts": layouts(book, each), "parts": parts(each, f"megatron-parts{f'-{place}' * bool(place)}")}
        for place, each in enumerate(apart(book.cite("scaling")))
    ]
    return {
        "f": facts(lambda: spoken(book)),
        "schedules": schedules(),
        "split_block": split_block(),
        "ours": ours,
        "study": study_table(book, study, steps),
        "slowest": min(efficiency(run, base) for run in study if run.world >= base.world),
        "findings": [markdown_text(without_recipe(each.text)) for each in anomalies(study)],
        "study_picture": drawn(
            "megatron-study", draw_study(study),
            "The published study: throughput, efficiency, and parts of an iteration. In brackets: the findings.",
            "Three panels of the published scaling study of BERT-345M",
        ),
        "n": {name.replace("-", "_"): answer.texts for name, answer in answers.items()},
        "limits": limits(book, answers),
        "readings": readings(book, answers["xxl-batch"]),
    }  # fmt: skip


def spoken(book: Book) -> dict[str, Any]:
    """Efficiency of the three ways to use two ranks, and what the published study's model is off by."""
    cited = book.cite("scaling")
    two = {axis: cited.need(layout=layout) for axis, layout in {"tp": "2x1x1", "pp": "1x2x1", "dp": "1x1x2"}.items()}
    return {axis: each.metrics["efficiency_median"] for axis, each in two.items()} | {
        "bubble": two["pp"].metrics["bubble"], "ideal": two["pp"].predicted["bubble"]
    }  # fmt: skip


def apart(cited: Citation) -> list[Citation]:
    """The records that one table can show, each as a citation; the whole one if there are none."""
    groups = tables_apart(list(cited))
    return [Citation(cited.benchmark, cited.command, tuple(group), cited.keys) for group in groups] or [cited]


def layouts(book: Book, cited: Citation) -> Table:
    """A row for each of our layouts: time, efficiency and bubble, each with what was predicted."""
    base = next((predicted_ms(r) for r in cited if r.config["layout"] == r.config["base"]), None)
    rows = []
    for record in cited:
        config, found = record.config, record.metrics
        memory = [each / 2**20 for each in found.get("memory_bytes", ()) if each is not None]
        rows.append({
            "<layout": markdown_text(config["layout"]), "ranks": str(config["ranks"]),
            "batch": str(config["global_batch_size"]), "step": timing(book, record),
            "predicted (of measured)": prediction(record),
            "efficiency": _range(record, "efficiency"), "predicted": _efficiency(record, cited, base),
            "bubble": percent(found.get("bubble")), "ideal": percent(record.predicted.get("bubble")),
            "peak memory": f"{span(memory, '{:.0f}')} MiB" if memory else NONE, "MFU": percent(found.get("mfu")),
        })  # fmt: skip
        if record.status != "ok":
            rows[-1] |= dict.fromkeys([*rows[-1]][4:], NONE)
    return Table(book, rows, cited)


def _range(record: Record, prefix: str) -> str:
    if record.status != "ok":
        return NONE
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


def parts(cited: Citation, name: str) -> Figure | None:
    """Parts of a step: the last rank's timers, and beside each bar the prediction; None if nothing was measured."""
    if not cited.measured:
        return None
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
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(
        name,
        "Parts of a step. Left: timers of the last rank, whose forward and backward hold tensor-parallel sums. Right: "
        "predicted.",
        "Stacked bars of the parts of a step for each layout, measured beside predicted", into, height=3.4,
    )  # fmt: skip


def _stack(axes: Any, place: float, found: dict[str, float]) -> None:
    bottom = 0.0
    for name, value in found.items():
        style = {"hatch": "///", "edgecolor": "#555555"} if name == "bubble" else {"edgecolor": "white"}
        axes.bar(place, value, 0.36, bottom, color=COLOURS[name], linewidth=0.5, **style)
        bottom += value


def predicted_step(run: ScalingRun) -> StepTime:
    """The model's step for a row of the study."""
    config = model_preset("bert-345m").override(recompute="segments")
    system = system_preset(SYSTEM)
    plan = Plan(
        tp=run.tp, pp=run.pp, dp=run.dp, micro_batch=run.micro_batch_size, global_batch=run.global_batch_size,
        overlap=system.overlap,
    )  # fmt: skip
    return step_time(config, plan, run.seq_length or config.context_length, system)


def study_table(book: Book, study: Sequence[ScalingRun], steps: Sequence[StepTime]) -> Table:
    """The published rows with the model's step beside them."""
    base, rows = default_base(study), []
    for run, step, see in zip(study, steps, marks(study), strict=True):
        held = f"{run.gpu_memory[0] / 1024:.1f} to {run.gpu_memory[1] / 1024:.1f} GiB" if run.gpu_memory else NONE
        rows.append({
            "GPUs": str(run.world), "tp/pp/dp": run.layout, "batch": str(run.global_batch_size),
            "a sample": f"{run.ms_per_sample:g} ms", "iteration": f"{run.iteration_ms:.1f} ms",
            "predicted (of it)": f"{step.total * 1e3:.0f} ms ({step.total * 1e3 / run.iteration_ms:.2f})",
            f"efficiency vs {base.world}": percent(efficiency(run, base) if run.world >= base.world else None),
            "bubble": percent(bubble(run)), "ideal": percent(ideal_bubble(run)),
            "MFU": percent(utilisation(run, model_only=True)),
            "nvidia-smi": NONE if run.gpu_util is None else f"{run.gpu_util:.0f}%", "memory": held, "see": see,
        })  # fmt: skip
    return Table(book, rows)


def without_recipe(text: str) -> str:
    """A finding without its advice for a cluster, which the benchmark's own output has in full."""
    cause, colon, _ = text.partition(": Open MPI binds")
    return f"{cause}." if colon else text


def limits(book: Book, answers: Mapping[str, Answer]) -> Table:
    """Table of the ways to split a layer: communication over compute, and the most devices that hide it."""
    data, sharded, tensor, grid = (
        answers[name].numbers for name in ("data-parallel", "fsdp", "tensor-parallel", "fsdp-tensor-parallel")
    )

    def ratio(found: Mapping[str, float], way: str) -> str:
        return quantity(found[f"{way}_communication"] / found[f"{way}_compute"], "%")

    both, apart = grid["together"], grid["fsdp"] + grid["tp"]
    one, two = ("N",), ("X", "Y")
    forward, backward = "largest_forward", "largest_backward"
    lines = [
        ("data parallel", "forward", "data-parallel", one, "0%", "any number"),
        ("", "backward", "data-parallel", one, ratio(data, "backward"), _whole(data["largest"])),
        ("FSDP", "forward", "fsdp", one, ratio(sharded, "forward"), _whole(sharded["largest"])),
        ("", "backward", "fsdp", one, ratio(sharded, "backward"), _whole(sharded["largest"])),
        ("tensor parallel", "forward", "tensor-parallel", one, ratio(tensor, "forward"), _whole(tensor[forward])),
        ("", "backward", "tensor-parallel", one, ratio(tensor, "backward"), _whole(tensor[backward])),
        ("FSDP x TP, overlapped", "forward", "fsdp-tensor-parallel", two, quantity(both / grid["compute"], "%"),
         _grid(grid, "largest_overlapped", max)),
        ("FSDP x TP, one after another", "forward", "fsdp-tensor-parallel", two, quantity(apart / grid["compute"], "%"),
         _grid(grid, "largest_apart", add)),
    ]  # fmt: skip
    rows = [
        {"<split": split, "<pass": way, "devices": " x ".join(answers[name].texts[letter] for letter in letters),
         "communication / compute": share, "hidden up to": limit}
        for split, way, name, letters, share, limit in lines
    ]  # fmt: skip
    return Table(book, rows)


def _whole(bound: float) -> str:
    return f"{int(bound)} devices"


def _grid(found: Mapping[str, float], bound: str, together: Callable[[float, float], float]) -> str:
    """The largest whole grid that is hidden, and the bound of the formula, whose X and Y need not be whole."""
    a, b = found["a"], found["b"]
    x, y = largest_grid(a, b, together)
    return f"{x * y} devices, {x} x {y} (formula: {found[bound]:.4g})"


def largest_grid(a: float, b: float, together: Callable[[float, float], float]) -> tuple[int, int]:
    """The X and Y of most devices whose times over compute, (X - 1)/a and (Y - 1)/b, taken together are at most 1."""
    grids = [
        (x, y) for x in range(1, int(a) + 2) for y in range(1, int(b) + 2) if together((x - 1) / a, (y - 1) / b) <= 1
    ]
    return max(grids, key=lambda grid: grid[0] * grid[1])


def readings(book: Book, answer: Answer) -> Table:
    """The answers to part (c), one for each way to read it."""
    lines = [
        ("X and Y free, one axis after another", "$4\\alpha^2/(M_X M_Y F)$", "free_apart"),
        ("the mesh as given, both axes at once", "$\\alpha/(M_X Y)$", "given_overlapped"),
        ("the mesh as given, one axis after another", "$\\alpha/(M_X Y) / (1 - \\alpha Y/(M_Y F))$", "given_apart"),
        ("X and Y free, both axes at once", "$\\alpha^2/(M_X M_Y F)$", "free_overlapped"),
    ]
    rows = [
        {"<what the question is taken to say": words, "<tokens a device, at least": formula,
         "with these numbers": f"{answer.numbers[key]:.0f}" if key in answer.numbers else NONE}
        for words, formula, key in lines
    ]  # fmt: skip
    return Table(book, rows)
