"""Attention by blocks, for rows that are packed from documents and for sequences that are split over ranks.

A segment is a run of neighbouring tokens of one document. A segment sees all of the document's earlier segments, and
itself up to the diagonal. So the visible pairs of queries and keys form a list of rectangles, which plain attention
kernels compute one at a time, without a mask of all pairs of tokens:

    keys      a a a b b c c c
    queries a *
            a # *                 documents a, b and c in one row;  * the diagonal, # all keys
            a # # *
            b       *
            b       # *           if a's last token is on another rank it is a segment of its own, which sees
            c           *         its own diagonal and the rectangle of the two before
            c           # *
            c           # # *

If a query has several rectangles, their outputs O and log-sum-exps L are merged as in tiled attention
(kernels/tiled_attention.py; Liu et al., Ring Attention, arXiv:2310.01889):

    L = log(exp(L_1) + exp(L_2)),    O = exp(L_1 - L) O_1 + exp(L_2 - L) O_2

Backward needs only the merged L and O: with P = exp(S - L) each rectangle adds its terms of dQ, dK and dV.
Shapes are in einops order; places are indices in the row.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cs336_systems.errors import UserError
from cs336_systems.model.dropout import drop
from kernels.checks import once_differentiable
from kernels.flash_attention import flash_attention, flash_attention_backward

Parts = tuple[range, ...]  # places of a rank's tokens, in the order in which it has them
PartsOf = Callable[[int], tuple[Parts, int]]  # number of its tokens -> their places, and the length of the row


class Segment(NamedTuple):
    """Neighbouring tokens of one document, as a slice of the rank's tokens."""

    span: slice
    place: int  # of the first of them
    document: int  # place of the document's first token


class Rectangle(NamedTuple):
    """Queries that see some keys: slices of the batch's rows and of two ranks' tokens. If `causal`, both slices are the
    same tokens, which are visible up to the diagonal. `query` and `key` are the places of the first query and key."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    query: int
    key: int

    def area(self, rows: int) -> int:
        """Number of scores to compute, for a batch of `rows` rows."""
        queries, keys = (part.stop - part.start for part in (self.queries, self.keys))
        return len(range(rows)[self.rows]) * (queries * (queries + 1) // 2 if self.causal else queries * keys)


class Visible:
    """Visible pairs of a batch's tokens, from each token's position in its document (batch seq), or None if each row is
    one document. Waits once for the device."""

    def __init__(self, positions: Tensor | None = None) -> None:
        self.documents: list[tuple[slice, list[int]]] = [(slice(None), [0])]  # by rows: first places of documents
        if positions is not None:
            starts = [[place for place, position in enumerate(row) if not position] for row in positions.tolist()]
            self.documents = [(slice(row, row + 1), each) for row, each in enumerate(starts)]
        self.known: dict[tuple[Parts, Parts], list[Rectangle]] = {}

    def rectangles(self, queries: Parts, keys: Parts) -> list[Rectangle]:
        """Rectangles of one rank's queries and the keys of the same rank or another."""
        if (queries, keys) not in self.known:
            found = self.known[queries, keys] = []
            for rows, starts in self.documents:
                of_document: dict[int, list[Segment]] = {}
                for key in segments(starts, keys):
                    of_document.setdefault(key.document, []).append(key)
                found += [
                    Rectangle(rows, query.span, key.span, key.place == query.place, query.place, key.place)
                    for query in segments(starts, queries)
                    for key in of_document.get(query.document, ())
                    if key.place <= query.place
                ]
        return self.known[queries, keys]


def segments(starts: Sequence[int], parts: Parts) -> Iterator[Segment]:
    """Cut a rank's tokens where documents begin: at the places `starts`, ascending, of which the first is 0."""
    index = 0
    for part in filter(len, parts):
        within = starts[bisect_right(starts, part.start) : bisect_left(starts, part.stop)]
        for first, last in pairwise([part.start, *within, part.stop]):
            end = index + last - first
            yield Segment(slice(index, end), first, starts[bisect_right(starts, first) - 1])
            index = end


@dataclass(frozen=True)
class BlockKernel:
    """Attention of one rectangle and its gradients, by `kind`. naive: plain operations, which dropout needs in any
    kind; sdpa: torch's fused form on CPUs, but flash on GPUs, where torch's has no public log-sum-exp; flash:
    FlashAttention-2. Random numbers of dropout depend on the place, by `key` (batch,), `site` and the number of the
    first head. Raises UserError for dropout without a key."""

    kind: Literal["naive", "sdpa", "flash"] = "naive"
    dropout: float = 0.0
    key: Tensor | None = None
    site: str = ""
    first_head: int = 0

    def __post_init__(self) -> None:
        if self.dropout and self.key is None:
            what = "dropout of packed documents and under context parallelism draws by place"
            raise UserError(f"{what}: pass the model a dropout key, or train with dropout 0")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Rectangle) -> tuple[Tensor, Tensor]:
        """Compute O (batch heads queries head_dim) and L (batch heads queries) of a rectangle's q, k and v."""
        if self.kind == "naive" or self.dropout:
            scores = _scores(q, k, at.causal)
            log_sum_exp = scores.logsumexp(-1)
            weights = self._drop((scores - log_sum_exp[..., None]).exp(), at)
            return weights.to(v.dtype) @ v, log_sum_exp
        if self.kind == "sdpa" and q.device.type != "cuda":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_dense(q, k, v), 0.0, at.causal)
        return flash_attention(q, k, v, at.causal)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum_exp: Tensor, at: Rectangle
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the rectangle's terms of dQ, dK and dV, from O and L over all keys."""
        given = grad, q, k, v, output, log_sum_exp
        if self.kind == "naive" or self.dropout:
            weights = (_scores(q, k, at.causal) - log_sum_exp[..., None]).exp()
            grad_v = self._drop(weights, at).to(grad.dtype).mT @ grad
            row_dot = (grad * output).sum(-1, keepdim=True, dtype=weights.dtype)
            grad_scores = weights * (self._drop((grad @ v.mT).to(weights.dtype), at) - row_dot) / math.sqrt(q.shape[-1])
            return grad_scores.to(k.dtype) @ k, grad_scores.to(q.dtype).mT @ q, grad_v
        if self.kind == "sdpa" and q.device.type != "cuda":
            fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return fused(*_dense(*given), 0.0, at.causal)
        return flash_attention_backward(*given, at.causal, True, True)

    def _drop(self, weights: Tensor, at: Rectangle) -> Tensor:
        """Dropout of weights (batch heads queries keys)."""
        key = None if self.key is None else self.key[at.rows]
        return drop(weights, self.dropout, key, self.site, (self.first_head, at.query, at.key))


