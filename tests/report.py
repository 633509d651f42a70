"""Run the tests that the write-up cites, and the gallery of broken variants, and write their report:

    python -m tests.report

It takes about two minutes on two cores and writes writeup/reports/equality.json, which is committed.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.host.machine import environment
from writeup.equality import cited
from writeup.errors import CitationError
from writeup.proofs import REPORT, ROOT, SCHEMA, in_words, read_report

GALLERY = "tests/test_gallery.py"
USUAL = 90.0  # seconds on two cores


class Recorder:
    """A plugin of pytest that notes what comes of each test."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """A hook of pytest: what there is to run."""
        for item in session.items:
            file, line, _ = item.location
            first = (item.function.__doc__ or in_words(item.function.__name__)).strip().partition("\n\n")[0]
            entry = {"outcome": "not run", "seconds": 0.0, "says": " ".join(first.split())}
            self.tests[item.nodeid] = entry | {"file": Path(file).as_posix(), "line": line + 1}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A hook of pytest, after the set-up, the test and what it leaves to be tidied up. The slowest counts, since
        what tests share is made in the set-up of the first."""
        entry = self.tests[report.nodeid]
        entry["seconds"] = round(entry["seconds"] + report.duration, 2)
        if report.when == "call" or report.outcome != "passed":
            entry["outcome"] = report.outcome
        entry.update(report.user_properties)


def gathered(tests: dict[str, dict[str, Any]], nodes: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The cited ones in the order of citation, then the gallery's."""
    rest = [node for node in tests if node not in nodes]
    return {node: tests[node] for node in (*nodes, *rest) if node in tests}


def main(path: Path = REPORT) -> int:
    """Run, and write the report: 0 if every test passed."""
    nodes = cited()
    try:
        usual = read_report(path).seconds
    except CitationError:  # the first one
        usual = USUAL
    print(f"{len(nodes)} cited tests and the gallery: about {usual / 60:.0f} minutes", flush=True)
    recorder, start = Recorder(), time.perf_counter()
    # Of the state of the code before, which is what runs: the report itself is no part of it.
    stamp = environment(torch.device("cpu"))
    # By file: what the tests of one share is then made once.
    status = pytest.main(["-q", f"--rootdir={ROOT}", *sorted(nodes), GALLERY], plugins=[recorder])
    if not recorder.tests or status == pytest.ExitCode.INTERRUPTED:
        print("error: nothing was written; a test that is cited may not exist", file=sys.stderr)
        return 1
    report = {
        "schema": SCHEMA,
        "environment": stamp,
        "seconds": round(time.perf_counter() - start, 1),
        "tests": gathered(recorder.tests, nodes),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
