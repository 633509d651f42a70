"""The write-up's core: citations are found, missing or wrong; what is old, doubtful or noisy is marked."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
from benchmarks.records import RESULTS, Record, append_record, open_records
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from writeup import compose as composing
from writeup import proofs
from writeup.book import Book, Citation, benchmark, choose_machine, metric
from writeup.cells import joined, mean_and_deviation, median_ms, pair_ratios, prediction, quartiles, timing
from writeup.edition import CHAPTERS
from writeup.errors import CitationError
from writeup.proofs import ROOT
from writeup.tables import Table, plain, provenance

HEAD = "a" * 40
WHERE = {"device": "Test <CPU>", "device_type": "cpu", "cores": 2, "threads": 2, "torch": "2.13", "triton": None}
WHERE |= {"python": "3.11.7", "commit": HEAD, "dirty": False, "date": "2026-01-02T03:04:05"}
SLOW, FAST = (10.0, 11.0, 12.0, 10.5, 11.5), (5.0, 5.5, 6.0, 5.2, 5.8)


def made(samples=(10.0, 11.0, 12.0, 13.0), status="ok", flags=(), **config) -> Record:
    middle = sorted(samples)[len(samples) // 2] if samples else 0.0
    metrics = {"median_ms": middle, "mean_ms": middle, "std_ms": 0.5} if status == "ok" else {}
    base = {"candidate": "eager", "pass": "forward", "columns": 1024}
    return Record("norms", base | config, WHERE, [*samples], metrics, {"median_ms": 9.0}, [*flags], status)


@pytest.fixture
def book(tmp_path):
    """Two candidates at two widths, measured at a commit since which nothing has changed."""
    for columns in (1024, 2048):
        append_record(made(columns=columns), open_records(tmp_path / "test-cpu", "norms"))
        append_record(made((5.0, 5.0, 5.0), candidate="fused", columns=columns), tmp_path / "test-cpu/norms.jsonl")
    return Book(tmp_path, "test-cpu")


def test_a_citation_finds_what_it_asks_for_and_of_several_records_the_newest(book):
    cited = book.cite("norms", {"pass": "forward"}, columns=(1024, 4096), candidate=lambda name: name != "copy")
    assert [record.config["candidate"] for record in cited] == ["eager", "fused"]
    assert cited.one(candidate="fused").samples_ms == [5.0] * 3
    assert cited.one(candidate="none such") is None
    assert cited.values("candidate") == ["eager", "fused"]
    later = replace(made((5.0,) * 3, columns=2048), environment=WHERE | {"date": "2026-01-03T00:00:00"})
    newer = replace(cited, records=(*cited.records, later, made(columns=4096)))
    assert newer.need(candidate="eager").samples_ms == [5.0] * 3


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
    table = str(Table(Book(tmp_path, None), [], cited))
    assert table == "::: missing\nNot measured on this machine. Run: `python -m benchmarks.norms`\n:::\n"


def test_a_table_says_where_it_comes_from(book):
    cited = book.cite("norms", columns=1024)
    table = plain(str(Table(book, [{"<who": r.config["candidate"], "time": timing(book, r)} for r in cited], cited)))
    assert "| who | time |\n| :-- | --: |\n| eager | 12.0 ms |\n| fused | 5.00 ms |" in table
    threads = "2 threads per process; commit aaaaaaa (2026-01-02)."
    assert f"Measured on the CPU [Test &lt;CPU>, 2 cores](#introduction), {threads}" in table
    book.places["another machine"] = 1  # which the reader must tell apart
    place = r"Measured on a CPU: Test &lt;CPU>, 2 cores; torch 2.13, Python 3.11.7"
    assert f"{place}, {threads}" in provenance(book, cited.records, {}, noisy=False)


def timings(book, cited) -> str:
    """A table of the medians alone."""
    return plain(str(Table(book, [{"a": timing(book, each)} for each in cited], cited)))


def test_the_spread_is_that_between_runs(tmp_path):
    path = open_records(tmp_path / "test-cpu", "norms")
    kept = replace(made([1.0] * 5), environment=WHERE | {"pages_kept": True})  # another allocator: no run of the same
    for record in (*(made([middle] * 5) for middle in (8.0, 15.0, 12.0)), kept, made([12.0] * 5)):
        append_record(record, path)
    book = Book(tmp_path, "test-cpu")
    table = timings(book, book.cite("norms"))
    assert "| 12.0 ms (8.00 to 15.0) |" in table
    assert "In brackets after a time: the lowest and highest median of all runs; no brackets: one run." in table
    assert book.between_runs == [15.0 / 8.0]


def test_rows_of_several_commits_bear_letters(book):
    other = replace(made(FAST), environment=WHERE | {"commit": "b" * 40, "date": "2026-02-03T03:04:05"})
    cited = replace(book.cite("norms"), records=(made(flags=["noisy: much"]), other))
    table = timings(book, cited)
    assert "12.0 ms^a^\\* |\n| 5.50 ms^b^ |" in table
    assert "^a^ commit aaaaaaa (2026-01-02), ^b^ commit bbbbbbb (2026-02-03)" in table
    assert "\\* flagged when it was measured: noisy." in table
    fast, full = "faster than the peak by 1.2 x", replace(made(flags=["needs 2 GiB"]), status="out-of-memory")
    cited = replace(cited, records=(made(flags=[fast]), made(flags=[fast.replace("1.2", "1.3")]), full))
    table = timings(book, cited)
    assert "\\* flagged when it was measured: faster than the peak." in table


def test_a_figure_names_its_record(book):
    made_here = replace(made(FAST), config={"candidate": 'a"]{.x}|<b>', "rows": 4})
    cited = replace(book.cite("norms"), records=(made_here,))
    cells = {"a": timing(book, made_here), "b": f"from {timing(book, made_here)} on", "c": "-"}
    table = str(Table(book, [cells], cited))
    about = f"norms: a .x b , rows 4; commit aaaaaaa, {WHERE['date']}; 5 samples, {min(FAST):.4g} to {max(FAST):.4g} ms"
    assert f'| [5.50 ms]{{.measured tabindex="-1" record="{about}"}} | [from 5.50 ms]{{' in table
    assert plain(table).splitlines()[2] == "| 5.50 ms | from 5.50 ms on | - |"


def test_a_sentence_that_the_records_do_not_bear_out_stops_the_build(tmp_path):
    say = lambda: " It is so. "  # noqa: E731
    assert composing.claim(Book(tmp_path), True, say) == "It is so.\n"
    assert composing.claim(Book(tmp_path, "another"), False, say) == "*Not so in these records:* It is so.\n"
    with pytest.raises(CitationError, match="do not bear out this sentence, write it anew: It is so"):
        composing.claim(Book(machine="amd-epyc"), False, say)


def test_cells_of_what_was_not_measured(book):
    assert timing(book, None) == mean_and_deviation(book, None) == prediction(None) == "-"
    assert timing(book, made((), "out-of-memory")) == "does not fit"
    assert mean_and_deviation(book, made((), "unsupported")) == "not supported here"
    assert mean_and_deviation(book, made(SLOW[:2])).startswith("11 ms⟦")
    assert prediction(made((), "out-of-memory")) == "9 ms"
    assert prediction(made((18.0,))) == "9 ms (0.50)"
    assert quartiles([7.0]) == (7.0, 7.0)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_changed_since_a_commit(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # a hook of git has those of its repository
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # which may ask for signatures

    def git(*words):
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    project = tmp_path / "project"  # which may be a folder of another project
    project.mkdir()
    for name in ("old.py", "new.py"):
        (project / name).write_text("one = 1\n")
    git("add", ".")
    git("-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    monkeypatch.setattr(proofs, "ROOT", project)
    for text, changed in (("one = 1\n", []), ("one = 2\n", ["new.py"])):  # the second in no commit yet
        (project / "new.py").write_text(text)
        proofs._changes.cache_clear()
        assert proofs.changed_since(commit, ["old.py", "new.py"]) == changed
    for name in (HEAD, "--output=x", "HEAD", "None", commit[:6], commit + "^"):
        assert proofs.changed_since(name, ["old.py"]) is None
    proofs._changes.cache_clear()


def test_whose_records(tmp_path):
    assert choose_machine(tmp_path, None) is None
    for name, count in {"cpu-one": 1, "cpu-two": 2}.items():
        for columns in range(count):
            append_record(made(columns=columns), open_records(tmp_path / name, "norms"))
    assert choose_machine(tmp_path, None) == "cpu-two"
    assert choose_machine(tmp_path, "ONE") == "cpu-one"
    for asked, said in (
        ("h200", r"--machine h200 names no machine in .*; there are records of cpu-two, cpu-one$"),
        ("cpu", "names 2 machines, cpu-two, cpu-one"),
    ):
        with pytest.raises(UserError, match=said):
            choose_machine(tmp_path, asked)
    (tmp_path / "cpu-two/moe_eval.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*/cpu-two/moe_eval.jsonl: Is a directory"):
        choose_machine(tmp_path, None)


def test_pairs_are_compared_turn_by_turn():
    slow, fast = made(SLOW), made(FAST)
    assert pair_ratios(slow, fast) == [x / y for x, y in zip(SLOW, FAST, strict=True)]
    other_run = replace(fast, environment=WHERE | {"date": "2026-01-02T03:20:00"})
    assert pair_ratios(slow, other_run) == [median_ms(slow) / median_ms(fast)]


def test_words_are_joined():
    assert (joined("a"), joined("abc")) == ("a", "a, b and c")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("## One {#one}\n\n{{ there }}", ""),
        ("## One {#one}\n\n{{ typo }}", "chapter one: 'typo' is undefined"),
        ("## One\n\nText.", "chapter one must begin with its heading, '## Title {#one}'"),
        ("## One {#one-more}\n\nText.", "chapter one must begin with its heading"),
        ("Text.", "chapter one must begin with its heading"),
        ("## One {#one}\n\n{{ there / 0 }}", "chapter one: a record does not fit, TypeError: unsupported operand"),
        ("## One {#one}\n\n{{ table }}", "chapter one: a record does not fit, KeyError: there is no 'cores' (tables"),
    ],
)  # fmt: skip
def test_a_chapter_that_names_what_is_not_there_fails(template, said, tmp_path, monkeypatch):
    (tmp_path / "one.md").write_text(template)
    monkeypatch.setattr(composing, "FOLDER", tmp_path)
    module = type(sys)("writeup.chapters.one")
    bare = replace(made(), environment={"device": "x"})
    cited = Citation("norms", "", (bare,))
    module.content = lambda book: {"there": "Text.", "table": Table(book, [{"a": "b"}], cited)}
    monkeypatch.setitem(sys.modules, "writeup.chapters.one", module)
    if not said:
        assert composing.chapter(Book(tmp_path), "one") == ("## One {#one}\n\nText.", {})
        return
    with pytest.raises(CitationError) as error:
        composing.chapter(Book(tmp_path), "one")
    assert said in str(error.value)


def test_every_chapter_is_there_and_what_left_records_can_be_cited():
    assert {path.stem.replace("_", "-") for path in (ROOT / "writeup/chapters").glob("*.md")} == {*CHAPTERS}
    for path in RESULTS.glob("*/*.jsonl"):
        assert benchmark(path.stem).name == path.stem


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", "h200"], "--machine h200 names no machine in "),
        (["--only", "norms"], "--only says what --run runs; without --run nothing is measured"),
        (["--run", "--only", "norm"], "--only norm is no benchmark; there are mixed_precision, norms, "),
        (["--out", "README.md"], "is a file"),
        (["--results", "README.md"], "is a file"),
        (["--results", "benchmarks/result"], "benchmarks/result is no folder of records; name one with --results"),
    ],
)
def test_what_the_reader_did_wrong_is_one_line(arguments, said, capsys, monkeypatch):
    from writeup.__main__ import main

    monkeypatch.chdir(ROOT)
    assert run_command(main, arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
