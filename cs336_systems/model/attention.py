"""Self-attention, its mask and rotary positions. Shapes are in einops order."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.data.corpus import Batch
from cs336_systems.errors import UserError
from cs336_systems.model.blockwise import BlockKernel, BlockwiseAttention, PartsOf, Visible, block_attention
from cs336_systems.model.dropout import drop
from cs336_systems.presets import ModelConfig
from kernels.flash_attention import FlashAttention2


class Places(NamedTuple):
    """Places of a batch's tokens: `row` (seq,) is the index in the row, None if this process has whole rows; `position`
    (seq,) or (batch seq) is the index in the document; `length` is that of a whole row."""

    row: Tensor | None
    position: Tensor
    length: int


class BlockInputs(NamedTuple):
    """Inputs that all blocks share; None for what the model does not use."""

    rotary: Tensor | None = None  # (2 ... seq head_dim/2), cosines and sines of the angles, in float32 at least
    bias: Tensor | None = None  # an `attention_bias`
    real: Tensor | None = None  # (batch seq), False at padding
    key: Tensor | None = None  # determines the random numbers, see dropout.py
    visible: Visible | None = None  # in packed documents and split sequences: which tokens see which
    places: Places | None = None


def find_places(batch: Batch, parts: PartsOf | None) -> Places:
    """Find the places of a batch's tokens; `parts` gives those of a rank that has a part of each sequence. Raises
    UserError for positions of another shape than whole rows, and for rows that do not begin at position 0."""
    length, device = batch.tokens.shape[1], batch.tokens.device
    mine, length = ((range(length),), length) if parts is None else parts(length)
    index = torch.cat([torch.arange(each.start, each.stop, device=device) for each in mine])
    if (positions := batch.positions) is not None:
        shape, meant = tuple(positions.shape), (len(batch.tokens), length)
        if shape != meant or positions.is_floating_point():
            found = f"positions are {positions.dtype} of shape {shape}"
            raise UserError(f"{found}: whole numbers of shape {meant} are meant")
        positions = positions.long()
        if (positions * (positions - F.pad(positions, (1, 0), value=-1)[:, :-1] - 1)).any():
            raise UserError("a row's positions begin at 0 and count up, again from 0 in each document, also a cut one")
    return Places(None if parts is None else index, index if positions is None else positions[:, index], length)


def angles(positions: Tensor, dim: int, base: float) -> Tensor:
    """Angles (... dim/2): positions (...) times base^(-2i/dim), in float64: float32 loses digits at large positions."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    return positions.double()[..., None] / base**exponents


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) of x (... seq head_dim). Coordinate i is paired with i + head_dim/2,
    as in GPT-NeoX and Llama; the paper pairs neighbours, which is the same up to a permutation of the rows of the query
    and key weights."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attention_bias(config: ModelConfig, seq: int, padding_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Bias of the scores, broadcastable to (batch heads seq seq): 0 at visible keys, else the lowest finite number
    (minus infinity would turn a row without any visible key into NaN); None if every key is visible."""
    lowest, bias = torch.finfo(like.dtype).min, None
    if config.causal:
        hidden = torch.ones(seq, seq, dtype=torch.bool, device=like.device).triu(1)
        bias = like.new_zeros(seq, seq).masked_fill(hidden, lowest)
    if padding_mask is not None:
        hidden = rearrange(~padding_mask, "batch key -> batch 1 1 key")
        bias = (like.new_zeros(1) if bias is None else bias).masked_fill(hidden, lowest)
    return bias


def block_inputs(config: ModelConfig, batch: Batch, x: Tensor, key: Tensor | None, places: Places) -> BlockInputs:
    """Make the inputs that all blocks share, for a batch whose hidden states have the dtype and device of x."""
    mask, rotary, bias, visible = batch.padding_mask, None, None, None
    if config.attention == "flash" and mask is not None:
        raise UserError("attention flash knows no padding mask; use sdpa")
    if mask is not None and mask.dtype != torch.bool:
        raise UserError(f"the padding mask is {mask.dtype}: it must be torch.bool, True at real tokens")
    if config.positions == "rotary":
        turn = angles(places.position, config.head_dim, config.rotary_base)
        turn = turn if turn.dim() == 2 else turn[:, None]  # of packed rows: (batch 1 seq head_dim/2), for all heads
        rotary = torch.stack((turn.cos(), turn.sin())).to(torch.promote_types(x.dtype, torch.float32))
    if batch.positions is not None or places.row is not None:
        if not config.causal or mask is not None:
            raise UserError("packed documents and split sequences are for causal attention without padding")
        visible = Visible(batch.positions)
    elif config.attention == "naive" or mask is not None:  # fused attention is faster with is_causal than with a bias
        bias = attention_bias(config, batch.tokens.shape[1], mask, x)
    return BlockInputs(rotary, bias, mask, key, visible, places)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim) + bias) v with all scores in memory: (batch heads seq head_dim) -> the
    same; `dropout` is applied to the weights (batch heads query key)."""
    scores = einsum(q, k, "batch heads query dim, batch heads key dim -> batch heads query key")
    scores = scores / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    # The sum of many small weights needs float32, whatever the precision of the products.
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    weights = weights if dropout is None else dropout(weights)
    return einsum(weights, v, "batch heads query key, batch heads key dim -> batch heads query dim")


