"""Published tables and records in one form: figures with their settings, and the least work of each measurement.

Ceilings are the data sheet's where the hardware is known, and otherwise the best that any record of the machine has
measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.records import Record
from cs336_systems.cost.flops import backward_flops, count_parameters, least_forward_flops
from cs336_systems.cost.machines import System, nearest_system, system_preset
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.presets import ModelConfig, model_preset
from writeup.publications import Published, PublishedTable

TIMES = ("mean", "time")  # columns of published tables that are times of one pass
# Times that a norm's input goes to or from memory at least: x and y forward; x, dy and dx backward.
NORM_TRIPS = {"forward": 2, "backward": 3, "forward-backward": 5}


@dataclass(frozen=True)
class Ceilings:
    """Upper limits of hardware, where known: bytes/s of a link and of memory, FLOP/s by name of number type."""

    link: float = 0.0
    memory: float = 0.0
    peak: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One figure with its settings; `value` in seconds, or bytes where `unit` says so."""

    where: str
    settings: dict[str, Any]
    value: float
    shown: str
    unit: str = "s"
    std: float = 0.0
    digit: float = 0.0  # what one unit of its last printed digit is worth
    moved: float = 0.0  # the least bytes that it reads and writes
    flops: float = 0.0  # the fewest
    year: int = 2024
    record: Record | None = None
    quoted: Published | None = None  # what it was made of, if not a record

    @property
    def model(self) -> ModelConfig | None:
        """The course's model that was measured, if its settings name one."""
        try:
            return model_preset(str(self.settings["size"]), self.year)
        except (UserError, KeyError):
            return None

    def place(self, axis: str) -> float:
        """Position along a setting: a model's is its number of parameters."""
        model = self.model if axis == "size" else None
        return float(sum(count_parameters(model).values())) if model else float(self.settings[axis])

    def without(self, *names: str) -> str:
        """All other settings, as a key."""
        return str(sorted((name, str(value)) for name, value in self.settings.items() if name not in names))


def published_figures(table: PublishedTable, where: str) -> Iterator[Figure]:
    """The times of a published table, or its peaks of memory."""
    column = next((each for each in table.values if each in (*TIMES, "peak")), "")
    for row in table.rows:
        found = row.values.get(column)
        if found is None or not found.value:
            continue
        std = row.values.get("std")
        shown = f"{label(row.keys)}: {found.text}" + (f" ± {std.text}" if std else "")
        figure = Figure(
            where, {**table.fixed, **row.keys}, found.value, shown, "bytes" if column == "peak" else "s",
            std.value if std else 0.0, found.resolution, year=table.source.year, quoted=found,
        )  # fmt: skip
        yield replace(figure, moved=_norm_bytes(figure.settings), flops=_flops(figure))


def time_figure(record: Record) -> Figure | None:
    """A record's median, with what it counted; None if it timed nothing."""
    found = record.metrics
    if not found.get("median_ms"):
        return None
    return Figure(
        _where(record), record.config, found["median_ms"] / 1e3,
        f"{label(record.config)}: {format_seconds(found['median_ms'] / 1e3)}", "s", found.get("std_ms", 0.0) / 1e3,
        moved=found.get("bytes", 0.0) if "bytes_per_s" in found else 0.0, flops=found.get("flops", 0.0),
        year=record.config.get("year", 2024), record=record,
    )  # fmt: skip


def memory_figure(record: Record) -> Figure | None:
    """A record's peak of memory, of a whole model; None if it has none."""
    peak = record.metrics.get("peak_memory_bytes")
    if not peak or "size" not in record.config:
        return None
    shown, year = f"{label(record.config)}: {format_bytes(peak)}", record.config.get("year", 2024)
    return Figure(_where(record), record.config, peak, shown, "bytes", year=year, record=record)


def data_sheet(system: str, inside: bool = True) -> Ceilings:
    """Ceilings of a system of `cost.machines`, its link inside a node or between two; none for no name."""
    return _ceilings(system_preset(system), inside) if system else Ceilings()


def measured_ceilings(records: Sequence[Record]) -> Ceilings:
    """Ceilings by the GPU's data sheet, or else the best of all records of the machine."""
    known = next(filter(None, (nearest_system(str(each.environment.get("device"))) for each in records)), None)
    if known:
        return _ceilings(known)
    peaks: dict[str, float] = {}
    memory = 0.0
    for record in records:
        said = {**record.metrics, **record.predicted}
        kind = number_type(record.config)
        peaks[kind] = max(peaks.get(kind, 0.0), said.get("peak_flops_per_s") or said.get("peak_flops") or 0.0)
        memory = max(memory, said.get("bandwidth_bytes_per_s") or 0.0)
    return Ceilings(0.0, memory, peaks)


def number_type(settings: dict[str, Any]) -> str:
    """ "fp32" or "bf16"; "" where the settings do not say."""
    return str(settings.get("dtype") or settings.get("precision") or "")


def label(settings: dict[str, Any]) -> str:
    """Settings in words: `nccl, cuda, 500 MB, 2 ranks`."""
    return ", ".join(_word(name, value) for name, value in settings.items() if value not in ("", None))


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, str):
        return value
    if name == "bytes":
        scale, unit = (1e9, "GB") if value >= 1e9 else (1e6, "MB") if value >= 1e6 else (1e3, "KB")
        return f"{value / scale:g} {unit}"
    if name in ("ranks", "nodes"):
        return f"{value} {name[:-1]}{'s' * (value != 1)}"
    return f"{name} {value}"


def _where(record: Record) -> str:
    return f"{record.benchmark}, {record.environment.get('device', 'unknown')}"


def _ceilings(system: System, inside: bool = True) -> Ceilings:
    link = (system.inside if inside else system.between).bandwidth
    narrow, wide = system.matmul_flops, system.wide_flops
    return Ceilings(link, system.bandwidth, {"bf16": narrow, "fp16": narrow, "fp32": wide})


def _norm_bytes(settings: dict[str, Any]) -> float:
    if not {"rows", "columns"} <= settings.keys():
        return 0.0
    return 4.0 * NORM_TRIPS.get(settings.get("pass", ""), 0) * settings["rows"] * settings["columns"]


def _flops(figure: Figure) -> float:
    """The fewest FLOPs of a model's pass or of causal attention; 0 where the settings do not say enough."""
    settings, forward, backward = figure.settings, 0.0, 0.0
    if {"seq", "dim", "batch"} <= settings.keys():  # two products forward and five backward; the mask spares half
        forward = 2.0 * settings["batch"] * settings["seq"] ** 2 * settings["dim"]
        backward = 2.5 * forward
    elif {"size", "context", "batch_size", "pass"} <= settings.keys() and (model := figure.model):
        batch, seq = settings["batch_size"], settings["context"]
        forward, backward = least_forward_flops(model, batch, seq), backward_flops(model, batch, seq)
    return {"forward": forward, "backward": backward}.get(settings.get("pass", ""), forward + backward)
