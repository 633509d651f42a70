"""Machines that a prediction can be made for, the constants of the cost model, and the files that hold either.

A machine has the figures of data sheets (`data/machines.json`), or of a probe: for one accelerator, dense (not sparse),
and for one direction of a link (data sheets count both). The shares of them that programs reach are one set of
constants for all machines, except `attainable`, that of the vendor's library at the clock that power allows.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.plan import OVERLAPS, Overlap
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.text import regular, strict_json

DEFAULT_SYSTEM = "A100-80GB"
GIB = 2**30  # a GB of an accelerator's memory in data sheets, as its driver reports it
HERE = "here"  # the name of this machine, to be probed, where presets have theirs
SECONDS = 20.0  # of a probe
LATER = ("narrow_flops", "narrow_attainable", "power", "reserve")  # figures that files of machines may lack
LEAST_FIGURE, MOST_FIGURE = 1e-18, 1e30  # what is computed from figures of a file stays finite
SHARES = {"attainable": 1.0, "narrow_attainable": 1.0, "reserve": 0.9}  # the most that each may be
MAY_BE_ZERO = ("start", "host", "call", "wave", "ramp", "hidden", "latency", "touch", *LATER)


@dataclass(frozen=True)
class Constants:
    """Constants that data sheets lack, fitted to runs of Megatron-LM; other stacks replace some (`stacks.py`)."""

    product: float = 0.93  # rate of GEMMs, as a share of the attainable one
    ramp: float = 180.0  # steps of the inner dimension that a tile takes to begin and to end
    wave: float = 0.3  # share of a wave of tiles that is empty
    fused: float = 0.556  # rate of fused attention, as a share of that of GEMMs
    memory: float = 0.7  # share of the bandwidth of memory that is reached
    start: float = 2.6e-6  # seconds that the device takes to start a kernel
    host: float = 70e-6  # seconds in which the host launches a kernel of this model, with the small ones around it
    call: float = 8e-6  # seconds that a collective takes whatever it sends
    inside: float = 0.716  # share of a link's bandwidth that is reached within a node
    between: float = 0.77  # the same between nodes
    hidden: float = 0.16  # share of a hidden transfer's time by which computing slows down


CONSTANTS = Constants()
NAMES = tuple(each.name for each in fields(Constants))


@dataclass(frozen=True)
class System:
    """One kind of accelerator and the network of two tiers between many; every figure for a single accelerator."""

    name: str
    matmul_flops: float  # FLOP/s of 16-bit GEMMs with 32-bit sums, dense
    wide_flops: float  # the same of 32-bit numbers, in TF32 where there is that
    attainable: float  # the share of these that the largest GEMMs reach
    bandwidth: float  # bytes/s of its memory
    memory: float  # bytes
    processors: int  # they share the tiles of a GEMM: streaming multiprocessors
    node: int  # accelerators that the faster network joins
    inside: Link  # a node: least seconds of a message, bytes/s out of one accelerator
    between: Link  # nodes, the same
    sources: dict[str, str] = field(default_factory=dict, compare=False)  # of each figure
    touch: float = 0.0  # seconds per byte of memory that the operating system has just given: page faults of a CPU
    measured: dict[str, float] = field(default_factory=dict, compare=False)  # constants that are this machine's own
    overlap: Overlap = "data"  # transfers that frameworks of its time hide behind computing
    constants: Constants = CONSTANTS  # used to predict its times; not in its file
    narrow_flops: float = 0.0  # FLOP/s of 8-bit GEMMs; 0: it has none
    narrow_attainable: float = 0.0  # the share of these that the largest reach
    power: float = 0.0  # watts of its data sheet; 0: not known
    reserve: float = 0.06  # share of its memory that context, communication library and fragmentation take

    def peak(self, number: int) -> float:
        """FLOP/s of the data sheet for GEMMs on numbers of this many bytes."""
        return {1: self.narrow_flops, 2: self.matmul_flops, 4: self.wide_flops}[number]

    def rate(self, number: int) -> float:
        """FLOP/s of large GEMMs on numbers of this many bytes."""
        return self.peak(number) * (self.narrow_attainable if number == 1 else self.attainable)

    def check_fp8(self, fp8: bool) -> None:
        """Raises UserError for FP8 on a machine without 8-bit GEMMs."""
        if fp8 and not self.rate(1):
            raise UserError(f"{self.name} has no 8-bit floating-point GEMMs: take H100, H200 or B200, or 16 bits")

    @property
    def memory_rate(self) -> float:
        """Bytes/s of its memory that are reached."""
        return self.bandwidth * self.constants.memory

    @property
    def link_rates(self) -> tuple[float, float]:
        """Bytes/s out of one accelerator that are reached, within a node and between nodes."""
        return self.inside.bandwidth * self.constants.inside, self.between.bandwidth * self.constants.between

    def record(self) -> dict[str, Any]:
        """The machine as `probe --out` writes it."""
        return {name: value for name, value in asdict(self).items() if name != "constants"}


def _links(row: Mapping[str, Any]) -> dict[str, Link]:
    return {tier: Link(**row[tier]) for tier in ("inside", "between")}


def _presets() -> Iterator[System]:
    """Machines of data sheets. One that is `like` another has the figures and sources of that one besides its own."""
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads((Path(__file__).parent / "data" / "machines.json").read_text()):
        base = rows.get(row.pop("like", ""), {"sources": {}})
        rows[row["name"]] = base | row | {"sources": base["sources"] | row.get("sources", {})}
    return (System(**row | _links(row)) for row in rows.values())


SYSTEMS = {each.name.lower(): each for each in _presets()}


def system_preset(name: str) -> System:
    """The named machine, in capitals or not. Raises UserError for a name that is not known, listing those that are."""
    if name.lower() not in SYSTEMS:
        known = ", ".join(each.name for each in SYSTEMS.values())
        raise UserError(f"no machine is called {name!r}: choose from {known}")
    return SYSTEMS[name.lower()]


CHANGES = ("peak", "bandwidth", "memory", "power", "node", "link", "network", "reserve")
IDLE = 1 / 7  # of an accelerator's watts: what it draws while it computes nothing; a judgement


def changed(system: System, **changes: float | None) -> System:
    """The machine with other figures: `peak` in TFLOP/s, bandwidths in GB/s, `memory` in GiB, `power` in watts.

    The rate of GEMMs falls with the cube root of the power above idle, as power grows with the cube of the clock.
    Raises UserError if the machine's power is not known, and for more or less than it has.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    for name, value in given.items():
        if value and not 1e-9 <= value <= 1e15:
            raise UserError(f"--{name} {value:g} is no figure of a machine: give one from 1e-09 to 1e+15")
    found = dict[str, Any]()
    if "peak" in given:
        ratio = given["peak"] * 1e12 / system.matmul_flops
        found |= {name: ratio * getattr(system, name) for name in ("matmul_flops", "wide_flops", "narrow_flops")}
    if "power" in given:
        watts, idle = given["power"], IDLE * system.power
        if not system.power or not idle < watts <= system.power:
            known = f"from {idle:.0f} to {system.power:.0f} W" if system.power else "which has no figure of it"
            raise UserError(f"--power {watts:g} W is not one of {system.name}, {known}: choose another")
        share = ((watts - idle) / (system.power - idle)) ** (1 / 3)
        found |= {name: share * getattr(system, name) for name in ("attainable", "narrow_attainable")}
    for name, unit in (("bandwidth", 1e9), ("memory", GIB), ("reserve", 1), ("node", 1)):
        found |= {name: given[name] * unit} if name in given else {}
    for option, name in (("link", "inside"), ("network", "between")):
        found |= {name: replace(getattr(system, name), bandwidth=given[option] * 1e9)} if option in given else {}
    name = system.name if set(given) <= {"reserve"} else f"{system.name}, changed"
    return replace(system, **found, name=name)


