"""A compact, from-scratch distributed training library; ARCHITECTURE.md is the map."""

import sys
from importlib.util import find_spec
from pathlib import Path

if (_found := find_spec("kernels")) is None or Path(str(_found.origin)).parent != Path(__file__).parents[1] / "kernels":
    _line = (
        f"`kernels` is found in {_found and Path(str(_found.origin)).parent}, and that is not the package of this name "
        f"beside {Path(__file__).parent}: rename that folder, or start from another one"
    )
    if sys.argv[:1] == ["-m"]:  # Python is about to start a command of this package
        print(f"error: {_line}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(_line)
