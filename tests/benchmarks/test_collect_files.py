"""Traces of ranks on several machines."""

import json
from pathlib import Path

import torch

from benchmarks.rank_times import collect_files
from cs336_systems.profiling.trace import trace_name
from tests.support import ranks


def collect_case(group, folder: str) -> None:
    mine = Path(folder, f"machine of {group.rank()}")
    mine.mkdir()
    (mine / trace_name(group.rank())).write_text(json.dumps({"rank": group.rank(), "pad": "x" * group.rank()}))
    if group.rank() == 2:
        (mine / trace_name(2)).unlink()  # a rank without a trace is left out
    collect_files(mine, group, torch.device("cpu"))


def test_traces_of_other_machines_come_to_rank_0(tmp_path):
    ranks.run(collect_case, 4, folder=str(tmp_path))
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "machine of 0").iterdir()}
    assert found == {trace_name(rank): {"rank": rank, "pad": "x" * rank} for rank in (0, 1, 3)}
