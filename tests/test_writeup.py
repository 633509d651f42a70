"""The write-up's core: citations are found, missing or wrong; what is old, doubtful or noisy is marked."""

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.records import RESULTS, Record, append_record, open_records
from cs336_systems.console import run_command
from cs336_systems.errors import UserError
from writeup import book as books
from writeup import compose as composing
from writeup import freshness
from writeup.book import Book, choose_machine, metric
from writeup.catalogue import RUNS, benchmark
from writeup.cells import mean_and_deviation, prediction, quartiles, timing
from writeup.contents import CHAPTERS
from writeup.errors import CitationError
from writeup.exercised import ROOT, exercised
from writeup.tables import Table
from writeup.words import faster, from_which, joined, prediction_error

pytest.importorskip("jinja2", reason="jinja2 is in the extra `writeup`")
HEAD = "a" * 40
WHERE = {"device": "Test <CPU>", "device_type": "cpu", "cores": 2, "threads": 2, "torch": "2.13", "triton": None}
WHERE |= {"python": "3.11.7", "commit": HEAD, "dirty": False, "date": "2026-01-02T03:04:05"}


def made(samples=(10.0, 11.0, 12.0, 13.0), status="ok", flags=(), **config) -> Record:
    middle = sorted(samples)[len(samples) // 2] if samples else 0.0
    metrics = {"median_ms": middle, "mean_ms": middle, "std_ms": 0.5} if status == "ok" else {}
    base = {"candidate": "eager", "pass": "forward", "columns": 1024}
    return Record("norms", base | config, WHERE, [*samples], metrics, {"median_ms": 9.0}, [*flags], status)


@pytest.fixture
def book(tmp_path, monkeypatch):
    """Two candidates at two widths, measured at a commit since which nothing has changed."""
    monkeypatch.setattr(books, "changed_since", lambda commit, files: [])
    for columns in (1024, 2048):
        append_record(made(columns=columns), open_records(tmp_path / "test-cpu", "norms"))
        append_record(made((5.0, 5.0, 5.0), candidate="fused", columns=columns), tmp_path / "test-cpu/norms.jsonl")
    return Book(tmp_path, "test-cpu")


def test_a_citation_finds_what_it_asks_for(book):
    cited = book.cite("norms", {"pass": "forward"}, columns=(1024, 4096), candidate=lambda name: name != "copy")
    assert [record.config["candidate"] for record in cited] == ["eager", "fused"]
    assert cited.one(candidate="fused").samples_ms == [5.0] * 3
    assert cited.one(candidate="none such") is None
    assert cited.values("candidate") == ["eager", "fused"]
    assert [record.config["columns"] for record, _ in book.cited[""].values()] == [1024, 1024]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda book: book.cite("norm"), "no benchmark is called 'norm'; there are allreduce, attention"),
        (lambda book: book.cite("norms", colums=3), "records of norms have no setting 'colums'; they have candidate"),
        (lambda book: book.cite("norms").one(columns=1024), "2 records of norms have {'columns': 1024}, not one"),
        (lambda book: book.cite("norms").values("size"), "no setting 'size'"),
        (lambda book: metric(made(), "mean"), "norms has no metric 'mean'; it has mean_ms, median_ms, std_ms"),
    ],
)  # fmt: skip
def test_a_wrong_citation_fails(book, ask, said):
    with pytest.raises(CitationError) as error:
        ask(book)
    assert said in str(error.value)


def test_a_missing_record_is_no_mistake(tmp_path):
    cited = Book(tmp_path, None).cite("norms", columns=1024)
    assert not cited
    table = str(Table(Book(tmp_path, None), ("<a", "b"), [], cited))
    assert table == "::: missing\nNot measured on this machine. Run: `python -m benchmarks.norms`\n:::\n"


