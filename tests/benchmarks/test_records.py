"""Records: what is written is read, all else is read or refused in one line; tables are made from nothing else."""

import io
import json
import os
import resource
import shutil
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import e2e
from benchmarks.lib.scaling_logs import read_runs
from benchmarks.lib.scaling_tables import NOT_YET, PUBLISHED
from benchmarks.records import (
    RESULTS,
    SCHEMA,
    Record,
    append_record,
    appended,
    machine_name,
    open_records,
    read_records,
)
from benchmarks.scaling import import_log
from benchmarks.tables import BEGIN, END, FIRST, chosen, insert, main, measured_tables
from cs336_systems.checkpoint.folder import open_plain
from cs336_systems.cost import Hardware
from cs336_systems.cost.fitting.observations import LogOptions, read_measured
from cs336_systems.cost.machines import DEFAULT_SYSTEM, load_constants, read_machine
from cs336_systems.cost.runs import read_runs as run_list
from cs336_systems.data.corpus import read_text
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.host.machine import environment
from tests.benchmarks.test_scaling_logs import HEADER, LAST, REPORTS
from tests.support.garble import garbled

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
METRICS = {"mean_ms": 2000.0, "median_ms": 1900.0, "std_ms": 100.0}
METRICS |= {"tokens_per_s": 1024.0, "mfu": 0.5, "peak_memory_bytes": 2**30}
PREDICTED = {"mean_ms": 1500.0, "peak_memory_bytes": 2**29}


def record(mode="forward", status="ok", date="2026-01-01", commit="abcdef012345", **config) -> Record:
    base = {"size": "small", "year": 2024, "mode": mode, "precision": "fp32", "batch_size": 2, "context": 128}
    base |= {"norm": "rmsnorm", "attention": "naive", "compile": False, "recompute": "none", "warmup": 2}
    where = {"device": "Test CPU", "cores": 2, "torch": "2.13", "commit": commit, "dirty": False, "date": date}
    metrics = METRICS if status == "ok" else {}
    return Record("e2e", base | config, where, [1.0] if metrics else [], metrics, PREDICTED, status=status)


def write(folder: Path, *records: Record) -> Path:
    path = open_records(folder, "e2e")
    for each in records:
        append_record(each, path)
    return path


def test_what_is_written_is_read_and_the_newest_of_a_configuration_wins(tmp_path):
    records = [record(), record("step", "out-of-memory"), record(batch_size=4)]
    path = write(tmp_path / "new" / "folder", record(date="2025-12-31"), *records)
    assert path == tmp_path / "new" / "folder" / "e2e.jsonl"
    assert read_records(path) == records
    before = path.read_text()
    assert set(json.loads(before.splitlines()[0])) == {
        "schema", "benchmark", "config", "samples_ms", "metrics", "predicted", "environment", "flags", "status",
    }  # fmt: skip
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_record(replace(record(), samples_ms=[float("nan")]), path)
    assert path.read_text() == before


def test_a_full_disk_costs_records_and_not_the_table(tmp_path, capsys, monkeypatch):
    path = open_records(tmp_path, "e2e")
    append_record(record(), path)
    before, limit = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limit[1]))  # a part of a line is written
    try:
        monkeypatch.setattr(e2e, "measure_size", lambda *_: iter([record("step"), record("backward")]))
        made_up = SimpleNamespace(hardware=Hardware("fast", 1e12, 1e11, "made up"))
        monkeypatch.setattr(e2e, "make_bench", lambda *_: made_up)
        monkeypatch.setattr(e2e, "show_plan", lambda *_: 0.0)
        monkeypatch.setattr(e2e, "show", lambda tables: print(len(tables[0].rows), "in the table"))
        assert run_command(e2e.main, ["--device", "cpu", "--results", str(tmp_path)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    shown = capsys.readouterr()
    assert shown.out == "2 in the table\n"
    assert shown.err == (
        f"error: 2 records could not be appended to {path}: File too large; the figures are in the table alone; "
        "next time name another folder with --results DIR\n"
    )
    assert path.read_text() == before
    append_record(record("step"), path)
    assert appended(1, path) == f"1 record appended to {path}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no record"),
        ("[]", "is no record"),
        ('{"schema": 1}', "is no record"),
        ('{"schema": 99}', f"has schema 99, this version reads {SCHEMA}"),
        ({"config": {"size": float("nan")}}, "NaN is no number of JSON"),
        ({"environment": {"commit": "y"}}, "e2e.jsonl:1 misses 'device'"),
        ({"environment": []}, "its environment is a list, not a dict"),
        ({"samples_ms": ["1"]}, "its samples_ms are not all numbers"),
        ({"status": "fine"}, "its status is 'fine', none of ok, out-of-memory, unsupported"),
        ("\xff", "e2e.jsonl has no records: it is not UTF-8 at byte 0"),
        ("[" * 100_000, "is no record"),
        (None, r"cannot read .*e2e.jsonl: Is a directory"),
    ],
    ids=lambda given: str(given)[-30:],
)
def test_what_is_no_record_is_refused(tmp_path, line, message):
    path = tmp_path / "e2e.jsonl"
    text = json.dumps(asdict(record()) | line) if isinstance(line, dict) else line
    path.mkdir() if text is None else path.write_bytes(text.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match=message):
        read_records(path)


def test_machine_names_are_folders_and_stamps_say_what_was_measured_on():
    assert machine_name(CPU, "NVIDIA H200 (141GB)") == "nvidia-h200-141gb"
    assert machine_name(CPU, "../../etc") == "etc"
    here = environment(CPU, commit="abc")  # the stamp says what was measured on
    assert set(here) >= {"device", "cores", "triton", "python", "world_size", "backend", "date"}
    stamp = {"torch": torch.__version__, "device_type": "cpu", "commit": "abc", "dirty": False}
    assert here | stamp == here


