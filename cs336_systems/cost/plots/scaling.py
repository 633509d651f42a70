"""Weak and strong scaling: MFU over the number of accelerators, of the best plan and of plans of fixed tp, pp.

Strong scaling keeps the batch, so that each accelerator has less to do. Weak scaling grows it with the accelerators.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plan_memory import fits
from cs336_systems.cost.plots.style import GREY, STYLES, name_lines, new_figure, ticks_at, tidy
from cs336_systems.cost.search_space import RECOMPUTES
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import Case, StepTime, step_time
from cs336_systems.errors import UserError
from cs336_systems.host.text import plot_text
from cs336_systems.presets import ModelConfig

Pair = tuple[int, int]  # tp, pp
FIXED: tuple[Pair, ...] = ((1, 1), (2, 1), (8, 1), (1, 8), (8, 8))  # drawn besides the best


def plans(study: Case, gpus: int, batch: int, pairs: Sequence[Pair]) -> Iterator[tuple[ModelConfig, Plan]]:
    """Every microbatch and recomputation that divides and fits, for some (tp, pp); data parallelism takes the rest. The
    plan of the study has the choices that are not tried."""
    for (tp, pp), micro in ((pair, micro) for pair in pairs for micro in (1, 2, 4, 8)):
        dp, rest = divmod(gpus, tp * pp)
        if rest or batch % (dp * micro):
            continue
        asked = study.plan.override(tp=tp, pp=pp, dp=dp, sequence=tp > 1, micro_batch=micro, global_batch=batch)
        model, plan = STACKS[asked.stack].shape(study.config, asked)
        with suppress(UserError):  # it does not divide
            for recompute in RECOMPUTES:
                config = replace(model, recompute=recompute)
                if fits(config, plan, study.seq, study.system):
                    yield config, plan


def curves(
    study: Case, counts: Sequence[int], batches: Sequence[int], fixed: Sequence[Pair] = FIXED
) -> dict[str, dict[int, StepTime]]:
    """The fastest step by number of accelerators, where one fits: of the best plans (tp up to the node, pp up to the
    layers, powers of two), and of each fixed (tp, pp). Raises UserError if nothing fits at all."""
    widths, depths = ([1 << k for k in range(n.bit_length())] for n in (study.system.node, study.config.num_layers))
    lines = {"best": [(tp, pp) for tp in widths for pp in depths]}
    lines |= {f"tp {tp}, pp {pp}": [(tp, pp)] for tp, pp in fixed}
    found: dict[str, dict[int, StepTime]] = {name: {} for name in lines}
    for name, (gpus, batch) in product(lines, zip(counts, batches, strict=True)):
        steps = [step_time(*each, study.seq, study.system) for each in plans(study, gpus, batch, lines[name])]
        found[name] |= {gpus: min(steps, key=lambda step: step.total)} if steps else {}
    if not found["best"]:
        raise UserError(
            f"on {counts[0]} to {counts[-1]} x {study.system.name} no plan of tp, pp and dp fits a batch of "
            f"{batches[0]} to {batches[-1]} sequences: start from more with --least, or try --zero 3"
        )
    return {name: line for name, line in found.items() if line}


def draw(study: Case, counts: Sequence[int], batch: int, each: int) -> Any:
    """A matplotlib Figure of two panels: strong scaling of a batch, weak scaling of `each` rows per accelerator."""
    kinds = {
        f"Strong: {batch} sequences of {study.seq} tokens in a step": [batch] * len(counts),
        f"Weak: {each} sequence{'s' * (each > 1)} of {study.seq} tokens for each GPU": [each * n for n in counts],
    }
    stack = "" if study.plan.stack == "megatron" else f", stack {study.plan.stack}"
    machine = f"on {plot_text(study.system.name)}, ZeRO {study.plan.zero}{stack}"
    heading = f"{study.config.num_layers} layers x {study.config.d_model} {machine}"
    figure = new_figure(13, 5.2, [study.system], heading)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, batches) in zip(panels, kinds.items(), strict=True):
        _panel(axes, curves(study, counts, batches), counts)
        tidy(axes, title)
    top = max(line.get_ydata().max() for axes in panels for line in axes.lines)
    panels[0].set(ylim=(0, top * 1.1), ylabel="MFU")
    panels[0].yaxis.set_major_formatter("{x:.0%}")
    # Tokens per second on the right: MFU times what one accelerator could do at its peak.
    batch = study.plan.micro_batch * study.plan.data
    step = step_time(study.config, study.plan.override(global_batch=batch), study.seq, study.system)
    per_second = batch * study.seq / (step.model_flops / study.system.matmul_flops)
    scales = (lambda mfu: mfu * per_second, lambda rate: rate / per_second)
    other = panels[1].secondary_yaxis("right", functions=scales)
    other.set_ylabel("tokens/s for each GPU", color=GREY)
    other.spines["right"].set_visible(False)
    return figure


def _panel(axes: Any, lines: dict[str, dict[int, StepTime]], counts: Sequence[int]) -> None:
    for (name, line), (colour, marker) in zip(lines.items(), (("black", "o"), *STYLES), strict=False):
        first = name == "best"
        look = {"linewidth": 2.6 if first else 1.2, "markersize": 6 if first else 4, "zorder": 2 if first else 3}
        axes.plot(list(line), [step.mfu for step in line.values()], color=colour, marker=marker, label=name, **look)
    plans = {gpus: f"{step.plan.tp} / {step.plan.pp}" for gpus, step in lines["best"].items()}
    ticks_at(axes, counts, [f"{gpus}\n{plans.get(gpus, '-')}" for gpus in counts])
    axes.set_xlim(counts[0] / 1.3, counts[-1] * 6)
    axes.set_xlabel("GPUs, and the best plan's tp / pp")
    name_lines(axes)