def test_a_table_says_where_it_comes_from(book):
    cited = book.cite("norms", columns=1024)
    table = str(Table(book, ("<who", "time"), [[r.config["candidate"], timing(book, r)] for r in cited], cited))
    assert "| who | time |\n| :-- | --: |\n| eager | 12 ms (10.8 to 12.2) |\n| fused | 5 ms (5 to 5) |" in table
    assert "Measured on a CPU: Test &lt;CPU>, 2 cores (2 threads a process); torch 2.13, Python 3.11.7; " in table
    assert "commit aaaaaaa, 2026-01-02.\n3 to 4 samples a figure; in brackets the quartiles." in table
    assert "†" not in table


def test_marks_say_what_is_wrong(book, monkeypatch):
    monkeypatch.setattr(books, "changed_since", lambda commit, files: [*files][:5])
    record = made(flags=["noisy: deviation 20%"])
    table = str(Table(book, ("a",), [[timing(book, record)]], replace(book.cite("norms"), records=(record,))))
    assert "12 ms (10.8 to 12.2)†\\*" in table
    assert "† older than the last change of what its benchmark exercises: `benchmarks/contest.py`, " in table
    assert table.count("`benchmarks/") == 3
    assert " and 2 more" in table
    assert "\\* flagged when it was measured: noisy." in table
    monkeypatch.setattr(books, "changed_since", lambda commit, files: None)
    assert "How old this is cannot be known" in str(Table(book, ("a",), [["b"]], book.cite("norms")))


def test_cells_of_what_was_not_measured(book):
    assert timing(book, None) == mean_and_deviation(book, None) == prediction(None) == "-"
    assert timing(book, made((), "out-of-memory")) == "does not fit"
    assert mean_and_deviation(book, made((), "unsupported")) == "not supported here"
    assert prediction(made((), "out-of-memory")) == "9 ms"
    assert prediction(made((18.0,))) == "9 ms (0.50)"
    assert quartiles([7.0]) == (7.0, 7.0)


def test_which_files_a_benchmark_exercises():
    norms, ddp = exercised("benchmarks.norms"), exercised("benchmarks.ddp")
    assert {"benchmarks/norms.py", "kernels/rmsnorm.py", "kernels/reference.py"} <= {*norms}
    assert {"cs336_systems/ddp.py", "cs336_systems/bucket.py", "cs336_systems/comm/verbs.py"} <= {*ddp}
    assert "cs336_systems/ddp.py" not in norms
    assert not {"cs336_systems/console.py", "benchmarks/records.py", "cs336_systems/cost/flops.py"} & {*norms, *ddp}
    for run in RUNS:
        assert f"{run.source.replace('.', '/')}.py" in exercised(run.source)


