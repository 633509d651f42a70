"""Best length of a segment of recomputed blocks. Short ones keep many inputs, long ones recompute much at once.

With L blocks of which each keeps b bytes, and s bytes of the stream between two, segments of k blocks need about
(L / k) s + k b: least at k = sqrt(L s / b). It is sqrt(L) where s = b, as in Chen et al. (arXiv:1604.06174, section 4),
but a transformer's block keeps 20 or 30 times its input: one block or two are best up to a depth of 50.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import ceil, sqrt
from typing import NamedTuple

from benchmarks.lib.residuals import model_residuals
from cs336_systems.presets import ModelConfig, Precision, Recompute

_residuals = cache(model_residuals)  # of the same few layers for every length of segments


class Kept(NamedTuple):
    """Bytes that autograd keeps for backward, parameters and their casts apart, by the time at which they are freed."""

    shared: int  # token ids, targets and what all blocks share: when backward ends
    blocks: tuple[int, ...]  # of each block
    head: int  # of the last norm, the head and the loss: before the backward of the blocks


@dataclass(frozen=True)
class Strategy:
    """A way of recomputing, and the bytes of activations that it needs."""

    recompute: Recompute
    every: int  # blocks in a segment
    kept: int  # bytes kept from forward to backward
    recomputed: int  # bytes that the blocks hold more at once when backward runs something again
    logits: int  # bytes of the logits, if they are made
    head: int  # bytes of `kept` that the last norm, the head and the loss keep

    @property
    def peak(self) -> int:
        """The most bytes of activations at once: when the loss has been made of the logits (it keeps their softmax,
        too), or when blocks have been run again; the loss, the head and the last norm are over by then."""
        return max(self.kept + self.logits, self.kept - self.head + self.recomputed)

    @property
    def name(self) -> str:
        return f"segments of {self.every}" if self.recompute == "segments" else self.recompute

    def apply(self, config: ModelConfig) -> ModelConfig:
        """The model that recomputes so."""
        return config.override(recompute=self.recompute, recompute_every=self.every)


def strategy(
    config: ModelConfig, batch: int, seq: int, recompute: Recompute, every: int = 1, precision: Precision = "fp32"
) -> Strategy:
    """Bytes that one way of recomputing needs for (batch seq) tokens. Raises UserError for one that does not exist."""
    config = config.override(recompute=recompute, recompute_every=every)
    plain = _kept(replace(config, recompute="none"), batch, seq, precision)
    blocks, stream = plain.blocks, 4 * batch * seq * config.d_model  # between two blocks, in float32
    if recompute == "nested" and len(blocks) == 1:
        recompute = "none"
    match recompute:
        case "attention":
            apart = _kept(config, batch, seq, precision)
            kept, most, plain = sum(apart.blocks), sum(apart.blocks) + blocks[-1] - apart.blocks[-1], apart
        case "segments":
            # A segment's first block keeps the segment's input, which is there already.
            kept = ceil(len(blocks) / every) * stream
            before = [0, *accumulate(blocks)]
            most = max(i // every * stream + before[i + 1] - before[i - i % every] for i in range(len(blocks)))
        case "nested":
            # The input of every second half on the way; that of the first halves is their parent's.
            kept = 2 * stream
            most = max(_second_halves(i, len(blocks)) * stream + block for i, block in enumerate(blocks))
        case _:
            kept = most = sum(blocks)
    fused = config.kernels == "triton" and not config.bert_heads  # the logits are never made whole
    logits = 0 if fused else 4 * batch * seq * config.vocab_size
    return Strategy(config.recompute, every, plain.shared + kept + plain.head, most - kept, logits, plain.head)


def _kept(config: ModelConfig, batch: int, seq: int, precision: Precision) -> Kept:
    """Bytes kept for backward, counted for as few layers as there are kinds of them."""
    kinds = config.expert_every if config.num_experts else 1
    found = _residuals(replace(config, num_layers=2 * kinds, recompute_every=1), batch, seq, precision)
    inside = {name: nbytes for name, nbytes in found.by_block().items() if name.startswith("blocks.")}
    # What all blocks share is counted with the first one, so that the second half tells what a block keeps by itself.
    blocks = list(inside.values())[kinds:]
    outside = (each for each in found.kept if each.block not in (*inside, "embedding"))
    targets = "int64", 8 * batch * seq
    head = sum(each.nbytes for each in outside if (each.dtype, each.nbytes) != targets)
    shared = found.nbytes - 2 * sum(blocks) - head
    return Kept(shared, tuple(blocks[i % kinds] for i in range(config.num_layers)), head)


def _second_halves(block: int, depth: int) -> int:
    """Number of second halves on the way from all blocks to one of them, by halving."""
    first, last, turns = 0, depth, 0
    while last - first > 1:
        middle = (first + last) // 2
        first, last, turns = (first, middle, turns) if block < middle else (middle, last, turns + 1)
    return turns


def sweep(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> list[Strategy]:
    """Segments of every length, 1 block to all of them."""
    lengths = range(1, config.num_layers + 1)
    return [strategy(config, batch, seq, "segments", every, precision) for every in lengths]


def best(strategies: Iterable[Strategy]) -> Strategy:
    """The one that needs the least memory; of equal ones the first."""
    return min(strategies, key=lambda each: each.peak)


def square_root_rule(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> float:
    """The length that the continuous formula gives: sqrt(L s / b). It may lie below one block."""
    blocks = _kept(config, batch, seq, precision).blocks
    return len(blocks) * sqrt(4 * batch * seq * config.d_model / sum(blocks))


def neighbours(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> list[Strategy]:
    """Candidates worth measuring: nothing recomputed, the best length k with k - 1 and k + 1, and nested halves."""
    lengths = sweep(config, batch, seq, precision)
    k = best(lengths).every
    nothing = strategy(config, batch, seq, "none", 1, precision)
    nested = strategy(config, batch, seq, "nested", 1, precision)
    return [nothing, *lengths[max(0, k - 2) : k + 1], nested]
