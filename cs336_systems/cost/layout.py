"""A layout: how a model and its batch are spread over ranks, checked before anything is built, and what each rank owns.

Tensor parallelism splits every matrix over tp ranks, pipeline parallelism the blocks over pp stages of `chunks` runs
each, data parallelism the rows of a batch over dp replicas of it all. What a rank owns follows from its stage alone:
the vocabulary is padded until it divides, so that all tp ranks of a stage have tensors of the same shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import blocks_of, bubble_fraction

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
    zero: int = 0  # ZeRO stage over dp
    micro_batch: int = 1
    global_batch: int = 1
    vocabulary_multiple: int = 1  # the vocabulary is padded to a multiple of it

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "chunks", "micro_batch", "global_batch", "vocabulary_multiple"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"ZeRO has stages 0 to 3, not {self.zero}")
        together = self.micro_batch * self.dp
        if self.global_batch % together:
            below = self.global_batch // together * together
            near = f"{below} or {below + together}" if below else str(together)
            raise UserError(
                f"a global batch of {self.global_batch} sequences is not a multiple of micro-batch {self.micro_batch} "
                f"x dp {self.dp} = {together}: use {near}"
            )
        if self.chunks > 1 and self.pp == 1:
            raise UserError(f"{self.chunks} chunks are of no use on one stage: set chunks to 1, or pp above 1")
        bubble_fraction(self.schedule, self.pp, self.microbatches, self.chunks)  # which checks that they fit

    @property
    def ranks(self) -> int:
        """tp pp dp."""
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """That a replica takes in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def check(self, config: ModelConfig, seq: int | None = None) -> None:
        """Raises UserError, in one line with the numbers, for a model or a sequence that does not divide over it."""
        if config.num_experts:
            raise UserError(f"a layout of a model with {config.num_experts} experts is not counted yet")
        if seq is not None and seq > config.context_length:
            raise UserError(f"{seq} tokens do not fit the context of {config.context_length}")
        check_divides(config, self.tp, self.sequence, seq)
        padded_vocabulary(config.vocab_size, self.vocabulary_multiple, self.tp)
        self.blocks(config)

    def blocks(self, config: ModelConfig) -> int:
        """Blocks in one chunk. Raises UserError if the layers do not divide."""
        return len(blocks_of(0, 0, self.pp, self.chunks, config.num_layers))

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


def check_divides(config: ModelConfig, ranks: int, sequence: bool = False, seq: int | None = None) -> None:
    """Raises UserError, with the numbers, for a model that tensor parallelism cannot split over so many ranks."""
    for name, size in (("heads", config.num_heads), ("key/value heads", config.kv_heads), ("of d_ff", config.d_ff)):
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
    after a reduction are whole on every rank. The last stage has the tied embedding as well as the first. (Shoeybi et
    al., arXiv:1909.08053, section 3; Narayanan et al., arXiv:2104.04473, section 2.)
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
    owned = [blocks_of(stage, chunk, layout.pp, layout.chunks, config.num_layers) for chunk in range(layout.chunks)]
    for number in (number for span in owned for number in span):
        shapes |= {f"blocks.{number}.{name}": shape for name, shape in _block(config, layout.tp)}
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


def _block(config: ModelConfig, tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, kv, hidden = config.d_model, config.kv_heads * config.head_dim, config.d_ff

    def column(name: str, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows // tp, d)
        if config.bias:
            yield f"{name}.bias", (rows // tp,)

    def row(name: str, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (d, columns // tp)
        if config.bias:
            yield f"{name}.bias", (d,)

    yield from _norm("attention_norm", config)
    for name, rows in (("query", d), ("key", kv), ("value", kv)):
        yield from column(f"attention.{name}", rows)
    yield from row("attention.out", d)
    yield from _norm("feed_forward_norm", config)
    for name in ("gate", "up") if config.feed_forward == "swiglu" else ("up",):
        yield from column(f"feed_forward.{name}", hidden)
    yield from row("feed_forward.down", hidden)


def partial_names(shapes: Shapes, layout: Layout) -> list[str]:
    """The parameters whose gradient, under sequence parallelism, is a part of a sum over tp: norms and the biases that
    are added after a reduction (arXiv:2205.05198, section 4.2.2)."""
    if layout.tp == 1 or not layout.sequence:
        return []
    whole = ("norm.weight", "norm.bias", "out.bias", "down.bias")
    return [name for name in shapes if name.startswith(("blocks.", "final_norm.")) and name.endswith(whole)]


def is_tied_copy(config: ModelConfig, layout: Layout, stage: int) -> bool:
    """Whether the stage's token embedding is on another stage as well."""
    return config.tied_head and layout.pp > 1 and any(layout.ends(stage))


def buckets(config: ModelConfig, layout: Layout, stage: int, width: int) -> list[list[str]]:
    """How `BucketedDDP` groups the stage's gradients, of `width` bytes an element: from the last parameter to the
    first, up to 25 MB, a tied embedding that is on two stages by itself."""
    shapes = rank_shapes(config, layout, stage)
    alone = [TIED] if is_tied_copy(config, layout, stage) else []
    groups: list[list[str]] = []
    for name in (name for name in reversed(shapes) if name not in alone):
        held = sum(prod(shapes[each]) for each in groups[-1]) if groups else 0
        if not groups or width * (held + prod(shapes[name])) > BUCKET_BYTES:
            groups.append([])
        groups[-1].append(name)
    return [*groups, *([name] for name in alone)]


def rank_parameters(config: ModelConfig, layout: Layout, stage: int) -> dict[str, int]:
    """Parameters of one rank of a stage by part, the same on all its tp ranks; see `rank_shapes`."""
    parts = dict.fromkeys(("embedding", "positions", "attention", "feed-forward", "norms", "head"), 0)
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
    return "attention" if ".attention." in name else "feed-forward"
