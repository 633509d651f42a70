"""How long should a segment of recomputed blocks be? Short ones keep many inputs, long ones recompute much at once.

With L blocks of which each keeps b bytes, and s bytes of the stream between two, segments of k blocks need about
(L / k) s + k b: least at k = sqrt(L s / b). It is sqrt(L) where s = b, as in Chen et al. (arXiv:1604.06174, section 4),
but a transformer's block keeps 20 or 30 times its input: one block or two are best up to a depth of 50.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from cs336_systems.cost import Precision, saved_activations
from cs336_systems.cost.memory import Activations, Sizes, block_activations, is_loss_fused
from cs336_systems.presets import ModelConfig, Recompute


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
        """The most bytes of activations at once.

        That is when the loss has been made of the logits (it keeps their softmax, too), or when blocks have been run
        again; the loss, the head and the last norm are over by then.
        """
        return max(self.kept + self.logits, self.kept - self.head + self.recomputed)

    @property
    def name(self) -> str:
        """`segments of 2`, `nested`."""
        return f"segments of {self.every}" if self.recompute == "segments" else self.recompute

    def apply(self, config: ModelConfig) -> ModelConfig:
        """The model that recomputes so."""
        return config.override(recompute=self.recompute, recompute_every=self.every)


def strategy(
    config: ModelConfig, batch: int, seq: int, recompute: Recompute, every: int = 1, precision: Precision = "fp32"
) -> Strategy:
    """What one way of recomputing needs for (batch seq) tokens. Raises UserError for one that does not exist."""
    shape = config.override(recompute=recompute, recompute_every=every)
    logits = 0 if is_loss_fused(config) else Sizes.of(config, batch, seq, precision).logits
    head = Activations.of(shape, batch, seq, precision).head
    return Strategy(recompute, every, *saved_activations(shape, batch, seq, precision), logits, head)


def sweep(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> list[Strategy]:
    """Segments of every length, 1 block to all of them."""
    lengths = range(1, config.num_layers + 1)
    return [strategy(config, batch, seq, "segments", every, precision) for every in lengths]


def best(strategies: Iterable[Strategy]) -> Strategy:
    """The one that needs the least memory; of equal ones the first."""
    return min(strategies, key=lambda each: each.peak)


def square_root_rule(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> float:
    """The length that the continuous formula gives: sqrt(L s / b). It may lie below one block."""
    sizes = Sizes.of(config, batch, seq, precision)
    return sqrt(config.num_layers * sizes.stream / block_activations(config, sizes))


def neighbours(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> list[Strategy]:
    """What is worth measuring: nothing recomputed, the best length k with k - 1 and k + 1, and nested halves."""
    lengths = sweep(config, batch, seq, precision)
    k = best(lengths).every
    nothing = strategy(config, batch, seq, "none", 1, precision)
    nested = strategy(config, batch, seq, "nested", 1, precision)
    return [nothing, *lengths[max(0, k - 2) : k + 1], nested]
