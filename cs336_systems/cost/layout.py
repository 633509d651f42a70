"""A layout: how a model and its batch are spread over ranks, checked before anything is built, and what each rank owns.

Tensor parallelism splits every matrix over tp ranks, pipeline parallelism the blocks over pp stages of `chunks` runs
each, data parallelism the rows of a batch over dp replicas of it all. Expert parallelism does so too, over ep ranks,
of which each has some of the experts and all else. What a rank owns follows from its stage alone: the vocabulary is
padded until it divides, so that all other ranks of a stage have tensors of the same shapes.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from cs336_systems.cost.spread import check_spread
from cs336_systems.cost.transfer import Parameter, plan_buckets
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import blocks_of

TIED = "embedding.tokens.weight"
BUCKET_BYTES = 25e6

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism and the batch, in sequences; checked on construction as far as no model is needed.

    Raises UserError, with the numbers, for degrees below one and a batch or schedule that does not divide.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1  # of a stage, for the schedule "interleaved"
    schedule: str = "1f1b"
    sequence: bool = False  # sequence parallelism between the layers of tensor parallelism
    zero: int = 0  # ZeRO stage over the ranks that see different rows
    micro_batch: int = 1
    global_batch: int = 1
    vocabulary_multiple: int = 1  # the vocabulary is padded to a multiple of it
    ep: int = 1  # ranks that the experts are split over; with dp they are the ranks that see different rows

    def __post_init__(self) -> None:
        check_spread(self, ("tp", "pp", "dp", "ep", "chunks", "micro_batch", "global_batch", "vocabulary_multiple"))

    @property
    def ranks(self) -> int:
        """tp pp dp ep."""
        return self.tp * self.pp * self.data

    @property
    def data(self) -> int:
        """Ranks that see different rows."""
        return self.dp * self.ep

    @property
    def microbatches(self) -> int:
        """That a replica takes in a step."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def data_axis(self) -> str:
        """The axis of the mesh over which dense parameters have replicas: "data" joins "dp" and "ep"."""
        return "data" if self.ep > 1 else "dp"

    def check(self, config: ModelConfig, seq: int | None = None) -> None:
        """Raises UserError, in one line with the numbers, for a model or a sequence that does not divide over it."""
        check_experts(config, self.ep)
        if seq is not None and seq > config.context_length:
            raise UserError(f"{seq} tokens do not fit the context of {config.context_length}")
        check_divides(config, self.tp, self.sequence, seq)
        padded_vocabulary(config.vocab_size, self.vocabulary_multiple, self.tp)
        self.blocks(config)

    def blocks(self, config: ModelConfig, stage: int = 0, chunk: int = 0) -> range:
        """The blocks of one chunk of a stage. Raises UserError if the layers do not divide."""
        return blocks_of(stage, chunk, self.pp, self.chunks, config.num_layers)

    def vocabulary(self, config: ModelConfig) -> int:
        """Words, padding included, of which a rank has the logits; one tp rank needs no padding."""
        if self.tp == 1:
            return config.vocab_size
        return padded_vocabulary(config.vocab_size, self.vocabulary_multiple, self.tp) // self.tp

    def ends(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage has the embedding, and whether it has the head. Raises UserError for no stage."""
        if not 0 <= stage < self.pp:
            raise UserError(f"stage {stage} does not exist: the {self.pp} stages are 0 to {self.pp - 1}")
        return stage == 0, stage == self.pp - 1


def check_experts(config: ModelConfig, ranks: int) -> None:
    """Raises UserError if the model's experts cannot be split over so many ranks."""
    if ranks > 1 and not config.num_experts:
        raise UserError(f"ep {ranks} splits experts, and the model has none: set --num-experts, or leave --ep out")
    if config.num_experts % ranks:
        raise UserError(
            f"{config.num_experts} experts do not divide over ep {ranks}: choose an ep that divides "
            f"{config.num_experts}"
        )


def check_divides(config: ModelConfig, ranks: int, sequence: bool = False, seq: int | None = None) -> None:
    """Raises UserError, with the numbers, for a model that tensor parallelism cannot split over so many ranks."""
    sizes = [("heads", config.num_heads), ("key/value heads", config.kv_heads), ("of d_ff", config.d_ff)]
    for name, size in sizes + ([("of the experts' d_ff", config.expert_d_ff)] if config.num_experts else []):
        if size % ranks:
            raise UserError(f"{size} {name} do not divide over tp {ranks}: choose a tp that divides {size}")
    if sequence and (seq or config.context_length) % ranks:
        raise UserError(f"a sequence of {seq or config.context_length} tokens does not divide over tp {ranks}")


def padded_vocabulary(vocab_size: int, multiple: int, ranks: int) -> int:
    """The vocabulary with padding to a multiple. Raises UserError if that does not divide over the ranks."""
    padded = -(-vocab_size // multiple) * multiple
    if padded % ranks:
        raise UserError(
            f"a vocabulary of {vocab_size}, padded to {padded} (a multiple of {multiple}), does not divide over tp "
            f"{ranks}: pad it to a multiple of {ranks}"
        )
    return padded


def rank_shapes(config: ModelConfig, layout: Layout, stage: int) -> Shapes:
    """The shape of every parameter that a rank of a stage owns, by its name in the whole model and in its order.

    Column-parallel matrices (out in) have out / tp rows, row-parallel ones in / tp columns; norms and what is added
    after a reduction are whole on every rank. Experts are stacked, (experts out in), and each rank of ep has experts /
    ep of them; their routers are whole. The last stage has the tied embedding as well as the first. (Shoeybi et al.,
    arXiv:1909.08053, section 3; Narayanan et al., arXiv:2104.04473, section 2.)
    """
    layout.check(config)
    (first, last), d, part = layout.ends(stage), config.d_model, layout.vocabulary(config)
    shapes: Shapes = {}
    if first or (last and config.tied_head):
        shapes[TIED] = (part, d)
    if first and config.positions == "learned":
        shapes["embedding.positions.weight"] = (config.context_length, d)
    if first and config.token_types:
        shapes["embedding.types.weight"] = (config.token_types, d)
    owned = [layout.blocks(config, stage, chunk) for chunk in range(layout.chunks)]
    for number in (number for span in owned for number in span):
        block = _block(config, layout, config.has_experts(number))
        shapes |= {f"blocks.{number}.{name}": shape for name, shape in block}
    if last:
        shapes |= dict(_norm("final_norm", config))
        if config.bert_heads:
            shapes |= {"bert_heads.bias": (part,), "bert_heads.transform.weight": (d, d)}
            shapes |= {"bert_heads.transform.bias": (d,), "bert_heads.norm.weight": (d,), "bert_heads.norm.bias": (d,)}
            shapes |= {"bert_heads.pooler.weight": (d, d), "bert_heads.pooler.bias": (d,)}
            shapes |= {"bert_heads.pair.weight": (2, d), "bert_heads.pair.bias": (2,)}
        if not config.tied_head:
            shapes["head.weight"] = (part, d)
    return shapes


def _norm(name: str, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (config.d_model,)
    if config.norm == "layernorm" and config.bias:
        yield f"{name}.bias", (config.d_model,)


def _block(config: ModelConfig, layout: Layout, sparse: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, kv = config.d_model, config.kv_heads * config.head_dim
    yield from _norm("attention_norm", config)
    for name, rows in (("query", d), ("key", kv), ("value", kv)):
        yield from _layer(f"attention.{name}", d, rows // layout.tp, config.bias)
    yield from _layer("attention.out", d // layout.tp, d, config.bias)
    yield from _norm("feed_forward_norm", config)
    if not sparse:
        yield from _feed_forward("feed_forward", config, config.d_ff // layout.tp)
        return
    yield "feed_forward.router.weight", (config.num_experts, d)
    experts = config.num_experts // layout.ep
    for name, shape in _feed_forward("feed_forward.experts", config, config.expert_d_ff // layout.tp):
        yield name, (experts, *shape)
    if config.mixture.shared_expert:
        yield from _feed_forward("feed_forward.shared", config, config.d_ff // layout.tp)


def _layer(name: str, size_in: int, size_out: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size_out, size_in)
    if bias:
        yield f"{name}.bias", (size_out,)


def _feed_forward(name: str, config: ModelConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for each in ("gate", "up") if config.feed_forward == "swiglu" else ("up",):
        yield from _layer(f"{name}.{each}", config.d_model, hidden, config.bias)
    yield from _layer(f"{name}.down", hidden, config.d_model, config.bias)


def is_expert(name: str) -> bool:
    """Whether a parameter, by its name, is the stacked experts', of which the ranks of ep have different ones."""
    return ".feed_forward.experts." in name


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether AdamW lets a parameter decay. Stacked biases are vectors all the same."""
    return len(shape) > 1 and not name.endswith("bias")


def partial_names(shapes: Shapes, layout: Layout) -> list[str]:
    """The parameters that are whole on the ranks of tp, but whose gradient is a part of a sum over them.

    Of expert layers, whose result is reduced once: routers, and the biases that are added before that. Under sequence
    parallelism: norms and the biases that are added after a reduction (arXiv:2205.05198, section 4.2.2).
    """
    if layout.tp == 1:
        return []
    whole = ["router.weight", "experts.down.bias", "shared.down.bias"]
    if layout.sequence:
        whole += ["norm.weight", "norm.bias", "out.bias", "down.bias"]
    return [name for name in shapes if name.startswith(("blocks.", "final_norm.")) and name.endswith(tuple(whole))]


def is_sharded(name: str, shape: tuple[int, ...]) -> bool:
    """Whether ZeRO stage 3 shards a parameter's rows: those of a matrix, but not of stacked experts."""
    return Parameter(name, shape).is_sharded


def alone_names(config: ModelConfig, layout: Layout, stage: int) -> list[str]:
    """What has a bucket by itself: a tied embedding that is on two stages."""
    return [TIED] if is_tied_copy(config, layout, stage) else []


def is_tied_copy(config: ModelConfig, layout: Layout, stage: int) -> bool:
    """Whether the stage's token embedding is on another stage as well."""
    return config.tied_head and layout.pp > 1 and any(layout.ends(stage))


def wrapped(shapes: Shapes, layout: Layout) -> list[tuple[Shapes, str, int, int]]:
    """What the data-parallel wrappers synchronise: (parameters, axis of the mesh, its ranks, ZeRO stage) of each.

    Experts that are split over ep have a wrapper of their own, since their replicas are on dp ranks only, and so have
    all experts in stage 3, which shards matrices: theirs are stacked, and sharded as in stage 2.
    """
    apart = layout.ep > 1 or layout.zero == 3
    experts = {name: shape for name, shape in shapes.items() if is_expert(name)} if apart else {}
    dense = {name: shape for name, shape in shapes.items() if name not in experts}
    found = [(dense, layout.data_axis, layout.data, layout.zero)]
    return [*found, (experts, "dp", layout.dp, min(layout.zero, 2))] if experts else found


def buckets(shapes: Shapes, alone: Collection[str], width: int) -> list[list[str]]:
    """How `BucketedDDP` groups gradients of `width` bytes an element: from the last parameter to the first, up to
    25 MB, those of `alone` by themselves."""
    parameters = [Parameter(name, shape, width) for name, shape in shapes.items()]
    return [[each.name for each in group] for group in plan_buckets(parameters, BUCKET_BYTES, alone)]


def rank_parameters(config: ModelConfig, layout: Layout, stage: int) -> dict[str, int]:
    """Parameters of one rank of a stage by part, the same on all its tp ranks; see `rank_shapes`."""
    parts = dict.fromkeys(("embedding", "positions", "attention", "feed-forward", "experts", "norms", "head"), 0)
    for name, shape in rank_shapes(config, layout, stage).items():
        parts[_part_of(name)] += prod(shape)
    return parts


def _part_of(name: str) -> str:
    if name.startswith("embedding."):
        return "positions" if "positions" in name else "embedding"
    if name.startswith(("head.", "bert_heads.")):
        return "head"
    if "norm." in name:
        return "norms"
    if ".attention." in name:
        return "attention"
    sparse = any(f".feed_forward.{each}." in name for each in ("router", "experts", "shared"))
    return "experts" if sparse else "feed-forward"
