"""The transformer: one page of maths that knows no parallelism.

A decoder (GPT, Llama) or an encoder (BERT), by ModelConfig. Shapes are in einops order; batch, seq, d_model, heads and
head_dim are the axes' names throughout.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.attention import SelfAttention, angles, attention_bias, rotary_table
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig
from kernels.cross_entropy import linear_cross_entropy
from kernels.reference import rmsnorm
from kernels.rmsnorm import TritonRMSNormFunction
from kernels.swiglu import SwiGLUFunction


class RMSNorm(nn.Module):
    """`kernels.reference.rmsnorm`, or its fused form, with the gain as a parameter: (... d_model) -> (... d_model)."""

    def __init__(self, d_model: int, eps: float, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))
        self.eps, self.fused = eps, fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return TritonRMSNormFunction.apply(x, self.weight, self.eps)
        return rmsnorm(x, self.weight, self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """The normalisation that the configuration names."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
    return RMSNorm(config.d_model, config.norm_eps, fused=config.kernels == "triton")


class Embedding(nn.Module):
    """Token, position and segment embeddings: (batch seq) -> (batch seq d_model)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, config.d_model)
        if config.token_types:
            self.types = nn.Embedding(config.token_types, config.d_model)

    def forward(self, tokens: Tensor, token_types: Tensor | None) -> Tensor:
        config, seq = self.config, tokens.shape[1]
        x = self.tokens(tokens)
        if config.positions == "learned":
            x = x + self.positions.weight[:seq]
        elif config.positions == "sinusoidal":
            # Attention Is All You Need (arXiv:1706.03762), sections 3.4 and 3.5, sines first as in fairseq: the
            # embedding is scaled so that the fixed waves of size one do not drown it.
            turn = angles(seq, config.d_model, 10_000.0, x.device)
            x = x * math.sqrt(config.d_model) + torch.cat((turn.sin(), turn.cos()), dim=-1).to(x.dtype)
        if config.token_types:
            x = x + self.types(torch.zeros_like(tokens) if token_types is None else token_types)
        return F.dropout(x, config.dropout, self.training)


class FeedForward(nn.Module):
    """Two layers with a GELU between, or the gated SwiGLU (arXiv:2002.05202): (batch seq d_model) -> the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.fused = config.feed_forward, config.kernels == "triton"
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        if self.kind == "swiglu":
            self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu" and self.fused:
            hidden = SwiGLUFunction.apply(self.gate(x), self.up(x))
        elif self.kind == "swiglu":
            hidden = F.silu(self.gate(x)) * self.up(x)
        else:
            hidden = F.gelu(self.up(x), approximate="tanh" if self.kind == "gelu-tanh" else "none")
        return self.down(hidden)


class Block(nn.Module):
    """Pre-norm: each branch reads the normalised stream and adds to it. (batch seq d_model) -> the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, table: Tensor | None, bias: Tensor | None) -> Tensor:
        branch = self.attention(self.attention_norm(x), table, bias)
        x = x + F.dropout(branch, self.dropout, self.training)
        branch = self.feed_forward(self.feed_forward_norm(x))
        return x + F.dropout(branch, self.dropout, self.training)


def recomputed(function: Callable[[int, int, Tensor], Tensor], first: int, last: int, x: Tensor) -> Tensor:
    """Run blocks [first, last) keeping only x: backward runs them again."""
    return checkpoint(function, first, last, x, use_reentrant=False)


def run_nested(run: Callable[[int, int, Tensor], Tensor], first: int, last: int, x: Tensor) -> Tensor:
    """Run blocks [first, last) as two halves that are recomputed, and each half likewise.

    Not inside `run_blocks`: a function that calls itself is a cycle with all that it refers to, a mask for example, and
    would hold that until the garbage collector comes round.
    """
    if last - first == 1:
        return run(first, last, x)
    middle = (first + last) // 2
    half = partial(run_nested, run)
    x = recomputed(half, first, middle, x)
    return recomputed(half, middle, last, x)


class BertOutput(NamedTuple):
    """Logits of every token (batch seq vocab_size) and of the sentence pair (batch 2)."""

    tokens: Tensor
    pair: Tensor


class BertHeads(nn.Module):
    """BERT's two classifiers (arXiv:1810.04805, section 3.1): the masked token's and the sentence pair's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.d_model, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.pooler = nn.Linear(config.d_model, config.d_model)
        self.pair = nn.Linear(config.d_model, 2)

    def forward(self, x: Tensor, embedding: Tensor) -> BertOutput:
        tokens = F.linear(self.norm(F.gelu(self.transform(x))), embedding, self.bias)
        return BertOutput(tokens, self.pair(torch.tanh(self.pooler(x[:, 0]))))


