"""Turns of expert layers: the CPU time of every pass, the bytes it sends and holds, the tokens it drops, its record."""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from benchmarks.harness import noise, ratios, summarise, take_turns
from benchmarks.lib.expert_layer import DEVICE, ITEM, Bench, LayerSettings, Way
from benchmarks.lib.launcher import Answer, Launcher
from benchmarks.lib.options import Recorder
from benchmarks.rank_times import gather_times, line_up
from benchmarks.records import Record
from cs336_systems.comm import Group, Place, distributed, find_place, record
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.host.machine import PeakMemory, device_name, environment
from cs336_systems.model.routing import gate

Lap = list[float]  # milliseconds of a turn: of the processor, the kernel's part of that, and by the clock


def clocks() -> Lap:
    """Milliseconds on the clocks of a `Lap`."""
    kernel = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    return [1e3 * time.process_time(), 1e3 * kernel, 1e3 * time.perf_counter()]


@dataclass
class Candidate:
    """A way on a bench, what one pass sent and held, and what it took in every turn. `about` is what the record's
    configuration says beside the layer; ratios are to `baseline`, by default itself, in the same rounds."""

    bench: Bench
    way: Way
    about: dict[str, Any]
    baseline: "Candidate | None" = None
    sent: dict[str, Any] = field(default_factory=dict)
    laps: list[Lap] = field(default_factory=list)

    def observe(self) -> None:
        """One pass that is not timed: what it sends, drops and holds, of all ranks the mean, of memory the most."""
        bench, way, memory = self.bench, self.way, PeakMemory(DEVICE)
        with record() as events:
            bench.run(way)
        peak, sizes = memory.read(), [event.nbytes for event in events if event.label != "expert counts"]
        load = gate(bench.layer.logits(bench.x[0]).detach(), way.config.mixture, way.slots(bench.tokens)).load
        dropped = 1 - load.kept.sum().item() / load.wanted.sum().item()
        numbers = [sum(sizes) / (len(sizes) or 1), sum(event.nbytes for event in events), dropped]
        every = gather_times([*numbers, -1 if peak is None else peak], bench.group, DEVICE)
        one, layer, dropped, _ = every.mean(dim=0).tolist()
        self.sent = {"all_to_all_bytes": one, "layer_bytes": layer, "dropped_share": dropped}
        self.sent["rows"] = one / (ITEM * way.config.d_model) if sizes else None
        self.sent["peak_memory_bytes"] = None if peak is None else int(every[:, -1].max().item())

    def turn(self, steps: int) -> Lap:
        """Time some passes, which a small all-reduce lets all ranks start as one."""
        line_up(self.bench.group, DEVICE)
        start = clocks()
        for _ in range(steps):
            self.bench.run(self.way)
        return [(end - begin) / steps for begin, end in zip(start, clocks(), strict=True)]

    def record(self, benchmark: str, steps: int, predicted: dict[str, Any], stamp: dict[str, Any]) -> Record:
        """The record; `stamp` is the machine's environment."""
        config, bench = self.way.config, self.bench
        what = {
            "candidate": self.way.name, "experts": config.num_experts, "tokens": bench.tokens,
            "slots": self.way.slots(bench.tokens), "d_model": config.d_model, "d_ff": config.expert_d_ff,
            "top_k": config.mixture.top_k, "skew": bench.skew, "backward": False, "steps": steps,
            "ranks": bench.group.size(), "backend": "gloo",
        }  # fmt: skip
        samples, system, wall = (list(column) for column in zip(*self.laps, strict=True))
        base = self.baseline or self
        user = ([cpu - kernel for cpu, kernel, _ in each.laps] for each in (self, base))
        metrics = summarise(samples) | self.sent | ratios(samples, [cpu for cpu, _, _ in base.laps])
        metrics |= {"system_ms": median(system), "wall_ms": median(wall)}
        metrics["user_ratio_median"] = ratios(*user)["ratio_median"]
        if metrics["layer_bytes"]:
            metrics["bytes_ratio"] = metrics["layer_bytes"] / base.sent["layer_bytes"]
        return Record(benchmark, what | self.about, stamp, samples, metrics, predicted, noise(metrics))


