"""The transformer: a decoder (GPT, Llama) or an encoder (BERT), by ModelConfig.

    positions     learned, rotary, sinusoidal or none            attention.py
    attention     multi-head or grouped-query; naive, torch's fused, or this project's FlashAttention-2
    norm          pre-norm, RMSNorm or LayerNorm
    feed-forward  GELU, SwiGLU (feed_forward.py), or a mixture of experts (moe.py)
    head          tied to the embedding or not, BERT's heads (heads.py), or fused with the loss
    dropout       by torch's generator, or by place in the run (dropout.py)
    recompute     segments of blocks, nested halves, or attention alone

Other packages add parallelism. A pipeline's stage calls `run_blocks`, and `finish` or `losses`. Tensor parallelism
replaces linear layers, `tied_head` and `token_loss`; expert parallelism the dispatcher of an expert layer; context
parallelism the attention's `blockwise` and the model's `parts`. Shapes are in einops order: batch, seq, d_model, heads,
head_dim.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.data.corpus import IGNORED, Batch, count_targets
from cs336_systems.errors import UserError
from cs336_systems.model.attention import BlockInputs, Places, SelfAttention, angles, block_inputs, find_places
from cs336_systems.model.blockwise import PartsOf
from cs336_systems.model.dropout import drop
from cs336_systems.model.feed_forward import FeedForward
from cs336_systems.model.heads import BertHeads, BertOutput, Losses, TiedHead, TokenLoss
from cs336_systems.model.moe import MoELayer
from cs336_systems.presets import ModelConfig
from kernels.cross_entropy import linear_cross_entropy
from kernels.reference import rmsnorm
from kernels.rmsnorm import TritonRMSNormFunction


class RMSNorm(nn.Module):
    """RMSNorm with a gain, by `kernels.reference.rmsnorm` or its fused form: (... d_model) -> (... d_model)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(config.d_model)), config.norm_eps
        self.norm: Callable[..., Tensor] = TritonRMSNormFunction.apply if config.kernels == "triton" else rmsnorm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """Make the normalisation layer that the configuration names."""
    if config.norm == "rmsnorm":
        return RMSNorm(config)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class Embedding(nn.Module):
    """Sum of token, position and segment embeddings: (batch seq) -> (batch seq d_model)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, config.d_model)
        if config.token_types:
            self.types = nn.Embedding(config.token_types, config.d_model)

    def forward(self, tokens: Tensor, token_types: Tensor | None, key: Tensor | None, places: Places) -> Tensor:
        config = self.config
        if places.length > config.context_length:
            raise UserError(f"{places.length} tokens do not fit the context of {config.context_length}")
        x = self.tokens(tokens)
        if config.positions == "learned":
            whole = places.row is None and places.position.dim() == 1
            x = x + (self.positions.weight[: places.length] if whole else self.positions(places.position))
        elif config.positions == "sinusoidal":
            # Attention Is All You Need (arXiv:1706.03762), sections 3.4 and 3.5, sines first as in fairseq: the
            # embedding is scaled, as it would be small beside sines and cosines of size one.
            turn = angles(places.position, config.d_model, 10_000.0)
            x = x * math.sqrt(config.d_model) + torch.cat((turn.sin(), turn.cos()), dim=-1).to(x.dtype)
        if config.token_types:
            x = x + self.types(torch.zeros_like(tokens) if token_types is None else token_types)
        return drop(x, config.dropout if self.training else 0.0, key, "embedding", starts_of(places))


def starts_of(places: Places | None, part: int = 0, seq: int = 0) -> tuple[int | Tensor]:
    """Places in the row of part number `part`, of `seq` tokens, of a batch, in the form that `drop` takes."""
    if places is None or places.row is None:
        return (part * seq,)
    return (places.row[part * seq : (part + 1) * seq] if seq else places.row,)


class Block(nn.Module):
    """Pre-norm residual block: (batch seq d_model) -> the same. `layer` is its number in the model. Under sequence
    parallelism x is part number `part` of the sequence, of equal parts."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.dropout, self.layer, self.part = config.dropout, layer, 0
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config, layer)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = MoELayer(config, layer) if config.has_experts(layer) else FeedForward(config)

    def forward(self, x: Tensor, shared: BlockInputs) -> Tensor:
        p, site = self.dropout if self.training else 0.0, f"blocks.{self.layer}"
        starts = starts_of(shared.places, self.part, x.shape[1])
        # No variable holds a branch's result: it would keep the memory while the next branch computes.
        x = x + drop(self.attention(self.attention_norm(x), shared), p, shared.key, f"{site}.attention branch", starts)
        routed = (shared.real, shared.key, shared.places) if isinstance(self.feed_forward, MoELayer) else ()
        y = self.feed_forward(self.feed_forward_norm(x), *routed)
        return x + drop(y, p, shared.key, f"{site}.feed-forward branch", starts)


