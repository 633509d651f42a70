"""Context parallelism: split a sequence over ranks and make attention work across them, without changes to the model.

All layers but attention treat each token separately, so each rank runs them on its own tokens. In attention a token
sees all earlier ones, also on other ranks. Queries and keys (batch heads seq head_dim) meet in one of three ways:

    ring      each rank passes keys and values on to the next rank, step by step  (Ring Attention, arXiv:2310.01889)
    gather    every rank gathers all keys and values                              (Llama 3, arXiv:2407.21783, 3.3.2)
    ulysses   all-to-all: a rank gets all tokens of some heads, and gives back    (DeepSpeed Ulysses, arXiv:2309.14509)

The sequence is cut into 2 N parts, and rank r has parts r and 2 N - 1 - r (the zigzag order). With a causal mask early
tokens see few keys and late ones many, so this gives every rank the same number of scores to compute. With N = 2:

    places    0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15
    rank         0         1          1            0

For all other layers the group's ranks are data-parallel ranks, with different tokens, whose gradients are added up.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from cs336_systems.comm import Exchange, Group, default_group, pairs, receive, send
from cs336_systems.data.corpus import Batch
from cs336_systems.errors import UserError
from cs336_systems.layout import check_context
from cs336_systems.model.attention import SelfAttention
from cs336_systems.model.blockwise import BlockAttention, BlockGradients, BlockKernel, BlockSum, Parts, Visible
from cs336_systems.model.transformer import TransformerLM, require_transformer
from cs336_systems.presets import ContextType
from kernels.checks import once_differentiable


def parts_of(rank: int, ranks: int, seq: int) -> Parts:
    """Places of a rank's tokens in a sequence; one rank has all. Raises UserError unless 2 x ranks divides `seq`."""
    if ranks == 1:
        return (range(seq),)
    size, rest = divmod(seq, 2 * ranks)
    if rest:
        raise UserError(f"{seq} tokens do not divide into 2 x cp {ranks} = {2 * ranks} parts: pad or cut the sequence")
    return tuple(range(part * size, (part + 1) * size) for part in (rank, 2 * ranks - 1 - rank))


def places_of(rank: int, ranks: int, seq: int) -> Tensor:
    """Places of a rank's tokens as indices (seq/ranks,)."""
    return torch.cat([torch.arange(part.start, part.stop) for part in parts_of(rank, ranks, seq)])


def split_sequence(batch: Batch, group: Group) -> Batch:
    """Take this rank's tokens and targets of a batch: (batch seq) -> (batch seq/ranks). Positions stay whole, because
    attention needs to know where all documents begin. Raises UserError for a length that does not divide."""
    if group.size() == 1:
        return batch
    mine = places_of(group.rank(), group.size(), batch.tokens.shape[1]).to(batch.tokens.device)
    targets = None if batch.targets is None else batch.targets[:, mine]
    return batch._replace(tokens=batch.tokens[:, mine], targets=targets)


def join_sequence(x: Tensor, group: Group) -> Tensor:
    """Gather the ranks' parts (batch seq/ranks ...) to the whole sequence (batch seq ...) on every rank."""
    whole, ranks = pairs.gather(x, 1, group, "sequence"), group.size()
    order = torch.cat([places_of(rank, ranks, whole.shape[1]) for rank in range(ranks)])
    return whole if ranks == 1 else whole[:, order.argsort().to(x.device)]


def attention_work(ranks: int, seq: int, positions: Tensor | None = None) -> list[int]:
    """Number of scores that each rank computes for one head of a layer; `positions` (batch seq) of packed documents."""
    visible, rows = Visible(positions), 1 if positions is None else len(positions)
    parts = [parts_of(rank, ranks, seq) for rank in range(ranks)]
    return [sum(at.area(rows) for keys in parts for at in visible.rectangles(own, keys)) for own in parts]


