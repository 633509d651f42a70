"""The transformer: one page of maths that knows no parallelism.

A decoder (GPT, Llama) or an encoder (BERT), by ModelConfig. Shapes are in einops order; batch, seq, d_model, heads and
head_dim are the axes' names throughout.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.attention import SelfAttention, angles, attention_bias, drop, rotary_table
from cs336_systems.data import IGNORED, Batch, count_targets
from cs336_systems.dropout import DropoutKey
from cs336_systems.errors import UserError
from cs336_systems.feed_forward import FeedForward
from cs336_systems.heads import BertHeads, BertOutput, Losses, TiedHead, TokenLoss
from cs336_systems.moe import MoELayer
from cs336_systems.presets import ModelConfig
from cs336_systems.recompute import recomputed, run_nested
from kernels.cross_entropy import linear_cross_entropy
from kernels.reference import rmsnorm
from kernels.rmsnorm import TritonRMSNormFunction


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

    def forward(self, tokens: Tensor, token_types: Tensor | None, key: DropoutKey | None = None) -> Tensor:
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
        return drop(x, config.dropout if self.training else 0.0, key, "embedding")


class Block(nn.Module):
    """Pre-norm: each branch reads the normalised stream and adds to it. (batch seq d_model) -> the same.

    `layer` is its number in the model, which decides whether it has experts. It may compute a part of the sequence, the
    `part`-th of equal ones.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.dropout, self.layer, self.part = config.dropout, layer, 0
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config, layer)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = MoELayer(config, layer) if config.has_experts(layer) else FeedForward(config)

    def forward(
        self,
        x: Tensor,
        table: Tensor | None = None,
        bias: Tensor | None = None,
        real: Tensor | None = None,
        key: DropoutKey | None = None,
    ) -> Tensor:
        p, starts = self.dropout if self.training else 0.0, (self.part * x.shape[1],)
        branch = self.attention(self.attention_norm(x), table, bias, key)
        x = x + drop(branch, p, key, f"blocks.{self.layer}.attention branch", starts)
        y = self.feed_forward_norm(x)
        branch = self.feed_forward(y, real, key) if isinstance(self.feed_forward, MoELayer) else self.feed_forward(y)
        return x + drop(branch, p, key, f"blocks.{self.layer}.feed-forward branch", starts)


def initial_weight(
    config: ModelConfig, name: str, shape: torch.Size, seed: int, device: torch.device, first_expert: int = 0
) -> Tensor:
    """A parameter's first value: a function of its name and the seed alone (on one kind of device), so that whoever
    holds a part of a model can make it without the rest.

    Weights are normal with standard deviation 0.02, those that write to the stream 0.02 / sqrt(2 num_layers), and an
    embedding that sinusoidal positions scale by sqrt(d_model) is 1 / sqrt(d_model). Gains are one, biases zero. Of
    experts (experts ...) each has a name of its own, by its global number; the first is `first_expert`.
    """
    value = torch.empty(shape, device=device)
    if name.endswith("bias"):
        return value.zero_()
    if "norm." in name:
        return value.fill_(1.0)
    if name == "embedding.tokens.weight" and config.positions == "sinusoidal":
        deviation = config.d_model**-0.5
    else:
        narrow = name.endswith(("attention.out.weight", "down.weight"))
        deviation = 0.02 / math.sqrt(2 * config.num_layers) if narrow else 0.02
    parts = {name: value}
    if ".experts." in name:
        parts = {f"{name} {first_expert + i}": part for i, part in enumerate(value)}
    generator = torch.Generator(value.device)
    for part_name, part in parts.items():
        digest = hashlib.blake2b(f"{seed} {part_name}".encode(), digest_size=7).digest()
        part.normal_(std=deviation, generator=generator.manual_seed(int.from_bytes(digest, "little")))
    return value


def first_expert(model: nn.Module, name: str) -> int:
    """The global number of the first expert in a parameter that is here; 0 for one that has none."""
    layer, found, _ = name.partition(".experts.")
    return model.get_submodule(f"{layer}.experts").first if found else 0  # type: ignore[return-value]


