"""Profile of a step's time and memory on every rank: `python -m benchmarks.profiling_run --size tiny --nproc 2`.

Profiles some steps of every rank and writes to --out one trace for all ranks, operator tables, a flame graph, a memory
timeline, the overlap of communication with computation, and a picture of all ranks.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import click
import torch

from benchmarks.lib.collective import probe as probe_link
from benchmarks.lib.gate import check as check_model
from benchmarks.lib.options import COUNT, command
from benchmarks.lib.profiling_record import (
    BUCKET_SIZE_MB,
    beside_measured,
    collect_files,
    leave_pictures,
    make_record,
    memory_snapshot,
    predicted,
)
from benchmarks.lib.turns import ADAMW, Build, alone, check, stage, torch_ddp, wrapped
from benchmarks.lib.workload import Case, ModelOptions, compile_model
from cs336_systems.comm import Event, Group, Place, agree, distributed, find_place, record
from cs336_systems.comm.launch import run_command_on_ranks, start_ranks
from cs336_systems.comm.startup import TIMEOUT, Backend
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import PATIENCE, setting
from cs336_systems.host.machine import device_name, environment, usable_memory
from cs336_systems.model.precision import autocast, set_matmul_precision
from cs336_systems.model.transformer import lm_loss
from cs336_systems.profiling import Capture, read_trace, trace_files
from cs336_systems.profiling.report import write_report
from cs336_systems.profiling.trace import trace_name
from cs336_systems.zero import WRAPPERS

SNAPSHOT = "memory_snapshot.bin"  # on a GPU, for https://pytorch.org/memory_viz
BUILDS: dict[str, Build] = {"none": alone} | {name: wrapped(kind) for name, kind in WRAPPERS.items()}
BUILDS["bucketed"] = wrapped(partial(WRAPPERS["bucketed"], bucket_size_mb=BUCKET_SIZE_MB))
BUILDS |= {f"zero{number}": stage(number) for number in (1, 2, 3)} | {"torch-ddp": torch_ddp}


@dataclass(frozen=True)
class ProfilingSettings(ModelOptions):
    """Options of the command line, one field each."""

    size: str = setting("tiny", "Model preset.")
    # fp16 is missing because its gradients need loss scaling, which this loop does not have.
    precision: Literal["fp32", "tf32", "bf16"] = setting("fp32", "Precision of matrix products; bf16 is mixed.")
    wrapper: str | None = setting(
        None, "Data-parallel wrapper.  [default: bucketed, or none for one rank]", type=click.Choice(list(BUILDS))
    )
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 1]", type=COUNT)
    backend: Backend | None = setting(None, "Communication backend.  [default: nccl on cuda, gloo on cpu]")
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
    warmup: int = setting(2, "Steps before the profiled ones.", type=click.IntRange(0))
    steps: int = setting(2, "Profiled steps.", type=COUNT)
    nvtx: bool = setting(False, "Add NVTX ranges of the same names, for nsys (CUDA).")
    out: Path | None = setting(None, "Folder for the output.  [default: runs/profile/<size>-<wrapper>]")

    def chosen(self, ranks: int) -> str:
        """The wrapper. Raises UserError for several ranks without a wrapper, and for what cannot be combined."""
        wrapper = self.wrapper or ("bucketed" if ranks > 1 else "none")
        if wrapper == "none" and ranks > 1:
            raise UserError(f"--wrapper none joins no ranks, and there are {ranks}: choose another, or start one rank")
        if self.nvtx and (self.device == "cpu" or not torch.cuda.device_count()):
            raise UserError("--nvtx makes ranges for nsys, which follows a GPU; without one, drop it")
        if self.compile and wrapper != "none":
            raise UserError(f"--compile cannot be combined with --wrapper {wrapper}; profile one rank, --wrapper none")
        return wrapper

    def folder(self, ranks: int) -> Path:
        """Folder for the output."""
        return self.out or Path("runs/profile") / f"{self.size}-{self.chosen(ranks)}"


def take_steps(case: Case, build: Build, settings: ProfilingSettings, group: Group, folder: Path) -> list[Event]:
    """Warm up, and profile the steps after that; returns the collectives of one step."""
    device, model = case.device, case.make_model(case.config)
    trained = build(model, torch.optim.AdamW, ADAMW)
    run = compile_model(model, device) if case.compiled else trained.model
    tokens, targets = replace(case, seed=1 + group.rank()).make_batch(case.config, case.batch)
    set_matmul_precision(device, case.precision)
    capture = Capture(
        folder, group, trained.model, trained.optimizer, settings.warmup, settings.steps, device,
        tags=not case.compiled, nvtx=settings.nvtx,
        meta={"size": settings.size, "wrapper": settings.chosen(group.size()), "device": device_name(device)},
    )  # fmt: skip
    snapshot = memory_snapshot(folder / SNAPSHOT) if device.type == "cuda" and group.rank() == 0 else nullcontext()
    with capture, snapshot, console.progress("steps", capture.total, quiet=group.rank() > 0) as advance:
        for _ in range(capture.total):
            with capture.step(), record() as events:
                with capture.phase("forward"), autocast(device, case.precision):
                    loss = lm_loss(run, tokens, targets)
                with capture.phase("backward"):
                    loss.backward()
                del loss
                with capture.phase("synchronise"):
                    trained.finish()
                with capture.phase("optimizer"):
                    trained.optimizer.step()
                    trained.optimizer.zero_grad()
            advance("" if capture.taken > settings.warmup else "warming up")
    return events


def work(place: Place, settings: ProfilingSettings) -> None:
    """One rank's part: the gates, the steps, and on rank 0 the report and the record."""
    device = settings.on
    # Between ranks that share memory only waits are in the trace; gloo's threads show what overlaps.
    backend = settings.backend or ("nccl" if device.type == "cuda" else "gloo")
    case = settings.case(settings.size, device)
    wrapper, folder = settings.chosen(place.world_size), settings.folder(place.world_size)
    build = BUILDS[wrapper]
    with distributed(device, backend, settings.timeout, place) as group:
        first = group.rank() == 0
        error, tolerance = check_model(case)
        if first:
            print(f"gate: one block equals plain float64 within {error:.1e} (tolerance {tolerance:.1e})")
        if wrapper != "none":
            errors = check(case.config, {wrapper: build}, group, device, lambda note: None)
            if first:
                print(f"gate: {wrapper}'s update equals the mean gradient's within {max(errors.values()):.1e}")
        hardware = probe(device, case.precision, device_name(device), budget=0.02 if settings.smoke else 0.3)
        link = probe_link(group, device) if group.size() > 1 else None
        events = take_steps(case, build, settings, group, folder)
        agree("the traces are written", "", group)
        if not place.one_machine:
            collect_files(folder, group, device)
        if first:
            traces = [read_trace(path) for path in trace_files(folder)]
            write_report(folder, traces, console.console())
            if not settings.smoke:
                stamp = environment(device, settings.commit) | {"world_size": group.size(), "backend": backend}
                recorder = settings.recorder("profiling", device)
                beside = predicted(case, hardware, wrapper, link, events, group.size())
                record = make_record(vars(settings), wrapper, case, traces, beside, stamp)
                console.console().print(beside_measured(record).table())
                record.metrics["pictures"] = leave_pictures(record, traces, folder, settings.records_folder(device))
                recorder.keep(record)
                recorder.tell()


