"""Shared parts of the benchmarks of data parallelism and ZeRO: options, start-up, progress and records."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.harness import noise, summarise
from benchmarks.lib.collective import probe as probe_link
from benchmarks.lib.collective import room
from benchmarks.lib.options import COUNT, RankOptions
from benchmarks.lib.parallel_tables import sheets
from benchmarks.lib.sheets import show
from benchmarks.lib.turns import UNTIMED, Arena, Build, Turn, check
from benchmarks.records import Record
from cs336_systems.buffers.flat import plan_buckets
from cs336_systems.comm import Group, Place, backend_of, distributed, find_place
from cs336_systems.comm.launch import start_ranks
from cs336_systems.comm.startup import choose_backend
from cs336_systems.cost import Hardware, count_parameters, predict
from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.observed import observe_passes
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, setting
from cs336_systems.host.machine import device_name, environment
from cs336_systems.presets import COURSE_YEARS, DEFAULT_YEAR, ModelConfig, preset


@dataclass(frozen=True)
class ParallelSettings(RankOptions):
    """Options of a benchmark over several ranks."""

    size: str = setting("tiny", "Model preset.")
    year: int = setting(
        DEFAULT_YEAR, f"Edition of the course that the size is from, {COURSE_YEARS[0]} to {COURSE_YEARS[-1]}."
    )
    d_model: int | None = setting(None, "Width instead of the preset's; sets d_ff to 4 x it.", type=click.IntRange(64))
    layers: int | None = setting(None, "Depth instead of the preset's.", type=COUNT)
    batch_size: int = setting(4, "Sequences of each rank in a step.", type=COUNT)
    context: int | None = setting(None, "Tokens in a sequence.  [default: the edition's]", type=COUNT)
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 2]", type=COUNT)
    rounds: int = setting(7, "Turns of each candidate.", type=COUNT)
    link: str | None = setting(None, "Description of the link for the record, if ranks are on several machines.")

    def config(self) -> ModelConfig:
        """The model. Raises UserError for a width that its heads do not divide."""
        model = preset(self.size, self.year).model
        width = self.d_model
        if width is not None:
            if width % 64:
                raise UserError(f"--d-model {width} is no multiple of 64, the size of a head")
            model = model.override(d_model=width, d_ff=4 * width, num_heads=width // 64)
        return model.override(num_layers=self.layers, context_length=self.context)


@dataclass(frozen=True)
class StepSettings(ParallelSettings):
    """Options of a benchmark of training steps."""

    steps: int = setting(3, "Timed steps per turn.", type=COUNT)


@dataclass(frozen=True)
class ParallelRun:
    """The settings, the ranks of this many machines, the measured speed at which they compute and communicate, and the
    bytes that each candidate was seen to hold, where they were counted."""

    settings: StepSettings
    arena: Arena
    nodes: int
    hardware: Hardware
    link: Link
    stamp: dict[str, Any]
    held: dict[str, dict[str, int]]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.arena.group.size()

    def compute_seconds(self) -> dict[str, float]:
        """Seconds predicted for forward, backward and optimizer, without communication."""
        config = self.arena.config
        passes = observe_passes(config, self.settings.batch_size, config.context_length)
        parts = {mode: sum(predict(passes.of(mode), self.hardware).values()) for mode in ("forward", "backward")}
        # A fused AdamW reads and writes weight and moments once, and reads the gradient.
        return parts | {"optimizer": 7 * 4 * self.arena.trainable / self.hardware.bandwidth}

    def gradient_buckets(self, cap: float) -> list[float]:
        """Bytes of the buckets that a wrapper of this size would make."""
        parameters: list[Tensor] = list(self.arena.base.parameters())
        return [float(sum(p.nbytes for p in bucket)) for bucket in plan_buckets(parameters, cap)]

    def record(
        self, benchmark: str, name: str, turn: Turn, metrics: dict[str, Any], predicted: dict[str, Any]
    ) -> Record:
        """One candidate's record; `metrics` are added to the summary of its steps."""
        settings, config, stamp = self.settings, self.arena.config, self.stamp
        what = {
            "candidate": name, "size": settings.size, "year": settings.year, "d_model": config.d_model,
            "layers": config.num_layers, "batch_size": settings.batch_size, "context": config.context_length,
            "ranks": self.ranks, "nodes": self.nodes, "backend": stamp["backend"], "link": settings.link or "",
        }  # fmt: skip
        summary = summarise(turn.steps)
        metrics = summary | metrics | {"parameters": self.arena.trainable}
        metrics |= {"latency_ms": 1e3 * self.link.latency, "link_bytes_per_s": self.link.bandwidth}
        return Record(benchmark, what, stamp, turn.steps, metrics, predicted, noise(summary))


