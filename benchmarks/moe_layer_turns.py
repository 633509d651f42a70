"""Expert layers take turns: the CPU time of every pass, and what it sends, drops and holds."""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.harness import interleave, noise, ratios, summarise
from benchmarks.lib.turns import Advance
from benchmarks.moe_layer_run import DEVICE, ITEM, Bench, Way
from benchmarks.rank_times import gather_times
from benchmarks.records import Record
from cs336_systems.comm import Event, all_reduce, record
from cs336_systems.host.machine import PeakMemory
from cs336_systems.model.routing import gate


class Lap(NamedTuple):
    """Milliseconds of one pass: of the processor, the kernel's part of that, and by the clock."""

    cpu: float
    system: float
    wall: float

    @property
    def user(self) -> float:
        """Without the kernel's part."""
        return self.cpu - self.system


@dataclass
class Contender:
    """A way on a bench, with what it took in every turn, and what one pass sent and held."""

    bench: Bench
    way: Way
    steps: int
    laps: list[Lap] = field(default_factory=list)
    sent: dict[str, Any] = field(default_factory=dict)

    def turn(self) -> float:
        """Some passes, which a small all-reduce lets all ranks start as one; milliseconds of CPU time of one."""
        all_reduce(torch.zeros(1), self.bench.group, "line up").wait()
        start = _now()
        for _ in range(self.steps):
            self.bench.run(self.way)
        self.laps.append(Lap(*((end - begin) / self.steps for begin, end in zip(start, _now(), strict=True))))
        return self.laps[-1].cpu

    def observe(self) -> None:
        """One pass that is not timed: what it sends, drops and holds, of all ranks the mean, of memory the most."""
        bench, way, memory = self.bench, self.way, PeakMemory(DEVICE)
        with record() as events:
            bench.run(way)
        peak, exchanges = memory.read(), [event for event in events if event.label != "expert counts"]
        plan = gate(bench.layer.logits(bench.x[0]).detach(), way.config.mixture, self.capacity())
        kept = plan.load.kept.sum().item() / plan.load.wanted.sum().item()
        numbers = [mean_bytes(exchanges), mean_bytes(events, 1), len(events), 1 - kept, -1 if peak is None else peak]
        every = gather_times(numbers, bench.group, DEVICE)
        names = ("all_to_all_bytes", "layer_bytes", "all_to_alls", "dropped_share")
        self.sent = dict(zip(names, every.mean(dim=0).tolist(), strict=False))
        self.sent["rows"] = self.sent["all_to_all_bytes"] / (ITEM * way.config.d_model) if exchanges else None
        self.sent["peak_memory_bytes"] = None if peak is None else int(every[:, -1].max().item())

    def capacity(self) -> int | None:
        """Slots of an expert, None for as many as are needed."""
        config = self.way.config
        return config.mixture.capacity(self.bench.tokens, config.num_experts, self.way.training)

    def metrics(self) -> dict[str, Any]:
        """Metrics. Every rank must call this once, after all turns: `laps` then has the ranks' means."""
        cpu, system, wall = (
            gather_times(list(column), self.bench.group, DEVICE) for column in zip(*self.laps, strict=True)
        )
        rows = zip(*(each.tolist() for each in (cpu.mean(0), system.mean(0), wall.amax(0))), strict=True)
        self.laps = [Lap(*row) for row in rows]
        metrics: dict[str, Any] = summarise([lap.cpu for lap in self.laps])
        metrics["system_ms"] = statistics.median(lap.system for lap in self.laps)
        metrics["wall_ms"] = statistics.median(lap.wall for lap in self.laps)
        return metrics | self.sent

    def record(
        self,
        benchmark: str,
        baseline: "Contender | None",
        metrics: dict[str, Any],
        predicted: dict[str, Any],
        stamp: dict[str, Any],
        about: dict[str, Any],
    ) -> Record:
        """After `metrics`: the record, with the ratio to a baseline's CPU time in the same rounds, and to its bytes.
        `stamp` is the machine's environment, `about` the rest of the configuration."""
        config, bench = self.way.config, self.bench
        what = {
            "candidate": self.way.name, "experts": config.num_experts, "tokens": bench.tokens, "slots": self.capacity(),
            "d_model": config.d_model, "d_ff": config.expert_d_ff, "top_k": config.mixture.top_k, "skew": bench.skew,
            "backward": bench.backward, "steps": self.steps, "ranks": bench.group.size(), "backend": "gloo",
        }  # fmt: skip
        samples = [lap.cpu for lap in self.laps]
        if baseline is not None:
            metrics = metrics | ratios(samples, [lap.cpu for lap in baseline.laps])
            own = ratios([lap.user for lap in self.laps], [lap.user for lap in baseline.laps])
            metrics["user_ratio_median"] = own["ratio_median"]
            if metrics["layer_bytes"]:
                metrics["bytes_ratio"] = metrics["layer_bytes"] / baseline.sent["layer_bytes"]
        return Record(benchmark, what | about, stamp, samples, metrics, predicted, noise(metrics))


def _now() -> Lap:
    system = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    return Lap(1e3 * time.process_time(), 1e3 * system, 1e3 * time.perf_counter())


def mean_bytes(events: Sequence[Event], count: int | None = None) -> float:
    """Mean bytes that a rank sends in one collective; with `count` 1, in all of them."""
    return sum(event.nbytes for event in events) / (count or len(events) or 1)


def play(contenders: Sequence[Contender], rounds: int, advance: Advance) -> None:
    """Let all of them take turns, A B A B, after a pass each that does not count; tells `advance` of every one."""

    def told(turn: Callable[[], float], name: str) -> float:
        milliseconds = turn()
        advance(name)
        return milliseconds

    for contender in contenders:
        contender.observe()
        advance(contender.way.name)
    interleave({str(i): partial(told, each.turn, each.way.name) for i, each in enumerate(contenders)}, rounds)