class SelfAttention(nn.Module):
    """Multi-head self-attention of a layer, grouped-query if num_kv_heads says so: (batch seq d_model) -> the same.
    Under tensor parallelism its weights have the rows of some heads only, of which the first is `first_head`.
    `blockwise` is the attention of packed rows; context parallelism replaces it by attention across ranks."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.layer, self.first_head = config, layer, 0
        self.blockwise: BlockwiseAttention = block_attention
        kv_width = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.key = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.value = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, shared: BlockInputs) -> Tensor:
        config = self.config
        q, k, v = (
            rearrange(project(x), "batch seq (heads dim) -> batch heads seq dim", dim=config.head_dim)
            for project in (self.query, self.key, self.value)
        )
        if shared.rotary is not None:
            q, k = rotate(q, shared.rotary), rotate(k, shared.rotary)
        attend = self.attend if shared.visible is None else self.attend_in_blocks
        if config.kv_heads != config.num_heads and shared.visible is None:
            group = config.num_heads // config.kv_heads
            k, v = (repeat(t, "batch heads seq dim -> batch (heads group) seq dim", group=group) for t in (k, v))
        again = config.recompute == "attention" and torch.is_grad_enabled()  # selective recompute
        y = checkpoint(attend, q, k, v, shared, use_reentrant=False) if again else attend(q, k, v, shared)
        return self.out(rearrange(y, "batch heads seq dim -> batch seq (heads dim)"))

    def attend_in_blocks(self, q: Tensor, k: Tensor, v: Tensor, shared: BlockInputs) -> Tensor:
        """Attention of packed rows or of a part of a sequence: (batch heads seq head_dim), k and v with kv_heads."""
        config, site = self.config, f"blocks.{self.layer}.attention"
        dropout = config.dropout if self.training and config.attention != "flash" else 0.0
        assert shared.visible is not None
        kernel = BlockKernel(config.attention, dropout, shared.key, site, self.first_head)
        return self.blockwise(q, k, v, shared.visible, kernel)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, shared: BlockInputs) -> Tensor:
        """Attention without its linear layers: (batch heads seq head_dim) -> the same."""
        bias, key = shared.bias, shared.key
        dropout = self.config.dropout if self.training else 0.0
        if self.config.attention == "flash":
            return FlashAttention2.apply(q, k, v, self.config.causal)
        # torch's fused attention draws the dropout mask itself, so it cannot be used with a key.
        if self.config.attention == "sdpa" and (key is None or not dropout):
            causal = self.config.causal and bias is None
            if bias is not None and bias.dtype != q.dtype:
                # Autocast would round float32's lowest number to minus infinity in half precision.
                bias = bias.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
            if q.is_meta and not dropout:  # on the meta device torch would not choose its fused attention
                fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return fused(q, k, v, dropout, causal, attn_mask=bias)[0]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal)
        if self.config.attention == "sdpa" and bias is None:
            bias = attention_bias(self.config, q.shape[-2], None, q)
        site = f"blocks.{self.layer}.attention"
        return naive_attention(q, k, v, bias, partial(drop, p=dropout, key=key, site=site, starts=(self.first_head,)))
