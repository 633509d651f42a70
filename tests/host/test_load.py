"""Load by other processes: when it is reported, and that threads then sleep while they wait."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.records import append_record, read_records
from cs336_systems.host import load
from tests.benchmarks.test_records import record

TICKS = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 {0} 0 0 {1} 0 0 0 0 0 0
cpu1 0 {2} 0 {3} 0 0 0 0 0 0
cpu7 99 0 0 0 0 0 0 0 0 0
intr 5
"""


@pytest.fixture
def stat(monkeypatch):
    """Counters of two cores before and after; a third core is not this process's."""

    def use(first: int, second: int) -> None:
        texts = iter([TICKS.format(5, 5, 3, 7), TICKS.format(5 + first, 15 - first, 3 + second, 17 - second)])
        text = [next(texts)]
        monkeypatch.setattr(Path, "read_text", lambda path: text[0])
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
        monkeypatch.setattr(load.time, "sleep", lambda seconds: text.__setitem__(0, next(texts)))
        monkeypatch.setattr(load, "used_by_others", load.measure)

    return use


def test_others_are_counted_on_the_cores_of_this_process(stat, capsys, monkeypatch):
    stat(10, 4)
    assert load.measure() == pytest.approx(1.4)
    stat(10, 4)
    load.note_if_busy()
    assert capsys.readouterr().err.startswith("note: busy: others used 1.4 of 2 cores, load ")
    stat(3, 1)
    assert load.busy() == ""
    stat(3, 1)
    monkeypatch.setattr(load, "_ticks", dict)  # nobody counts
    assert load.measure() == 0.0


def test_a_record_of_a_busy_machine_is_flagged(tmp_path, monkeypatch):
    append_record(record(), tmp_path / "e2e.jsonl")
    monkeypatch.setattr("benchmarks.records.busy", lambda: "busy: others")
    append_record(record("step"), tmp_path / "e2e.jsonl")
    assert [each.flags for each in read_records(tmp_path / "e2e.jsonl")] == [[], ["busy: others"]]


@pytest.mark.parametrize(
    ("used", "given", "policy"), [(1.5, "", "PASSIVE"), (0.1, "", None), (1.5, "ACTIVE", "ACTIVE")]
)
def test_threads_sleep_on_a_busy_machine_unless_the_user_has_chosen(used, given, policy, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", given)
    if not given:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(load, "used_by_others", lambda: used)
    monkeypatch.setattr(load, "_ticks", lambda: dict.fromkeys((0, 1)))
    monkeypatch.delitem(sys.modules, "torch")  # which would have started the threads
    load.wait_asleep()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
