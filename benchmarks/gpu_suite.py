"""The GPU edition of `benchmarks.all`, under its earlier name: `python -m benchmarks.gpu_suite`."""

import sys

from benchmarks.all import main
from cs336_systems.host import console

if __name__ == "__main__":
    sys.exit(console.run_command(main, ["--edition", "gpu", *sys.argv[1:]]))
