"""The published scaling study of BERT-345M: its rows beside this project's predictions, and why they differ."""

from collections.abc import Sequence

from benchmarks.lib.scaling_anomalies import marks
from benchmarks.lib.scaling_logs import ScalingRun, bubble, default_base, efficiency, ideal_bubble
from benchmarks.lib.scaling_tables import percent, utilisation
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.presets import model_preset
from writeup.book import Book
from writeup.cells import NONE
from writeup.tables import Table

SYSTEM = "ThetaGPU"


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
        scaled = percent(efficiency(run, base) if run.world >= base.world else None)
        cells = [str(run.world), run.layout, str(run.global_batch_size), f"{run.ms_per_sample:g} ms"]
        cells += [
            f"{run.iteration_ms:.1f} ms",
            f"{step.total * 1e3:.0f} ms ({step.total * 1e3 / run.iteration_ms:.2f})",
        ]
        cells += [scaled, percent(bubble(run)), percent(ideal_bubble(run)), percent(utilisation(run, model_only=True))]
        held = f"{run.gpu_memory[0] / 1024:.1f} to {run.gpu_memory[1] / 1024:.1f} GiB" if run.gpu_memory else NONE
        cells += [NONE if run.gpu_util is None else f"{run.gpu_util:.0f}%", held, see]
        rows.append(cells)
    columns = (
        "GPUs", "tp/pp/dp", "batch", "a sample", "iteration", "predicted (of it)", f"efficiency vs {base.world}",
        "bubble", "ideal", "MFU", "nvidia-smi", "memory", "see",
    )  # fmt: skip
    return Table(book, columns, rows, always=True)


def without_recipe(text: str) -> str:
    """A finding without its advice for a cluster, which the benchmark's own output has in full."""
    cause, colon, _ = text.partition(": Open MPI binds")
    return f"{cause}." if colon else text