def nearest_system(name: str) -> System | None:
    """The machine that a run's own words mean: a known name that they begin with, or its family with "H100-SXM5-80GB",
    and of two A100 the one with 80 GB unless they say 40; None for words that name no known family."""
    asked = name.lower().replace("_", "-").replace(" ", "-")
    if found := [known for known in SYSTEMS if asked == known or asked.startswith(f"{known}-")]:
        return SYSTEMS[max(found, key=len)]
    if "a100" in asked:
        return SYSTEMS["a100-40gb" if "40" in asked.replace("a100", "") else "a100-80gb"]
    families = {"v100": "v100-32gb-dgx2", "theta": "thetagpu", "h100": "h100", "h200": "h200", "b200": "b200"}
    return next((SYSTEMS[known] for family, known in families.items() if family in asked), None)


def check_out(path: Path | None, option: str = "--out") -> None:
    """Raise UserError if a file cannot be written, before minutes of work instead of after them."""
    if path is None:
        return
    problems = {
        "it is a folder": path.is_dir(),
        f"there is no folder {path.parent}": not path.parent.is_dir(),
        "permission denied": not os.access(path if path.exists() else path.parent, os.W_OK),
    }
    if problem := next((problem for problem, there in problems.items() if there), None):
        raise UserError(f"cannot write {path}: {problem}; name another file with {option}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a machine, or constants, as JSON that a person can edit. Raises UserError if it cannot be written."""
    with os_errors(f"write {path}", "name another file with --out"):
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_machine(path: Path) -> System:
    """Read a machine from a file. Raises UserError for a file that cannot be read, and for an invalid figure."""
    found = read_json(path, "no machine", f"; `python -m cs336_systems.cost probe --out {path}` makes it")
    kinds = {each.name: each.type for each in fields(System) if each.name != "constants"}
    # Files written before machines had the field do not have it.
    later = {name: getattr(System, name) for name in ("overlap", *LATER)}
    found = later | found if isinstance(found, dict) else {}
    if set(found) != set(kinds):
        raise UserError(f"{path} is no machine: it needs {', '.join(sorted(kinds))}, as `probe --out` writes them")
    wanted = {"overlap": (f"one of {', '.join(OVERLAPS)}", found["overlap"] in OVERLAPS)}
    wanted["name"] = "text", isinstance(found["name"], str) and bool(found["name"].strip())
    for name in ("sources", "measured"):
        wanted[name] = "an object of names and values", isinstance(found[name], dict)
    for tier in ("inside", "between"):
        right = isinstance(found[tier], dict) and set(found[tier]) == {"latency", "bandwidth"}
        wanted[tier] = "an object of latency and bandwidth", right
    for name, (what, right) in wanted.items():
        if not right:
            raise UserError(f"{path}: {name} must be {what}, not {found[name]!r}")
    if unknown := set(found["measured"]) - set(NAMES):
        raise UserError(f"{path} measured {', '.join(sorted(unknown))}, which the cost model does not know")
    for name in ("inside", "between", "measured"):
        found[name] = {key: _figure(path, key, value) for key, value in found[name].items()}
    found |= {name: _figure(path, name, found[name], kind) for name, kind in kinds.items() if kind in (int, float)}
    return System(**found | _links(found))


def load_constants(path: Path) -> Constants:
    """Read the constants of a file; those that it lacks keep their values in `CONSTANTS`. Raises UserError for
    a file that cannot be read, an unknown name, and a value below zero, or zero for a share."""
    found = read_json(path, "no file of constants")
    values = found.get("constants") if isinstance(found, dict) else None
    if not isinstance(values, dict) or not values:
        raise UserError(f'{path} is no file of constants: it needs {{"constants": {{"product": 0.9, ...}}}}')
    if unknown := sorted(set(values) - set(NAMES)):
        raise UserError(f"{path} has {', '.join(unknown)}, but the constants are {', '.join(NAMES)}")
    return replace(CONSTANTS, **{name: _figure(path, name, value) for name, value in values.items()})


def read_json(path: Path, otherwise: str, hint: str = "") -> Any:
    """Read a JSON file. Raises UserError if it cannot be read, or is no JSON: then it is `otherwise`, "no machine"."""
    try:
        return strict_json(regular(path).read_text("utf-8-sig"))
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        raise UserError(f"cannot read {path}: {error.strerror}{hint if absent else ''}") from None
    except ValueError as error:
        raise UserError(f"{path} is {otherwise}: it is not JSON: {error}") from None


def _figure(path: Path, name: str, value: Any, kind: type = float) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not number or value < 0 or (value == 0 and name not in MAY_BE_ZERO) or (kind is int and value != int(value)):
        raise UserError(f"{path}: {name} must be a {'whole ' * (kind is int)}number above zero, not {value!r}")
    if value and not LEAST_FIGURE <= value <= MOST_FIGURE:
        raise UserError(f"{path}: {name} must be from {LEAST_FIGURE:g} to {MOST_FIGURE:g}, not {value!r}")
    if value > (most := SHARES.get(name, value)):
        raise UserError(f"{path}: {name} is a share, so it must be {most:g} at most, not {value!r}")
    return kind(value)
