"""Communication by degree: the share of a step that one axis of parallelism spends on it.

The same work is split over more and more ranks along one axis, all others 1: a sequence over tp and cp, a batch over
dp (ZeRO 3, which gathers each weight twice and scatters its gradient) and ep. What a rank computes shrinks with the
degree, what it sends hardly. Nothing is hidden behind computing here: a share above a half cannot be hidden at all.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from cs336_systems.cost.machines import CONSTANTS, Constants, System
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plots.scaling import divides
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
    """Seconds of a step at one degree; the optimizer, once a step however large the batch is, counts as neither."""

    degree: int
    communication: float
    computing: float

    @property
    def share(self) -> float:
        """Of the two together."""
        return self.communication / (self.communication + self.computing)


def with_experts(config: ModelConfig) -> ModelConfig:
    """The model, or if it has no experts the same with EXPERTS in every second layer."""
    return config if config.num_experts else replace(config, num_experts=EXPERTS, expert_every=2)


def plan_at(axis: Axis, degree: int, batch: int) -> Plan | None:
    """A plan of one axis alone, its rows in one microbatch; None for a batch that does not divide."""
    splits_batch = axis in ("dp", "ep")
    if splits_batch and batch % degree:
        return None
    zero, rows, together = (
        3 if axis == "dp" else 0,
        batch // degree if splits_batch else 1,
        batch if splits_batch else 1,
    )
    plan = Plan(sequence=axis == "tp", zero=zero, micro_batch=rows, global_batch=rows, overlap="none")
    return plan.override(**{axis: degree, "global_batch": together})


def shares(
    config: ModelConfig,
    seq: int,
    system: System,
    axis: Axis,
    degrees: Sequence[int],
    batch: int,
    constants: Constants = CONSTANTS,
) -> list[Share]:
    """One Share for each degree that divides the model, the sequence or the batch."""
    config, found = with_experts(config) if axis == "ep" else config, []
    for degree in degrees:
        plan = plan_at(axis, degree, batch)
        if plan and divides(config, plan, seq):
            parts = step_time(config, plan, seq, system, constants).parts
            found.append(Share(degree, parts[AXES[axis][0]], sum(parts[name] for name in COMPUTING)))
    return found


def crossing(found: Sequence[Share]) -> int | None:
    """The first degree at which communication takes longer than computing."""
    return next((each.degree for each in found if each.communication > each.computing), None)


def draw(
    config: ModelConfig, seq: int, systems: Sequence[System], most: int, batch: int, constants: Sequence[Constants]
) -> Any:
    """A matplotlib Figure of four panels, one for each axis, with a line for each machine and its constants. Raises
    UserError if no degree divides."""
    figure = new_figure(11.5, 7.6)
    degrees = [1 << k for k in range(1, most.bit_length())]
    panels = figure.subplots(2, 2, sharey=True, sharex=True).ravel()
    for axes, (axis, (_, heading)) in zip(panels, AXES.items(), strict=True):
        lines = {
            each.name: shares(config, seq, each, axis, degrees, batch, own)
            for each, own in zip(systems, constants, strict=True)
        }
        if not any(lines.values()):
            raise UserError(f"no power of two up to {most} divides what {axis} splits: choose another --batch-size")
        _panel(axes, lines, most)
        sparse = with_experts(config)
        experts = f"{sparse.num_experts} experts in {sparse.expert_layers} layers"
        title(axes, heading.format(batch=f"{batch} sequences", experts=experts))
        _mark_nodes(axes, {each.node for each in systems})
        ticks_at(axes, degrees)
        axes.set(xlim=(1.7, most * 3.6), ylim=(0, 1))
        in_percent(axes.yaxis)
    for axes in panels[2:]:
        axes.set_xlabel("degree")
    for axes in panels[::2]:
        axes.set_ylabel("communication / (it + computing)")
    figure.suptitle(
        f"{config.num_layers} layers x {config.d_model}, sequences of {seq} tokens, nothing hidden; "
        "ringed: the first degree at which communication takes longer than computing",
        fontsize="medium",
    )
    panels[0].text(most * 3.4, 0.52, "communication takes longer", ha="right", color=GREY, fontsize="small")
    footnote(figure, systems)
    return figure


def _panel(axes: Any, lines: dict[str, list[Share]], most: int) -> None:
    axes.axhspan(0.5, 1, color="#f3f3f3", zorder=0)
    ends: dict[str, tuple[float, float]] = {}
    for (name, found), (colour, marker) in zip(lines.items(), STYLES, strict=False):
        axes.plot([s.degree for s in found], [s.share for s in found], color=colour, marker=marker, markersize=4.5)
        if found:
            ends[name] = (found[-1].degree, found[-1].share)
        if (first := crossing(found)) is not None:
            place = next(each.share for each in found if each.degree == first)
            axes.scatter(first, place, s=130, facecolors="none", edgecolors=colour, linewidths=1.6, zorder=4)
    name_ends(axes, ends, {name: colour for name, (colour, _) in zip(lines, STYLES, strict=False)}, 0.055)
    tidy(axes)


def _mark_nodes(axes: Any, sizes: set[int]) -> None:
    for size in sizes:
        axes.axvline(size, color=GREY, linewidth=1, linestyle=":", zorder=1)
        axes.annotate(f"a node: {size}", (size, 0.97), (4, 0), textcoords="offset points", va="top", color=GREY,
                      fontsize="small")  # fmt: skip
