"""One expert layer over several ranks: ways to dispatch its tokens, their predicted cost, the gate, and their turns."""

import resource
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.harness import (
    WrongResultError,
    gather_times,
    line_up,
    noise,
    ratios,
    require_close,
    rounding,
    summarise,
    take_turns,
)
from benchmarks.lib.collective import room
from benchmarks.lib.launcher import Answer
from benchmarks.lib.options import COUNT, RecordOptions
from benchmarks.records import Record
from cs336_systems.comm import Group, Place, agree, distributed, record
from cs336_systems.comm.startup import TIMEOUT
from cs336_systems.cost import Hardware
from cs336_systems.cost import flops as cost
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.host.console import PATIENCE, format_bytes, setting
from cs336_systems.host.machine import PeakMemory, device_name, environment
from cs336_systems.layout import MAPPED
from cs336_systems.model.moe import MoELayer
from cs336_systems.model.routing import gate
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import Mixture, ModelConfig

DEVICE = torch.device("cpu")  # CPU time is measured
ITEM = torch.float32.itemsize
EXPERT_LAUNCHES = 63  # operators of a sorted layer: router, sort, gather, experts and the way back; a test counts them
# Of tensors of tokens x experts x slots, by `one_hot.py`: those that a rank holds at once at most, writes or reads, and
# makes, which a CPU gives new memory each time; booleans are a quarter.
ONE_HOT_TENSORS, ONE_HOT_PASSES, ONE_HOT_MADE = 4, 12, 5.25
ONE_HOT_LIMIT = 4e9  # bytes of these at once, above which only the sort is timed
GATE_BYTES = 2**24  # of such a tensor where the gate looks at a part of the tokens
STAGES = 16  # roundings that follow one another in an output: the weights of choices, two layers, GELU, the sum


@dataclass(frozen=True)
class LayerSettings(RecordOptions):
    """Options that all benchmarks of one expert layer have: its size, and how it is run."""

    benchmark: ClassVar[str]
    tokens: int = setting(2048, "Tokens of each rank.", type=COUNT)
    d_model: int = setting(64, "Width of a token.", type=COUNT)
    d_ff: int = setting(256, "Hidden width of an expert.", type=COUNT)
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
    rounds: int = setting(5, "Turns of each candidate.", type=COUNT)
    steps: int = setting(1, "Timed passes per turn.", type=COUNT)

    def enter(self, group: Group, about: dict[str, Any]) -> "list[Candidate]":
        """The candidates, seen by the gate, whose records are to have `about` in their configuration. Every rank
        decides alike. Raises WrongResultError for a layer that computes something else."""
        raise NotImplementedError

    def sorted(self, experts: int, mixture: Mixture, training: bool = False) -> "Way":
        """A sorted layer with biases, as fairseq's have. Raises UserError for one that cannot be."""
        shape = (1, self.tokens, self.d_model, self.d_ff, 1, 1)
        config = ModelConfig(*shape, bias=True, num_experts=experts, expert_every=1, mixture=mixture)
        return Way("sort", config, training)


