"""Turns of expert layers: the CPU time of every pass, the bytes it sends and holds, the tokens it drops, its record."""

import resource
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness import noise, ratios, summarise
from benchmarks.lib.expert_layer import DEVICE, ITEM, Bench, LayerSettings, Way
from benchmarks.rank_times import gather_times, line_up
from benchmarks.records import Record, append_record, appended, every_record, open_records, require_written
from cs336_systems.comm import CommError, Group, Place, distributed, find_place, record
from cs336_systems.comm.launch import run_ranks
from cs336_systems.cost import Hardware
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import PeakMemory, device_name, environment
from cs336_systems.model.routing import gate

Laps = list[list[float]]  # milliseconds of each turn: of the processor, the kernel's part of that, and by the clock


def ceilings(group: Group, budget: float) -> Hardware:
    """Rates that the slowest rank reaches while all run, each with its threads; a probe takes `budget` seconds."""
    name = device_name(DEVICE)
    here = probe(DEVICE, "fp32", name, budget)
    found = gather_times([here.matmul_flops, here.bandwidth, here.launch, here.first_touch], group, DEVICE)
    least, most = found.amin(dim=0).tolist(), found.amax(dim=0).tolist()
    return Hardware(name, least[0], least[1], here.source, launch=most[2], first_touch=most[3])


def clocks() -> list[float]:
    """Milliseconds on the clocks of `Laps`."""
    kernel = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    return [1e3 * time.process_time(), 1e3 * kernel, 1e3 * time.perf_counter()]


@dataclass
class Candidate:
    """A way on a bench, what it took in every turn, and what one pass sent and held. `about` is what the record's
    configuration says beside the layer; ratios are to `baseline`, by default itself, in the same rounds."""

    bench: Bench
    way: Way
    about: dict[str, Any]
    baseline: "Candidate | None" = None
    laps: Laps = field(default_factory=list)
    sent: dict[str, Any] = field(default_factory=dict)

    def turn(self, steps: int) -> None:
        """Time some passes, which a small all-reduce lets all ranks start as one."""
        line_up(self.bench.group, DEVICE)
        start = clocks()
        for _ in range(steps):
            self.bench.run(self.way)
        self.laps.append([(end - begin) / steps for begin, end in zip(start, clocks(), strict=True)])

    def observe(self) -> None:
        """One pass that is not timed: what it sends, drops and holds, of all ranks the mean, of memory the most."""
        bench, way, memory = self.bench, self.way, PeakMemory(DEVICE)
        with record() as events:
            bench.run(way)
        peak, sizes = memory.read(), [event.nbytes for event in events if event.label != "expert counts"]
        load = gate(bench.layer.logits(bench.x[0]).detach(), way.config.mixture, way.slots(bench.tokens)).load
        dropped = 1 - load.kept.sum().item() / load.wanted.sum().item()
        numbers = [sum(sizes) / (len(sizes) or 1), sum(event.nbytes for event in events), len(events), dropped]
        every = gather_times([*numbers, -1 if peak is None else peak], bench.group, DEVICE)
        names = ("all_to_all_bytes", "layer_bytes", "all_to_alls", "dropped_share")
        self.sent = dict(zip(names, every.mean(dim=0).tolist(), strict=False))
        self.sent["rows"] = self.sent["all_to_all_bytes"] / (ITEM * way.config.d_model) if sizes else None
        self.sent["peak_memory_bytes"] = None if peak is None else int(every[:, -1].max().item())

    def share(self) -> None:
        """Make `laps` those of all ranks: the means of CPU time, the slowest by the clock. Every rank calls this."""
        flat = [ms for lap in self.laps for ms in lap]
        every = gather_times(flat, self.bench.group, DEVICE).view(-1, len(self.laps), 3)
        self.laps = torch.cat((every[..., :2].mean(0), every[..., 2:].amax(0)), dim=1).tolist()

    def record(self, benchmark: str, steps: int, predicted: dict[str, Any], stamp: dict[str, Any]) -> Record:
        """The record after `share`; `stamp` is the machine's environment."""
        config, bench = self.way.config, self.bench
        what = {
            "candidate": self.way.name, "experts": config.num_experts, "tokens": bench.tokens,
            "slots": self.way.slots(bench.tokens), "d_model": config.d_model, "d_ff": config.expert_d_ff,
            "top_k": config.mixture.top_k, "skew": bench.skew, "backward": False, "steps": steps,
            "ranks": bench.group.size(), "backend": "gloo",
        }  # fmt: skip
        samples, system, wall = (list(column) for column in zip(*self.laps, strict=True))
        metrics: dict[str, Any] = summarise(samples) | self.sent
        metrics |= {"system_ms": median(system), "wall_ms": median(wall)}
        base = self.baseline or self
        metrics |= ratios(samples, [cpu for cpu, _, _ in base.laps])
        user = ([cpu - system for cpu, system, _ in each.laps] for each in (self, base))
        metrics["user_ratio_median"] = ratios(*user)["ratio_median"]
        if metrics["layer_bytes"]:
            metrics["bytes_ratio"] = metrics["layer_bytes"] / base.sent["layer_bytes"]
        return Record(benchmark, what | self.about, stamp, samples, metrics, predicted, noise(metrics))


