"""Time of a step of a plan on a machine, by what the time is spent on.

The slowest stage computes all microbatches; the bubble is the time of one microbatch in all others, divided by the
chunks of a stage (Narayanan et al., arXiv:2104.04473, section 2.2). Then come what backward does not hide, and AdamW.

Gradients are sent during the last microbatch's backward, all but the last bucket; from ZeRO stage 1 on weights are sent
during the first one's forward. Stage 3 gathers weights for every forward and backward, layer by layer, and
reduce-scatters every microbatch's gradients (Rajbhandari et al., arXiv:1910.02054, section 7).
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, gcd
from typing import NamedTuple

from cs336_systems.cost.flops import model_flops
from cs336_systems.cost.machines import System
from cs336_systems.cost.operator_time import group_seconds, kernel_time, message_seconds, waiting_seconds
from cs336_systems.cost.operators import operators_of, repeated, vocabulary_rows
from cs336_systems.cost.plan import Overlap, Plan
from cs336_systems.cost.rank import Group, Rank
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.template import read_data
from cs336_systems.presets import ModelConfig

Counts = tuple[tuple[Group, int], ...]  # of the blocks of each kind, and of the ends of the model
GRADIENT = 4  # bytes: gradients add up in 32 bits
# AdamW in one kernel: read the gradient for its norm; read gradient, master weight and two moments; write the last
# three; set the gradient to zero. In half precision the 16-bit weight is written as well.
OPTIMIZER_BYTES = 4 + 16 + 12 + 4
# Parts of a step in order; the first, which every microbatch takes, are the fields of `Seconds`, both waits as one.
PARTS: dict[str, dict[str, str]] = read_data("data/parts")


@dataclass(frozen=True)
class Case:
    """A model on a plan on a machine, over sequences of `seq` tokens."""

    config: ModelConfig
    plan: Plan
    seq: int
    system: System

    @property
    def args(self) -> tuple[ModelConfig, Plan, int, System]:
        return self.config, self.plan, self.seq, self.system

    @cached_property
    def step(self) -> "StepTime":
        """The prediction. Raises UserError for a plan that does not divide the model."""
        return step_time(*self.args)


@dataclass(frozen=True)
class StepTime(Case):
    """Prediction of one step: the seconds of the busiest stage, by what they are spent on."""

    stage: int
    parts: dict[str, float]

    @cached_property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def model_flops(self) -> float:
        """FLOPs that the model itself needs, on all ranks together; attention is counted in full, as PaLM counts it."""
        rows = self.plan.micro_batch
        return model_flops(self.config, rows, self.seq) * (self.plan.global_batch // rows)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the machines' peak (arXiv:2204.02311, appendix B)."""
        return self.model_flops / (self.total * self.plan.ranks * self.system.peak(self.plan.number))


