"""The benchmarks that the chapters cite, by name."""

from benchmarks.lib.catalogue import CPU, Benchmark
from writeup.errors import CitationError

RUNS = CPU


def benchmark(name: str) -> Benchmark:
    """The first run of that name. Raises CitationError for a name that no benchmark has."""
    for each in RUNS:
        if each.name == name:
            return each
    raise CitationError(f"no benchmark is called {name!r}; there are {', '.join(sorted({run.name for run in RUNS}))}")
