"""What a worked answer is made of: a question, its symbols, a derivation in steps, and where reality departs from it.

Every number of an answer is the value of a step or of a symbol, so that a test can ask for it and no text repeats it.
"""

import re
from dataclasses import dataclass

from cs336_systems.errors import UserError

_PREFIXES = (
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)
_WORDS = ((1e12, " trillion"), (1e9, " billion"), (1e6, " million"), (1.0, ""))


@dataclass(frozen=True)
class Symbol:
    """A letter of the formulas, what it stands for, and its value in this instance."""

    name: str
    meaning: str
    value: float | str
    unit: str = ""


@dataclass(frozen=True)
class Step:
    """One line of a derivation; `key` is the name under which `Answer.numbers` has its value."""

    words: str
    formula: str = ""
    key: str = ""
    value: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Question:
    """What is asked, whatever the numbers."""

    id: str
    title: str
    years: tuple[int, ...]
    problems: tuple[str, ...]  # as the handouts call them
    text: str
    assumed: tuple[str, ...]
    departures: tuple[str, ...] = ()  # where the real world is otherwise


@dataclass(frozen=True)
class Answer:
    """A question of the course, answered for one set of numbers."""

    question: Question
    symbols: tuple[Symbol, ...]
    steps: tuple[Step, ...]
    result: str
    notes: tuple[str, ...] = ()  # more departures, with these numbers

    @property
    def id(self) -> str:
        """The name by which it is asked for."""
        return self.question.id

    @property
    def years(self) -> tuple[int, ...]:
        """The editions that ask it."""
        return self.question.years

    @property
    def anchor(self) -> str:
        """Where a link within the page goes: the heading, as GitHub writes it."""
        return re.sub(r"[^\w -]", "", self.question.title.lower()).replace(" ", "-")

    @property
    def numbers(self) -> dict[str, float]:
        """Every number of the derivation by its key, in the order of the steps and in their units."""
        return {step.key: step.value for step in self.steps if step.value is not None}

    def markdown(self) -> str:
        """The answer as a section of a Markdown page."""
        asked, years = self.question, ", ".join(map(str, self.years))
        lines = [f"## {asked.title}", "", f"`{self.id}`, {years}: {', '.join(asked.problems)}", "", asked.text, ""]
        lines += ["| symbol | meaning | here |", "| --- | --- | --: |"]
        lines += [f"| `{each.name}` | {each.meaning} | {quantity(each.value, each.unit)} |" for each in self.symbols]
        lines += ["", "Assumed:", "", *(f"- {each}" for each in asked.assumed), ""]
        lines += [f"{place}. {_line(step)}" for place, step in enumerate(self.steps, 1)]
        lines += ["", f"**{self.result}**"]
        if departures := asked.departures + self.notes:
            lines += ["", "Where reality departs:", "", *(f"- {each}" for each in departures)]
        return "\n".join(lines)


def _line(step: Step) -> str:
    """A step as text: words, formula, value."""
    if not step.formula and step.value is None:
        return f"{step.words}."
    parts = [f"`{step.formula}`"] if step.formula else []
    parts += [] if step.value is None else [f"**{quantity(step.value, step.unit)}**"]
    return f"{step.words}: {' = '.join(parts)}."


def require(holds: bool, words: str) -> None:
    """Raise UserError with these words unless the condition holds: the numbers given make no sense together."""
    if not holds:
        raise UserError(words)


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

    `quantity(3.518e12, "B")` is `3.518 TB (3276 GiB)`.
    """
    if isinstance(value, str):
        return value
    if unit == "":
        return _digits(value)
    if unit == "decimals":
        return f"{value:.4f}"
    if unit in ("parameters", "tokens", "tensors", "devices", "buckets", "layers", "blocks"):
        size, word = next(each for each in _WORDS if abs(value) >= each[0] or each[0] == 1.0)
        return f"{_digits(value / size)}{word} {unit if value != 1 else unit[:-1]}"
    if unit in ("%", "x"):
        return f"{_digits(100 * value)}%" if unit == "%" else f"{_digits(value)} times"
    size, prefix = next((each for each in _PREFIXES if abs(value) >= each[0]), (1.0, ""))
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
