"""The course's parallelism arithmetic: results, with the numbers of one machine, and when communication is hidden."""

from collections.abc import Callable, Mapping
from operator import add
from typing import Any

from cs336_systems.cost.course import Answer, question
from cs336_systems.cost.course.answers import quantity
from writeup.book import Book
from writeup.cells import NONE
from writeup.figures import COLOURS, Figure, draw
from writeup.tables import Table

NAMES = (
    "rings", "data-parallel", "fsdp", "tensor-parallel", "fsdp-tensor-parallel", "xxl-memory", "xxl-fsdp", "xxl-batch",
)  # fmt: skip
MOST = 32  # devices in the figure
TOKENS = range(40, 801, 5)  # a device, in the figure


def content(book: Book) -> dict[str, Any]:
    """Every number of the questions as text, by question and key, the tables and the figure."""
    answers = {name: question(name) for name in NAMES}
    return {
        "n": {name.replace("-", "_"): answer.texts for name, answer in answers.items()},
        "limits": limits(book, answers),
        "readings": readings(book, answers["xxl-batch"]),
    }


def limits(book: Book, answers: Mapping[str, Answer]) -> Table:
    """Table of the ways to split a layer: communication over compute, and the most devices that hide it."""
    data, sharded, tensor, grid = (
        answers[name].numbers for name in ("data-parallel", "fsdp", "tensor-parallel", "fsdp-tensor-parallel")
    )

    def ratio(found: Mapping[str, float], way: str) -> str:
        return quantity(found[f"{way}_communication"] / found[f"{way}_compute"], "%")

    both, apart = grid["together"], grid["fsdp"] + grid["tp"]
    free = ["0%", "any number"]
    rows = [
        ["data parallel", "forward", *_devices(answers, "data-parallel"), *free],
        ["", "backward", *_devices(answers, "data-parallel"), ratio(data, "backward"), _whole(data["largest"])],
        ["FSDP", "forward", *_devices(answers, "fsdp"), ratio(sharded, "forward"), _whole(sharded["largest"])],
        ["", "backward", *_devices(answers, "fsdp"), ratio(sharded, "backward"), _whole(sharded["largest"])],
        ["tensor parallel", "forward", *_devices(answers, "tensor-parallel"), ratio(tensor, "forward"),
         _whole(tensor["largest_forward"])],
        ["", "backward", *_devices(answers, "tensor-parallel"), ratio(tensor, "backward"),
         _whole(tensor["largest_backward"])],
        ["FSDP x TP, overlapped", "forward", *_devices(answers, "fsdp-tensor-parallel", "X", "Y"),
         quantity(both / grid["compute"], "%"), _grid(grid, "largest_overlapped", max)],
        ["FSDP x TP, one after another", "forward", *_devices(answers, "fsdp-tensor-parallel", "X", "Y"),
         quantity(apart / grid["compute"], "%"), _grid(grid, "largest_apart", add)],
    ]  # fmt: skip
    columns = ("<split", "<pass", "devices", "communication / compute", "hidden up to")
    return Table(book, columns, rows)


def _devices(answers: Mapping[str, Answer], name: str, *letters: str) -> list[str]:
    return [" x ".join(answers[name].texts[letter] for letter in letters or ("N",))]


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
    found = answer.numbers
    rows = [
        ["X and Y free, one axis after another", "$4\\alpha^2/(M_X M_Y F)$", "free_apart"],
        ["the mesh as given, both axes at once", "$\\alpha/(M_X Y)$", "given_overlapped"],
        ["the mesh as given, one axis after another", "$\\alpha/(M_X Y) / (1 - \\alpha Y/(M_Y F))$", "given_apart"],
        ["X and Y free, both axes at once", "$\\alpha^2/(M_X M_Y F)$", "free_overlapped"],
    ]
    cells = [[words, formula, f"{found[key]:.0f}" if key in found else NONE] for words, formula, key in rows]
    return Table(
        book, ("<what the question is taken to say", "<tokens a device, at least", "with these numbers"), cells
    )


def _ratio(way: str) -> Callable[[Answer], float]:
    return lambda answer: answer.numbers[f"{way}_communication"] / answer.numbers[f"{way}_compute"]


def _many(axes: Any) -> None:
    """Communication over compute, by devices."""
    lines = {
        "DP backward, FSDP both": ("fsdp", "forward"),
        "TP forward": ("tensor-parallel", "forward"),
        "TP backward": ("tensor-parallel", "backward"),
    }
    counts = range(2, MOST + 1)
    for name, (asked, way) in lines.items():
        axes.plot(counts, [_ratio(way)(question(asked, N=count)) for count in counts], label=name)
    axes.set_xlabel("devices")
    axes.set_ylabel("communication / compute")
    axes.set_title("2026: one layer", loc="left", fontsize="medium")


def _tokens(axes: Any, answer: Answer) -> None:
    """Both axes' communication over compute, by tokens per device, on the mesh of the 2025 question."""
    found = answer.numbers
    gather = [found["given_overlapped"] / tokens for tokens in TOKENS]
    axes.plot(TOKENS, gather, label="FSDP's gather")
    axes.plot(TOKENS, [found["tp_share"]] * len(TOKENS), label="TP's gather and scatter")
    axes.plot(TOKENS, [each + found["tp_share"] for each in gather], label="one after another")
    for key in ("given_overlapped", "given_apart"):
        axes.plot([found[key]], [1.0], "o", color="black", markersize=5)
        axes.annotate(f"{found[key]:.0f}", (found[key], 1.0), (4, 6), textcoords="offset points", fontsize=8)
    axes.set_ylim(0, 3)
    axes.set_xlabel("tokens a device")
    axes.set_title("2025: the mesh as given", loc="left", fontsize="medium")


def picture(answers: Mapping[str, Answer]) -> Figure:
    """Picture of where communication takes longer than compute, for one layer and for XXL."""

    def into(panels: Any) -> None:
        _many(panels[0])
        _tokens(panels[1], answers["xxl-batch"])
        for axes in panels:
            axes.axhline(1.0, color=COLOURS[6], linewidth=0.8)
            axes.legend(fontsize=8)

    return draw(
        "arithmetic-hidden",
        "Communication over compute; below 1 it can be hidden. Left: a layer of 2026 over devices. Right: XXL of 2025, "
        "where the two readings of the mesh as given cross 1.",
        "Two panels of communication over compute: rising with devices, falling with tokens a device",
        into, columns=2, height=3.4,
    )  # fmt: skip
