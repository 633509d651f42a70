"""`probe`: this machine, measured in seconds, as the machine that the other commands predict for."""

import sys
from math import sqrt
from pathlib import Path
from typing import Literal

import click
from rich.table import Table

from cs336_systems.cost.machines import SECONDS, System, check_out, write_json
from cs336_systems.cost.operator_time import TILE
from cs336_systems.cost.template import fill_file, new_table
from cs336_systems.host.console import console, finite, run_command


@click.command("probe")
@click.option("--out", type=click.Path(path_type=Path), help="File to write it to, for --machine-file of the others.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What is measured.  [default: cuda if there]")
@click.option(
    "--budget", default=SECONDS, show_default=True, type=click.FloatRange(1.0, 1e6), callback=finite,
    help="Seconds to measure, about.",
)  # fmt: skip
def command(out: Path | None, device: Literal["cpu", "cuda"] | None, budget: float) -> None:
    """Measure this machine: products, memory, the cost of launching an operator, sending between two processes."""
    from cs336_systems.cost.probe import probe_here  # torch, which the other commands need not load

    check_out(out)
    system = probe_here(budget, device)
    if out:
        write_json(out, system.record())
    screen = console()
    screen.print(figures(system))
    used = f"--machine-file {out}" if out else "--system here (or keep it: probe --out FILE)"
    screen.print(f"predict for it: python -m cs336_systems.cost step {used}")


def figures(system: System) -> Table:
    """Each figure of a measured machine, and where it is from."""
    # The law of products gives half of the rate at the ramp, and where a result is as large as the empty tiles.
    measured, side = system.measured, sqrt(system.measured["wave"] * TILE * system.processors)
    values = {"system": system, "side": side, "small": side > 0, "short": measured["ramp"] > 0}
    values |= {"touch": 2**30 * system.touch, "latency": 1e6 * system.inside.latency}
    starts = {name: 1e6 * measured[name] if measured.get(name) else None for name in ("start", "host")}
    rows = (line.split("|") for line in fill_file("probe", values | starts))
    cells = [(what, figure, system.sources.get(name, "")) for name, what, figure in rows]
    return new_table(["what", "figure", "~source"], cells, title=system.name)


main = command  # the name by which `benchmarks.all` finds what it runs

if __name__ == "__main__":
    sys.exit(run_command(main))
