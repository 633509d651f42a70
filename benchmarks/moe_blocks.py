"""Text for evaluation: contiguous blocks of a stream of tokens, each scored once, dealt to the ranks in turn.

Block i goes to rank i mod ranks. All ranks take equally many batches of one shape, since each must enter every
all-to-all: what is missing at the end is padding, whose targets count for nothing.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np
import torch

from cs336_systems.data.corpus import IGNORED, Batch, check_length, load_corpus

KEPT = 0.1  # of the text, at its end, is what is evaluated
NO_BLOCK = -1  # the number of a row that is padding


class Blocks:
    """Blocks of `context` tokens and, as their targets, the tokens after each; the last one may be shorter."""

    def __init__(self, tokens: np.ndarray, context: int, name: str = "") -> None:
        self.tokens, self.context, self.name = tokens, context, name
        self.count = ceil((len(tokens) - 1) / context)

    def targets(self, block: int) -> int:
        """How many targets a block has."""
        return max(0, min(self.context, len(self.tokens) - 1 - block * self.context)) if block != NO_BLOCK else 0

    def batches(self, ranks: int, rows: int) -> int:
        """Batches of `rows` blocks that each of so many ranks takes until all are scored."""
        return ceil(self.count / (ranks * rows))

    def numbers(self, batch: int, rank: int, ranks: int, rows: int) -> list[int]:
        """The blocks of a rank's batch, NO_BLOCK where there is none left."""
        found = [rank + ranks * (batch * rows + row) for row in range(rows)]
        return [number if number < self.count else NO_BLOCK for number in found]

    def batch(self, batch: int, rank: int, ranks: int, rows: int) -> Batch:
        """A rank's batch: tokens, targets and the mask of real tokens, (rows context), and the blocks' numbers."""
        numbers = self.numbers(batch, rank, ranks, rows)
        tokens = torch.zeros(rows, self.context, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        for row, number in enumerate(numbers):
            if length := self.targets(number):
                first = number * self.context
                stretch = torch.from_numpy(self.tokens[first : first + length + 1].astype(np.int64))
                tokens[row, :length], targets[row, :length] = stretch[:-1], stretch[1:]
        return Batch(tokens, targets, torch.tensor(numbers), padding_mask=targets != IGNORED)


def load_blocks(data: Sequence[str], vocab_size: int, context: int) -> Blocks:
    """The end of the text that `--data` names. Raises UserError where it is shorter than one block."""
    kept = load_corpus(data, vocab_size, context).split(KEPT)[1]
    check_length(kept, context)
    return Blocks(kept.tokens, context, kept.name)