class Seconds(NamedTuple):
    """Seconds that one microbatch spends on one rank."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    forward_wait: float = 0.0  # the device waits for the host to launch kernels
    backward_wait: float = 0.0  # the same, recomputation included
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    messages: float = 0.0


def step_time(config: ModelConfig, plan: Plan, seq: int, system: System) -> StepTime:
    """Predict the time of a step. Raises UserError for what does not divide, and for FP8 on a machine without it."""
    plan.check(config, seq)
    system.check_fp8(plan.fp8)
    kinds = stage_kinds(config, plan)
    spent = {stage: stage_seconds(config, plan, seq, stage, system) for stage in kinds}
    busiest = max(kinds, key=lambda stage: sum(spent[stage]))
    own, m = spent[busiest], plan.microbatches
    others = sum(count * sum(spent[stage]) for stage, count in kinds.items()) - sum(own)
    sums = data_parallel_seconds(config, plan, seq, busiest, own, system)
    once = others / plan.chunks, sums, optimizer_seconds(config, plan, seq, busiest, system)
    passes = *own[:3], own.forward_wait + own.backward_wait, *own[5:]
    parts = dict(zip(PARTS, (*(m * each for each in passes), *once), strict=False))
    return StepTime(config, plan, seq, system, busiest, parts)


def stage_groups(config: ModelConfig, plan: Plan, stage: int) -> Counts:
    """(group, count) of the operators of a stage: blocks, and on the first and last stage embedding and head."""
    return _stages(config, plan.pp, plan.chunks, plan.layers)[0][stage]


def stage_kinds(config: ModelConfig, plan: Plan) -> dict[int, int]:
    """Stages with the same groups, as {the first of them: the number of them}."""
    stages = _stages(config, plan.pp, plan.chunks, plan.layers)[0]
    return {stages.index(groups): count for groups, count in Counter(stages).items()}


def fullest_stages(config: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """The first of all stages with the same layers and ends, for each kind: it has the most microbatches in flight."""
    return _stages(config, plan.pp, plan.chunks, plan.layers)[1]


@lru_cache(maxsize=4096)
def _stages(config: ModelConfig, pp: int, chunks: int, layers: tuple[int, ...]) -> tuple[list[Counts], tuple[int, ...]]:
    """(`stage_groups` of every stage, `fullest_stages`)."""
    found, first = [], dict[tuple[object, ...], int]()
    plan = Plan(pp=pp, chunks=chunks, layers=layers, global_batch=pp)
    for stage, owned in enumerate(plan.stage_chunks(config.num_layers)):
        held, sparse = [*map(len, owned)], [sum(map(config.has_experts, each)) for each in owned]
        ends: list[tuple[Group, int]] = [("embedding", int(stage == 0)), ("head", int(stage == pp - 1))]
        parts: list[tuple[Group, int]] = [("dense", sum(held) - sum(sparse)), ("sparse", sum(sparse)), *ends]
        found.append(tuple((group, times) for group, times in parts if times))
        first.setdefault((*held, *sparse, *ends), stage)
    return found, tuple(first.values())


def stage_seconds(config: ModelConfig, plan: Plan, seq: int, stage: int, system: System) -> Seconds:
    """Seconds of a microbatch on a rank of a stage, each chunk entered and left by messages, both ways."""
    total, rank = Seconds(), Rank(config, plan.alone(), seq)
    if plan.pp > 1:
        nbytes = plan.width * plan.micro_batch * seq * config.d_model / (plan.cp * plan.tp)
        near = plan.local("pp", node=system.node) == plan.pp
        seen = system.constants.hidden if plan.overlap == "all" and plan.chunks > 1 else 1.0
        total = Seconds(messages=2 * plan.chunks * seen * message_seconds(nbytes, near, system))
    places = tuple((axis, getattr(plan, axis), plan.local(axis, node=system.node)) for axis in ("tp", "cp", "ep"))
    for group, count in stage_groups(config, plan, stage):
        for recompute, times in plan.recomputed(config, group, count):
            computing = _computing(rank, group, recompute, system)
            for each in (computing, _sending(rank, group, recompute, places, plan.overlap, system)):
                total = Seconds(*(one + times * more for one, more in zip(total, each, strict=True)))
    return total


@lru_cache(maxsize=8192)
def _computing(rank: Rank, group: Group, recompute: str, system: System) -> Seconds:
    """Seconds of computing. Each pass takes as long as the device computes or the host launches, the longer of both."""
    once, again = operators_of(rank, group), repeated(rank, group, recompute).operators
    passes = [each.forward for each in once], [each.backward for each in once], [each.forward for each in again]
    ways = [[kernel for kernels in each for kernel in kernels] for each in passes]
    busy = [sum(kernel_time(kernel, system).busy for kernel in way) for way in ways]
    launches = [system.constants.host * sum(kernel.kernels for kernel in way) for way in ways]
    waits = [max(0.0, host - device) for host, device in zip(launches, busy, strict=True)]
    return Seconds(busy[0], busy[1], busy[2], waits[0], waits[1] + waits[2])


@lru_cache(maxsize=65536)
def _sending(
    rank: Rank, group: Group, recompute: str, places: tuple[tuple[str, int, int], ...], overlap: Overlap, system: System
) -> Seconds:
    """Seconds of collectives; `places` are axes as (name, ranks, ranks in one node)."""
    groups = {axis: (ranks, local) for axis, ranks, local in places}
    spent, operators = dict.fromkeys(groups, 0.0), operators_of(rank, group)
    sent = [one for each in operators for one in (*each.sent, *each.returned)]
    for one in (*sent, *repeated(rank, group, recompute).sent):
        spent[one.axis] += waiting_seconds(one, *groups[one.axis], overlap, system)
    return Seconds(**spent)


def gradient_bytes(plan: Plan) -> int:
    """Bytes of one gradient element when it is sent."""
    return GRADIENT if plan.width == 4 else STACKS[plan.stack].gradient


def bucket_size(ranks: int) -> float:
    """Elements of a gradient bucket by Megatron-LM's default: more for more ranks, which make each call slower."""
    return max(40e6, 1e6 * ranks)


@lru_cache(maxsize=8192)
def group_weights(rank: Rank, group: Group) -> tuple[int, int, int]:
    """(weights that all replicas share, those of a rank's experts, matrices) of a block, the embedding or the head."""
    operators = operators_of(rank, group)
    owned = sum(each.weights for each in operators if each.expert)
    matrices = sum(any(kernel.inner for kernel in each.forward) for each in operators if each.weights)
    return sum(each.weights for each in operators) - owned, owned, matrices


