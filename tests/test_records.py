"""Records: the line that is written is the record that is read, and the tables are made from nothing else."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.records import RESULTS, SCHEMA, Record, append_records, machine_name, read_records, stamp
from benchmarks.tables import BEGIN, END, insert, main, measured_tables
from cs336_systems.console import run_command
from cs336_systems.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
METRICS = {"mean_ms": 2000.0, "std_ms": 100.0, "tokens_per_s": 1024.0, "mfu": 0.5, "peak_memory_bytes": 2**30}
PREDICTED = {"mean_ms": 1500.0, "peak_memory_bytes": 2**29}


def record(mode="forward", status="ok", date="2026-01-01", **config) -> Record:
    base = {"size": "small", "mode": mode, "precision": "fp32", "batch_size": 2, "context": 128}
    environment = {"device": "Test CPU", "cores": 2, "torch": "2.13", "commit": "abcdef012345", "date": date}
    metrics = METRICS if status == "ok" else {}
    return Record("e2e", base | config, environment, [1.0] if metrics else [], metrics, PREDICTED, status=status)


def test_what_is_written_is_read(tmp_path):
    records = [record(), record("step", "out-of-memory")]
    path = append_records(records, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "e2e.jsonl"
    assert read_records(path) == records
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "schema", "benchmark", "config", "samples_ms", "metrics", "predicted", "environment", "flags", "status",
    }  # fmt: skip


def test_the_newest_record_of_a_configuration_wins(tmp_path):
    for date in ("2026-01-01", "2026-02-02"):
        path = append_records([record(date=date), record("step", date=date)], tmp_path)
    append_records([record(batch_size=4)], tmp_path)
    kept = read_records(path)
    assert [(r.config["mode"], r.config["batch_size"], r.environment["date"]) for r in kept] == [
        ("forward", 2, "2026-02-02"),
        ("step", 2, "2026-02-02"),
        ("forward", 4, "2026-01-01"),
    ]


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_records([Record("e2e", {}, {}, samples_ms=[float("nan")])], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no record"),
        ("[]", "is no record"),
        ('{"schema": 1}', "is no record"),
        ('{"schema": 99}', f"has schema 99, this version reads {SCHEMA}"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, line, message):
    (tmp_path / "e2e.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        read_records(tmp_path / "e2e.jsonl")


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--results DIR"):
        append_records([record()], tmp_path / "file")


def test_machine_names_are_folders():
    assert machine_name(CPU, "NVIDIA H200 (141GB)") == "nvidia-h200-141gb"
    assert machine_name(CPU, "../../etc") == "etc"
    assert machine_name(CPU) == machine_name(CPU).lower()


def test_the_stamp_says_what_was_measured_on():
    here = stamp(CPU)
    assert here["torch"] == torch.__version__
    assert here["device_type"] == "cpu"
    assert set(here) >= {"device", "cores", "triton", "python", "world_size", "backend", "commit", "dirty", "date"}
    assert stamp(CPU, commit="abc")["commit"] == "abc"
    assert stamp(CPU, commit="abc")["dirty"] is False


def test_tables_come_from_records(tmp_path):
    append_records([record(), record("step", "out-of-memory"), record(precision="bf16")], tmp_path / "test-cpu")
    table = measured_tables(tmp_path)
    assert "**Test CPU**, 2 cores, torch 2.13, commit abcdef0, 2026-01-01" in table
    assert "| small, 2 x 128 | forward | 2.0 s ± 5% | 1.5 s | 1.02 k | 50% | 1.0 GiB | 512.0 MiB |" in table
    assert "| small, 2 x 128 | step | does not fit | 1.5 s |  |  |  | 512.0 MiB |" in table
    assert "| small (bf16), 2 x 128 | forward |" in table
    with pytest.raises(UserError, match="no records under"):
        measured_tables(tmp_path / "elsewhere")


def test_tables_are_inserted_between_their_marks(tmp_path):
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = insert(page, "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert insert(once, "new") == once
    with pytest.raises(UserError, match="the file needs one line"):
        insert("no marks", "new")
    (tmp_path / "page.md").write_text("no marks")
    assert run_command(main, ["--write", str(tmp_path / "page.md")]) == 2


def test_the_readme_shows_the_committed_records():
    readme = (ROOT / "README.md").read_text()
    assert insert(readme, measured_tables(RESULTS)) == readme, "run make readme"
