"""Turns of expert layers: the CPU time of every pass, the bytes it sends and holds, the tokens it drops, its record."""

import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.harness import noise, ratios, summarise
from benchmarks.lib.expert_layer import DEVICE, ITEM, Bench, Way, predict
from benchmarks.rank_times import gather_times
from benchmarks.records import Record
from cs336_systems.comm import all_reduce, record
from cs336_systems.cost import Hardware
from cs336_systems.host import console
from cs336_systems.host.machine import PeakMemory, environment
from cs336_systems.model.routing import gate


class Lap(NamedTuple):
    """Milliseconds of one pass: of the processor, the kernel's part of that, and by the clock."""

    cpu: float
    system: float
    wall: float

    @classmethod
    def now(cls) -> "Lap":
        """Read the clocks."""
        system = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        return cls(1e3 * time.process_time(), 1e3 * system, 1e3 * time.perf_counter())


@dataclass
class Candidate:
    """A way on a bench, what it took in every turn, and what one pass sent and held. `about` is what the record's
    configuration says beside the layer; ratios are to `baseline`, which took its turns in the same rounds."""

    bench: Bench
    way: Way
    steps: int
    about: dict[str, Any]
    baseline: "Candidate | None" = None
    laps: list[Lap] = field(default_factory=list)
    sent: dict[str, Any] = field(default_factory=dict)

    def turn(self) -> None:
        """Time some passes, which all ranks start together after a small all-reduce."""
        all_reduce(torch.zeros(1), self.bench.group, "line up").wait()
        start = Lap.now()
        for _ in range(self.steps):
            self.bench.run(self.way)
        self.laps.append(Lap(*((end - begin) / self.steps for begin, end in zip(start, Lap.now(), strict=True))))

    def observe(self) -> None:
        """One pass that is not timed: what it sends, drops and holds, of all ranks the mean, of memory the most."""
        bench, way, memory = self.bench, self.way, PeakMemory(DEVICE)
        with record() as events:
            bench.run(way)
        peak, sizes = memory.read(), [event.nbytes for event in events if event.label != "expert counts"]
        load = gate(bench.layer.logits(bench.x[0]).detach(), way.config.mixture, self.slots()).load
        dropped = 1 - load.kept.sum().item() / load.wanted.sum().item()
        numbers = [sum(sizes) / (len(sizes) or 1), sum(event.nbytes for event in events), len(events), dropped]
        every = gather_times([*numbers, -1 if peak is None else peak], bench.group, DEVICE)
        names = ("all_to_all_bytes", "layer_bytes", "all_to_alls", "dropped_share")
        self.sent = dict(zip(names, every.mean(dim=0).tolist(), strict=False))
        self.sent["rows"] = self.sent["all_to_all_bytes"] / (ITEM * way.config.d_model) if sizes else None
        self.sent["peak_memory_bytes"] = None if peak is None else int(every[:, -1].max().item())

    def slots(self) -> int | None:
        """Slots of an expert, None without a capacity limit."""
        config = self.way.config
        return config.mixture.capacity(self.bench.tokens, config.num_experts, self.way.training)

    def share(self) -> None:
        """Make `laps` those of all ranks: the means of CPU time, the slowest by the clock. Every rank calls this."""
        cpu, system, wall = (gather_times(column, self.bench.group, DEVICE) for column in zip(*self.laps, strict=True))
        rows = zip(*(each.tolist() for each in (cpu.mean(0), system.mean(0), wall.amax(0))), strict=True)
        self.laps = [Lap(*row) for row in rows]

    def record(self, benchmark: str, predicted: dict[str, Any], stamp: dict[str, Any]) -> Record:
        """The record after `share`; `stamp` is the machine's environment."""
        config, bench = self.way.config, self.bench
        what = {
            "candidate": self.way.name, "experts": config.num_experts, "tokens": bench.tokens, "slots": self.slots(),
            "d_model": config.d_model, "d_ff": config.expert_d_ff, "top_k": config.mixture.top_k, "skew": bench.skew,
            "backward": bench.backward, "steps": self.steps, "ranks": bench.group.size(), "backend": "gloo",
        }  # fmt: skip
        samples = [lap.cpu for lap in self.laps]
        metrics: dict[str, Any] = summarise(samples) | self.sent
        metrics["system_ms"] = statistics.median(lap.system for lap in self.laps)
        metrics["wall_ms"] = statistics.median(lap.wall for lap in self.laps)
        if base := self.baseline:
            metrics |= ratios(samples, [lap.cpu for lap in base.laps])
            user = ([lap.cpu - lap.system for lap in each.laps] for each in (self, base))
            metrics["user_ratio_median"] = ratios(*user)["ratio_median"]
            if metrics["layer_bytes"]:
                metrics["bytes_ratio"] = metrics["layer_bytes"] / base.sent["layer_bytes"]
        return Record(benchmark, what | self.about, stamp, samples, metrics, predicted, noise(metrics))


def take_turns(
    benchmark: str, candidates: Sequence[Candidate], rounds: int, hardware: Hardware, commit: str | None
) -> list[Record]:
    """Let all take turns, A B A B, after a pass each that does not count. The records, on rank 0 alone."""
    group = candidates[0].bench.group
    said = [predict(each.way, each.bench.tokens, group.size(), hardware, each.bench.backward) for each in candidates]
    passes = zip(candidates, said, strict=True)
    expected = rounds * sum(each.steps * predicted["mean_ms"] for each, predicted in passes) / 1e3
    title, first = f"{group.size()} rank(s), taking turns", group.rank() == 0
    with console.progress(title, (1 + rounds) * len(candidates), expected, quiet=not first) as advance:
        for number in range(1 + rounds):
            for each in candidates:
                each.turn() if number else each.observe()
                advance(each.way.name)
    for each in candidates:
        each.share()
    stamp = environment(DEVICE, commit) if first else {}
    stamp |= {"world_size": group.size(), "backend": "gloo"}
    pairs = zip(candidates, said, strict=True) if first else ()
    return [each.record(benchmark, predicted, stamp) for each, predicted in pairs]
