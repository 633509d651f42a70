"""Benchmarks, one file per question: each runs alone or under torchrun, checks its candidates, and appends records."""

import sys
from pathlib import Path

import cs336_systems

if (_found := Path(str(cs336_systems.__file__)).parent).parent != Path(__file__).parents[1]:
    _line = (
        f"`cs336_systems` is found in {_found}, and that is not the package of this name beside {Path(__file__).parent}"
        ": rename that folder, or start from another one"
    )
    if sys.argv[:1] == ["-m"]:  # Python is about to start a command of this package
        print(f"error: {_line}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(_line)
