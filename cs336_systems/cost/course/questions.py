"""The list of questions, one of them with other numbers, and all of them as a page."""

import re
from collections.abc import Callable, Iterable
from inspect import signature
from math import isfinite
from typing import get_type_hints

from cs336_systems.cost.course.activations import attention_memory, checkpointing, pass_memory
from cs336_systems.cost.course.answers import Answer, given
from cs336_systems.cost.course.buckets import buckets
from cs336_systems.cost.course.inequalities import data_parallel, fsdp, tensor_parallel
from cs336_systems.cost.course.kernels import leaderboard_flash, leaderboard_step, norm_roofline, softmax_share
from cs336_systems.cost.course.mesh import fsdp_tensor_parallel
from cs336_systems.cost.course.precision import accumulation
from cs336_systems.cost.course.rings import rings
from cs336_systems.cost.course.sharding import fsdp_memory, optimizer_memory, zero1_traffic
from cs336_systems.cost.course.xxl import xxl_batch, xxl_fsdp, xxl_memory
from cs336_systems.errors import UserError

ANSWERS: dict[str, Callable[..., Answer]] = {
    # Communication
    "rings": rings,
    "buckets": buckets,
    "data-parallel": data_parallel,
    "fsdp": fsdp,
    "tensor-parallel": tensor_parallel,
    "fsdp-tensor-parallel": fsdp_tensor_parallel,
    "xxl-memory": xxl_memory,
    "xxl-fsdp": xxl_fsdp,
    "xxl-batch": xxl_batch,
    "zero1-traffic": zero1_traffic,
    # Memory
    "optimizer-memory": optimizer_memory,
    "fsdp-memory": fsdp_memory,
    "pass-memory": pass_memory,
    "attention-memory": attention_memory,
    "checkpointing": checkpointing,
    # Arithmetic
    "accumulation": accumulation,
    "norm-roofline": norm_roofline,
    "softmax-share": softmax_share,
    "leaderboard-flash": leaderboard_flash,
    "leaderboard-step": leaderboard_step,
}
_SIZE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?) ?([kKMGTP]?)(i?)B(?:/s)?")  # 1GB, 1GiB, 450GB/s
LARGEST = 1e30  # of a number given by a user: what is computed from it stays finite


def question(name: str, **numbers: float | str) -> Answer:
    """One answer, with other numbers than its own where they are given: `question("rings", N=16, S=2e9)`.

    Raises UserError for a question or a number that does not exist, and for values that make no sense.
    """
    if name not in ANSWERS:
        raise UserError(f"no question {name!r}; choose from {', '.join(ANSWERS)}")
    answer = ANSWERS[name]
    known = get_type_hints(answer)
    known.pop("return")
    if strange := [each for each in numbers if each not in known]:
        raise UserError(f"{name} has no number {strange[0]!r}; it has {defaults(name)}")
    values = {each: _checked(name, each, value, known[each]) for each, value in numbers.items()}
    try:
        return answer(**values)
    except (ArithmeticError, StopIteration) as error:
        wrong = ", ".join(f"{each}={given(value)}" for each, value in values.items())
        raise UserError(f"{name} has no answer for {wrong}: {error or 'out of range'}") from None


def defaults(name: str) -> str:
    """The numbers of a question and their values, as they may be given: `N=8, S=1e9, W=450e9, a=3e-6`."""
    return ", ".join(f"{each}={given(known.default)}" for each, known in signature(ANSWERS[name]).parameters.items())


def parse_numbers(settings: Iterable[str]) -> dict[str, float | str]:
    """`["N=16", "size=xl"]` as the numbers of `question`.

    Raises UserError for what is not NAME=VALUE, and for a name that is given twice.
    """
    found: dict[str, float | str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals or not value:
            raise UserError(f"{setting!r} is not NAME=VALUE, such as N=16")
        if name in found:
            raise UserError(f"{name} is given twice, as {given(found[name])} and as {value}")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
    return found


def contents() -> str:
    """A list of all questions, each with its name and a link to its answer in `markdown()`."""
    answers = [answer() for answer in ANSWERS.values()]
    return "\n".join(f"- [{each.question.title}](#{each.anchor}) (`{each.id}`)" for each in answers)


def markdown() -> str:
    """All answers with their own numbers: what docs/accounting.md holds."""
    return "\n\n".join(answer().markdown() for answer in ANSWERS.values())


def _checked(name: str, key: str, value: float | str, kind: type) -> float | str:
    """The value as the answer's parameter wants it."""
    if kind is str:
        # A name that looks like a number was parsed as one.
        return value if isinstance(value, str) else f"{value:g}"
    if isinstance(value, str) and (nbytes := _nbytes(name, key, value)) is not None:
        value = nbytes
    if isinstance(value, str) or not isfinite(value) or not 0 < value <= LARGEST:
        raise UserError(f"{name}: {key} must be a number above 0 and up to 1e30, not {given(value)}")
    if value < 1 / LARGEST:
        raise UserError(f"{name}: {key} must be at least 1e-30, not {given(value)}")
    if kind is int and value != int(value):
        raise UserError(f"{name}: {key} is counted, so it must be whole, not {given(value)}")
    return int(value) if kind is int else float(value)


def _nbytes(name: str, key: str, text: str) -> float | None:
    """`1GB` as 1e9 and `1GiB` as 2³⁰ where the question's number is in bytes or bytes a second; otherwise None."""
    units = {symbol.name: symbol.unit for symbol in ANSWERS[name]().symbols}
    if units.get(key) not in ("B", "B/s") or (text.endswith("/s") and units[key] == "B"):
        return None
    if not (match := _SIZE.fullmatch(text)):
        return None
    number, prefix, binary = match.groups()
    try:
        return float(number) * (1024 if binary else 1000) ** " KMGTP".index(prefix.upper() or " ")
    except ValueError:
        return None
