"""`probe`: this machine, measured in seconds, as the machine that the other commands predict for."""

import sys
from math import sqrt
from pathlib import Path
from typing import Literal

import click
from rich.table import Table

from cs336_systems.cost.commands.output import new_table
from cs336_systems.cost.machines import SECONDS, System, check_out, write_json
from cs336_systems.cost.operator_time import TILE
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, format_seconds


@click.command("probe")
@click.option("--out", type=click.Path(path_type=Path), help="File to write it to, for --machine-file of the others.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What is measured.  [default: cuda if there]")
@click.option(
    "--budget", default=SECONDS, show_default=True, type=click.FloatRange(1.0, 1e6), callback=console.finite,
    help="Seconds to measure, about.",
)  # fmt: skip
def command(out: Path | None, device: Literal["cpu", "cuda"] | None, budget: float) -> None:
    """Measure this machine: products, memory, the cost of launching an operator, sending between two processes."""
    from cs336_systems.cost.probe import probe_here  # torch, which the other commands need not load

    check_out(out)
    system = probe_here(budget, device)
    if out:
        write_json(out, system.record())
    screen = console.console()
    screen.print(figures(system))
    used = f"--machine-file {out}" if out else "--system here (or keep it: probe --out FILE)"
    screen.print(f"predict for it: python -m cs336_systems.cost step {used}")


def figures(system: System) -> Table:
    """Each figure of a measured machine, and where it is from."""
    # The law of products gives half of the rate at the ramp, and where a result is as large as the empty tiles.
    ramp, side = system.measured["ramp"], sqrt(system.measured["wave"] * TILE * system.processors)
    small = f"to half at {side:.0f} x {side:.0f} numbers" if side else "not seen"
    starts = {name: f"{1e6 * system.measured[name]:.2f} us" for name in ("start", "host") if system.measured.get(name)}
    rows = {
        "matmul_flops": ("16-bit products", f"{format_count(system.matmul_flops)}FLOP/s"),
        "wide_flops": ("32-bit products", f"{format_count(system.wide_flops)}FLOP/s"),
        "ramp": ("short sums lower their rate", f"to half at {ramp:.0f} terms" if ramp else "not seen"),
        "wave": ("small results lower their rate", small),
        "fused": ("fused attention's rate, as a share of theirs", f"{system.measured['fused']:.0%}"),
        "bandwidth": ("memory, read and written", f"{format_bytes(system.bandwidth)}/s"),
        "touch": ("first write of new memory takes, in addition", f"{format_seconds(2**30 * system.touch)} a GiB"),
        "memory": ("memory", format_bytes(system.memory)),
        "processors": ("processors that one product is split over", str(system.processors)),
        "inside": ("a message takes at least", f"{1e6 * system.inside.latency:.0f} us"),
        "between": ("large messages are sent at", f"{format_bytes(system.between.bandwidth)}/s"),
        **{name: ("to start an operator", text) for name, text in starts.items()},
    }
    cells = [(what, figure, system.sources.get(name, "")) for name, (what, figure) in rows.items()]
    return new_table(["what", "figure", "~source"], cells, title=system.name)


main = command  # the name by which `benchmarks.all` finds what it runs

if __name__ == "__main__":
    sys.exit(console.run_command(main))
