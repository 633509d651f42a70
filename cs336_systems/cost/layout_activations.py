"""What a rank of a layout keeps for the backward of one microbatch, to the byte.

A block with biases, GELU, LayerNorm, dropout and naive attention keeps, in half precision, for b sequences of s tokens,
h wide, with a heads over t tensor-parallel ranks, in bytes (Korthikanti et al., arXiv:2205.05198, table 2):

                                   the paper                                here, besides 16 s b for norms
    one process                    s b h (34 + 5 a s / h)                   s b h (34 + 7 a s / h)
    tensor parallel                s b h (10 + 24 / t + 5 a s / (h t))      s b h (10 + 24 / t + 7 a s / (h t))
    and sequence parallel          s b h (34 / t + 5 a s / (h t))           s b h (34 / t + 7 a s / (h t))
    and attention recomputed       s b h 34 / t                             s b h 34 / t
    sequence, all recomputed       s b h 2 / t                              s b h 2 / t

Torch's softmax in float32 keeps four bytes a score where the paper counts two, and LayerNorm its mean and 1/std, two
numbers of four bytes a token, twice a block.
"""

from dataclasses import replace

from cs336_systems.cost.layout import Layout
from cs336_systems.cost.memory import Activations, Precision, Share, Sizes, is_loss_fused, keep_blocks, norm_activations
from cs336_systems.presets import ModelConfig


def share_of(layout: Layout) -> Share:
    """What a rank of the layout computes of each block."""
    return Share(layout.tp, layout.ep, layout.sequence and layout.tp > 1, keyed=True, half=True)


def sizes_of(config: ModelConfig, layout: Layout, seq: int, precision: Precision) -> Sizes:
    """What the formulas of `memory.py` are made of, for one microbatch of (micro_batch seq) tokens on a rank."""
    return Sizes.of(config, layout.micro_batch, seq, precision, share_of(layout))


def block_bytes(config: ModelConfig, layout: Layout, seq: int, precision: Precision = "fp32", layer: int = 0) -> int:
    """Bytes that one block keeps for the backward of one microbatch, on each tp rank."""
    return keep_blocks(config, sizes_of(config, layout, seq, precision), range(layer, layer + 1))[0]


def saved_by_sequence(config: ModelConfig, layout: Layout, seq: int, precision: Precision = "fp32") -> tuple[int, int]:
    """`block_bytes` of the layout without and with sequence parallelism."""
    without, with_ = (replace(layout, sequence=sequence) for sequence in (False, True))
    return block_bytes(config, without, seq, precision), block_bytes(config, with_, seq, precision)


def pass_activations(
    config: ModelConfig, layout: Layout, seq: int, stage: int, chunk: int = 0, precision: Precision = "fp32"
) -> Activations:
    """Bytes kept for the backward of one microbatch (micro_batch seq) through one chunk of a stage's blocks.

    Dropout is by place (`keyed_dropout`), and BERT's batches have segments, a mask of real tokens and the pair's label.
    In bf16 and fp16 the weights and the stream are in two bytes, not in autocast's mixture. Raises UserError for a
    layout that does not divide.
    """
    layout.check(config, seq)
    s, (first, last) = sizes_of(config, layout, seq, precision), layout.ends(stage)
    shared = _shared(config, layout, s, seq)
    shared += _embedding(config, layout, seq) if first and chunk == 0 else 0
    head = _head(config, layout, s, seq) if last and chunk == layout.chunks - 1 else 0
    return Activations(shared, head, *keep_blocks(config, s, layout.blocks(config, stage, chunk)))


def _shared(config: ModelConfig, layout: Layout, s: Sizes, seq: int) -> int:
    """What all blocks of a chunk read: the rotary table, and what is added to the scores where backward needs it."""
    if config.recompute == "segments" or (config.recompute == "nested" and len(layout.blocks(config)) > 1):
        return 0  # what is run again has them from its caller
    table = 4 * seq * config.head_dim if config.positions == "rotary" else 0
    masked = config.bert_heads
    added = (config.attention == "naive" and config.causal) or masked  # fused attention knows causality by itself
    kept = config.recompute == "attention" or (config.attention == "sdpa" and not config.dropout)
    rows = (seq if config.causal else 1) * (layout.micro_batch if masked else 1)
    return table + (rows * seq * _width(s) if added and kept else 0)


def _width(s: Sizes) -> int:
    return 4 * s.stream // s.wide


def _embedding(config: ModelConfig, layout: Layout, seq: int) -> int:
    """Token ids, with tensor parallelism as rows of this rank and whether they are its own, segments, and dropout."""
    tokens = layout.micro_batch * seq
    ids = 8 * tokens + (tokens if layout.tp > 1 else 0) + (8 * tokens if config.token_types else 0)
    return ids + (tokens * config.d_model if config.dropout else 0)


def _head(config: ModelConfig, layout: Layout, s: Sizes, seq: int) -> int:
    """The last norm, the head and the loss: targets and softmax; gone before the last block's backward."""
    tokens, width = layout.micro_batch * seq, _width(s)
    whole = width * tokens * config.d_model  # every token, also under sequence parallelism
    kept = norm_activations(config, s) + whole
    if layout.tp > 1:
        # Split over the words: softmax, and of each target its row here, whether that is so, and whether it counts.
        kept += 4 * tokens * layout.vocabulary(config) + (8 + 1 + 1) * tokens
    elif is_loss_fused(config):
        kept += width * config.vocab_size * config.d_model + 16  # the gradient of the head, and two counts
    else:
        kept += 4 * tokens * config.vocab_size + 8 * tokens + 4
    if config.bert_heads:
        # The transform's input and product, its norm's numbers; the pooler's output; the pair's softmax and label.
        pair = layout.micro_batch * (width * config.d_model + 4 * 2 + 8) + 4
        kept += 2 * whole + 8 * tokens + whole + pair
    return kept
