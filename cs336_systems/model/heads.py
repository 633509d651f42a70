"""Heads and losses: BERT's two classifiers, the head tied to the embedding, and cross entropy."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.data.corpus import IGNORED
from cs336_systems.presets import ModelConfig


class BertOutput(NamedTuple):
    """Logits of every token (batch seq vocab_size) and of the sentence pair (batch 2)."""

    tokens: Tensor
    pair: Tensor


class Losses(NamedTuple):
    """Cross entropies in nats, sums or means over targets that are not IGNORED, and for BERT over sentence pairs."""

    tokens: Tensor
    pair: Tensor | None = None


class BertHeads(nn.Module):
    """BERT's transform before the masked tokens' logits, and its classifier of sentence pairs (arXiv:1810.04805,
    section 3.1): (batch seq d_model) -> (batch seq d_model) and logits (batch 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.d_model, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.pooler = nn.Linear(config.d_model, config.d_model)
        self.pair = nn.Linear(config.d_model, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(F.gelu(self.transform(x))), self.pair(torch.tanh(self.pooler(x[:, 0])))


class TiedHead(nn.Module):
    """Head with the embedding's weight: (batch seq d_model) -> logits (batch seq vocab_size)."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class TokenLoss(nn.Module):
    """Cross entropy in nats of logits (batch seq vocab_size) with targets (batch seq), in float32 at least."""

    def forward(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary: these, since the vocabulary is not split."""
        return logits
