"""A second transformer, written as the papers write it: one sequence, one head and one formula at a time.

It shares no code with the library and takes the library's weights by name.
"""

import math

import torch
from torch import Tensor


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def norm(x: Tensor, weights: dict[str, Tensor], name: str, kind: str, eps: float) -> Tensor:
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def gelu(x: Tensor, kind: str) -> Tensor:
    if kind == "gelu-tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def rotary(x: Tensor, base: float) -> Tensor:
    """(seq, dim): each pair (i, i + dim/2) as a complex number, turned by position * base^(-2i/dim)."""
    half = x.shape[1] // 2
    rates = torch.tensor([base ** (-2 * i / x.shape[1]) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(len(x), half, dtype=torch.float64), torch.arange(len(x))[:, None] * rates)
    turned = torch.complex(x[:, :half], x[:, half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=1)


def head(q: Tensor, k: Tensor, v: Tensor, causal: bool, real: Tensor) -> Tensor:
    """One attention head over (seq, dim); `real` (seq,) is False at padding."""
    rows = []
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if real[j] and (j <= i or not causal)]
        weight = torch.exp(torch.stack([q[i] @ k[j] for j in seen]) / math.sqrt(q.shape[1]))
        rows.append(sum(weight[n] * v[j] for n, j in enumerate(seen)) / weight.sum())
    return torch.stack(rows)


def block(x: Tensor, w: dict[str, Tensor], name: str, config, real: Tensor) -> Tensor:
    h = norm(x, w, f"{name}.attention_norm", config.norm, config.norm_eps)
    q, k, v = (linear(h, w, f"{name}.attention.{part}") for part in ("query", "key", "value"))
    dim, heads = config.head_dim, []
    for i in range(config.num_heads):
        j = i * config.kv_heads // config.num_heads
        qi, kj, vj = q[:, i * dim : (i + 1) * dim], k[:, j * dim : (j + 1) * dim], v[:, j * dim : (j + 1) * dim]
        if config.positions == "rotary":
            qi, kj = rotary(qi, config.rotary_base), rotary(kj, config.rotary_base)
        heads.append(head(qi, kj, vj, config.causal, real))
    x = x + linear(torch.cat(heads, dim=1), w, f"{name}.attention.out")
    h = norm(x, w, f"{name}.feed_forward_norm", config.norm, config.norm_eps)
    up = linear(h, w, f"{name}.feed_forward.up")
    if config.feed_forward == "swiglu":
        gate = linear(h, w, f"{name}.feed_forward.gate")
        up = gate / (1 + torch.exp(-gate)) * up
    else:
        up = gelu(up, config.feed_forward)
    return x + linear(up, w, f"{name}.feed_forward.down")


def one_sequence(
    w: dict[str, Tensor], config, tokens: Tensor, types: Tensor, real: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Logits (seq, vocab) and, for BERT, of the pair (2,)."""
    embedding = w["embedding.tokens.weight"]
    x = embedding[tokens]
    if config.positions == "learned":
        x = x + w["embedding.positions.weight"][: len(tokens)]
    if config.positions == "sinusoidal":
        rates = [10_000 ** (-2 * i / config.d_model) for i in range(config.d_model // 2)]
        waves = [[math.sin(p * r) for r in rates] + [math.cos(p * r) for r in rates] for p in range(len(tokens))]
        x = x * math.sqrt(config.d_model) + torch.tensor(waves, dtype=torch.float64)
    if config.token_types:
        x = x + w["embedding.types.weight"][types]
    for i in range(config.num_layers):
        x = block(x, w, f"blocks.{i}", config, real)
    x = norm(x, w, "final_norm", config.norm, config.norm_eps)
    if config.bert_heads:
        h = gelu(linear(x, w, "bert_heads.transform"), "gelu")
        h = norm(h, w, "bert_heads.norm", "layernorm", config.norm_eps)
        pair = linear(torch.tanh(linear(x[0], w, "bert_heads.pooler")), w, "bert_heads.pair")
        return h @ embedding.T + w["bert_heads.bias"], pair
    return x @ (embedding if config.tied_head else w["head.weight"]).T, None