@dataclass(frozen=True)
class Way:
    """A way to send tokens to experts: by sort or one-hot, and an expert's capacity, in training or evaluation."""

    name: str
    config: ModelConfig
    training: bool = False

    def slots(self, tokens: int) -> int | None:
        """Slots of an expert; None without a capacity limit."""
        return self.config.mixture.capacity(tokens, self.config.num_experts, self.training)

    def changed(self, name: str, **mixture: Any) -> "Way":
        """Copy with other values of some fields of the mixture."""
        return replace(self, name=name, config=replace(self.config, mixture=replace(self.config.mixture, **mixture)))

    def one_hot_bytes(self, tokens: int) -> int:
        """Bytes of a float32 tensor of tokens x experts x slots."""
        return ITEM * tokens * cost.padded_rows(self.config, tokens, self.training)

    def predict(self, tokens: int, ranks: int, hardware: Hardware) -> dict[str, Any]:
        """Counted, for one rank: rows and bytes of an all-to-all, FLOPs of a layer, and the milliseconds that these,
        reading what is large, starting operators and the first touch of large tensors would take on a device.

        Without a capacity that drops tokens, and with one-hot always, the bytes are exact; else they are the most.
        """
        config, one_hot, large = self.config, self.config.mixture.dispatch == "einsum", self.one_hot_bytes(tokens)
        rows = cost.computed_rows(config, tokens, self.training)
        flops = cost.router_flops(config, tokens) + cost.expert_flops(config, rows)
        moved: float = 2 * ITEM * config.d_model * config.expert_d_ff * config.num_experts // ranks  # weights
        if one_hot:
            flops += cost.one_hot_flops(config, tokens, self.training)[0]
            moved += ONE_HOT_PASSES * large
        seconds = flops / hardware.matmul_flops + moved / hardware.bandwidth
        # A CPU starts a product of each expert.
        seconds += hardware.waiting(EXPERT_LAUNCHES + 2 * config.num_experts // ranks, seconds)
        if one_hot and large >= MAPPED:
            seconds += hardware.first_touch * ONE_HOT_MADE * large
        sent = cost.row_bytes(config, rows, ITEM) if ranks > 1 else 0
        return {"rows": rows, "all_to_all_bytes": sent, "flops": flops, "mean_ms": 1e3 * seconds}

    def too_large(self, tokens: int, group: Group) -> str:
        """Reason why one-hot tensors for these slots are too large, the same on every rank; empty if they are not."""
        need, have = ONE_HOT_TENSORS * self.one_hot_bytes(tokens), min(room(group, DEVICE), ONE_HOT_LIMIT)
        shape = f"{tokens} tokens x {self.config.num_experts} experts x {self.slots(tokens)} slots"
        return (need > have) * (
            f"one-hot tensors of {shape} need {format_bytes(need)} on each of {group.size()} ranks, where "
            f"{format_bytes(have)} are usable"
        )


def build_layer(config: ModelConfig, group: Group) -> MoELayer:
    """An expert layer with this rank's experts; each has the same weights on however many ranks."""
    model = TransformerLM(config, "meta")
    (layer,) = expert_parallel(model, group).layers()
    layer.to_empty(device=DEVICE)
    for name, parameter in layer.named_parameters():
        # Biases are drawn like weights: one that was forgotten would be seen only if it is not zero.
        full = f"blocks.0.feed_forward.{name}".replace("bias", "offset")
        parameter.data.copy_(model.initial_weight(full, parameter.shape, 0, DEVICE))
    return layer


class Bench:
    """A layer and a rank's tokens (1 tokens d_model), on which ways to dispatch are tried. `skew` is how much all
    tokens have in common: at 1 experts' mean scores differ as much as one expert's scores of different tokens."""

    def __init__(self, config: ModelConfig, skew: float, group: Group) -> None:
        self.group, self.skew, self.tokens = group, skew, config.context_length
        # Weights, tokens in three copies, the router's scores, and a sorted pass's rows before and after each product.
        weights, rows = 2 * config.expert_d_ff * config.num_experts // group.size(), config.mixture.top_k * self.tokens
        need = (weights + 3 * self.tokens + 2 * rows) * config.d_model + self.tokens * config.num_experts
        need, have = ITEM * (need + 2 * rows * config.expert_d_ff), room(group, DEVICE)
        if need > have:
            raise UserError(
                f"{self.tokens} tokens and {config.num_experts} experts need {format_bytes(need)} on each of "
                f"{group.size()} ranks, where {format_bytes(have)} are usable: choose fewer --tokens or --experts"
            )
        self.layer = build_layer(config, group)
        common = torch.randn(config.d_model, generator=torch.Generator().manual_seed(0))
        own = torch.Generator().manual_seed(1 + group.rank())
        self.x = (torch.randn(1, self.tokens, config.d_model, generator=own) + skew * common) / (1 + skew**2) ** 0.5

    @torch.no_grad()
    def run(self, way: Way, tokens: int | None = None) -> Tensor:
        """One forward pass of the first `tokens`: (1 tokens d_model)."""
        self.layer.mixture = way.config.mixture
        self.layer.train(way.training)
        return self.layer(self.x[:, :tokens])

    def check(self, way: Way, whole: bool = False) -> None:
        """The gate: a way against the one-hot formulation with the same share of slots, over the `whole` of the tokens
        or as many as make small one-hot tensors. Raises WrongResultError on all ranks."""
        tokens = self.tokens
        while not whole and tokens > 1 and way.one_hot_bytes(tokens) > GATE_BYTES:
            tokens //= 2
        tolerance = rounding(STAGES, "fp32", max(way.config.d_model, way.config.expert_d_ff))
        want, got = (self.run(each, tokens) for each in (way.changed("einsum", dispatch="einsum"), way))
        wrong = ""
        try:
            require_close(f"{way.name}'s output", got, want, tolerance)
        except WrongResultError as refused:
            wrong = str(refused)
        if found := [each for each in agree("gate", wrong, self.group) if each]:
            raise WrongResultError(found[0])


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
    bench.check(way, whole=fits)
    return [Candidate(bench, one_hot, about, sort)] * fits + [sort]


def work(place: Place, settings: LayerSettings) -> Answer:
    """One rank's part: the gate, then all candidates take turns, A B A B, after a pass each that does not count.
    Returns the records."""
    torch.set_num_threads(1)  # idle ones would spin and add to CPU time
    with distributed(DEVICE, "gloo", settings.timeout, place) as group:
        ranks, steps = group.size(), settings.steps
        # All ranks at once, each with its thread, as they are timed; the predictions are from the first one's.
        hardware = probe(DEVICE, "fp32", device_name(DEVICE), 0.02 if settings.smoke else 0.3)
        candidates = settings.enter(group, {"nodes": place.world_size // place.local_world_size})
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
        pairs, name = zip(candidates, said, strict=True), settings.benchmark
        return {"records": [asdict(each.record(name, steps, predicted, stamp)) for each, predicted in pairs]}
