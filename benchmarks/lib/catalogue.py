"""Every benchmark that the write-up cites, as `catalogue.toml` lists them, by the kind of machine that measures it."""

import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Edition = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Benchmark:
    """The module that measures, its options, and the minutes that it takes, on a GPU at most."""

    name: str
    options: tuple[str, ...] = ()
    minutes: float = 1.0
    root: bool = False  # it makes network namespaces
    gpus: int = 0
    module: str = ""  # if that is not benchmarks.NAME
    takes_budget: bool = False  # stops by itself, given --budget
    leaves: str = ""  # a folder beside the records, for pictures and traces, or a file
    records: bool = True  # it leaves records; else only what `leaves` names

    @property
    def source(self) -> str:
        """The dotted name of the module whose imports are what the benchmark exercises."""
        return self.module or f"benchmarks.{self.name}"

    @property
    def command(self) -> str:
        """The command to type."""
        return shlex.join(("python", "-m", self.source, *self.options))


def listed(run: str, seconds: float = 0.0, minutes: float = 0.0, name: str = "", **more: Any) -> Benchmark:
    """A benchmark from its entry in the list."""
    module, *options = shlex.split(run)
    name = name or module.rpartition(".")[2].removesuffix("_run")
    return Benchmark(name, tuple(options), minutes or seconds / 60, module=module, **more)


_entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CPU = tuple(listed(**entry) for entry in _entries["cpu"])
GPU = tuple(listed(**{"gpus": 1, **entry}) for entry in _entries["gpu"])
EDITIONS: dict[Edition, tuple[Benchmark, ...]] = {"cpu": CPU, "gpu": GPU}