def cell(bench: Bench, way: Way, about: dict[str, Any]) -> list[Candidate]:
    """A sorted layer that the gate has seen, after its one-hot twin where the tensors of that are not too large. Every
    rank decides alike. Raises WrongResultError if the two differ."""
    tokens, one_hot = bench.tokens, way.changed("einsum", dispatch="einsum")
    sort, fits = Candidate(bench, way, about), not one_hot.too_large(tokens, bench.group)
    bench.check(way, tokens if fits else None)
    return [Candidate(bench, one_hot, about, sort)] * fits + [sort]


Enter = Callable[[Group, dict[str, Any]], list[Candidate]]


def work(place: Place, settings: LayerSettings, benchmark: str, enter: Enter, path: Path) -> None:
    """One rank's part: `enter` checks the candidates of these ranks, then all take turns, A B A B, after a pass each
    that does not count. Rank 0 appends the records to a file; `enter` gets what they say of the nodes."""
    torch.set_num_threads(1)  # idle ones would spin and add to CPU time
    with distributed(DEVICE, "gloo", settings.timeout, place) as group:
        ranks, first, steps = group.size(), group.rank() == 0, settings.steps
        hardware = ceilings(group, 0.02 if settings.smoke else 0.3)
        candidates = enter(group, {"nodes": place.world_size // place.local_world_size})
        said = [each.way.predict(each.bench.tokens, ranks, hardware) for each in candidates]
        turns = (1 + settings.rounds) * len(candidates)
        expected = settings.rounds * steps * sum(predicted["mean_ms"] for predicted in said) / 1e3
        with console.progress(f"{ranks} rank(s), taking turns", turns, expected, quiet=not first) as advance:
            for number in range(1 + settings.rounds):
                for each in candidates:
                    each.turn(steps) if number else each.observe()
                    advance(each.way.name)
        for each in candidates:
            each.share()
        stamp = environment(DEVICE, settings.commit) | {"world_size": ranks, "backend": "gloo"} if first else {}
        for each, predicted in zip(candidates, said, strict=True) if first else ():
            append_record(each.record(benchmark, steps, predicted, stamp), path)
    require_written(path)


def rank_counts(nproc: Sequence[int], default: Sequence[int], experts: Sequence[int]) -> Sequence[int]:
    """The numbers of ranks to measure: those that torchrun started, else as many as were asked for. Raises UserError
    for ranks that cannot be, or over which the experts do not divide."""
    started = find_place().world_size
    if started > 1 and nproc:
        raise UserError(f"--nproc {nproc[0]} would start ranks, but {started} were started already: drop it")
    found = [started] if started > 1 else nproc or default
    for number, count in ((number, count) for number in experts for count in found if number % count):
        raise UserError(f"{number} experts do not divide over {count} ranks: choose ranks that divide {number}")
    return found


def run(
    settings: LayerSettings, benchmark: str, counts: Sequence[int], enter: Enter, show: Callable[[list[Record]], None]
) -> list[Record]:
    """Measure on each number of ranks, and show what was measured, also until an error. The new records, on rank 0
    alone. Raises UserError, before anything is measured where it cannot be recorded."""
    here, records, before = find_place(), list[Record](), 0
    kept = nullcontext(str(settings.records_folder(DEVICE)))
    with TemporaryDirectory(prefix=f"{benchmark}-") if settings.smoke else kept as folder:
        path = Path(folder, f"{benchmark}.jsonl")
        if here.rank == 0:
            before = len(every_record(open_records(path.parent, benchmark)))
        try:
            for count in counts:
                if here.world_size > 1:
                    work(here, settings, benchmark, enter, path)
                else:
                    run_ranks(work, count, "cpu", settings, benchmark, enter, path)
        except CommError as error:
            raise UserError(str(error)) from None
        finally:
            if here.rank == 0 and (records := every_record(path)[before:]):
                show(records)
    if records and not settings.smoke:
        print(appended(len(records), path))
    return records
