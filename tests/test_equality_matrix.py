"""Equality matrix: it cites existing tests, which run what their row claims, and its report is complete."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cs336_systems.errors import UserError
from cs336_systems.host.text import markdown_text
from tests import test_expert_layouts
from tests.support import state_cases
from tests.support.gallery import QUIETLY, WITHOUT
from tests.support.layout_table import TABLE
from writeup import proofs as proofs_of
from writeup.book import Book
from writeup.chapters import equality
from writeup.equality import MATRIX, PROPERTIES, Row, cited, matrix
from writeup.errors import CitationError
from writeup.gallery import variants
from writeup.proofs import REPORT, ROOT, SAW, anchor, read_report, source_of

DENSE = "tests/test_layouts.py::test_layouts_learn_what_one_process_learns"
EXPERTS = "tests/test_expert_layouts.py::test_experts_over_ranks_learn_what_one_process_learns"
SAVED = "tests/train/test_run_state.py::"
ROWS = {row.strategy: row for row in matrix()}


class Collected:
    """A plugin of pytest that keeps what was collected."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.nodes = {item.nodeid for item in session.items}


def existing(session: pytest.Session, nodes: set[str]) -> set[str]:
    """The node ids of this run, and, if it is of some tests only, of the files that are cited."""
    found = {item.nodeid for item in session.items}
    if not nodes <= found:
        plugin, files = Collected(), sorted({node.partition("::")[0] for node in nodes})
        options = [*QUIETLY, *(f"-pno:{name}" for name in WITHOUT), f"--rootdir={ROOT}", "--collect-only"]
        pytest.main([*options, *(f"{ROOT}/{file}" for file in files)], plugins=[plugin])
        found |= plugin.nodes
    return found


def test_every_cited_test_exists(request):
    nodes = {*cited(), *(f"{SAW}[{variant.name}]" for variant in variants())}
    assert sorted(nodes - existing(request.session, nodes)) == []
    assert len({anchor(node) for node in nodes}) == len(nodes), "two tests would have one anchor"


def layouts_of(node: str) -> Iterator[object]:
    """The layouts that one test runs."""
    name = node.partition("[")[2].removesuffix("]")
    if node.startswith(DENSE):
        yield from (each for each in TABLE if str(each.ranks) == name)
    if node.startswith(EXPERTS):
        yield from (each for each in test_expert_layouts.LAYOUTS if str(each) == name)


def fits(row: Row, layout: object) -> bool:
    return all(getattr(layout, name, None) in values for name, values in row.layout.items())


@pytest.mark.parametrize("strategy", ROWS)
def test_what_a_row_cites_runs_its_strategy(strategy):
    row = ROWS[strategy]
    assert all((ROOT / file).is_file() for file in row.files)
    for name in PROPERTIES:
        nodes = row.cells[name].tests
        many = [node for node in nodes if node.startswith((DENSE, EXPERTS))]
        assert all(any(fits(row, layout) for layout in layouts_of(node)) for node in many), name
        worlds = {int(node.partition("[")[2][:-1]) for node in nodes if node.startswith(SAVED)}
        if worlds:
            assert worlds == {state_cases.ranks_of(run) for run in row.runs}, name
            assert set(row.runs) <= set(state_cases.ALL)


def test_the_report_has_what_is_cited_and_all_of_it_passed():
    report = read_report()
    nodes = [*cited(), *(f"{SAW}[{variant.name}]" for variant in variants())]
    missing = [node for node in nodes if node not in report.proofs]
    assert not missing, "run python -m tests.report and commit"
    assert {report.proof(node).outcome for node in nodes} == {"passed"}
    for variant in variants():
        assert report.proof(f"{SAW}[{variant.name}]").message, "with what the test failed"
    for node in nodes:
        function = report.proof(node).function
        assert f"def {function.partition('::')[2]}(" in source_of(function)


def test_what_was_not_run_is_refused(tmp_path):
    report = read_report()
    node = cited()[0]
    with pytest.raises(CitationError, match=r"was not run: the report lacks it; run python -m tests\.report"):
        report.proof("tests/test_ddp.py::test_of_nothing")
    skipped = replace(report, proofs={node: replace(report.proof(node), outcome="skipped")})
    with pytest.raises(CitationError, match="was skipped: it proves nothing"):
        skipped.proof(node)
    (tmp_path / "old.json").write_text(json.dumps(json.loads(REPORT.read_text()) | {"schema": 0}, allow_nan=False))
    with pytest.raises(CitationError, match="has schema 0"):
        read_report(tmp_path / "old.json")
    with pytest.raises(CitationError, match=r"cannot be read: .*No such file"):
        read_report(tmp_path / "none.json")
    with pytest.raises(CitationError, match="has no function test_of_nothing"):
        source_of("tests/test_ddp.py::test_of_nothing")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('parameters = ["two-steps"]', 'parameters = ["three-steps"]', "'three-steps' stands for no test"),
        ('parameters = ["two-steps"]', "parameters = []", "parameters is empty"),
        ('reshard = "not defined: nothing is sharded"', 'reshard = "no"', "an empty cell says"),
        ('strategy = "NaiveDDP"', 'strategy = "NaiveDDP"\ncolour = 1', "NaiveDDP: there is no 'colour'"),
        ("\n[tests]", '\n[tests]\nidle = "tests/x.py::y"', "no cell cites 'idle'"),
        ('strategy = "NaiveDDP"', "", "KeyError"),
    ],
)
def test_a_matrix_that_is_not_whole_is_refused(tmp_path, old, new, said):
    text = MATRIX.read_text()
    assert old in text
    (tmp_path / "equality.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=said):
        matrix(tmp_path / "equality.toml")


def test_what_failed_or_is_older_than_the_code_is_marked(monkeypatch):
    report, node = read_report(), cited()[0]
    proofs = report.proofs | {node: replace(report.proof(node), outcome="failed")}
    monkeypatch.setattr(equality, "read_report", lambda: replace(report, proofs=proofs))
    file = node.partition("::")[0]
    monkeypatch.setattr(proofs_of, "_changes", lambda commit: frozenset([file]))
    shown = equality.content(Book())
    assert f"[✗](#{anchor(node)})†" in shown["table"]
    assert (shown["failed"], shown["changed"]) == ([f"[{markdown_text(node)}](#{anchor(node)})"], [f"`{file}`"])
    other = next(each for each in cited() if not each.startswith(file))
    assert f"[✓](#{anchor(other)}) " in shown["table"]
