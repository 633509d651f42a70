"""Vocabulary parallelism: each rank holds some rows of the embedding and computes the logits of its words only. For the
loss the ranks exchange three numbers per token, so that no rank ever holds all logits.

Rank r has the words [r n, (r + 1) n), n = padded vocabulary / ranks. Padding words have zero weights and are left out
of the softmax. (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.) The axis `part` is of size n.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.comm import Group, all_reduce, pairs
from cs336_systems.data.corpus import IGNORED
from cs336_systems.errors import UserError
from cs336_systems.tensor_parallel.layers import split
from kernels.checks import once_differentiable


def check_words(words: Tensor, vocab_size: int, what: str) -> None:
    """Raises UserError for a number outside the vocabulary: all ranks, or a padding word, would accept it silently."""
    unknown = (words < 0) | (words >= vocab_size)
    if words.device.type == "cuda":  # without waiting for the device
        torch._assert_async(~unknown.any(), f"a {what} lies outside the vocabulary of {vocab_size}")
    elif not words.is_meta and unknown.any():
        word = int(words[unknown][0])
        raise UserError(f"{what} {word} lies outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})")


class VocabParallelEmbedding(nn.Module):
    """Embedding with this rank's words: tokens (batch seq) -> (batch seq d_model), summed over the ranks; a rank adds
    zeros for other ranks' words. Raises UserError for a token that is not in the vocabulary."""

    def __init__(self, embedding: nn.Embedding, padded: int, group: Group) -> None:
        super().__init__()
        self.vocab_size, self.group = embedding.num_embeddings, group
        self.weight = split(embedding.weight, 0, group, padded)

    def forward(self, tokens: Tensor) -> Tensor:
        check_words(tokens, self.vocab_size, "token")
        part = self.weight.shape[0]
        local = tokens - self.group.rank() * part
        foreign = (local < 0) | (local >= part)
        x = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill(foreign[..., None], 0.0)
        return pairs.reduce(x, self.group, "embedding")


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(z)[target] = log(sum exp(z - max)) - (z[target] - max), each term over all ranks' words."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, real: int, group: Group) -> Tensor:
        """Losses (tokens,) of logits (tokens part), of which the first `real` are words, and targets (tokens,)."""
        part = logits.shape[1]
        largest = logits[:, :real].amax(1) if real else logits.new_full((len(logits),), -torch.inf)
        all_reduce(largest, group, "largest logit", "max").wait()
        local = targets - group.rank() * part
        foreign = (local < 0) | (local >= part)  # IGNORED as well
        local = local.masked_fill(foreign, 0)
        shifted = logits - largest[:, None]
        sums = shifted.new_zeros(2, len(logits))
        sums[1] = shifted.gather(1, local[:, None])[:, 0].masked_fill(foreign, 0.0)
        weights = shifted.exp_()
        weights[:, real:] = 0.0
        sums[0] = weights.sum(1)
        all_reduce(sums.view(-1), group, "softmax", "sum").wait()
        ctx.save_for_backward(weights.div_(sums[0][:, None]), local, foreign)
        return sums[0].log() - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute (softmax - one-hot) times the gradient of each loss; nothing is sent."""
        softmax, local, foreign = ctx.saved_tensors
        result = softmax * gradient[:, None]
        mine = gradient.masked_fill(foreign, 0.0)[:, None]
        return result.scatter_add_(1, local[:, None], -mine), None, None, None


class VocabParallelLoss(nn.Module):
    """Loss of `heads.TokenLoss`, of logits (batch seq part) that are split over ranks; equal on all of them. Raises
    UserError for a target that is neither in the vocabulary nor IGNORED. The maximum of logits over ranks may lose a
    NaN, but the sum that follows keeps it."""

    def __init__(self, vocab_size: int, padded: int, group: Group) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, group
        part = padded // group.size()
        self.real = min(max(vocab_size - group.rank() * part, 0), part)

    def forward(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        flat = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        targets = targets.flatten()
        counted = targets != IGNORED
        check_words(targets.masked_fill(~counted, 0), self.vocab_size, "target")
        losses: Tensor = _CrossEntropy.apply(flat, targets, self.real, self.group)
        total = losses.masked_fill(~counted, 0.0).sum()
        return total if reduction == "sum" else total / counted.sum()

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary (batch seq vocab_size), on every rank."""
        return pairs.gather(logits, -1, self.group, "logits")[..., : self.vocab_size]
