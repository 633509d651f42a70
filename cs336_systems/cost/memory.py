"""How much a pass keeps for backward, part by part, counted from what autograd saves; a test holds the count equal, to
the byte, to what `saved_tensors_hooks` sees.

bf16 and fp16 are mixed precision (autocast), which computes products in two bytes and keeps everything else in four.
"""

from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Literal

from cs336_systems.cost.expert_activations import ExpertSizes, expert_activations, expert_gradients
from cs336_systems.presets import ModelConfig

Mode = Literal["forward", "backward", "forward-backward", "step"]
MODES: tuple[Mode, ...] = ("forward", "backward", "forward-backward", "step")
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Share:
    """What one rank of a layout computes, and how: by default everything, as one process does with autocast."""

    tp: int = 1  # ranks over which heads, d_ff and the vocabulary are split
    ep: int = 1  # ranks over which experts are
    sequence: bool = False  # the stream is, too, along the sequence
    keyed: bool = False  # dropout by place, whose mask takes a byte an element
    half: bool = False  # in bf16 and fp16 the weights and the stream are so as well: master weights, no autocast


@dataclass(frozen=True)
class Sizes:
    """Byte counts that the formulas share: tokens by width, tokens by feed-forward width, scores, logits."""

    stream: int  # tokens d_model, as it goes from block to block
    wide: int  # the same in float32
    compute: int  # the same in the precision of products
    read: int  # what a branch's first products read, as it is kept, in the precision of products
    heads: int  # tokens heads head_dim, in the precision of products
    queries_keys_values: int  # the same of all three
    hidden: int  # tokens d_ff, in the precision of products
    scores: int  # batch heads seq seq, float32
    scores_compute: int
    logits: int  # tokens vocab_size, float32
    row: int  # one float32 a token
    head_rows: int  # one float32 a token and head
    mask: int  # dropout's, of the stream
    scores_mask: int
    mixed: bool
    experts: ExpertSizes | None  # what a layer of them counts with

    @classmethod
    def of(cls, config: ModelConfig, batch: int, seq: int, precision: Precision, share: Share | None = None) -> "Sizes":
        share = share or Share()
        narrow = precision in ("bf16", "fp16")
        tokens, width = batch * seq, 2 if narrow else 4
        mine = tokens // share.tp if share.sequence else tokens
        scores, stream = tokens * seq * config.num_heads // share.tp, mine * config.d_model
        # Under sequence parallelism a branch reads all tokens, but keeps its own and gathers them again, unless it is
        # run again as a whole.
        parted = config.recompute in ("none", "attention")
        heads = width * tokens * config.d_model // share.tp
        # A single key that several queries share is not copied for each but seen by all, until a product wants it.
        copied = config.attention == "naive" or (config.attention == "sdpa" and config.dropout > 0)
        seen = config.kv_heads == share.tp and not (copied and config.recompute != "attention")
        return cls(
            stream=(width if share.half else 4) * stream,
            wide=4 * stream,
            compute=width * stream,
            read=width * (mine if parted else tokens) * config.d_model,
            heads=heads,
            queries_keys_values=heads + 2 * (heads * config.kv_heads // config.num_heads if seen else heads),
            hidden=width * tokens * config.d_ff // share.tp,
            scores=4 * scores,
            scores_compute=width * scores,
            logits=4 * tokens * config.vocab_size // share.tp,
            row=4 * mine,
            head_rows=4 * tokens * config.num_heads // share.tp,
            mask=(1 if share.keyed else width) * stream,
            scores_mask=(1 if share.keyed else width) * scores,
            mixed=(mixed := narrow and not share.half),
            experts=ExpertSizes.of(config, tokens, width, mixed, share.tp, share.ep),
        )


def norm_activations(config: ModelConfig, s: Sizes) -> int:
    """Bytes that autograd keeps for one norm."""
    # LayerNorm keeps its input, mean and 1/std; RMSNorm its input and 1/rms and, written out, the normalised input.
    if config.norm == "layernorm":
        return s.stream + 2 * s.row
    if config.kernels == "triton":
        return s.stream + s.row
    copies = 2 if s.stream < s.wide else 1  # of a narrow input, one for the squares and one for the product
    return (copies + 1) * s.wide + s.row


def _scores(config: ModelConfig, s: Sizes) -> int:
    """What the attention core keeps besides its inputs and output."""
    if config.attention == "flash":
        return s.head_rows + s.heads  # its output is contiguous by head: a copy in the stream's order
    if config.attention == "sdpa" and not config.dropout:
        # The log-sum-exp of each query; and rotated queries are contiguous by head, so is the output: a copy of it
        # in the stream's order is what the next product reads.
        return s.head_rows + (s.heads if config.positions == "rotary" else 0)
    if config.dropout:
        return s.scores + s.scores_mask + s.scores_compute  # the softmax, the mask and the dropped weights
    return s.scores + (s.scores_compute if s.scores_compute < s.scores else 0)  # the softmax, and its cast


def attention_activations(config: ModelConfig, s: Sizes) -> int:
    """Bytes that autograd keeps for one attention branch without recompute, its input included."""
    reads = 3 if s.mixed else 1  # autocast casts a shared input once for each product that reads it
    masks = s.mask if config.dropout else 0
    inside = s.queries_keys_values + _scores(config, s) + s.heads  # and the output
    return norm_activations(config, s) + reads * s.read + inside + masks


def feed_forward_activations(config: ModelConfig, s: Sizes, layer: int = 0) -> int:
    """Bytes that autograd keeps for a layer's feed-forward branch without recompute, its input included."""
    gated = config.feed_forward == "swiglu"
    reads = 2 if s.mixed and gated else 1
    masks = s.mask if config.dropout else 0
    if s.experts is not None and config.has_experts(layer):
        return norm_activations(config, s) + expert_activations(config, s.experts) + masks
    gate = 2 if config.kernels == "torch" else 1  # fused, silu(gate) is computed anew
    return norm_activations(config, s) + reads * s.read + (2 + gate if gated else 2) * s.hidden + masks


def is_loss_fused(config: ModelConfig) -> bool:
    """Whether the logits are never made whole (`kernels/cross_entropy.py`)."""
    return config.kernels == "triton" and not config.bert_heads


def logits_bytes(config: ModelConfig, s: Sizes) -> int:
    """The most that the loss adds to what is kept: the logits and their gradient, or the logits of a chunk of tokens
    (`kernels/cross_entropy.py`) and a scaled copy of the weight's gradient."""
    weight = 4 * config.vocab_size * config.d_model
    return min(s.logits, max(2**29, weight)) + weight if is_loss_fused(config) else 2 * s.logits


def block_activations(config: ModelConfig, s: Sizes, layer: int = 0) -> int:
    """Bytes that autograd keeps for one block without recompute."""
    return attention_activations(config, s) + feed_forward_activations(config, s, layer)


def _head_activations(config: ModelConfig, s: Sizes, batch: int) -> int:
    """What the last norm, the head and the loss keep. It is gone when backward comes to the last block."""
    fused = is_loss_fused(config)
    # The head's input, the log-softmax and a scalar weight; or, fused, both gradients of the head and a count.
    kept = (
        norm_activations(config, s)
        + s.compute
        + (4 * config.vocab_size * config.d_model + 8 if fused else s.logits + 4)
    )
    if config.bert_heads:
        # The transform's product, the norm's input, mean and 1/std, the norm's output, and the pooler's.
        kept += 3 * s.compute + 2 * s.row + 4 * batch * config.d_model
    return kept


def _shared_activations(config: ModelConfig, s: Sizes, tokens: int, seq: int) -> int:
    """What is kept from the beginning of forward to the end of backward: ids, targets, and what all blocks read."""
    ids = 8 * tokens * ((1 if is_loss_fused(config) else 2) + (1 if config.token_types else 0))
    table = 4 * seq * config.head_dim if config.positions == "rotary" else 0
    recomputes_bias = config.recompute == "attention" and config.attention == "naive" and config.causal
    bias = 4 * seq**2 if recomputes_bias else 0  # an input of what is run again
    return ids + table + bias + (s.stream if config.dropout else 0)


def _second_halves(block: int, depth: int) -> int:
    """How often the way from all blocks to one of them, by halves, turns to the second half."""
    first, last, turns = 0, depth, 0
    while last - first > 1:
        middle = (first + last) // 2
        first, last, turns = (first, middle, turns) if block < middle else (middle, last, turns + 1)
    return turns


@dataclass(frozen=True)
class Activations:
    """Bytes kept for backward, by the time at which they are freed."""

    shared: int  # at the end of backward
    head: int  # before the last block's backward
    blocks: int  # kept by the blocks when forward ends
    held: tuple[int, ...]  # by the blocks that are left when the backward of each begins, what was run again included
    scores: int  # run again inside an attention, and gone after it

    @property
    def kept(self) -> int:
        """Bytes when forward ends."""
        return self.shared + self.head + self.blocks

    @classmethod
    def of(cls, config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> "Activations":
        """Those of a training step on (batch seq) tokens."""
        s = Sizes.of(config, batch, seq, precision)
        shared = _shared_activations(config, s, batch * seq, seq)
        return cls(shared, _head_activations(config, s, batch), *keep_blocks(config, s, range(config.num_layers)))


def keep_blocks(config: ModelConfig, s: Sizes, layers: range) -> tuple[int, tuple[int, ...], int]:
    """`Activations.blocks`, `held` and `scores` of some blocks in a row."""
    blocks, every = [block_activations(config, s, layer) for layer in layers], config.recompute_every
    match "none" if config.recompute == "nested" and len(layers) == 1 else config.recompute:
        case "attention":
            scores = _scores(config, s)
            held = tuple(accumulate(block - scores for block in blocks))
            return held[-1], held, scores
        case "segments":
            # A segment's first block keeps the segment's input, which is there already.
            held = tuple(i // every * s.stream + sum(blocks[i - i % every : i + 1]) for i in range(len(blocks)))
            return ceil(len(blocks) / every) * s.stream, held, 0
        case "nested":
            # The input of every second half on the way; that of the first halves is their parent's.
            turns = (_second_halves(i, len(blocks)) for i in range(len(blocks)))
            return 2 * s.stream, tuple(n * s.stream + block for n, block in zip(turns, blocks, strict=True)), 0
        case _:
            held = tuple(accumulate(blocks))
            return held[-1], held, 0


def saved_activations(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> tuple[int, int]:
    """Bytes kept for backward when forward ends, and the bytes that recompute adds to what the blocks keep."""
    found = Activations.of(config, batch, seq, precision)
    return found.kept, max(found.held) + found.scores - found.blocks


def gradients_inside(config: ModelConfig, s: Sizes, layer: int = 0) -> tuple[int, int]:
    """The most that backward adds inside an attention and inside a feed-forward branch to what the branch kept."""
    # What a product kept is freed before the next gradient is made, but a softmax needs its result to the end.
    scores = 2 * s.scores if config.attention == "naive" else 0
    hidden = (2 if config.feed_forward == "swiglu" else 1) * s.hidden
    if s.experts is not None and config.has_experts(layer):
        hidden = expert_gradients(config, s.experts)
    return 2 * s.stream + scores, 2 * s.stream + hidden