def start(
    work: Callable[[Place, Any], None],
    settings: ParallelSettings,
    benchmark: str,
    check: Callable[[Any, Place], None] = lambda settings, place: None,
) -> None:
    """Run `work(place, settings)` on every rank: those that torchrun or Slurm started, or as many as --nproc says.

    Raises UserError for what cannot be run, also what `check` raises, which sees the settings before any rank starts.
    """
    if settings.smoke:
        settings = replace(settings, size="tiny", batch_size=1, context=32, rounds=1)
        settings = replace(settings, steps=1) if isinstance(settings, StepSettings) else settings
    settings.config()
    here, ranks = find_place(), settings.nproc or 2
    place = here if here.world_size > 1 else Place(0, ranks, 0, ranks)
    choose_backend(settings.backend, settings.on, place)
    check(settings, place)
    if here.rank == 0:
        settings.recorder(benchmark, settings.on)
    start_ranks(work, settings.device, settings.nproc if here.world_size > 1 else ranks, settings)


def require_room(config: ModelConfig, settings: ParallelSettings, group: Group, device: torch.device) -> None:
    """Raises UserError on every rank if two copies of the model and one candidate's training state do not fit."""
    need = sum(observe_passes(config, settings.batch_size, config.context_length).memory("step").values())
    need += 2 * 4 * sum(count_parameters(config).values())
    have = room(group, device)
    if need > have:
        raise UserError(
            f"each of {group.size()} ranks needs {format_bytes(need)} and has {format_bytes(have)}; choose a smaller "
            "--size or --batch-size, or fewer ranks with --nproc"
        )


def worker_run(
    place: Place,
    settings: StepSettings,
    benchmark: str,
    candidates: dict[str, Build],
    make_record: Callable[[ParallelRun, str, dict[str, Turn]], Record],
    before: Callable[[Arena], dict[str, dict[str, int]]] = lambda arena: {},
) -> None:
    """Run one rank: gate, probe, the function `before`, timed turns; rank 0 then records and prints."""
    device, config = settings.on, settings.config()
    gc.freeze()  # torch's half a million objects would be looked through before every turn
    with distributed(device, settings.backend, settings.timeout, place) as group:
        first, backend = group.rank() == 0, backend_of(group)
        require_room(config, settings, group, device)
        with console.progress("gate", len(candidates), quiet=not first) as advance:
            errors = check(config, candidates, group, device, advance)
        hardware = probe(device, "fp32", device_name(device), budget=0.02 if settings.smoke else 0.3)
        link = probe_link(group, device)
        stamp = environment(device, settings.commit) | {"world_size": group.size(), "backend": backend}
        arena = Arena(config, settings.batch_size, candidates, group, device)
        held, nodes = before(arena), place.world_size // place.local_world_size
        run = ParallelRun(settings, arena, nodes, hardware, link, stamp, held)
        if first:
            print(f"gate: every candidate's update equals the mean gradient's within {max(errors.values()):.1e}")
        expected = len(candidates) * settings.rounds * (UNTIMED + settings.steps) * sum(run.compute_seconds().values())
        turns = arena.play(settings.rounds, settings.steps, expected)
        records = [make_record(run, name, turns) for name in candidates]
        if first:
            show(sheets(records))
            recorder = settings.recorder(benchmark, device)
            recorder.keep(*records)
            recorder.tell()