# Keep only the input of a run of blocks for backward, which runs the blocks again.
recompute = partial(checkpoint, use_reentrant=False)


def run_nested(run: Callable[[range, Tensor], Tensor], span: range, x: Tensor) -> Tensor:
    """Run blocks as two recomputed halves, each again in halves (arXiv:1604.06174). Not a closure in `run_blocks`: a
    closure that calls itself is a reference cycle, which would hold tensors until garbage is collected."""
    if len(span) == 1:
        return run(span, x)
    half, middle = partial(run_nested, run), len(span) // 2
    return recompute(half, span[middle:], recompute(half, span[:middle], x))


class TransformerLM(nn.Module):
    """The language model: `forward` is `run_blocks`, then `finish` or `losses`."""

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        # First on the meta device: torch's layers would otherwise draw weights that are drawn again below.
        with torch.device("meta"):
            self.embedding = Embedding(config)
            self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
            self.final_norm = make_norm(config)
            self.bert_heads = BertHeads(config) if config.bert_heads else None
            self.head = None if config.tied_head else nn.Linear(config.d_model, config.vocab_size, bias=False)
            self.tied_head = TiedHead() if config.tied_head else None
            self.token_loss = TokenLoss()
        self.fused_loss = config.kernels == "triton" and self.bert_heads is None
        self.parts: PartsOf | None = None  # places of this rank's tokens, if it has some of a sequence
        device = torch.device(device) if device is not None else torch.get_default_device()
        if device.type != "meta":  # a meta model gets no values: it is only counted, or split before they are drawn
            self.to_empty(device=device)
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Draw every parameter anew (`initial_weight`); the default seed comes from torch's global generator."""
        seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_weight(name, parameter.shape, seed, parameter.device))

    def initial_weight(self, name: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
        """Draw a parameter's first value, a function of its name and the seed alone (on one kind of device), so that a
        rank can make its part of a model without the rest. Each expert (experts ...) is drawn separately. Weights are
        normal with standard deviation 0.02; 0.02 / sqrt(2 num_layers) for those that write to the residual stream; and
        1 / sqrt(d_model) for an embedding with sinusoidal positions. Gains are one, biases zero."""
        value, deviation = torch.empty(shape, device=device), 0.02
        if name.endswith("bias"):
            return value.zero_()
        if "norm." in name:
            return value.fill_(1.0)
        if name == "embedding.tokens.weight" and self.config.positions == "sinusoidal":
            deviation = self.config.d_model**-0.5
        elif name.endswith(("attention.out.weight", "down.weight")):
            deviation = 0.02 / math.sqrt(2 * self.config.num_layers)
        layer, of_experts, _ = name.partition(".experts.")
        parts = {"": value}
        if of_experts:
            first: int = self.get_submodule(f"{layer}.experts").first  # type: ignore[assignment]
            parts = {f" {number}": part for number, part in enumerate(value, first)}
        for number, part in parts.items():
            digest = hashlib.blake2b(f"{seed} {name}{number}".encode(), digest_size=7).digest()
            generator = torch.Generator(value.device).manual_seed(int.from_bytes(digest, "little"))
            part.normal_(std=deviation, generator=generator)
        return value

    def forward(
        self, tokens: Tensor, token_types: Tensor | None = None, padding_mask: Tensor | None = None,
        targets: Tensor | None = None, positions: Tensor | None = None,
    ) -> Tensor | BertOutput:  # fmt: skip
        """Compute logits (batch seq vocab_size) of tokens (batch seq), and with `bert_heads` the sentence pair's; or,
        with targets (batch seq), the mean cross entropy in nats over those that are not IGNORED. token_types (batch
        seq) are BERT's segments (default 0); padding_mask (batch seq) is True at real tokens. positions (batch seq) are
        tokens' places in packed documents, from 0: a token sees earlier ones of its document. Raises UserError for a
        sequence longer than the context, and for a padding mask with flash attention or packed documents."""
        if tokens.dim() != 2:
            raise UserError(f"tokens have shape {tuple(tokens.shape)}; (batch seq) is meant")
        for name, each in (("targets", targets), ("token_types", token_types), ("padding_mask", padding_mask)):
            if each is not None and each.shape != tokens.shape:
                shapes = f"{name}: shape {tuple(each.shape)}, tokens: shape {tuple(tokens.shape)}"
                raise UserError(f"{shapes}; one value per token is meant")
        if token_types is not None and not self.config.token_types:
            raise UserError("token_types were given, but the model has none: its configuration has token_types=0")
        batch = Batch(tokens, targets, None, token_types, padding_mask, positions=positions)
        x = self.run_blocks(batch)
        return self.finish(x) if targets is None else self.losses(x, batch, "mean").tokens

    def run_blocks(
        self, batch: Batch, x: Tensor | None = None, key: Tensor | None = None, span: range | None = None
    ) -> Tensor:
        """Embed the tokens, unless x (batch seq d_model) comes from the block before, and run the blocks of `span`
        (default all). `key` determines random numbers. Backward recomputes what `config.recompute` names."""
        places = find_places(batch, self.parts)
        x = self.embedding(batch.tokens, batch.token_types, key, places) if x is None else x
        shared = block_inputs(self.config, batch, x, key, places)

        def run(span: range, x: Tensor) -> Tensor:
            for number in span:
                x = self.blocks[number](x, shared)
            return x

        span = range(len(self.blocks)) if span is None else span
        again, every = self.config.recompute if torch.is_grad_enabled() else "none", self.config.recompute_every
        if again == "nested":
            return run_nested(run, span, x)
        if again != "segments":
            return run(span, x)
        for start in range(0, len(span), every):
            x = recompute(run, span[start : start + every], x)
        return x

    def finish(self, x: Tensor) -> Tensor | BertOutput:
        """Compute from the last block's x (batch seq d_model) the logits that `forward` returns."""
        logits, pair = self.logits(x)
        logits = self.token_loss.whole(logits)
        return logits if pair is None else BertOutput(logits, pair)

    def losses(self, x: Tensor, batch: Batch, reduction: str = "sum") -> Losses:
        """Compute losses from the last block's x (batch seq d_model): sums, which add up over ranks, or means."""
        assert batch.targets is not None
        if self.fused_loss:  # the kernel never holds all logits
            weight = self.embedding.tokens.weight if self.head is None else self.head.weight
            mean = linear_cross_entropy(self.final_norm(x), weight, batch.targets, IGNORED)
            count = count_targets(batch)
            # Without targets the mean is NaN, but the sum is zero.
            return Losses(mean if reduction == "mean" else torch.where(count > 0, mean * count, torch.zeros_like(mean)))
        logits, pair = self.logits(x)
        tokens = self.token_loss(logits, batch.targets, reduction)
        if pair is None or batch.pair_labels is None:
            return Losses(tokens)
        wide = pair.to(torch.promote_types(pair.dtype, torch.float32))
        return Losses(tokens, F.cross_entropy(wide, batch.pair_labels, reduction=reduction))

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute logits of every token and, with `bert_heads`, of the sentence pair, from x (batch seq d_model)."""
        x, pair, bias = self.final_norm(x), None, None
        if self.bert_heads is not None:
            x, pair = self.bert_heads(x)
            bias = self.bert_heads.bias
        if self.head is not None:
            return self.head(x), pair
        assert self.tied_head is not None
        return self.tied_head(x, self.embedding.tokens.weight, bias), pair


def lm_loss(model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
    """Mean cross entropy in nats of targets for tokens, with positions in packed documents, all (batch seq)."""
    return model(tokens, targets=targets) if positions is None else model(tokens, targets=targets, positions=positions)


def require_transformer(model: nn.Module) -> TransformerLM:
    """Return the model that a strategy splits. Raises UserError for a module of another class."""
    if not isinstance(model, TransformerLM):
        raise UserError(f"only a TransformerLM can be split, and this is a {type(model).__name__}; give the bare model")
    return model
