"""Plan of a large run: degrees of parallelism in the terms of Megatron-LM, and where each axis lies in a node.

`layout.Layout` is what this project's trainer runs. A plan is wider: context parallelism, layers that do not divide
evenly over stages, and the order in which axes fill a node.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, gcd, prod
from operator import attrgetter
from typing import Any, Literal, get_args

from cs336_systems.errors import UserError, require_count
from cs336_systems.layout import check_divides, check_experts, check_spread
from cs336_systems.presets import ModelConfig, Recompute

# Megatron's order of ranks: neighbours in tp are neighbours in the node.
ORDER = ("tp", "cp", "ep", "dp", "pp")

# Transfers that run while layers compute. "data": those of data parallelism. "all": also gathers and scatters of
# sequence parallelism, cut into parts that overlap with their GEMMs, and messages between interleaved stages.
Overlap = Literal["none", "data", "all"]
OVERLAPS = get_args(Overlap)
StackName = Literal["megatron", "fsdp", "torchtitan", "nanotron", "deepspeed", "other"]

# Megatron-LM's names of recomputation, and this project's; and the other way round.
RECOMPUTE: dict[str, Any] = {"none": "none", "selective": "attention", "full": "segments"}
RECOMPUTE_NAMES: dict[str, Any] = {ours: name for name, ours in RECOMPUTE.items()}

# Options of the command line that have other names than the fields of `Plan`.
OPTIONS = {"sequence": "sequence_parallel", "micro_batch": "micro_batch_size", "global_batch": "batch_size"}

# Parts of a block that backward may run again, in Megatron-LM's words (`--recompute-modules`): attention between its
# linear layers, both norms, the feed-forward, the experts with their router, and the experts' activation alone.
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act")

MOST_LAYERS = 100_000

# Chunks of a pipeline that may go without a layer: the first has the embedding, the last the head.
ENDS = 2

# Fields that matter to one microbatch in a block.
BLOCK = ("tp", "cp", "ep", "sequence", "micro_batch", "width", "fp8", "recompute_modules")


@dataclass(frozen=True)
class Plan:
    """Degrees of parallelism, the batch in sequences, and the choices that go with them; checked on construction.
    Raises UserError, with the numbers, for what does not divide."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1  # context parallelism: ranks that a sequence is split over everywhere
    ep: int = 1  # ranks that experts are split over; dp x ep ranks see different rows
    chunks: int = 1  # of each stage; more than one are interleaved
    sequence: bool = False  # sequence parallelism between the layers of tensor parallelism
    zero: int = 0  # ZeRO stage
    micro_batch: int = 1
    global_batch: int = 1
    overlap: Overlap = "data"  # transfers that run while layers compute
    order: tuple[str, ...] = ORDER  # of the axes, from neighbours in a node to ranks far apart
    width: int = 2  # bytes of an activation, and of a weight in GEMMs
    layers: tuple[int, ...] = ()  # of each part, chunk 0 of all stages first; empty: split as evenly as possible
    stack: str = "megatron"  # the implementation (`stacks.py`)
    shard: int = 0  # replicas over which ZeRO splits, the nearest ones; 0: all. Fewer: hybrid sharding (HSDP)
    fp8: bool = False  # linear layers of blocks multiply 8-bit numbers
    recompute_modules: tuple[str, ...] = ()  # names in `MODULES`, if the model recomputes "attention"; none: its core
    recompute_nth: int = 1  # only every n-th block recomputes

    def __post_init__(self) -> None:
        for name, known in (("overlap", OVERLAPS), ("stack", get_args(StackName)), ("width", (2, 4))):
            if (value := getattr(self, name)) not in known:
                raise UserError(f"{name} {value!r} does not exist; choose from {', '.join(map(str, known))}")
        if sorted(self.order) != sorted(ORDER):
            raise UserError(f"the order of axes {' '.join(self.order)} must name each of {' '.join(ORDER)} once")
        counts = ("tp", "pp", "dp", "cp", "ep", "chunks", "micro_batch", "global_batch", "recompute_nth")
        check_spread(self, counts)
        if unknown := [name for name in self.recompute_modules if name not in MODULES]:
            raise UserError(f"no module to recompute is called {unknown[0]!r}: choose from {', '.join(MODULES)}")
        if min(self.layers, default=0) < 0:
            raise UserError(f"layers {' '.join(map(str, self.layers))}: a stage cannot have fewer than 0")
        require_count("shard", self.shard, 0)
        if self.shard and not self.zero:
            raise UserError(f"a shard of {self.shard} replicas needs a ZeRO stage from 1 to 3, which splits over them")
        if self.shard and self.replicas % self.shard:
            raise UserError(f"{self.replicas} replicas are no multiple of the shard {self.shard}: choose a divisor")

    @property
    def schedule(self) -> str:
        return "interleaved" if self.chunks > 1 else "1f1b"

    @property
    def data(self) -> int:
        """Number of ranks that see different rows of the batch."""
        return self.dp * self.ep

    @property
    def replicas(self) -> int:
        """Number of ranks that reduce a dense weight's gradient together: of different rows or parts of a sequence."""
        return self.data * self.cp

    @property
    def number(self) -> int:
        """Bytes of a number in the GEMMs of blocks."""
        return 1 if self.fp8 else self.width

    @property
    def shards(self) -> tuple[int, int]:
        """Ranks over which ZeRO splits dense weights, and those of experts."""
        same = self.cp * self.dp
        return (self.shard, gcd(self.shard, same)) if self.shard else (self.replicas, same)

    @property
    def ranks(self) -> int:
        """Number of ranks: tp x pp x cp x dp x ep."""
        return self.tp * self.pp * self.replicas

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.micro_batch * self.data)

    def short(self) -> str:
        """`tp4 pp4x5 cp2 dp2 m1 z1 sp`: degrees above one, chunks after the stages, the microbatch, ZeRO's stage."""
        stages = f"pp{self.pp}" + (f"x{self.chunks}" if self.chunks > 1 else "")
        words = [f"{name}{getattr(self, name)}" for name in ("tp", "cp", "ep", "dp") if getattr(self, name) > 1]
        words += [stages] if self.pp > 1 else []
        words += [f"m{self.micro_batch}", *([f"z{self.zero}"] if self.zero else []), *(["sp"] if self.sequence else [])]
        words += [f"shard{self.shard}"] if self.shard else []
        return " ".join(words)

    def override(self, **changes: Any) -> "Plan":
        return replace(self, **changes)

    def alone(self) -> "Plan":
        """The part of the plan that matters to one microbatch in a block: without dp, pp and the batch."""
        return self.only(*BLOCK)

    def only(self, *names: str, microbatches: int = 1) -> "Plan":
        """A plan with these fields of this one and so many microbatches, one object for the same values: for caches."""
        return _only(names, attrgetter(*names)(self), self.micro_batch * self.ep * microbatches)

    def recomputed(self, config: ModelConfig, group: str, times: int) -> list[tuple[Recompute, int]]:
        """(recomputation, count) of `times` blocks: only every n-th recomputes. Embedding and head never do."""
        if group in ("embedding", "head"):
            return [("none", times)]
        again = ceil(times / self.recompute_nth)
        return [(name, count) for name, count in ((config.recompute, again), ("none", times - again)) if count]

    def local(self, *axes: str, node: int) -> int:
        """Number of ranks of a group along some axes that share a node, if ranks fill nodes in the plan's order."""
        held = _held(self.order, attrgetter(*self.order)(self), node)
        return prod(held[axis] for axis in axes)

    def check(self, config: ModelConfig, seq: int) -> None:
        """Raises UserError, in one line with the numbers, for a model or a sequence that does not divide over it."""
        if seq < 1:
            raise UserError(f"a sequence must have at least 1 token, not {seq}")
        if config.num_layers > MOST_LAYERS:
            raise UserError(f"{config.num_layers} layers are more than the {MOST_LAYERS} that are counted: use fewer")
        check_experts(config, self.ep)
        dense, sparse = config.num_layers - config.expert_layers, config.expert_layers
        absent = {"mlp": not dense, "moe": not sparse, "moe_act": not sparse}
        if idle := [name for name in self.recompute_modules if absent.get(name)]:
            raise UserError(f"no block of this model has {', '.join(idle)} to recompute: leave it out")
        check_divides(config, self.tp, fewer=self.tp % config.kv_heads == 0)
        parts = self.cp * (self.tp if self.sequence else 1)
        if seq % parts:
            over = f"cp {self.cp}" + (f" x tp {self.tp}, as sequence parallelism needs" if self.sequence else "")
            raise UserError(f"a sequence of {seq} tokens does not divide over {over}: choose degrees that divide it")
        parts = self.pp * self.chunks
        if self.layers and (len(self.layers), sum(self.layers)) != (parts, config.num_layers):
            raise UserError(
                f"layers {' '.join(map(str, self.layers))}: {len(self.layers)} numbers, {sum(self.layers)} in all, but "
                f"pp {self.pp} x chunks {self.chunks} = {parts} parts have {config.num_layers} layers"
                + (": chunk 0 of every stage comes first, then chunk 1" if self.chunks > 1 else "")
            )
        if config.num_layers + ENDS < parts and not self.layers:
            raise UserError(
                f"{config.num_layers} layers are too few for pp {self.pp} x chunks {self.chunks}: lower one of the two"
            )

    def stage_chunks(self, num_layers: int) -> list[list[range]]:
        """Layers of each chunk of each stage: chunk 0 of all stages comes first, then chunk 1 of all stages. If the
        layers do not divide, parts at both ends get one less first, as they also have embedding and head."""
        parts = self.pp * self.chunks
        size, rest = divmod(num_layers, parts)
        # Parts in the order in which they get one layer less: from both ends inwards, the last part first.
        inwards = sorted(range(parts), key=lambda part: (min(part, parts - 1 - part), -part))
        sizes = list(self.layers) or [size + (part not in inwards[: parts - rest]) for part in range(parts)]
        found = [range(end - each, end) for end, each in zip(accumulate(sizes), sizes, strict=True)]
        return [found[stage :: self.pp] for stage in range(self.pp)]


@lru_cache(maxsize=65536)
def _only(names: tuple[str, ...], values: tuple[Any, ...], batch: int) -> Plan:
    return Plan(**dict(zip(names, values, strict=True)), global_batch=batch)


@lru_cache(maxsize=4096)
def _held(order: tuple[str, ...], degrees: tuple[int, ...], node: int) -> dict[str, int]:
    if prod(degrees) <= node:  # one node holds all, whether it is full or not
        return dict(zip(order, degrees, strict=True))
    held, room = {}, node
    for axis, size in zip(order, degrees, strict=True):
        # The largest divisor of the degree that fits into what is left of the node.
        held[axis] = next(n for n in range(min(size, room), 0, -1) if size % n == 0 and room % n == 0)
        # If this axis does not fit whole, neighbours along all later axes are on different nodes.
        room = room // size if held[axis] == size else 1
    return held