def _dense(*tensors: Tensor) -> list[Tensor]:
    """Copy those whose last dim has another stride than the 1 that torch's fused kernel assumes: rotated heads of 2."""
    return [each if each.stride(-1) == 1 else each.contiguous() for each in tensors]


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Compute Q K^T / sqrt(head_dim) (batch heads queries keys) in float32 at least, minus infinity if not visible."""
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[-1])
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return scores


class BlockSum:
    """Output (batch heads queries head_dim) and log-sum-exp (batch heads queries) over the keys added so far, in
    float32 at least. Keys and values (batch kv_heads keys head_dim) may have fewer heads (grouped queries)."""

    def __init__(self, q: Tensor, kernel: BlockKernel) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.q, self.kernel = q, kernel
        self.output = torch.zeros_like(q, dtype=wide)
        self.log_sum_exp = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)

    def add(self, kv: Tensor | tuple[Tensor, Tensor], rectangles: Sequence[Rectangle]) -> None:
        """Add keys and values of some rectangles."""
        for at in rectangles:
            block = at.rows, slice(None), at.queries
            k, v = _of_heads(self.q, kv, at)
            o, log_sum_exp = self.kernel.forward(self.q[block], k, v, at)
            before = self.log_sum_exp[block]
            total = torch.logaddexp(before, log_sum_exp.to(before.dtype))
            kept, added = ((each - total).exp()[..., None] for each in (before, log_sum_exp))
            self.output[block] = self.output[block] * kept + o * added
            self.log_sum_exp[block] = total


class BlockGradients:
    """Gradients of `BlockSum`, added up over rectangles, in float32 at least; `of_q` is that of all queries."""

    def __init__(self, grad: Tensor, q: Tensor, output: Tensor, log_sum_exp: Tensor, kernel: BlockKernel) -> None:
        self.grad, self.q, self.output, self.log_sum_exp, self.kernel = grad, q, output, log_sum_exp, kernel
        self.of_q = torch.zeros_like(q, dtype=log_sum_exp.dtype)

    def add(self, kv: Tensor | tuple[Tensor, Tensor], rectangles: Sequence[Rectangle], of_kv: Tensor) -> None:
        """Add gradients: of keys and values to of_kv (2 batch kv_heads keys head_dim), of queries to `of_q`."""
        for at in rectangles:
            block = at.rows, slice(None), at.queries
            grad, q, output, log_sum_exp = (t[block] for t in (self.grad, self.q, self.output, self.log_sum_exp))
            k, v = _of_heads(self.q, kv, at)
            of_q, *rest = self.kernel.backward(grad, q, k, v, output, log_sum_exp, at)
            self.of_q[block] += of_q
            for total, part in zip(of_kv, rest, strict=True):
                total[at.rows, :, at.keys] += part.unflatten(1, (total.shape[1], -1)).sum(2)


def _of_heads(q: Tensor, kv: Tensor | tuple[Tensor, Tensor], at: Rectangle) -> list[Tensor]:
    """Take a rectangle's keys and values, repeated for every head of the queries."""
    return [each[at.rows, :, at.keys].repeat_interleave(q.shape[1] // each.shape[1], 1) for each in kv]


class BlockAttention(torch.autograd.Function):
    """Attention over the rectangles of q (batch heads queries head_dim), k and v (batch kv_heads keys head_dim) ->
    (batch heads queries head_dim). Keeps q, k, v, O and L for backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rectangles: Sequence[Rectangle], kernel: BlockKernel
    ) -> Tensor:
        total = BlockSum(q, kernel)
        total.add((k, v), rectangles)
        output = total.output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, total.log_sum_exp)
        ctx.rectangles, ctx.kernel = rectangles, kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sum_exp = ctx.saved_tensors
        gradients = BlockGradients(grad, q, output, log_sum_exp, ctx.kernel)
        of_kv = torch.zeros((2, *k.shape), dtype=log_sum_exp.dtype, device=k.device)
        gradients.add((k, v), ctx.rectangles, of_kv)
        return gradients.of_q.to(q.dtype), *of_kv.to(k.dtype), None, None


BlockwiseAttention = Callable[[Tensor, Tensor, Tensor, Visible, BlockKernel], Tensor]


def block_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, kernel: BlockKernel) -> Tensor:
    """Attention of whole rows in one process (see `BlockAttention`)."""
    whole = (range(q.shape[2]),)
    return BlockAttention.apply(q, k, v, visible.rectangles(whole, whole), kernel)