class TransformerLM(nn.Module):
    """The language model: embedding, blocks, head; `forward` is the three in turn."""

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        # On the meta device first: torch's layers would otherwise fill weights that are drawn again below.
        with torch.device("meta"):
            self.embedding = Embedding(config)
            self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
            self.final_norm = make_norm(config)
            self.bert_heads = BertHeads(config) if config.bert_heads else None
            self.head = None if config.tied_head else nn.Linear(config.d_model, config.vocab_size, bias=False)
            self.tied_head = TiedHead() if config.tied_head else None
            self.token_loss = TokenLoss()
        self.fused_loss = config.kernels == "triton" and self.bert_heads is None
        device = torch.device(device) if device is not None else torch.get_default_device()
        if device.type != "meta":  # a model without values: for whoever counts it, or makes parts of it
            self.to_empty(device=device)
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Draw every parameter anew (see `initial_weight`); the default seed comes from torch's global generator."""
        seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        for name, parameter in self.named_parameters():
            first = first_expert(self, name)
            parameter.copy_(initial_weight(self.config, name, parameter.shape, seed, parameter.device, first))

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | BertOutput:
        """Logits (batch seq vocab_size) of tokens (batch seq), with `bert_heads` also the pair's; or, with targets
        (batch seq), the mean cross entropy in nats of those that are not IGNORED.

        token_types (batch seq) are BERT's segments (default all 0); padding_mask (batch seq) is True at real tokens.
        Raises UserError for a sequence longer than the context, and for a mask where attention knows none.
        """
        if targets is not None and targets.shape != tokens.shape:
            raise UserError(
                f"targets have shape {tuple(targets.shape)}, tokens {tuple(tokens.shape)}; one a token is meant"
            )
        x = self.embed(tokens, token_types)
        x = self.run_blocks(x, *self.shared_inputs(x, tokens, padding_mask))
        return self.finish(x, targets)

    def embed(self, tokens: Tensor, token_types: Tensor | None, key: DropoutKey | None = None) -> Tensor:
        """The first of three parts: tokens (batch seq) -> (batch seq d_model)."""
        if tokens.shape[1] > self.config.context_length:
            raise UserError(f"{tokens.shape[1]} tokens do not fit the context of {self.config.context_length}")
        x: Tensor = self.embedding(tokens, token_types, key)
        return x

    def shared_inputs(
        self, like: Tensor, tokens: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What all blocks use alike for tokens (batch seq), or None: the rotary table, the bias of attention, and the
        mask of real tokens."""
        config, seq = self.config, tokens.shape[1]
        table = rotary_table(config, seq, like) if config.positions == "rotary" else None
        # The fused attention knows causality by itself and is faster without a bias.
        fused = config.attention != "naive" and padding_mask is None
        if config.attention == "flash" and not fused:
            raise UserError("attention flash knows no padding mask; use sdpa")
        return table, None if fused else attention_bias(config, seq, padding_mask, like), padding_mask

    def run_blocks(
        self,
        x: Tensor,
        table: Tensor | None = None,
        bias: Tensor | None = None,
        real: Tensor | None = None,
        span: range | None = None,
        key: DropoutKey | None = None,
    ) -> Tensor:
        """The second part: blocks in order, (batch seq d_model) -> the same, all of them or those of `span`; backward
        runs again what `recompute` names."""
        first, last = (0, len(self.blocks)) if span is None else (span.start, span.stop)

        def run(first: int, last: int, x: Tensor) -> Tensor:
            for block in self.blocks[first:last]:
                x = block(x, table, bias, real, key)
            return x

        every = self.config.recompute_every
        if self.config.recompute == "segments" and torch.is_grad_enabled():
            for start in range(first, last, every):
                x = recomputed(run, start, min(start + every, last), x)
            return x
        if self.config.recompute == "nested" and torch.is_grad_enabled():
            return run_nested(run, first, last, x)
        return run(first, last, x)

    def finish(self, x: Tensor, targets: Tensor | None = None) -> Tensor | BertOutput:
        """The last part, of x (batch seq d_model): logits or, with targets, the mean loss, as of `forward`."""
        if targets is not None and self.fused_loss:
            return linear_cross_entropy(self.final_norm(x), self.head_weight(), targets, IGNORED)
        logits, pair = self.logits(x)
        if targets is not None:
            loss: Tensor = self.token_loss(logits, targets, "mean")
            return loss
        logits = self.token_loss.whole(logits)
        return logits if pair is None else BertOutput(logits, pair)

    def losses(self, x: Tensor, batch: Batch) -> Losses:
        """The last part, of x (batch seq d_model): sums, which may be added over microbatches and ranks."""
        assert batch.targets is not None
        if self.fused_loss:
            mean = linear_cross_entropy(self.final_norm(x), self.head_weight(), batch.targets, IGNORED)
            return Losses(mean * count_targets(batch))
        logits, pair = self.logits(x)
        tokens = self.token_loss(logits, batch.targets, "sum")
        if pair is None or batch.pair_labels is None:
            return Losses(tokens)
        wide = pair.to(torch.promote_types(pair.dtype, torch.float32))
        return Losses(tokens, F.cross_entropy(wide, batch.pair_labels, reduction="sum"))

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of x (batch seq d_model): every token's, and with `bert_heads` the pair's."""
        x, pair, bias = self.final_norm(x), None, None
        if self.bert_heads is not None:
            x, pair = self.bert_heads(x)
            bias = self.bert_heads.bias
        if self.head is not None:
            return self.head(x), pair
        assert self.tied_head is not None
        return self.tied_head(x, self.embedding.tokens.weight, bias), pair

    def head_weight(self) -> Tensor:
        """(vocab_size d_model)."""
        return self.embedding.tokens.weight if self.head is None else self.head.weight


def lm_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of the targets (batch seq) after, or for BERT in place of, the tokens; a scalar."""
    return model(tokens, targets=targets)
