"""A worked answer: a Markdown template that holds the derivation in words, and the numbers computed for it.

`templates/NAME.md` is the answer to question NAME, a template of `cost.template` with the units of `quantity`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from cs336_systems.cost.template import Value, fields, fill, kept_lines, read_template
from cs336_systems.errors import UserError

_PREFIXES = dict(zip("PTGMk", (1e15, 1e12, 1e9, 1e6, 1e3), strict=True)) | {"": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
_COUNTED = ("parameters", "tokens", "tensors", "devices", "buckets", "layers", "blocks")
_WORDS = {" trillion": 1e12, " billion": 1e9, " million": 1e6, "": 0.0}


@dataclass(frozen=True)
class Question:
    """A question of the course without numbers, with the head of its template."""

    id: str

    @cached_property
    def template(self) -> str:
        """The answer as Markdown, with fields where numbers go."""
        return read_template(f"course/templates/{self.id}.md")

    @property
    def title(self) -> str:
        return self.template.splitlines()[0].removeprefix("## ")

    @property
    def fields(self) -> list[str]:
        return list(dict.fromkeys(re.findall(r"{(\w+)", self.template)))

    def unit(self, symbol: str) -> str:
        """Unit of a symbol, from the table of symbols."""
        return next((unit for name, unit in fields(self.template) if name == symbol), "")


@dataclass(frozen=True)
class Answer:
    """Answer to a question for one set of numbers, those given and those computed from them."""

    question: Question
    values: Mapping[str, Value]

    @property
    def numbers(self) -> dict[str, float]:
        """Every number by its name in the template."""
        return {name: value for name, value in self.values.items()
                if isinstance(value, int | float) and not isinstance(value, bool)}  # fmt: skip

    @property
    def texts(self) -> dict[str, str]:
        """Every number of the table of symbols and of the steps as the page writes it."""
        lines = kept_lines(self.question.template, self.values)
        found = [each for line in lines if line[:1] == "|" or line[:1].isdigit() for each in fields(line)]
        return {name: quantity(each, unit) for name, unit in reversed(found) if (each := self.values[name]) is not None}

    @property
    def result(self) -> str:
        """The conclusion, the line in bold."""
        return next(line for line in self.markdown().splitlines() if line.startswith("**")).strip("*")

    def markdown(self) -> str:
        """The answer as a section of a Markdown page."""
        number, lines = count(1), fill(self.question.template, self.values, quantity)
        return "\n".join(re.sub(r"^\d+(?=\. )", lambda _: str(next(number)), line) for line in lines)


def require(holds: bool, message: str) -> None:
    """Raise UserError with this message, before which `question` puts its name, unless the condition holds."""
    if not holds:
        raise UserError(message)


def require_format(e: int) -> None:
    """Raise UserError for numbers of e bytes where there is no such format."""
    require(e in (1, 2, 4, 8), f"a number has e = 1, 2, 4 or 8 bytes, not {given(e)}")


def given(value: float | str) -> str:
    """A number as people type it, exactly: `450e9`, `3e-6`, `0.01`, `32768`."""
    if isinstance(value, str) or not 0 < abs(value) < float("inf"):
        return str(value)
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.12g}"
    power = 3 * ((int(f"{value:e}".partition("e")[2])) // 3)
    return f"{value / 10.0**power:.12g}e{power}"


def quantity(value: float | str, unit: str = "") -> str:
    """A number as people read it: four digits, a prefix where the unit takes one, bytes in both kinds of units.
    `quantity(3.518e12, "B")` is `3.518 TB (3276 GiB)`."""
    if isinstance(value, str) or unit == "given":
        return given(value)
    if unit == "":
        return _digits(value)
    if unit == "decimals":
        return f"{value:.4f}" if abs(value) >= 1 else _digits(value)
    if unit in _COUNTED:
        word, size = next(each for each in _WORDS.items() if abs(value) >= each[1])
        return f"{_digits(value / (size or 1.0))}{word} {unit if value != 1 else unit[:-1]}"
    if unit in ("%", "x"):
        return f"{_digits(100 * value)}%" if unit == "%" else f"{_digits(value)} times"
    prefix, size = next((each for each in _PREFIXES.items() if abs(value) >= each[1]), ("", 1.0))
    text = f"{_digits(value / size)} {prefix}{unit}"
    if unit == "B" and abs(value) >= 1024:
        power = min(3, next(p for p in range(8, 0, -1) if abs(value) >= 1024**p))
        text += f" ({_digits(value / 1024**power)} {'KMG'[power - 1]}iB)"
    return text


def _digits(value: float) -> str:
    """Four significant digits, all those before the point of what is below 10¹⁵."""
    if abs(value) >= 1e15:
        return f"{value:.4g}"
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
