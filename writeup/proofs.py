"""The committed report of the tests that the write-up cites, and the source of each test.

`python -m tests.report` writes it. A test that is cited and not in it stops the build; one whose file has changed since
is marked.
"""

import ast
import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from writeup.errors import CitationError

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "writeup" / "reports" / "equality.json"
COMMAND = "python -m tests.report"
SCHEMA = 1
CASE = re.compile(r"_case$|^(check|compare|require)")  # functions that assert for a test
SAW = "tests/test_gallery.py::test_the_suite_sees"  # with the name of a variant
STALE = "†"  # beside a test or file that has changed since the report of tests


@cache
def _changes(commit: str) -> frozenset[str] | None:
    """Every file that differs from a commit, also if nobody has committed the change; None if git cannot tell."""
    if not re.fullmatch("[0-9a-f]{7,40}", commit):
        return None
    try:
        done = subprocess.run(
            ["git", "diff", "--name-only", "--no-renames", "--relative", commit, "--"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(done.stdout.splitlines())


def changed_since(commit: str, names: Iterable[str]) -> list[str] | None:
    """List the files, relative to the project's root, and the tests whose file, that have changed since a commit.

    None if that cannot be known: there is no git, or no such commit here, as in a shallow clone.
    """
    changes = _changes(commit)
    return None if changes is None else [name for name in names if name.partition("::")[0] in changes]


@dataclass(frozen=True)
class Proof:
    """A test that ran: its node id, its outcome, its duration, and its docstring."""

    node: str
    outcome: str
    seconds: float
    says: str
    file: str
    line: int
    message: str = ""  # of a gallery's variant: with what the broken library's test failed
    where: str = ""  # the line of the test, or of its case, that failed

    @property
    def anchor(self) -> str:
        """Its place in the appendix."""
        return anchor(self.node)

    @property
    def function(self) -> str:
        """`FILE::NAME`, without parameters."""
        return self.node.partition("[")[0]

    @property
    def parameters(self) -> str:
        """The parameters in a test's id, or nothing."""
        return self.node.partition("[")[2].removesuffix("]")


@dataclass(frozen=True)
class Report:
    """Results of one run of the cited tests."""

    environment: dict[str, Any]
    seconds: float
    proofs: dict[str, Proof]

    def proof(self, node: str) -> Proof:
        """A test by its node id. Raises CitationError if it is not in the report, or did not run."""
        if (found := self.proofs.get(node)) is None:
            raise CitationError(f"{node} is cited and was not run: the report lacks it; run {COMMAND}")
        if found.outcome not in ("passed", "failed"):
            raise CitationError(f"{node} is cited and was {found.outcome}: it proves nothing; run {COMMAND}")
        return found

    def changed(self, names: Iterable[str]) -> list[str] | None:
        """List the files, and the tests whose file, changed since the report's commit; None if git cannot tell."""
        return changed_since(str(self.environment.get("commit")), names)


def read_report(path: Path = REPORT) -> Report:
    """The report. Raises CitationError if there is none, or none of this schema."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise CitationError(f"{path.name} has schema {data['schema']}, this version reads {SCHEMA}; run {COMMAND}")
        proofs = {node: Proof(node=node, **entry) for node, entry in data["tests"].items()}
        return Report(data["environment"], float(data["seconds"]), proofs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CitationError(f"the report of tests cannot be read: {error}; run {COMMAND}") from None


def anchor(node: str) -> str:
    """The id of a test in the document: `test-zero-training-equals-one-process-sgd-2`."""
    file, _, rest = node.partition("::")
    words = f"{Path(file).stem}-{rest.removeprefix('test_')}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-").replace("test-", "", 1).join(("test-", ""))


def in_words(name: str) -> str:
    """`gradients are the mean over ranks` of `test_gradients_are_the_mean_over_ranks`."""
    return name.removeprefix("test_").replace("_", " ")


@cache
def _definitions(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def source_of(function: str) -> str:
    """The lines of a test `FILE::NAME`, and those of the cases and checks in its file that it or its ranks run.

    Raises CitationError if there is no such function.
    """
    file, _, name = function.partition("::")
    try:
        known = _definitions(file)
    except OSError as error:
        raise CitationError(f"{function} is cited, and there is no {file}: {error.strerror}") from None
    if name not in known:
        raise CitationError(f"{function} is cited, and {file} has no function {name}")
    wanted, reached = [name], {name}
    for each in wanted:  # grows meanwhile
        for used in ast.walk(known[each]):
            called = used.id if isinstance(used, ast.Name) else used.value if isinstance(used, ast.Constant) else ""
            if called in known and called not in reached and CASE.search(called):
                reached.add(called)
                wanted.append(called)
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    parts = []
    for node in sorted((known[each] for each in wanted), key=lambda node: node.lineno):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts)
