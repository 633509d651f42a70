"""The course's parallelism arithmetic: results, with the numbers of one machine, and when communication is hidden."""

from collections.abc import Callable, Mapping
from operator import add
from typing import Any

from cs336_systems.cost.course import Answer, question
from cs336_systems.cost.course.answers import quantity
from writeup.book import Book
from writeup.cells import NONE
from writeup.tables import Table

NAMES = (
    "rings", "data-parallel", "fsdp", "tensor-parallel", "fsdp-tensor-parallel", "xxl-memory", "xxl-fsdp", "xxl-batch",
)  # fmt: skip


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