class TransformerLM(nn.Module):
    """The language model.

    Weights are normal with standard deviation 0.02, those that write to the stream 0.02 / sqrt(2 num_layers), and an
    embedding that sinusoidal positions scale by sqrt(d_model) is 1 / sqrt(d_model). Gains are one, biases zero.

    Raises UserError for a configuration with experts.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        if config.num_experts:
            raise UserError(f"a model with {config.num_experts} experts can be counted, but not yet built")
        self.config = config
        # On the meta device first: torch's layers would otherwise fill weights that are drawn again below.
        with torch.device("meta"):
            self.embedding = Embedding(config)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.final_norm = make_norm(config)
            self.bert_heads = BertHeads(config) if config.bert_heads else None
            self.head = None if config.tied_head else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.to_empty(device=device or torch.get_default_device())
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw every parameter anew, in the order of `named_parameters`, from torch's global generator."""
        config = self.config
        narrow = 0.02 / math.sqrt(2 * config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm." in name:
                parameter.fill_(1.0)
            elif name == "embedding.tokens.weight" and config.positions == "sinusoidal":
                parameter.normal_(std=config.d_model**-0.5)
            else:
                parameter.normal_(std=narrow if name.endswith(("attention.out.weight", "down.weight")) else 0.02)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | BertOutput:
        """Logits (batch seq vocab_size) of tokens (batch seq), with `bert_heads` also the pair's; or, with targets
        (batch seq), the mean cross entropy in nats.

        token_types (batch seq) are BERT's segments (default all 0); padding_mask (batch seq) is True at real tokens.
        Raises UserError for a sequence longer than the context, and for a mask where attention knows none.
        """
        config, seq = self.config, tokens.shape[1]
        if targets is not None and targets.shape != tokens.shape:
            raise UserError(
                f"targets have shape {tuple(targets.shape)}, tokens {tuple(tokens.shape)}; one a token is meant"
            )
        if seq > config.context_length:
            raise UserError(f"{seq} tokens do not fit the context of {config.context_length}")
        x = self.embedding(tokens, token_types)
        table = rotary_table(config, seq, x) if config.positions == "rotary" else None
        # The fused attention knows causality by itself and is faster without a bias.
        fused = config.attention != "naive" and padding_mask is None
        if config.attention == "flash" and not fused:
            raise UserError("attention flash knows no padding mask; use sdpa")
        bias = None if fused else attention_bias(config, seq, padding_mask, x)
        x = self.final_norm(self.run_blocks(x, table, bias))
        if self.bert_heads is not None:
            output: BertOutput = self.bert_heads(x, self.embedding.tokens.weight)
            return output if targets is None else F.cross_entropy(output.tokens.flatten(0, 1), targets.flatten())
        if targets is not None and config.kernels == "triton":
            weight = self.embedding.tokens.weight if self.head is None else self.head.weight
            return linear_cross_entropy(x, weight, targets)
        logits = F.linear(x, self.embedding.tokens.weight) if self.head is None else self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def run_blocks(self, x: Tensor, table: Tensor | None, bias: Tensor | None) -> Tensor:
        """All blocks in order, (batch seq d_model) -> the same; backward runs again what `recompute` names."""

        def run(first: int, last: int, x: Tensor) -> Tensor:
            for block in self.blocks[first:last]:
                x = block(x, table, bias)
            return x

        depth, every = len(self.blocks), self.config.recompute_every
        if self.config.recompute == "segments" and torch.is_grad_enabled():
            for first in range(0, depth, every):
                x = recomputed(run, first, min(first + every, depth), x)
            return x
        if self.config.recompute == "nested" and torch.is_grad_enabled():
            return run_nested(run, 0, depth, x)
        return run(0, depth, x)


def lm_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of the targets (batch seq) after, or for BERT in place of, the tokens; a scalar."""
    return model(tokens, targets=targets)
