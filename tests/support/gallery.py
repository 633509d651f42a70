"""Plant a broken variant of the library in forked ranks, and run an existing test of it in this process.

A rank compiles the changed file and gives the functions that differ their new code: whoever has imported one has it,
too. The process of the tests, whose oracle must stay right, and the server of ranks stay as they are.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from cs336_systems.comm import shared_verbs
from tests.support import ranks
from writeup.gallery import ROOT, Variant, variants

PATIENCE, COLLECTIVE = 20.0, 5.0  # seconds that broken ranks get in all, and for one collective
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+\n +(?P<code>.*)')
LONGEST = 400  # characters of a message that are kept
# A pytest within pytest: it neither looks for leftovers, nor prints, nor takes over what the outer one has taken over.
QUIETLY = ("--noconftest", "--capture=no", "-o", "addopts=")
WITHOUT = ("xdist", "terminal", "cacheprovider", "faulthandler", "unraisableexception", "threadexception", "logging")


def functions(code: CodeType) -> Iterator[CodeType]:
    """The functions and methods of a compiled file, without those inside them."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & inspect.CO_OPTIMIZED:
                yield each
            else:  # the body of a class
                yield from functions(each)


def body(code: CodeType) -> tuple:
    """Body of a function, independent of its place in the file."""
    inside = (body(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, tuple(inside)


def live(module: ModuleType, name: str) -> FunctionType:
    """The function behind a qualified name, below what decorates it."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
        found = getattr(found, "__func__", getattr(found, "fget", found))
    return inspect.unwrap(found)


def changes(variant: Variant) -> list[tuple[FunctionType, CodeType]]:
    """The functions that the variant changes, and their other code.

    Raises UserError if its lines are not in the file, AssertionError if it changes nothing that is run.
    """
    before, after = (compile(text, variant.file, "exec", dont_inherit=True) for text in variant.sources())
    known = {code.co_qualname: body(code) for code in functions(before)}
    changed = [code for code in functions(after) if body(code) != known.get(code.co_qualname)]
    assert changed, f"variant {variant.name} changes nothing that is run"
    module = importlib.import_module(variant.file.removesuffix(".py").replace("/", "."))
    return [(live(module, code.co_qualname), code) for code in changed]


def plant(variant: Variant) -> None:
    """Give the functions that the variant changes their other code, in this process."""
    for function, code in changes(variant):
        function.__code__ = code


class Late:
    """A collective that does nothing before somebody waits for it."""

    def __init__(self, start: Callable[[], object]) -> None:
        self.start = start

    def wait(self) -> None:
        self.start()

    def is_completed(self) -> bool:
        return False


def slow_down() -> None:
    """The slowest of networks: an all-reduce is carried out when it is waited for."""
    real = shared_verbs.all_reduce
    shared_verbs.all_reduce = lambda *arguments: Late(lambda: real(*arguments).wait())


def broken(*place: Any, variant: str, change: bool, function: str, arguments: dict) -> Any:
    """A case of a test, in a rank with a variant."""
    chosen = next(each for each in variants() if each.name == variant)
    if chosen.slow_network:
        slow_down()
    if change:
        plant(chosen)
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*place, **arguments)


@contextmanager
def broken_ranks(variant: Variant, change: bool) -> Iterator[None]:
    """All cases that tests start meanwhile are run by ranks with the variant, and soon given up."""
    real = ranks.ask

    def ask(function: Callable, world: int, join: bool, timeout: float, collective: float, arguments: dict, *rest: str):
        given = {"variant": variant.name, "change": change, "arguments": arguments}
        given["function"] = f"{function.__module__}:{function.__name__}"
        patience = 1.0 if variant.may_hang else COLLECTIVE
        return real(broken, world, join, min(timeout, PATIENCE), min(collective, patience), given, *rest)

    ranks.ask = ask
    try:
        yield
    finally:
        ranks.ask = real


@dataclass
class Outcome:
    """Outcome of a test: "passed", "failed", or "error" if it did not come to its own lines; in which of them it
    failed ("FILE:LINE: code"), and what it said."""

    result: str = "error"
    where: str = ""
    message: str = "the test did not run"

    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> None:
        """A hook of pytest, of which this is a plugin."""
        if call.excinfo is None:
            if call.when == "call":
                self.result, self.message = "passed", ""
        elif call.when != "teardown":
            self.result = "failed" if call.when == "call" else "error"
            self.where, self.message = said(call.excinfo)


def is_of_a_test(path: Path) -> bool:
    """True for a file of tests, not of what supports them."""
    return ROOT / "tests" in path.parents and ROOT / "tests" / "support" not in path.parents


def said(excinfo: pytest.ExceptionInfo) -> tuple[str, str]:
    """Where a test failed and what it said: if ranks failed, the first that did not only lose another one."""
    error = excinfo.value
    if not isinstance(error, ranks.RanksFailedError):
        last = [entry for entry in excinfo.traceback if is_of_a_test(Path(entry.path))][-1]
        code = str(last.statement).strip().splitlines()[0]
        place = Path(last.path).relative_to(ROOT).as_posix()
        return f"{place}:{last.lineno + 1}: {code}", shortened(excinfo.exconly())
    parts = re.split(r"^(?=rank \d+ ended with )", str(error), flags=re.MULTILINE)[1:]
    part = min(parts, key=lambda each: "CommError" in each)
    frames = [found for found in FRAME.finditer(part) if is_of_a_test(Path(found["file"]))]
    rank, code = re.match(r"rank (\d+) ended with (\S+):", part).groups()
    place = Path(frames[-1]["file"]).relative_to(ROOT).as_posix() if frames else ""
    where = f"{place}:{frames[-1]['line']}: {frames[-1]['code']}" if frames else ""
    if (failure := error.errors[int(rank)]) is None:
        how = f"was killed by signal {code[1:]}" if code.startswith("-") else f"ended with {code}"
        last = re.findall(r"what\(\): +(?:\[[^\]]*\] )?(.*)", part)  # C++'s last words
        return where, shortened(f"rank {rank} {how}{': ' * bool(last)}{''.join(last[-1:])}")
    return where, shortened(f"rank {rank}: {failure[0]}{': ' * bool(failure[1])}{failure[1]}")


def shortened(text: str) -> str:
    """One paragraph, without addresses of this run."""
    text = re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"\s+", " ", text)).removesuffix(" Use -v to get more diff").strip()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def run_broken(variant: Variant, folder: Path, change: bool = True) -> Outcome:
    """Outcome of the variant's test, in `folder` if it writes anything; without `change` of the unchanged library,
    on the variant's network."""
    if change:
        changes(variant)  # here as well, where what is wrong with it is no success
    outcome = Outcome()
    options = [*QUIETLY, *(f"-pno:{name}" for name in WITHOUT), f"--rootdir={ROOT}", f"--basetemp={folder}/inner"]
    with broken_ranks(variant, change), pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_ADDOPTS", raising=False)  # of the outer one
        pytest.main([*options, f"{ROOT}/{variant.test}"], plugins=[outcome])
    return outcome