def test_each_commit_has_its_own_table(tmp_path):
    other = record(precision="bf16", norm="layernorm", warmup=0)  # for the write-up
    write(tmp_path / "test-cpu", record(), other, record("step", commit="9876543210"))
    tables = measured_tables(tmp_path)
    assert tables.count("| forward |") == 1
    assert tables.index("commit abcdef0") < tables.index("| forward |") < tables.index("commit 9876543")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no records under"):
        measured_tables(tmp_path / "empty")


@pytest.mark.parametrize("what", FIRST)
def test_a_page_without_records_says_how_to_get_them(what, tmp_path):
    said = measured_tables(tmp_path, what)
    assert said.startswith(NOT_YET if what == "scaling" else f"Not measured yet: `{FIRST[what]}`, then `make readme`.")


def test_tables_are_inserted_between_their_marks(tmp_path, monkeypatch):
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = insert(page, "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert insert(once, "new") == once
    row = "| row |\n"  # of which 25 stay in sight, below two lines of heads
    assert "details" not in insert(page, f"Title:\n\n{27 * row}")
    assert f"<summary>26 rows</summary>\n\n{28 * row}\n</details>\n\n{END}" in insert(page, f"Title:\n\n{28 * row}")
    with pytest.raises(UserError, match="the file needs one line"):
        insert("no marks", "new")
    monkeypatch.setattr("benchmarks.tables.measured_tables", lambda results, what: "new")
    (tmp_path / "page.md").write_text(page)
    assert run_command(main, ["--write", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == once
    assert run_command(main, ["--write", str(tmp_path)]) == 2
    (tmp_path / "binary").write_bytes(b"\xd0\x00")
    assert run_command(main, ["--write", str(tmp_path / "binary")]) == 2


def git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


@pytest.mark.skipif(not git("rev-parse", "HEAD"), reason="not a git checkout")
def test_the_pages_show_the_committed_records(tmp_path):
    # As committed: records of the reader's own, not committed yet, are not the README's business.
    names = git("ls-tree", "-r", "--name-only", "HEAD", "benchmarks/results").split()
    for name in (each for each in names if each.endswith(".jsonl")):
        path = tmp_path / Path(name).relative_to("benchmarks/results")
        path.parent.mkdir(exist_ok=True)
        path.write_text(git("show", f"HEAD:{name}"))
    pages = {"README.md": "e2e", "docs/data_parallel.md": "parallel", "docs/profiling.md": "memory"}
    pages |= {"docs/model_parallelism.md": "scaling"}
    pages |= {f"docs/{name}.md": name for name in ("kernels", "experts", "cost", "checkpoints")}
    for page, what in pages.items():
        text = git("show", f"HEAD:{page}")
        assert insert(text, measured_tables(tmp_path, what)) == text, "run make readme and commit"


FEW = [None, True, 10**300, float("inf"), "\ud800<b>|`*", [], {}]
TABLES = {  # by file of records
    "e2e": "e2e", "memory": "memory", "scaling": "scaling", "checkpoints": "checkpoints", "long_context": "context",
    "ddp": "parallel", "zero": "parallel", "allreduce": "parallel", "norms": "kernels", "attention": "kernels",
    "fused": "kernels", "moe_layer": "experts", "moe_sweep": "experts",
}  # fmt: skip


def outcome(use) -> str:
    """ "read", or the line that refuses it."""
    try:
        use()
    except UserError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize("name", TABLES)
def test_any_field_of_a_record_is_shown_or_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.lib.scaling_tables.markdown", lambda runs, level: "")
    path = tmp_path / "machine" / f"{name}.jsonl"
    path.parent.mkdir()
    records = read_records(RESULTS / "amd-epyc" / path.name)
    good = next(each for each in records if name != "moe_sweep" or each.config["candidate"] == "sort")
    good = next(each for each in records if not chosen(each)) if name == "e2e" else good
    if name == "scaling":  # a few timers tell as much as twenty
        good = replace(good, metrics=good.metrics | {"timers_ms": dict([*good.metrics["timers_ms"].items()][:3])})
    said = []
    for _, _, made in garbled(asdict(good) | {"samples_ms": [2.5]}, values=FEW):
        path.write_text(json.dumps(made))
        said.append(outcome(lambda: measured_tables(tmp_path, TABLES[name]).encode()))
    assert said.count("read") > 10
    assert len(said) - said.count("read") > 100
    assert not [each for each in said if "\n" in each]


def test_any_field_of_a_log_or_a_run_is_read_or_refused(tmp_path):
    runs = {"source": "a", "runs": [asdict(run) for run in read_runs([PUBLISHED])[:2]]}
    given, said = LogOptions(system=DEFAULT_SYSTEM), []
    for path, good in ((tmp_path / "x.json", runs), (tmp_path / "x.jsonl", [HEADER, *REPORTS[-2:], LAST])):
        for _, _, made in garbled(good, values=FEW):
            lines = [made] if path.suffix == ".json" else made
            path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
            said.append(outcome(partial(shown, path)))
            said.append(outcome(partial(read_measured, path, given)))
    assert said.count("read") > 10
    assert len(said) - said.count("read") > 100
    assert not [each for each in said if "\n" in each]


def shown(path: Path) -> None:
    """The tables of a file's runs, as the command prints them."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_command(import_log, [str(path)])
    out.getvalue().encode()
    if code:
        raise UserError(err.getvalue().removesuffix("\n"))


READERS = [read_records, lambda path: read_runs([path]), run_list, read_machine, load_constants, read_text, open_plain]


@pytest.mark.parametrize("read", READERS)
def test_no_reader_waits_for_a_pipe(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="a pipe or a device"):
        read(tmp_path / "pipe")
