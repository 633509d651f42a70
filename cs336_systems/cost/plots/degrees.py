"""Communication by degree: the share of a step that one axis of parallelism spends on it.

The same work is split over more and more ranks along one axis, all others 1: a sequence over tp and cp, a batch over
dp (ZeRO 3, which gathers each weight twice and scatters its gradient) and ep. A rank's computation shrinks with the
degree, its traffic hardly. Nothing overlaps here; with a share above a half, communication cannot be hidden whole.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from cs336_systems.cost.machines import System
from cs336_systems.cost.plan import Plan, StackName
from cs336_systems.cost.plots.style import GREY, STYLES, name_lines, new_figure, of_stack, ticks_at, tidy
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import step_time
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig

Axis = Literal["tp", "cp", "dp", "ep"]
# Part of a step that the axis takes, and title: what it splits.
AXES: dict[Axis, tuple[str, str]] = {
    "tp": ("tensor-parallel", "Tensor parallelism: one sequence"),
    "cp": ("context-parallel", "Context parallelism: one sequence"),
    "dp": ("data-parallel", "Data parallelism, ZeRO 3: {batch}"),
    "ep": ("expert-parallel", "Expert parallelism: {batch}, {experts}"),
}
COMPUTING = ("forward", "backward", "recompute", "host")
EXPERTS = 128  # of a model that has none, for the panel of ep


class Share(NamedTuple):
    """Seconds of a step at one degree. The optimizer, whose time does not depend on the batch, counts as neither."""

    degree: int
    communication: float
    computing: float

    @property
    def share(self) -> float:
        return self.communication / (self.communication + self.computing)


def with_experts(config: ModelConfig) -> ModelConfig:
    """The model, or if it has no experts the same with EXPERTS in every second layer."""
    return config if config.num_experts else replace(config, num_experts=EXPERTS, expert_every=2)


def plans(axis: Axis, degrees: Sequence[int], batch: int, stack: StackName = "megatron") -> list[Plan]:
    """Plans of one axis alone, the rows of each in one microbatch, of the degrees that divide the batch."""
    splits, found = axis in ("dp", "ep"), []
    for degree in (each for each in degrees if not splits or batch % each == 0):
        rows, together = (batch // degree, batch) if splits else (1, 1)
        along: dict[str, Any] = {axis: degree, "sequence": axis == "tp", "zero": 3 if axis == "dp" else 0}
        found.append(Plan(**along, micro_batch=rows, global_batch=together, overlap="none", stack=stack))
    return found


def shares(config: ModelConfig, seq: int, system: System, axis: Axis, tried: Sequence[Plan]) -> list[Share]:
    """One Share for each of some plans of an axis that divides the model and the sequence."""
    config, found = with_experts(config) if axis == "ep" else config, []
    for plan in tried:
        with suppress(UserError):  # it does not divide
            parts = step_time(config, plan, seq, system).parts
            found.append(Share(getattr(plan, axis), parts[AXES[axis][0]], sum(parts[name] for name in COMPUTING)))
    return found


def draw(
    config: ModelConfig, seq: int, systems: Sequence[System], most: int, batch: int, stack: StackName = "megatron"
) -> Any:
    """A matplotlib Figure: a panel for each axis, a line for each machine. Raises UserError if no degree divides."""
    heading = (
        f"{config.num_layers} layers x {config.d_model}, sequences of {seq} tokens{of_stack(stack)}, nothing hidden; "
        "ringed: the first degree at which communication takes longer than computing"
    )
    config = config.override(kernels=STACKS[stack].kernels)
    figure, degrees = new_figure(11.5, 7.6, systems, heading), [1 << k for k in range(1, most.bit_length())]
    panels, sparse = figure.subplots(2, 2, sharey=True, sharex=True).ravel(), with_experts(config)
    words = {"batch": f"{batch} sequences", "experts": f"{sparse.num_experts} experts in {sparse.expert_layers} layers"}
    for axes, (axis, (_, title)) in zip(panels, AXES.items(), strict=True):
        tried = plans(axis, degrees, batch, stack)
        lines = {each.name: shares(config, seq, each, axis, tried) for each in systems}
        if not any(lines.values()):
            raise UserError(f"no power of two up to {most} divides what {axis} splits: choose another --batch-size")
        _panel(axes, lines)
        tidy(axes, title.format(**words))
        for size in {each.node for each in systems}:
            axes.axvline(size, color=GREY, linewidth=1, linestyle=":", zorder=1)
            look = {"textcoords": "offset points", "va": "top", "color": GREY, "fontsize": "small"}
            axes.annotate(f"a node: {size}", (size, 0.97), (4, 0), **look)
        ticks_at(axes, degrees)
        axes.set(xlim=(1.7, most * 6), ylim=(0, 1))
        axes.yaxis.set_major_formatter("{x:.0%}")
    for axes in panels[2:]:
        axes.set_xlabel("degree")
    for axes in panels[::2]:
        axes.set_ylabel("communication / (it + computing)")
    panels[0].text(most * 5, 0.92, "communication takes longer", ha="right", color=GREY, fontsize="small")
    return figure


def _panel(axes: Any, lines: dict[str, list[Share]]) -> None:
    axes.axhspan(0.5, 1, color="#f3f3f3", zorder=0)
    for (name, found), (colour, marker) in zip(lines.items(), STYLES, strict=False):
        if found:
            style = {"color": colour, "marker": marker, "markersize": 4.5, "label": name}
            axes.plot([s.degree for s in found], [s.share for s in found], **style)
        if first := next((each for each in found if each.communication > each.computing), None):
            ring = {"facecolors": "none", "edgecolors": colour, "linewidths": 1.6, "zorder": 4}
            axes.scatter(first.degree, first.share, s=130, **ring)
    name_lines(axes)
