"""Text whose numbers are filled in: the words are in a template, the arithmetic in Python.

`{S:B}` is the number S formatted for the unit B, `{plan.tp}` and `{parts[host]:s}` look into objects, and
`{hidden:yes|no}` is one of two texts, by a condition. A line that names a value which is None is left out.
"""

from collections.abc import Callable, Iterator, Mapping
from string import Formatter
from typing import Any

Value = float | str | bool | None
Number = Callable[[Any, str], str]  # (value, unit) as text


class _Shown:
    """A value as a field of a template formats it."""

    def __init__(self, value: Any, number: Number) -> None:
        self._value, self._number = value, number

    def __getattr__(self, name: str) -> "_Shown":
        return _Shown(getattr(self._value, name), self._number)

    def __getitem__(self, key: str) -> "_Shown":
        return _Shown(self._value[key], self._number)

    def __format__(self, spec: str) -> str:
        if isinstance(self._value, bool):
            return spec.split("|")[not self._value]
        return "" if self._value is None else self._number(self._value, spec)  # None: in the text that is not chosen


def fields(line: str) -> list[tuple[str, str]]:
    """(name, unit) of each number of a line."""
    return [(name, spec or "") for _, name, spec, _ in Formatter().parse(line) if name]


def kept_lines(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a template without those that name a None."""
    for line in template.splitlines():
        if all(Formatter().get_field(name, (), values)[0] is not None for name, _ in fields(line)):
            yield line


def fill(template: str, values: Mapping[str, Any], number: Number) -> Iterator[str]:
    """Lines of a template with their values, `number(value, unit)` as text."""
    shown = {name: _Shown(value, number) for name, value in values.items()}
    return (line.format_map(shown) for line in kept_lines(template, values))
