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
