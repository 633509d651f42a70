"""Layout of a model and its batch over ranks, checked before anything is built; observations of one rank of it.

Tensor parallelism splits every matrix over tp ranks; pipeline parallelism splits the blocks over pp stages, each with
`chunks` runs of blocks. Data parallelism splits the rows of a batch over dp replicas of all this. Expert parallelism
also splits rows, over ep ranks; each has some of the experts and everything else. Context parallelism splits every
sequence over cp ranks. The vocabulary is padded until it divides over the tp ranks."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from cs336_systems.errors import UserError, require_count
from cs336_systems.presets import ContextType, ModelConfig
from cs336_systems.schedule.lists import TURNING, blocks_of, bubble_fraction

TIED = "embedding.tokens.weight"
# Bytes from which glibc's malloc maps each block separately (mallopt(3): M_MMAP_THRESHOLD, which grows to 32 MiB).
MAPPED = 2**25


def check_spread(spread: Any, counts: tuple[str, ...]) -> None:
    """Check a `Layout`, or a plan of its kind. Raises UserError, with the numbers, if a field in `counts` is below one,
    if the ZeRO stage does not exist, or if the batch or schedule does not divide."""
    for name in counts:
        require_count(name, getattr(spread, name))
    if spread.zero not in (0, 1, 2, 3):
        raise UserError(f"ZeRO has stages 0 to 3, not {spread.zero}")
    batch, together = spread.global_batch, spread.micro_batch * spread.dp * spread.ep
    if batch % together:
        below = batch // together * together
        near = f"{below} or {below + together}" if below else str(together)
        product = f"{spread.micro_batch} x dp {spread.dp}{f' x ep {spread.ep}' if spread.ep > 1 else ''} = {together}"
        size = f"a global batch (--batch-size) of {batch} sequences"
        raise UserError(f"{size} is not a multiple of micro-batch {product}: use {near}")
    if spread.chunks > 1 and spread.pp == 1:
        other = "another schedule than zbv" if spread.schedule in TURNING else "chunks to 1"
        raise UserError(f"{spread.chunks} chunks are of no use on one stage: set {other}, or pp above 1")
    bubble_fraction(spread.schedule, spread.pp, batch // together, spread.chunks)  # checks schedule and microbatches


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and the batch in sequences. The constructor checks all that does not depend on a model.
    Raises UserError, with the numbers, for degrees below one and a batch or schedule that does not divide."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1  # of a stage, for the schedules "interleaved" and "zbv"
    schedule: str = "1f1b"
    sequence: bool = False  # sequence parallelism between the layers of tensor parallelism
    zero: int = 0  # ZeRO stage over the ranks that see different tokens
    micro_batch: int = 1
    global_batch: int = 1
    vocabulary_multiple: int = 1  # the vocabulary is padded to a multiple of it
    ep: int = 1  # ranks over which the experts are split; dp and ep together are the ranks that see different rows
    cp: int = 1  # context parallelism: ranks that a sequence is split over, from the embedding to the loss
    cp_type: ContextType = "ring"  # method by which queries reach the keys of other ranks, see context_parallel.py

    def __post_init__(self) -> None:
        counts = "tp", "pp", "dp", "ep", "cp", "chunks", "micro_batch", "global_batch", "vocabulary_multiple"
        check_spread(self, counts)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.data

    @property
    def rows(self) -> int:
        """Ranks that see different rows."""
        return self.dp * self.ep

    @property
    def data(self) -> int:
        """Ranks that see different tokens, and hold the same dense parameters."""
        return self.rows * self.cp

    @property
    def parts(self) -> int:
        """Equal parts of a sequence: two for each context-parallel rank, each of which sequence parallelism splits."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence else 1)

    @property
    def turn(self) -> bool:
        """True if the chunks of the stages lie in a V: down the stages, and up again."""
        return self.schedule in TURNING

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.global_batch // (self.micro_batch * self.rows)

    def check(self, config: ModelConfig, seq: int | None = None) -> None:
        """Raises UserError, in one line with the numbers, for a model or a sequence that it does not divide."""
        check_experts(config, self.ep)
        if seq is not None and seq > config.context_length:
            raise UserError(f"{seq} tokens do not fit the context of {config.context_length}")
        check_divides(config, self.tp, self.sequence, seq)
        check_context(config, self.cp, self.cp_type, self.tp)
        if self.cp > 1 and (length := seq or config.context_length) % self.parts:
            parts = f"2 x cp {self.cp}{f' x tp {self.tp}' * self.sequence} = {self.parts} parts"
            near = max(1, length // self.parts) * self.parts
            raise UserError(f"{length} tokens do not divide into {parts}: use --context {near}, or a lower --cp")
        padded_vocabulary(config.vocab_size, self.vocabulary_multiple, self.tp)
        blocks_of(0, 0, self.pp, self.chunks, config.num_layers)


def check_experts(config: ModelConfig, ranks: int) -> None:
    """Raises UserError if the model's experts cannot be split over this number of ranks."""
    if ranks > 1 and not config.num_experts:
        raise UserError(f"ep {ranks} splits experts, and the model has none: set --num-experts, or leave --ep out")
    if (count := config.num_experts) % ranks:
        raise UserError(f"{count} experts do not divide over ep {ranks}: choose an ep that divides {count}")


def check_context(config: ModelConfig, ranks: int, kind: ContextType, tp: int = 1) -> None:
    """Raises UserError, with the numbers, for a model whose sequences cannot be split over this many ranks."""
    if ranks > 1 and not config.causal:
        raise UserError(f"cp {ranks} splits the sequence of a decoder, and this model is an encoder: leave --cp out")
    if ranks > 1 and kind == "ulysses" and config.num_heads % (tp * ranks):
        heads = f"{config.num_heads} heads do not divide over tp {tp} x cp {ranks} = {tp * ranks} ranks"
        raise UserError(f"{heads}: use --cp-type ring or gather, or degrees whose product divides {config.num_heads}")


def check_divides(
    config: ModelConfig, ranks: int, sequence: bool = False, seq: int | None = None, fewer: bool = False
) -> None:
    """Raises UserError, with the numbers, for a model that tensor parallelism cannot split over this many ranks. With
    `fewer` there may be fewer key/value heads than ranks, and several ranks hold the same one."""
    sizes = {"heads": config.num_heads, "of d_ff": config.d_ff, "key/value heads": 0 if fewer else config.kv_heads}
    for name, size in (sizes | ({"of the experts' d_ff": config.expert_d_ff} if config.num_experts else {})).items():
        if size % ranks:
            raise UserError(f"{size} {name} do not divide over tp {ranks}: choose a tp that divides {size}")
    if sequence and (seq or config.context_length) % ranks:
        raise UserError(f"a sequence of {seq or config.context_length} tokens does not divide over tp {ranks}")


def padded_vocabulary(vocab_size: int, multiple: int, ranks: int) -> int:
    """Size of the vocabulary, padded to a multiple. Raises UserError if it does not divide over the ranks."""
    padded = -(-vocab_size // max(multiple, 1)) * multiple
    if padded < vocab_size or padded % ranks:
        size = f"a vocabulary of {vocab_size}, padded to {padded} (a multiple of {multiple})"
        raise UserError(f"{size}, does not divide over tp {ranks}: pad it to a multiple of {ranks}")
    return padded


class Transfer(NamedTuple):
    """One collective or message of a step: its phase, its axis of the mesh ("tp", "pp", "ep", "cp", "dp", "data", which
    joins these three, "ends" or "world"), verb, purpose, bytes of the whole tensor, and how many ranks take part."""

    phase: str
    axis: str
    verb: str
    what: str
    nbytes: int
    ranks: int


class Work(NamedTuple):
    """Computation of one phase: FLOPs of matrix products; number of operators; bytes that other operators than products
    read and write; bytes of new storages that are so large that the allocator maps each separately."""

    flops: int = 0
    operators: int = 0
    moved: int = 0
    new: int = 0


@dataclass(frozen=True)
class Observation:
    """Memory (bytes) and work of a rank in one optimizer step."""

    parameters: int  # number of parameters
    state: dict[str, int]  # at rest: parameters, gradients after their synchronisation, optimizer state
    kept: int  # activations of the first microbatch, for its backward
    activations: int  # most activations at once, of all microbatches under way
    peak: dict[str, int]  # all memory at the moment when most is in use, by part
    work: dict[str, Work]  # by phase
    traffic: Counter[Transfer]

    def memory(self) -> dict[str, int]:
        """Bytes by part. Their sum is the peak if all parts are largest at the same moment, else it may be more."""
        parts = self.state | {"activations": self.activations}
        return parts | {"workspace": max(0, sum(self.peak.values()) - sum(parts.values()))}
