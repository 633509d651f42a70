"""Records and logs of any content: each field by each type of JSON is read, or refused in one line."""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.lib.scaling_logs import read_runs
from benchmarks.lib.scaling_tables import PUBLISHED
from benchmarks.records import RESULTS, read_records
from benchmarks.scaling import import_log
from benchmarks.tables import chosen, measured_tables
from cs336_systems.checkpoint.folder import open_plain
from cs336_systems.cost.fitting.logged_runs import LogOptions
from cs336_systems.cost.fitting.observations import read_measured
from cs336_systems.cost.machines import DEFAULT_SYSTEM, load_constants, read_machine
from cs336_systems.cost.runs import read_runs as run_list
from cs336_systems.data.corpus import read_text
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from tests.benchmarks.test_train_log import HEADER, LAST, REPORTS
from tests.support.garble import garbled

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
    monkeypatch.setattr("benchmarks.tables.goals_table", str)
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
        code = run_command(import_log, ["--markdown", str(path)])
    out.getvalue().encode()
    if code:
        raise UserError(err.getvalue().removesuffix("\n"))


READERS = [read_records, lambda path: read_runs([path]), run_list, read_machine, load_constants, read_text, open_plain]


@pytest.mark.parametrize("read", READERS)
def test_no_reader_waits_for_a_pipe(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="a pipe or a device"):
        read(tmp_path / "pipe")
