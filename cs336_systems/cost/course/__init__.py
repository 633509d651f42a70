"""The accounting questions of the course's three editions as worked calculations: words, symbols, numbers.

`question("buckets")` is one `Answer`, `question("rings", N=16)` one with a number of the caller's. The words are in
`templates/`, one file per question.
"""

import re
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, get_type_hints

from cs336_systems.cost.course import arithmetic, communication, memory
from cs336_systems.cost.course.answers import Answer as Answer
from cs336_systems.cost.course.answers import Question, given, require
from cs336_systems.errors import UserError

# The function that computes the numbers of the template of that name.
ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "rings": communication.rings, "buckets": communication.buckets, "data-parallel": communication.data_parallel,
    "fsdp": communication.data_parallel, "tensor-parallel": communication.tensor_parallel,
    "fsdp-tensor-parallel": communication.fsdp_tensor_parallel, "xxl-memory": memory.xxl_memory,
    "xxl-fsdp": memory.xxl_fsdp, "xxl-batch": memory.xxl_batch, "zero1-traffic": memory.zero1_traffic,
    "optimizer-memory": memory.optimizer_memory, "fsdp-memory": memory.fsdp_memory, "pass-memory": memory.pass_memory,
    "attention-memory": memory.attention_memory, "checkpointing": memory.checkpointing,
    "accumulation": arithmetic.accumulation, "norm-roofline": arithmetic.norm_roofline,
    "softmax-share": arithmetic.softmax_share, "leaderboard-flash": arithmetic.leaderboard_flash,
    "leaderboard-step": arithmetic.leaderboard_step,
}  # fmt: skip
QUESTIONS = {name: Question(name) for name in ANSWERS}
_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)"
_SIZE = re.compile(_NUMBER + r" ?([kKMGTP]?)(i?)B(?:/s)?")  # 1GB, 1GiB, 450GB/s
LARGEST = 1e30  # of a number given by a user: what is computed from it stays finite


def question(name: str, **numbers: float | str) -> Answer:
    """One answer, with its own numbers or those given: `question("rings", N=16, S=2e9)`. Raises
    UserError for a question or a number that does not exist, and for values that make no sense."""
    if name not in ANSWERS:
        raise UserError(f"no question {name!r}; choose from {', '.join(ANSWERS)}")
    known, asked = get_type_hints(ANSWERS[name]), QUESTIONS[name]
    if strange := [each for each in numbers if each not in known or each == "return"]:
        raise UserError(f"{name} has no number {strange[0]!r}; it has {defaults(name)}")
    try:
        values = {each: _checked(asked.unit(each), each, value, known[each]) for each, value in numbers.items()}
        found = ANSWERS[name](**values)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except (ArithmeticError, StopIteration) as error:
        wrong = ", ".join(f"{each}={given(value)}" for each, value in values.items())
        raise UserError(f"{name} has no answer for {wrong}: {error or 'out of range'}") from None
    return Answer(asked, {each: found[each] for each in asked.fields})


def defaults(name: str) -> str:
    """The numbers of a question and their own values, as a user types them: `N=8, S=1e9, W=450e9, a=3e-6`."""
    return ", ".join(f"{each}={given(known.default)}" for each, known in signature(ANSWERS[name]).parameters.items())


def parse_numbers(settings: Iterable[str]) -> dict[str, float | str]:
    """`["N=16", "size=xl"]` as the numbers of `question`. Raises UserError for another form, and for a name twice."""
    found: dict[str, float | str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if not name or not value:
            raise UserError(f"{setting!r} is not NAME=VALUE, such as N=16")
        if name in found:
            raise UserError(f"{name} is given twice, as {given(found[name])} and as {value}")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
    return found


def _checked(unit: str, key: str, value: Any, kind: type) -> float | str:
    """The value in the type of the answer's parameter."""
    if kind is str:
        # A name that looks like a number was parsed as one.
        return value if isinstance(value, str) else f"{value:g}"
    value = _nbytes(unit, value) if isinstance(value, str) else value
    wrong = isinstance(value, str) or not 0 < value <= LARGEST
    require(not wrong, f"{key} must be a number above 0 and up to 1e30, not {given(value)}")
    require(value >= 1 / LARGEST, f"{key} must be at least 1e-30, not {given(value)}")
    whole = kind is not int or value == int(value)
    require(whole, f"{key} is counted, so it must be whole, not {given(value)}")
    return kind(value)


def _nbytes(unit: str, text: str) -> float | str:
    """`1GB` as 1e9 and `1GiB` as 2³⁰ where the unit is bytes or bytes per second; the text if it is none of these."""
    match = _SIZE.fullmatch(text)
    if not match or unit not in ("B", "B/s") or (text.endswith("/s") and unit == "B"):
        return text
    number, prefix, binary = match.groups()
    return float(number) * (1024 if binary else 1000) ** " KMGTP".index(prefix.upper() or " ")
