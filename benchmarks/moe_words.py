"""The log-probability of every word of a text, twice: one number at a time from the device, or a batch at once.

Both give the same. The slow way is how fairseq's eval_lm reads them (branch moe, with its `output_word_probs`): for
each word its number, its log-probability twice, and the next word's. Each of these four is a read of one number, for
which the host waits until the device has nothing left to do; and a sum that stays on the device is one launch a word.
"""

import math
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from cs336_systems.data.corpus import IGNORED

How = Literal["none", "fast", "slow"]


class Words(Protocol):
    """Words that have been read: each with its log-probability in nats, in order, and sums by word."""

    words: list[tuple[int, float]]

    def read(self, targets: Tensor, log_probs: Tensor, known: Tensor) -> None:
        """Take a batch: targets and log-probabilities (rows seq) on the device; `known` is the targets on the host."""

    def sums(self) -> np.ndarray:
        """(vocab_size 3): how often each word came, its log-probability added up, and that of the words after it."""


class SlowWords:
    """One number at a time."""

    def __init__(self, vocab_size: int) -> None:
        self.words: list[tuple[int, float]] = []
        self.vocab_size = vocab_size
        self.counts, self.totals, self.after = dict[int, int](), dict[int, float](), dict[int, Tensor]()

    def read(self, targets: Tensor, log_probs: Tensor, known: Tensor) -> None:
        """See Words."""
        for row, length in enumerate((known != IGNORED).sum(1).tolist()):
            self._read_block(targets[row], log_probs[row], length)

    def _read_block(self, targets: Tensor, log_probs: Tensor, length: int) -> None:
        for i in range(length):
            word = int(targets[i].item())
            self.words.append((word, log_probs[i].item()))
            following = None
            if i + 1 < length and math.isfinite(log_probs[i + 1].item()):
                following = log_probs[i + 1]
            self._count(word, log_probs[i].item(), following)

    def _count(self, word: int, log_prob: float, following: Tensor | None) -> None:
        self.counts[word] = self.counts.get(word, 0) + 1
        self.totals[word] = self.totals.get(word, 0.0) + log_prob
        if following is not None and word in self.after:
            self.after[word] += following
        elif following is not None:
            self.after[word] = 0 + following  # not a view of the batch, which the next sum would write to

    def sums(self) -> np.ndarray:
        """See Words."""
        table = np.zeros((self.vocab_size, 3))
        for word, count in self.counts.items():
            after = self.after[word].item() if word in self.after else 0.0
            table[word] = count, self.totals[word], after
        return table


class FastWords:
    """One copy a batch, and numpy."""

    def __init__(self, vocab_size: int) -> None:
        self.words: list[tuple[int, float]] = []
        self.table = np.zeros((vocab_size, 3))

    def read(self, targets: Tensor, log_probs: Tensor, known: Tensor) -> None:
        """See Words."""
        for words, values in zip(known.numpy(), log_probs.double().cpu().numpy(), strict=True):
            real = words != IGNORED
            words, values = words[real], values[real]
            self.words += zip(words.tolist(), values.tolist(), strict=True)
            # `add.at` adds one after the other, so that the sums are the slow way's to the last bit.
            np.add.at(self.table, (words, 0), 1)
            np.add.at(self.table, (words, 1), values)
            finite = np.isfinite(values[1:])
            np.add.at(self.table, (words[:-1][finite], 2), values[1:][finite])

    def sums(self) -> np.ndarray:
        """See Words."""
        return self.table


def make_words(how: How, vocab_size: int) -> Words | None:
    """A reader, or none."""
    return {"none": lambda: None, "fast": lambda: FastWords(vocab_size), "slow": lambda: SlowWords(vocab_size)}[how]()