def test_what_changed_since_a_commit(tmp_path, monkeypatch):
    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    for name in ("old.py", "new.py"):
        (tmp_path / name).write_text("one = 1\n")
    git("add", ".")
    git("-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    monkeypatch.setattr(freshness, "ROOT", tmp_path)
    freshness._changes.cache_clear()
    assert freshness.changed_since(commit, ["old.py", "new.py"]) == []
    freshness._changes.cache_clear()
    (tmp_path / "new.py").write_text("one = 2\n")  # in no commit yet
    assert freshness.changed_since(commit, ["old.py", "new.py"]) == ["new.py"]
    assert freshness.changed_since(HEAD, ["old.py"]) is None
    assert freshness.changed_since("--output=x", ["old.py"]) is None
    freshness._changes.cache_clear()


def test_whose_records(tmp_path):
    assert choose_machine(tmp_path, None) is None
    for name, count in {"cpu-one": 1, "cpu-two": 2}.items():
        for columns in range(count):
            append_record(made(columns=columns), open_records(tmp_path / name, "norms"))
    assert choose_machine(tmp_path, None) == "cpu-two"
    assert choose_machine(tmp_path, "ONE") == "cpu-one"
    with pytest.raises(
        UserError, match=r"--machine h200 names no machine in .*; there are records of cpu-two, cpu-one$"
    ):
        choose_machine(tmp_path, "h200")
    with pytest.raises(UserError, match="names 2 machines, cpu-two, cpu-one"):
        choose_machine(tmp_path, "cpu")


def test_sentences_follow_the_data():
    slow, fast, close = made((10.0, 11.0, 12.0)), made((5.0, 5.5, 6.0)), made((10.1, 11.1, 12.1))
    assert faster("A", slow, "B", fast) == "B is 2 times as fast as A"
    assert faster("B", fast, "A", slow) == "B is 2 times as fast as A"
    assert faster("A", slow, "B", close) == "A and B cannot be told apart (medians 1% apart, quartiles overlap)"
    assert from_which("A", {1: fast, 2: fast}, "B", {1: slow, 2: slow}) == "A is faster than B at every size measured"
    assert from_which("A", {1: slow, 2: slow}, "B", {1: fast, 2: fast}) == "B is faster than A at every size measured"
    crossing = from_which("A", {1: slow, 2048: fast}, "B", {1: fast, 2048: slow})
    assert crossing == "A is faster than B from 2,048 on, and not below"
    back = from_which("A", {1: fast, 2: slow}, "B", {1: slow, 2: fast})
    assert back == "B is faster than A from 2 on, and not below"
    mixed = from_which("A", {1: fast, 2: slow, 3: fast}, "B", {1: slow, 2: fast, 3: slow})
    assert mixed == "A is faster than B at 1 and 3, slower at 2"
    assert from_which("A", {1: slow}, "B", {1: close}) == "A and B cannot be told apart at any size measured"
    assert from_which("A", {1: slow}, "B", {2: close}) == "A and B were not measured at the same size"
    assert prediction_error([(8.0, 10.0), (9.0, 10.0)]).startswith("the prediction lies 15% below the measurement")
    assert prediction_error([]) == "nothing was measured"
    assert joined(["a"]) == "a"
    assert joined(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("## One {#one}\n\n{{ there }}", ""),
        ("## One {#one}\n\n{{ typo }}", "chapter one: 'typo' is undefined"),
        ("## One\n\nText.", "chapter one must begin with its heading, '## Title {#one}'"),
        ("Text.", "chapter one must begin with its heading"),
    ],
)
def test_a_chapter_that_names_what_is_not_there_fails(template, said, tmp_path, monkeypatch):
    (tmp_path / "one.md").write_text(template)
    monkeypatch.setattr(composing, "FOLDER", tmp_path)
    module = type(sys)("writeup.chapters.one")
    module.content = lambda book: {"there": "Text."}
    monkeypatch.setitem(sys.modules, "writeup.chapters.one", module)
    if not said:
        assert composing.chapter(Book(tmp_path), "one") == ("## One {#one}\n\nText.", {})
        return
    with pytest.raises(CitationError) as error:
        composing.chapter(Book(tmp_path), "one")
    assert said in str(error.value)


def test_every_chapter_is_there():
    files = {path.stem.replace("_", "-") for path in (ROOT / "writeup/chapters").glob("*.md")}
    assert files == {*CHAPTERS}
    assert len(CHAPTERS) == len({*CHAPTERS})


def test_every_benchmark_that_left_records_can_be_cited():
    for path in RESULTS.glob("*/*.jsonl"):
        assert benchmark(path.stem).name == path.stem


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", "h200"], "--machine h200 names no machine in "),
        (["--only", "norms"], "--only says what --run runs; without --run nothing is measured"),
        (["--run", "--only", "norm"], "--only norm is no benchmark; there are mixed_precision, norms, "),
        (["--out", "README.md"], "is a file"),
    ],
)
def test_what_the_reader_did_wrong_is_one_line(arguments, said, capsys, monkeypatch):
    from writeup.__main__ import main

    monkeypatch.chdir(ROOT)
    assert run_command(main, arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
