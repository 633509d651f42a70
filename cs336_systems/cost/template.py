"""Text with numbers filled in: the words are in a template, the arithmetic in Python.

`{S:B}` is the number S formatted for the unit B, `{plan.tp}` and `{parts[host]:s}` look into objects, and
`{hidden:yes|no}` is one of two texts, by a condition. A line that names a value which is None is left out.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from cs336_systems.host.console import format_bytes, format_count, format_seconds

Value = float | str | bool | None
Number = Callable[[Any, str], str]  # (value, unit) as text


class _Filled(Formatter):
    """A formatter whose numbers have units, and whose conditions choose a text."""

    def __init__(self, number: Number) -> None:
        self._number = number

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool):
            return format_spec.split("|")[not value]
        return "" if value is None else self._number(value, format_spec)  # None: in the text that is not chosen


def fields(line: str) -> list[tuple[str, str]]:
    """(name, unit) of each number of a line."""
    return [(name, spec or "") for _, name, spec, _ in Formatter().parse(line) if name]


def kept_lines(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a template without those that name a None."""
    for line in template.splitlines():
        if all(Formatter().get_field(name, (), values)[0] is not None for name, _ in fields(line)):
            yield line


def unit_text(value: Any, unit: str) -> str:
    """A number as text: units are s, b (bytes), n (counted), p (parameters), or a format of Python's."""
    ways = {"s": format_seconds, "b": format_bytes, "n": format_count, "p": lambda each: format_count(each, "B")}
    return format(value, unit) if isinstance(value, str) or unit not in ways else ways[unit](value)


def fill(template: str, values: Mapping[str, Any], number: Number = unit_text) -> Iterator[str]:
    """Lines of a template with their values, `number(value, unit)` as text."""
    return (_Filled(number).vformat(line, (), values) for line in kept_lines(template, values))


def read_data(name: str) -> dict[str, Any]:
    """The tables of `NAME.toml`, a path from this folder."""
    return tomllib.loads(read_template(f"{name}.toml"))


def read_template(name: str) -> str:
    """The text of a template, a path from this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def fill_file(name: str, values: Mapping[str, Any]) -> list[str]:
    """Lines of `templates/NAME.txt` with their values."""
    return list(fill(read_template(f"templates/{name}.txt"), values))
