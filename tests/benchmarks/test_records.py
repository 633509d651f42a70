"""Records: the line that is written is the record that is read, and the tables are made from nothing else."""

import json
import resource
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import e2e
from benchmarks.lib.scaling_tables import NOT_YET
from benchmarks.records import SCHEMA, Record, append_record, appended, machine_name, open_records, read_records
from benchmarks.tables import BEGIN, END, FIRST, insert, main, measured_tables
from cs336_systems.cost import Hardware
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.host.machine import environment

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


def edited(**fields) -> str:
    """A record's line with other fields."""
    return json.dumps(asdict(record()) | fields)


def write(folder: Path, *records: Record) -> Path:
    path = open_records(folder, "e2e")
    for each in records:
        append_record(each, path)
    return path


def test_what_is_written_is_read(tmp_path):
    records = [record(), record("step", "out-of-memory")]
    path = write(tmp_path / "new" / "folder", *records)
    assert path == tmp_path / "new" / "folder" / "e2e.jsonl"
    assert read_records(path) == records
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "schema", "benchmark", "config", "samples_ms", "metrics", "predicted", "environment", "flags", "status",
    }  # fmt: skip


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


def test_the_newest_record_of_a_configuration_wins(tmp_path):
    for date in ("2026-01-01", "2026-02-02"):
        path = write(tmp_path, record(date=date), record("step", date=date))
    write(tmp_path, record(batch_size=4))
    kept = read_records(path)
    assert [(r.config["mode"], r.config["batch_size"], r.environment["date"]) for r in kept] == [
        ("forward", 2, "2026-02-02"),
        ("step", 2, "2026-02-02"),
        ("forward", 4, "2026-01-01"),
    ]


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_record(Record("e2e", {}, {}, samples_ms=[float("nan")]), tmp_path / "e2e.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no record"),
        ("[]", "is no record"),
        ('{"schema": 1}', "is no record"),
        ('{"schema": 99}', f"has schema 99, this version reads {SCHEMA}"),
        (edited(config={"size": float("nan")}), "NaN is no number of JSON"),
        (edited(environment={"commit": "y"}), "e2e.jsonl:1 misses 'device'"),
        (edited(environment=[]), "its environment is a list, not a dict"),
        (edited(samples_ms=["1"]), "its samples_ms are not all numbers"),
        (edited(status="fine"), "its status is 'fine', none of ok, out-of-memory, unsupported"),
        ("\xff", "e2e.jsonl has no records: it is not UTF-8 at byte 0"),
        ("[" * 100_000, "is no record"),
    ],
    ids=lambda text: text[-30:],
)
def test_what_is_no_record_is_refused(tmp_path, line, message):
    (tmp_path / "e2e.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match=message):
        read_records(tmp_path / "e2e.jsonl")


def test_a_folder_is_no_file_of_records(tmp_path):
    (tmp_path / "e2e.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*e2e.jsonl: Is a directory"):
        read_records(tmp_path / "e2e.jsonl")


def test_machine_names_are_folders():
    assert machine_name(CPU, "NVIDIA H200 (141GB)") == "nvidia-h200-141gb"
    assert machine_name(CPU, "../../etc") == "etc"
    assert machine_name(CPU) == machine_name(CPU).lower()


def test_the_stamp_says_what_was_measured_on():
    here = environment(CPU)
    assert here["torch"] == torch.__version__
    assert here["device_type"] == "cpu"
    assert set(here) >= {"device", "cores", "triton", "python", "world_size", "backend", "commit", "dirty", "date"}
    assert environment(CPU, commit="abc")["commit"] == "abc"
    assert environment(CPU, commit="abc")["dirty"] is False


def test_tables_come_from_records(tmp_path):
    noisy = replace(record("backward"), flags=["noisy: much"])
    other = record(precision="bf16", norm="layernorm", warmup=0)  # for the write-up
    write(tmp_path / "test-cpu", record(), record("step", "out-of-memory"), noisy, other)
    table = measured_tables(tmp_path)
    assert "Test CPU, 2 cores, torch 2.13, commit abcdef0, 2026-01-01:" in table
    assert "| small 2 x 128 | forward | 1.9 s ± 5% | 1.5 s | 1.02 k | 50% | 1.0 GiB | 512.0 MiB |" in table
    assert "| small 2 x 128 | step | does not fit | 1.5 s |  |  |  | 512.0 MiB |" in table
    assert "| small 2 x 128 | backward | 1.9 s ± 5%\\* |" in table
    assert table.endswith("small 2 x 128 backward (noisy: much).")
    assert table.count("| forward |") == 1


def test_each_commit_has_its_own_table(tmp_path):
    write(tmp_path / "test-cpu", record(), record("step", commit="9876543210"))
    tables = measured_tables(tmp_path)
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
    row = "| row |\n"
    assert "details" not in insert(page, f"Title:\n\n{27 * row}")  # 25 rows below two lines of heads
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
    docs = {"data_parallel": "parallel", "kernels": "kernels", "profiling": "memory"}
    docs |= {"model_parallelism": "scaling", "experts": "experts", "cost": "cost"}
    docs |= {"checkpoints": "checkpoints"}
    for page, what in {"README.md": "e2e", **{f"docs/{name}.md": what for name, what in docs.items()}}.items():
        text = git("show", f"HEAD:{page}")
        assert insert(text, measured_tables(tmp_path, what)) == text, "run make readme and commit"