def stage_weights(config: ModelConfig, plan: Plan, seq: int, stage: int) -> tuple[float, float, float]:
    """`group_weights` of a rank of a stage. Biases of linear layers, less than a thousandth, are left out."""
    rank = Rank(config, plan.alone(), seq)
    groups = [(times, group_weights(rank, group)) for group, times in stage_groups(config, plan, stage)]
    shared, owned, matrices = (float(sum(times * counts[kind] for times, counts in groups)) for kind in range(3))
    # A tied head adds no weights where the embedding is on the same stage.
    tied = vocabulary_rows(rank) * config.d_model if config.tied_head and plan.pp == 1 else 0
    return shared - tied, owned, matrices


class Replicas(NamedTuple):
    """Ranks that have the same weights, `local` of them in a node; ZeRO shards over `shard` neighbours of them."""

    weights: float
    ranks: int
    local: int
    shard: int

    @property
    def near(self) -> tuple[int, int]:  # ranks of a shard, and those of them in one node
        return self.shard, gcd(self.shard, self.local)

    @property
    def far(self) -> tuple[int, int]:  # ranks that have the same part of a weight, and those in one node
        return self.ranks // self.shard, max(1, self.local // self.shard)


def replica_groups(plan: Plan, shared: float, owned: float, node: int) -> list[Replicas]:
    """Replicas of dense weights and of a rank's experts; without ZeRO a shard is all of them."""
    groups = (shared, plan.replicas, ("cp", "ep", "dp")), (owned, plan.cp * plan.dp, ("cp", "dp"))
    found = [
        Replicas(weights, ranks, plan.local(*axes, node=node), shard)
        for (weights, ranks, axes), shard in zip(groups, plan.shards, strict=True)
        if weights and ranks > 1
    ]
    if plan.zero < 3 or not STACKS[plan.stack].own_port:
        return found
    return [each._replace(local=1) if each.local < each.shard else each for each in found]


def data_parallel_seconds(
    config: ModelConfig, plan: Plan, seq: int, stage: int, spent: Seconds, system: System
) -> float:
    """Seconds that data parallelism adds to a step, sending gradients and from ZeRO stage 1 on weights. If ZeRO shards
    over fewer than all replicas, each shard's reduced gradients are then all-reduced between the shards."""
    shared, owned, matrices = stage_weights(config, plan, seq, stage)

    def send(verb: str, width: int) -> float:
        """Seconds to send all weights or gradients once."""
        total = 0.0
        for each in replica_groups(plan, shared, owned, system.node):
            calls = ceil(matrices) if plan.zero == 3 else ceil(each.weights / bucket_size(each.ranks))
            total += group_seconds(verb, width * each.weights, *each.near, system, calls)
            if verb == "reduce-scatter":
                total += group_seconds("all-reduce", width * each.weights / each.shard, *each.far, system, calls)
        return total

    def exposed(seconds: float, computing: float) -> float:
        """Seconds that a transfer during computing adds: the part that is not hidden, and the slowdown of computing."""
        if plan.overlap == "none":
            return seconds
        last = min(1.0, bucket_size(plan.replicas) / max(1.0, shared + owned))
        seen = max(seconds - computing, last * seconds)
        return seen + system.constants.hidden * (seconds - seen)

    forward = spent.forward + spent.forward_wait  # transfers go on while the device waits for the host
    backward = spent.backward + spent.recompute + spent.backward_wait
    reduced = gradient_bytes(plan)
    if plan.zero == 0:
        total = exposed(send("all-reduce", reduced), backward)
    else:
        gather, scatter = send("all-gather", plan.number), send("reduce-scatter", reduced)
        total = exposed(scatter, backward) + exposed(gather, forward)
        if plan.zero == 3:
            total = plan.microbatches * (exposed(gather, forward) + exposed(gather + scatter, backward))
    if plan.pp > 1 and config.tied_head:  # first and last stage have the embedding, whose gradients they sum
        nbytes = reduced * vocabulary_rows(Rank(config, plan, seq)) * config.d_model
        near = plan.local("pp", node=system.node) == plan.pp
        total += group_seconds("all-reduce", nbytes, 2, 1 + near, system)
    return total


def optimizer_seconds(config: ModelConfig, plan: Plan, seq: int, stage: int, system: System) -> float:
    """Seconds of AdamW over the weights that a rank updates: from ZeRO stage 1 on, its share of them."""
    shared, owned, _ = stage_weights(config, plan, seq, stage)
    if plan.zero:
        shared, owned = shared / plan.shards[0], owned / plan.shards[1]
    return optimizer_bytes(plan) * (shared + owned) / system.memory_rate


def optimizer_bytes(plan: Plan) -> int:
    """Bytes per weight that AdamW moves; unless products have 32 bits, 16-bit (or two 8-bit) weights are written."""
    return OPTIMIZER_BYTES + (2 if plan.width == 2 else 0)