def context_parallel(model: TransformerLM, group: Group | None = None, kind: ContextType = "ring") -> TransformerLM:
    """Make a model, or that of a pipeline's stage, work on this rank's tokens, in place. Its inputs must come from
    `split_sequence`: a whole row would be treated as a part of a longer one. Losses are of this rank's targets. A group
    of one changes nothing. Raises UserError for a model that cannot be split, such as an encoder, and unknown kinds."""
    require_transformer(model)
    if (group := default_group(group)).size() == 1:
        return model
    ways: dict[str, Callable[..., Tensor]] = {"ring": ring, "gather": gather, "ulysses": ulysses}
    if kind not in ways:
        raise UserError(f"no context parallelism is called {kind!r}: choose from {', '.join(ways)}")
    attentions, ranks = [module for module in model.modules() if isinstance(module, SelfAttention)], group.size()
    here = attentions[0].query.weight.shape[0] // model.config.head_dim  # tensor parallelism has split them already
    check_context(model.config, ranks, kind, model.config.num_heads // here)
    model.parts = lambda seq: (parts_of(group.rank(), ranks, seq * ranks), seq * ranks)
    for attention in attentions:
        attention.blockwise = partial(ways[kind], group)
    return model


def gather(group: Group, q: Tensor, k: Tensor, v: Tensor, visible: Visible, kernel: BlockKernel) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. Every rank gathers keys and values, and keeps them for
    backward, which adds up their gradients on the rank that they came from."""
    keys, values = pairs.gather_sequence(torch.stack((k, v)), 3, group, "keys and values").unbind()
    parts = _all_parts(q, group)
    everything = tuple(part for each in parts for part in each)
    rectangles = visible.rectangles(parts[group.rank()], everything)
    return BlockAttention.apply(q, keys, values, rectangles, kernel)


def ulysses(group: Group, q: Tensor, k: Tensor, v: Tensor, visible: Visible, kernel: BlockKernel) -> Tensor:
    """Attention of this rank's heads over the whole sequence. If keys have fewer heads than there are ranks, each of
    their heads is sent to all ranks that need it."""
    ranks = group.size()

    def exchange(x: Tensor, label: str) -> Tensor:
        """Send x[r] to rank r: (ranks ...) -> (ranks ...)."""
        return Exchange(x.contiguous(), [1] * ranks, [1] * ranks, group, label).wait()

    heads, seq = q.shape[1] // ranks, q.shape[2] * ranks
    if q.shape[1] % ranks:  # tensor parallelism has split them since
        raise UserError(f"{q.shape[1]} heads on each rank do not divide over cp {ranks}: use ring or gather")
    copies = next(n for n in range(1, ranks + 1) if k.shape[1] * n % ranks == 0)
    mine = [q, *(each.repeat_interleave(copies, 1) for each in (k, v))]
    split = [rearrange(t, "batch (ranks heads) seq dim -> ranks batch heads seq dim", ranks=ranks) for t in mine]
    whole = exchange(torch.cat(split, dim=2), "heads")
    whole = rearrange(whole, "ranks batch heads seq dim -> batch heads (ranks seq) dim")
    order = torch.cat([places_of(rank, ranks, seq) for rank in range(ranks)]).to(q.device)
    whole = whole.index_select(2, order.argsort())
    rectangles = visible.rectangles((range(seq),), (range(seq),))
    kernel = replace(kernel, first_head=kernel.first_head + group.rank() * heads)
    y: Tensor = BlockAttention.apply(*whole.split((heads, *2 * [split[1].shape[2]]), 1), rectangles, kernel)
    y = rearrange(y.index_select(2, order), "batch heads (ranks seq) dim -> ranks batch heads seq dim", ranks=ranks)
    return rearrange(exchange(y, "heads back"), "ranks batch heads seq dim -> batch (ranks heads) seq dim")


def ring(group: Group, q: Tensor, k: Tensor, v: Tensor, visible: Visible, kernel: BlockKernel) -> Tensor:
    """Attention to each rank's keys in turn: first this rank's own, then those of rank - 1, then those of rank - 2,
    which rank - 1 passes on, and so on. While a rank computes with some keys, it receives the next."""
    return _Ring.apply(q, k, v, visible, kernel, group)


class _Ring(torch.autograd.Function):
    """Ring attention and its backward. Backward passes the keys around once more, and behind them their gradients, to
    which each rank adds its term, until they are back at the keys' own rank. A rank keeps only its q, k, v, O and L."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, kernel: BlockKernel, group: Group
    ) -> Tensor:
        parts, total, me = _all_parts(q, group), BlockSum(q, kernel), group.rank()
        kv = torch.stack((k, v))
        for step in range(group.size()):
            passing = _pass_on(kv, group, f"keys and values {step}") if step + 1 < group.size() else None
            total.add(kv, visible.rectangles(parts[me], parts[me - step]))
            kv = passing() if passing else kv
        output = total.output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, total.log_sum_exp)
        ctx.visible, ctx.kernel, ctx.group = visible, kernel, group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sum_exp = ctx.saved_tensors
        group, parts, me = ctx.group, _all_parts(q, ctx.group), ctx.group.rank()
        gradients = BlockGradients(grad, q, output, log_sum_exp, ctx.kernel)
        kv, arriving = torch.stack((k, v)), None
        for step in range(group.size()):
            passing = _pass_on(kv, group, f"keys and values {step}, again") if step + 1 < group.size() else None
            of_kv = torch.zeros_like(kv, dtype=log_sum_exp.dtype)
            gradients.add(kv, ctx.visible.rectangles(parts[me], parts[me - step]), of_kv)
            of_kv = of_kv + arriving() if arriving else of_kv
            arriving = _pass_on(of_kv, group, f"gradient of keys and values {step}")
            kv = passing() if passing else kv
        assert arriving is not None
        return gradients.of_q.to(q.dtype), *arriving().to(k.dtype), None, None, None


def _pass_on(tensor: Tensor, group: Group, label: str) -> Callable[[], Tensor]:
    """Send a tensor to the next rank of a ring; returns a function that waits for the one from the rank before."""
    ranks, me, inbox = group.size(), group.rank(), torch.empty_like(tensor)
    there = partial(send, tensor, (me + 1) % ranks, group, label)
    here = partial(receive, inbox, (me - 1) % ranks, group, label)
    # NCCL starts a message when both ranks have launched it: if all sent first, none would receive.
    under_way = [each() for each in ((here, there) if me % 2 else (there, here))]

    def wait() -> Tensor:
        for work in under_way:
            work.wait()
        return inbox

    return wait


def _all_parts(q: Tensor, group: Group) -> list[Parts]:
    """Places of every rank's tokens, from this rank's q (batch heads seq/ranks head_dim)."""
    ranks = group.size()
    return [parts_of(rank, ranks, q.shape[2] * ranks) for rank in range(ranks)]
