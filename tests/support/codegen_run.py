"""Start a module of the tests in a process whose Triton compiles, with the installed version or with 3.6.0."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OTHER_TRITON = Path(sys.prefix) / "triton-3.6.0"  # where `make test` puts it, because the GPU machines have it
VERSIONS = ["installed", "3.6.0"]


def start(arguments: list[str], version: str, **variables: str) -> subprocess.Popen | None:
    """`python -m arguments` with one of the versions, None if that is not there, and TRITON_INTERPRET only if it is
    among the variables."""
    if version == "3.6.0" and not OTHER_TRITON.exists():
        return None
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(OTHER_TRITON) if version == "3.6.0" else ""} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=environment, **pipes)