@command(ProfilingSettings)
def main(settings: ProfilingSettings) -> None:
    """Profile training steps on all ranks; write traces, tables, flame graph, memory, overlap and timeline."""
    here = find_place()
    ranks = here.world_size if here.world_size > 1 else settings.nproc or 1
    device = settings.on
    case = settings.case(settings.size, device)
    if settings.smoke:
        settings = replace(settings, size="tiny", batch_size=1, context=32, warmup=1, steps=1)
        case = settings.case(settings.size, device)
    folder = settings.folder(ranks)
    sharing = here.local_world_size if here.world_size > 1 else ranks
    case.require_fit(settings.size, "step", usable_memory(device) // (sharing if device.type == "cpu" else 1), modes=())
    with console.os_errors(f"write to {folder}", "name another folder with --out DIR"):
        folder.mkdir(parents=True, exist_ok=True)
    if here.rank == 0:
        if earlier := {path.name for path in folder.glob("rank*.trace.json*")} - {*map(trace_name, range(ranks))}:
            found = f"{folder} holds {min(earlier)}, which a profile of {ranks} rank{'s' * (ranks > 1)} leaves as it is"
            raise UserError(f"{found}; remove the earlier traces, or name another folder with --out DIR")
        settings.recorder("profiling", device)
    start_ranks(work, settings.device, settings.nproc, settings)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