def cell(bench: Bench, way: Way, about: dict[str, Any]) -> list[Candidate]:
    """A sorted layer that the gate has seen, after its one-hot twin where the tensors of that are not too large. Every
    rank decides alike. Raises WrongResultError if the two differ."""
    one_hot, sort = way.changed("einsum", dispatch="einsum"), Candidate(bench, way, about)
    fits = not one_hot.too_large(bench.tokens, bench.group)
    bench.check(way, bench.tokens if fits else None)
    return [Candidate(bench, one_hot, about, sort)] * fits + [sort]


Enter = Callable[[Group, dict[str, Any]], list[Candidate]]


def work(place: Place, settings: LayerSettings, benchmark: str, enter: Enter) -> Answer:
    """One rank's part: `enter` checks the candidates of these ranks, then all take turns, A B A B, after a pass each
    that does not count. Returns the records; `enter` gets what they say of the nodes."""
    torch.set_num_threads(1)  # idle ones would spin and add to CPU time
    with distributed(DEVICE, "gloo", settings.timeout, place) as group:
        ranks, steps = group.size(), settings.steps
        # All ranks at once, each with its thread, as they are timed; the predictions are from the first one's.
        hardware = probe(DEVICE, "fp32", device_name(DEVICE), 0.02 if settings.smoke else 0.3)
        candidates = enter(group, {"nodes": place.world_size // place.local_world_size})
        said = [each.way.predict(each.bench.tokens, ranks, hardware) for each in candidates]
        for each in candidates:
            each.observe()
        turns = {f"{n}: {each.way.name}": partial(each.turn, steps) for n, each in enumerate(candidates, 1)}
        seconds = settings.rounds * steps * sum(predicted["mean_ms"] for predicted in said) / 1e3
        laps = take_turns(turns, settings.rounds, seconds, quiet=group.rank() > 0)
        for each, mine in zip(candidates, laps.values(), strict=True):
            # Of all ranks the means of CPU time, and the slowest by the clock.
            every = gather_times([ms for lap in mine for ms in lap], group, DEVICE).view(ranks, -1, 3)
            each.laps = torch.cat((every[..., :2].mean(0), every[..., 2:].amax(0)), dim=1).tolist()
        if group.rank() > 0:
            return {"records": []}
        stamp = environment(DEVICE, settings.commit) | {"world_size": ranks, "backend": "gloo"}
        pairs = zip(candidates, said, strict=True)
        return {"records": [asdict(each.record(benchmark, steps, predicted, stamp)) for each, predicted in pairs]}


def rank_counts(nproc: Sequence[int], default: Sequence[int], experts: Sequence[int]) -> Sequence[int]:
    """The numbers of ranks to measure: those that torchrun started, else as many as were asked for. Raises UserError
    for ranks that cannot be, or over which the experts do not divide."""
    started = find_place().world_size
    if started > 1 and nproc:
        raise UserError(f"--nproc {nproc[0]} would start ranks, but {started} were started already: drop it")
    found = [started] if started > 1 else nproc or default
    for number, count in product(experts, found):
        if number % count:
            raise UserError(f"{number} experts do not divide over {count} ranks: choose ranks that divide {number}")
    return found


def run(
    settings: LayerSettings, benchmark: str, counts: Sequence[int], enter: Enter, show: Callable[[list[Record]], None]
) -> list[Record]:
    """Measure on each number of ranks, and show what was measured, also until an error. The new records, on rank 0
    alone. Raises UserError, before anything is measured where it cannot be recorded."""
    here = find_place()
    recorder = settings.recorder(benchmark, DEVICE) if here.rank == 0 else Recorder(None)
    try:
        for count in counts:
            answer = Launcher(here, "cpu").run(count, work, settings, benchmark, enter)
            recorder.keep(*(Record(**fields) for fields in answer["records"]))
    finally:
        if recorder.records:
            show(recorder.records)
    recorder.tell()
    return recorder.records
