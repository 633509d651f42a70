"""A sweep over expert layers in three panels: time over experts, bytes over capacity, what is dropped over capacity."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.allreduce_plot import HOW_TO_PLOT, STYLES, can_plot
from benchmarks.collective import size_name
from benchmarks.records import Record
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import plot_text

CANDIDATES = {"einsum": "black", "sort": "#E69F00"}  # which no number of experts has
DASHES = ("-", "--", ":")


def chosen_capacity(records: Sequence[Record]) -> str:
    """Of the capacities, the one whose times are drawn: a share of the tokens, as the evaluation has it, else the
    first."""
    names = list(dict.fromkeys(record.config["capacity"] for record in records))
    return next((name for name in names if name != "dropless" and not name.endswith("x")), names[0])


def factor(config: dict[str, Any]) -> float:
    """Slots of all experts over tokens: 1 if each expert takes its share of one choice."""
    return float(config["slots"] * config["experts"] / config["tokens"])


def lines(records: Iterable[Record], axis: str, *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Records by the values of some fields, each line sorted by another; for `factor` without those of no capacity."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if axis != "factor" or record.config["slots"] is not None:
            found.setdefault(tuple(record.config[name] for name in names), []).append(record)

    def place(record: Record) -> float:
        return factor(record.config) if axis == "factor" else float(record.config[axis])

    return {key: sorted(found[key], key=place) for key in sorted(found)}


def draw(records: Sequence[Record]) -> Any:
    """A matplotlib Figure of one sweep."""
    figure = import_module("matplotlib.figure").Figure(figsize=(10.5, 4.4), layout="constrained")
    times, sent, dropped = figure.subplots(1, 3)
    _times(times, records)
    most = max(record.config["ranks"] for record in records)
    there = [record for record in records if record.config["ranks"] == most]
    _sent(sent, there)
    _dropped(dropped, there)
    config, where = records[0].config, records[0].environment
    figure.suptitle(
        f"Expert layers, {config['d_model']} x {config['d_ff']}, {config['tokens']} tokens a rank, "
        f"top {config['top_k']}, skew {config['skew']:g}, on {plot_text(where['device'])}",
        fontsize="medium",
    )
    for axes in (times, sent, dropped):
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="minor", bottom=False, left=False)
        if axes.lines:
            axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


def _times(axes: Any, records: Sequence[Record]) -> None:
    capacity = chosen_capacity(records)
    every = [record for record in records if record.config["capacity"] == capacity]
    ranks = sorted({record.config["ranks"] for record in every})
    for (name, count), line in lines(every, "experts", "candidate", "ranks").items():
        number = ranks.index(count)
        axes.plot(
            [record.config["experts"] for record in line],
            [record.metrics["median_ms"] / 1e3 for record in line],
            DASHES[number % len(DASHES)],
            color=CANDIDATES[name],
            marker=STYLES[number % len(STYLES)][1],
            markersize=5,
            label=f"{name}, {count} rank{'s' * (count > 1)}",
        )
    ticks = sorted({record.config["experts"] for record in every})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("experts")
    axes.set_ylabel("CPU time of a layer, a rank")
    _name_steps(axes, format_seconds)
    share = "" if capacity == "dropless" or capacity.endswith("x") else " of the tokens"
    axes.set_title(f"Time, capacity {capacity}{share}", loc="left", fontsize="medium")


def _sent(axes: Any, records: Sequence[Record]) -> None:
    ranks = records[0].config["ranks"]
    axes.set_title(f"All-to-all, {ranks} rank{'s' * (ranks > 1)}", loc="left", fontsize="medium")
    if ranks == 1:
        axes.text(0.5, 0.5, "one rank sends nothing", transform=axes.transAxes, ha="center")
        return
    axes.set_yscale("log")
    sort = [record for record in records if record.config["candidate"] == "sort"]
    for each, ((experts,), line) in enumerate(lines(sort, "factor", "experts").items()):
        colour, marker = STYLES[each % len(STYLES)]
        _over_factor(axes, line, "all_to_all_bytes", colour, marker, f"sort, {experts} experts")
    einsum = [record for record in records if record.config["candidate"] == "einsum"]
    for line in lines(einsum, "factor").values():
        _over_factor(axes, line, "all_to_all_bytes", "black", "x", "einsum, all experts")
    for record in [record for record in sort if record.config["slots"] is None][:1]:
        axes.axhline(record.metrics["all_to_all_bytes"], color="black", linestyle=":", label="sort, dropless")
    axes.set_ylabel("sent by a rank in one all-to-all")
    _name_steps(axes, size_name)
    _factors(axes)


def _dropped(axes: Any, records: Sequence[Record]) -> None:
    sort = [record for record in records if record.config["candidate"] == "sort"]
    for each, ((experts,), line) in enumerate(lines(sort, "factor", "experts").items()):
        colour, marker = STYLES[each % len(STYLES)]
        _over_factor(axes, line, "dropped_share", colour, marker, f"{experts} experts")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("choices that find no slot")
    axes.yaxis.set_major_formatter(_named(lambda value: f"{value:.0%}"))
    axes.set_title("Dropped", loc="left", fontsize="medium")
    _factors(axes)


def _over_factor(axes: Any, line: Sequence[Record], key: str, colour: str, marker: str, label: str) -> None:
    factors, values = [factor(record.config) for record in line], [record.metrics[key] for record in line]
    axes.plot(factors, values, color=colour, marker=marker, markersize=5, label=label)


def _factors(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("capacity: slots of all experts / tokens")
    axes.xaxis.set_major_formatter(_named(lambda value: f"{value:g}"))


def _name_steps(axes: Any, name: Any) -> None:
    """Names 1, 2 and 5 times the powers of ten of a logarithmic axis, and nothing between."""
    ticker = import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(_named(name))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _named(name: Any) -> Any:
    return import_module("matplotlib.ticker").FuncFormatter(lambda value, _: name(value))


def save(records: Sequence[Record], path: Path) -> Path:
    """Draw a sweep into a file, of the kind that its suffix says; returns its path.

    Raises UserError without matplotlib.
    """
    if not can_plot():
        raise UserError(HOW_TO_PLOT)
    date = None if path.suffix == ".png" else {"Date" if path.suffix == ".svg" else "CreationDate": None}
    # The same records give the same file: no date, identifiers from a fixed salt. Text that stays text is smaller.
    with import_module("matplotlib").rc_context({"svg.hashsalt": "moe-sweep", "svg.fonttype": "none"}):
        draw(records).savefig(path, dpi=130, metadata=date)
    return path
