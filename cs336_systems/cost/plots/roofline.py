"""The roofline: FLOP/s of each operator of a block and of the head, over its FLOPs per byte.

Left of the ridge memory limits an operator, right of it the processors do (Williams et al., CACM 52(4), 2009).
"""

from typing import Any, NamedTuple

from cs336_systems.cost.machines import System
from cs336_systems.cost.operator_time import kernel_time
from cs336_systems.cost.operators import operators_of
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plots.style import BACKWARD, FORWARD, GREY, new_figure, spread, tidy
from cs336_systems.cost.rank import Rank
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import plot_text
from cs336_systems.presets import ModelConfig

SHOWN = 0.01  # share of the time below which an operator has no label
WAYS = {"forward": (FORWARD, ">", "▶"), "backward": (BACKWARD, "<", "◀")}


class Point(NamedTuple):
    """One operator in one direction ("forward" or "backward"), on one rank for one microbatch."""

    operator: str
    way: str
    intensity: float  # FLOPs per byte read or written
    rate: float  # FLOP/s
    seconds: float
    counted: bool  # False: element-wise work, of which the model counts bytes only; one FLOP a number stands for it


class Roof(NamedTuple):
    """Two ceilings: bytes/s of memory, and FLOP/s; they meet at the ridge, in FLOPs per byte."""

    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on compute is the bound, not memory."""
        return self.flops / self.bandwidth

    def at(self, intensity: float) -> float:
        return min(self.flops, self.bandwidth * intensity)


def roofs(plan: Plan, system: System) -> tuple[Roof, Roof]:
    """(of the data sheet, attainable)."""
    peak = system.matmul_flops if plan.width == 2 else system.wide_flops
    attainable = Roof(system.memory_rate, system.rate(plan.width) * system.constants.product)
    return Roof(system.bandwidth, peak), attainable


def points(config: ModelConfig, plan: Plan, seq: int, system: System) -> list[Point]:
    """The operators of one block, with experts if the model has any, and of the head, forward and backward. Raises
    UserError for a plan that does not divide the model."""
    plan.check(config, seq)
    rank, found = Rank(config, plan.alone(), seq), []
    for each in (*operators_of(rank, "sparse" if config.num_experts else "dense"), *operators_of(rank, "head")):
        for way, works in (("forward", each.forward), ("backward", each.backward)):
            seconds = sum(kernel_time(kernel, system).busy for kernel in works)
            flops = sum(work.flops or work.nbytes / work.width for work in works)
            nbytes = sum(work.nbytes for work in works)
            found.append(Point(each.name, way, flops / nbytes, flops / seconds, seconds, any(w.flops for w in works)))
    return found


def labels(found: list[Point]) -> dict[str, str]:
    """By operator, in the order of the model: its name and its share of the time, if that is worth a label."""
    total, names = sum(point.seconds for point in found), list(dict.fromkeys(point.operator for point in found))
    shares = {name: sum(point.seconds for point in found if point.operator == name) / total for name in names}
    return {name: f"{name}, {share:.0%}" for name, share in shares.items() if share >= SHOWN}


def draw(config: ModelConfig, plan: Plan, seq: int, system: System) -> Any:
    """A matplotlib Figure: all operators under the machine's two roofs, and the products in a linear scale."""
    found, both = points(config, plan, seq, system), roofs(plan, system)
    total, products = sum(point.seconds for point in found), [point for point in found if point.counted]
    split = f", tp {plan.tp}{' with sequence parallelism' if plan.sequence else ''}" if plan.tp > 1 else ""
    heading = (
        f"One block and the head of {config.num_layers} layers x {config.d_model}{split}, on {plot_text(system.name)}: "
        f"{plan.micro_batch} x {seq} tokens take {format_seconds(total)} (area: time)"
    )
    figure, (sheet, _) = new_figure(11.5, 5.4, [system], heading), both
    whole, near = figure.subplots(1, 2, width_ratios=(1, 1.25))
    left, right = (pick(point.intensity for point in found) for pick in (min, max))
    whole.set(xscale="log", yscale="log", xlim=(left / 4, max(right, sheet.ridge) * 3), ylabel="FLOP/s on one rank")
    whole.set_ylim(min(point.rate for point in found) / 3, sheet.flops * 2)
    left, right = (pick(point.intensity for point in products) for pick in (min, max))
    near.set(xscale="log", xlim=(min(left, sheet.ridge) / 2, max(right, sheet.ridge) * 14))
    near.set_ylim(0, sheet.flops * 1.12)
    _draw_points(whole, both, found, total)
    _draw_points(near, both, products, total)
    _name(whole, [point for point in found if not point.counted], labels(found), 0.36, 0.0)
    _name(near, products, labels(found), 0.62, -0.04)
    for roof, name, colour in zip(both, ("data sheet", "attainable"), (GREY, "black"), strict=True):
        text, where = f"{name}: {roof.flops / 1e12:.0f} TFLOP/s", (near.get_xlim()[1], roof.flops)
        near.annotate(text, where, (0, 3), textcoords="offset points", ha="right", color=colour, fontsize="small")
    near.yaxis.set_major_formatter(lambda value, _: f"{value / 1e12:.0f} T")
    for axes, title in ((whole, "All operators (hollow: element-wise, one FLOP a number)"), (near, "Products")):
        axes.set_xlabel("arithmetic intensity: FLOPs for each byte of memory")
        tidy(axes, title)
    for number, (way, (colour, _, sign)) in enumerate(WAYS.items()):
        where = (0.03, 0.93 - 0.06 * number)
        whole.text(*where, f"{sign} {way}", color=colour, transform=whole.transAxes, weight="bold")
    return figure


def _draw_points(axes: Any, both: tuple[Roof, Roof], found: list[Point], total: float) -> None:
    start, end = axes.get_xlim()
    for roof, colour, dashes in zip(both, (GREY, "black"), ("--", "-"), strict=True):
        # A straight line in a logarithmic scale is a curve in a linear one.
        places = sorted([*(start * (end / start) ** (step / 200) for step in range(201)), roof.ridge])
        axes.plot(places, [roof.at(x) for x in places], dashes, color=colour, linewidth=1.2, zorder=0)
    for point in found:
        colour, marker, _ = WAYS[point.way]
        inside = colour if point.counted else "none"
        look = {"facecolors": inside, "edgecolors": colour, "alpha": 0.7, "linewidths": 1.2}
        axes.scatter(point.intensity, point.rate, 14 + 1500 * point.seconds / total, marker=marker, **look)


def _name(axes: Any, found: list[Point], named: dict[str, str], column: float, down: float) -> None:
    """Names in a column, `down` lower, in shares of the axes, each joined to the slower direction of its operator."""
    slower: dict[str, Point] = {}
    for point in found:
        if point.operator in named:
            slower[point.operator] = min(point, slower.get(point.operator, point), key=lambda each: each.rate)
    place = axes.transData + axes.transAxes.inverted()
    joined = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "relpos": (0, 0.5), "shrinkB": 2}
    heights = spread([place.transform((p.intensity, p.rate))[1] + down for p in slower.values()], 0.045)
    for point, height in zip(slower.values(), heights, strict=True):
        look = {"textcoords": "axes fraction", "va": "center", "fontsize": "small", "arrowprops": joined}
        axes.annotate(named[point.operator], (point.intensity, point.rate), (column, height), **look)
