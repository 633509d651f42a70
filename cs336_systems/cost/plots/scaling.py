"""Weak and strong scaling: MFU over the number of accelerators, of the best plan and of plans of fixed tp, pp.

Strong: the batch of a step stays, so that each has less and less to do. Weak: the batch grows with the accelerators.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cs336_systems.cost.machines import CONSTANTS, Constants, System
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plan_memory import fits
from cs336_systems.cost.plots.style import (
    GREY,
    STYLES,
    footnote,
    in_percent,
    name_ends,
    new_figure,
    ticks_at,
    tidy,
    title,
)
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.errors import UserError
from cs336_systems.host.text import plot_text
from cs336_systems.presets import ModelConfig, Recompute

_MICRO = (1, 2, 4, 8)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "attention", "segments")

Pair = tuple[int, int]  # tp, pp


class Study(NamedTuple):
    """A model and its sequence, a machine, and a plan for the choices that are not tried."""

    config: ModelConfig
    seq: int
    system: System
    base: Plan
    constants: Constants = CONSTANTS


def plans(study: Study, gpus: int, batch: int, pairs: Sequence[Pair]) -> Iterator[tuple[ModelConfig, Plan]]:
    """Every microbatch and recomputation for some (tp, pp), data parallelism taking what is left; what does not divide
    or fit is passed over."""
    for (tp, pp), micro in ((pair, micro) for pair in pairs for micro in _MICRO):
        dp, rest = divmod(gpus, tp * pp * study.base.cp * study.base.ep)
        if rest or batch % (dp * study.base.ep * micro):
            continue
        plan = study.base.override(
            tp=tp, pp=pp, dp=dp, chunks=1, sequence=tp > 1, micro_batch=micro, global_batch=batch
        )
        if not divides(study.config, plan, study.seq):
            continue
        for recompute in _RECOMPUTE:
            config = replace(study.config, recompute=recompute)
            if fits(config, plan, study.seq, study.system):
                yield config, plan


def divides(config: ModelConfig, plan: Plan, seq: int) -> bool:
    """True where a plan divides a model and a sequence."""
    try:
        plan.check(config, seq)
    except UserError:
        return False
    return True


def best(study: Study, gpus: int, batch: int, pairs: Sequence[Pair]) -> StepTime | None:
    """The fastest step of these plans; None if none fits."""
    steps = [step_time(config, plan, study.seq, study.system, study.constants)
             for config, plan in plans(study, gpus, batch, pairs)]  # fmt: skip
    return min(steps, key=lambda step: step.total, default=None)


def every_pair(study: Study) -> list[Pair]:
    """tp up to the node and pp up to the layers, powers of two."""
    widths = [1 << k for k in range(study.system.node.bit_length())]
    return [(tp, 1 << k) for tp in widths for k in range(study.config.num_layers.bit_length())]


def curve(study: Study, counts: Sequence[int], batches: Sequence[int], pairs: Sequence[Pair]) -> dict[int, StepTime]:
    """The fastest step by number of accelerators, without the numbers for which nothing fits."""
    found = {gpus: best(study, gpus, batch, pairs) for gpus, batch in zip(counts, batches, strict=True)}
    return {gpus: step for gpus, step in found.items() if step}


def curves(study: Study, counts: Sequence[int], batches: Sequence[int], fixed: Sequence[Pair]) -> dict[str, Any]:
    """By name of the line: that of the best plans, and one for each fixed (tp, pp) that fits anywhere. Raises UserError
    if no plan fits any number of accelerators."""
    found = {"best": curve(study, counts, batches, every_pair(study))}
    if not found["best"]:
        raise UserError(
            f"on {counts[0]} to {counts[-1]} x {study.system.name} no plan of tp, pp and dp fits a batch of "
            f"{batches[0]} to {batches[-1]} sequences: start from more with --least, or try --zero 3"
        )
    found |= {f"tp {tp}, pp {pp}": curve(study, counts, batches, [(tp, pp)]) for tp, pp in fixed}
    return {name: line for name, line in found.items() if line}


def draw(study: Study, counts: Sequence[int], batch: int, each: int, fixed: Sequence[Pair]) -> Any:
    """A matplotlib Figure of two panels: strong scaling of a batch, weak scaling of `each` sequences an accelerator."""
    figure = new_figure(13, 5.2)
    panels = figure.subplots(1, 2, sharey=True)
    kinds = (
        (f"Strong: {batch} sequences of {study.seq} tokens in a step", [batch] * len(counts)),
        (f"Weak: {each} sequence{'s' * (each > 1)} of {study.seq} tokens for each GPU", [each * n for n in counts]),
    )
    for axes, (heading, batches) in zip(panels, kinds, strict=True):
        _panel(axes, curves(study, counts, batches, fixed), counts)
        title(axes, heading)
    top = max(line.get_ydata().max() for axes in panels for line in axes.lines)
    panels[0].set(ylim=(0, top * 1.1), ylabel="MFU")
    in_percent(panels[0].yaxis)
    _rates(panels[1], study)
    machine = plot_text(study.system.name)
    figure.suptitle(
        f"{study.config.num_layers} layers x {study.config.d_model} on {machine}, ZeRO {study.base.zero}",
        fontsize="medium",
    )
    footnote(figure, [study.system])
    return figure


def _panel(axes: Any, lines: dict[str, dict[int, StepTime]], counts: Sequence[int]) -> None:
    styles = dict(zip(lines, (("black", "o"), *STYLES), strict=False))
    for name, line in lines.items():
        colour, marker = styles[name]
        first = name == "best"
        look = {"linewidth": 2.6 if first else 1.2, "markersize": 6 if first else 4, "zorder": 2 if first else 3}
        axes.plot(list(line), [step.mfu for step in line.values()], color=colour, marker=marker, **look)
    names = [f"{n}\n{lines['best'][n].plan.tp} / {lines['best'][n].plan.pp}" if n in lines["best"] else f"{n}\n-"
             for n in counts]  # fmt: skip
    ticks_at(axes, counts, names)
    axes.set_xlim(counts[0] / 1.3, counts[-1] * 3.6)
    axes.set_xlabel("GPUs, and the best plan's tp / pp")
    tidy(axes)
    ends = {name: (max(line), line[max(line)].mfu) for name, line in lines.items()}
    name_ends(axes, ends, {name: colour for name, (colour, _) in styles.items()}, 0.025, counts[-1] * 1.25)


def _rates(axes: Any, study: Study) -> None:
    """The scale of tokens per second on the right: MFU times what one accelerator could do at its peak."""
    step = step_time(study.config, study.base.override(global_batch=study.base.micro_batch * study.base.data),
                     study.seq, study.system, study.constants)  # fmt: skip
    tokens = step.plan.global_batch * step.seq
    per_second = tokens / (step.model_flops / study.system.matmul_flops)
    other = axes.secondary_yaxis("right", functions=(lambda mfu: mfu * per_second, lambda rate: rate / per_second))
    other.set_ylabel("tokens/s for each GPU", color=GREY)
    other.spines["right"].set_visible(False)
