"""Routing: the experts that a token is sent to, and the slot that it gets there, by one stable sort.

Each token chooses one or two experts. An expert has a number of slots, its capacity, and drops tokens that come when
these are taken. GShard (arXiv:2006.16668, algorithm 1; `one_hot.py`) computes this with one-hot tensors of tokens x
experts x slots. Here all first choices in the order of tokens, and then all second choices, are sorted by expert. The
sort is stable, so the place of a choice among those of its expert is GShard's slot number: first choices before second
ones, earlier tokens before later ones. Choices with `slot < capacity` are kept; dropless routing keeps all.

    choices, choice-major      2 0 2 1 | 0 2 0 0         tokens 0 1 2 3, first choices | second choices
    sorted by expert           0 0 0 0   1   2 2 2       of tokens 1 0 2 3, 3, 0 2 1
    slot                       0 1 2 3   0   0 1 2       with two slots, the second choices of 2 3 and of 1 are dropped
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cs336_systems.model.attention import Places
from cs336_systems.model.dropout import keyed_uniform
from cs336_systems.presets import Mixture

Average = Callable[[Tensor], Tensor]  # mean of a tensor over the ranks that compute one balancing loss together


class ExpertLoad(NamedTuple):
    """Numbers of choices in a group of tokens, without gradients."""

    wanted: Tensor  # (top_k experts): how often each expert is first and second choice, before any was dropped
    kept: Tensor  # (top_k,): choices that found a slot


class Routing(NamedTuple):
    """Kept choices of a group of tokens, one row each, ordered by expert and within an expert by slot."""

    tokens: Tensor  # (rows,) int64: each row's token
    weights: Tensor  # (rows,): factor of the expert's output
    counts: Tensor  # (experts,) int64: rows of each expert
    slots: Tensor  # (rows,) int64: its place among the rows of its expert
    balance: Tensor  # the balancing loss, a scalar: 1 if all experts are equally likely
    load: ExpertLoad


def draw_noise(
    mixture: Mixture, like: Tensor, shape: tuple[int, ...], key: Tensor | None, site: str, places: Places | None = None
) -> Tensor:
    """Draw random numbers in (0, 1) for the second choices of `shape` (batch seq) tokens with logits `like` (tokens
    experts): (tokens experts) to sample them, (tokens,) to keep them at random. With a key they depend on the place in
    the run, else on torch's generator. In float32 at least: bfloat16 would round one in 512 to 1."""
    wide = torch.promote_types(like.dtype, torch.float32)
    shape = (*shape, like.shape[-1]) if mixture.second_policy == "sampling" else shape
    if key is None:
        noise = torch.rand(shape, device=like.device, dtype=wide).clamp_(min=torch.finfo(wide).tiny)
    else:
        row = None if places is None else places.row
        whole = shape if places is None or row is None else (shape[0], places.length, *shape[2:])
        noise = keyed_uniform(whole, key, site, like.device).to(wide)
        noise = noise if row is None else noise[:, row]
    return noise.flatten(0, 1)


def choose(logits: Tensor, gates: Tensor, mixture: Mixture, noise: Tensor | None) -> Tensor:
    """Choose the experts of every token: logits, and gates, their softmax, (tokens experts) -> (top_k tokens). As in
    fairseq, the first has the largest probability and the second the largest logit of the others; ties go to the lower
    number. With noise the second is a sample of the router's distribution without the first (Gumbel's trick)."""
    first = gates.argmax(dim=-1)
    if mixture.top_k == 1:
        return first[None]
    if noise is not None and mixture.second_policy == "sampling":
        logits = logits - noise.log().neg().log()
    return torch.stack((first, logits.scatter(-1, first[:, None], -torch.inf).argmax(dim=-1)))


def gate(
    logits: Tensor, mixture: Mixture, capacity: int | None = None, real: Tensor | None = None,
    noise: Tensor | None = None, average: Average | None = None,
) -> Routing:  # fmt: skip
    """Route one group of tokens by their logits (tokens experts). `capacity` is the number of an expert's slots, None
    for as many as are needed. `real` (tokens,) is False at padding. `average` is for the balancing loss. The host waits
    for the device once, for the number of kept choices, or not at all if nothing can be dropped."""
    tokens, experts = logits.shape
    gates = logits.softmax(dim=-1)
    chosen = choose(logits.detach(), gates.detach(), mixture, noise)
    weights = gates.gather(-1, chosen.T).T  # (top_k tokens)
    if mixture.top_k == 2 and mixture.normalize == "before":
        weights = _normalized(weights)
    # An improbable second choice, and those of padding, are not made: they get a number after the last expert's.
    doubt = noise if mixture.second_policy == "random" else None
    if doubt is not None:
        chosen = torch.stack((chosen[0], chosen[1].masked_fill(doubt >= 2 * weights[1].detach(), experts)))
    if real is not None:
        chosen = chosen.masked_fill(~real, experts)
    wanted = torch.zeros(len(chosen), experts + 1, dtype=torch.int64, device=logits.device)
    wanted = wanted.scatter_add_(1, chosen, torch.ones_like(chosen))[:, :experts]
    order, slots = _sort(chosen, wanted.sum(0), gates.detach().amax(-1) if mixture.prioritized else None)
    if capacity is not None or doubt is not None or real is not None:
        keep = chosen.flatten()[order] < experts
        if capacity is not None:
            keep &= slots < capacity
        if keep.is_meta:  # without values: as many rows as a balanced router's
            rows = order.new_empty(len(keep) if capacity is None else min(len(keep), experts * capacity))
        else:
            rows = keep.nonzero()[:, 0]  # the one wait
        order, slots = order[rows], slots[rows]
    kept = torch.zeros(weights.shape, dtype=torch.bool, device=logits.device)
    kept.view(-1).index_fill_(0, order, True)
    if mixture.top_k == 2 and mixture.normalize == "after":
        weights = _normalized(weights * kept)
    counts = wanted.sum(0) if capacity is None else wanted.sum(0).clamp(max=capacity)
    balance, load = balancing_loss(gates, wanted[0], average), ExpertLoad(wanted, kept.sum(dim=1))
    return Routing(order % tokens, weights.flatten().index_select(0, order), counts, slots, balance, load)


def _normalized(weights: Tensor) -> Tensor:
    """Divide weights (top_k tokens) by each token's sum, or by the dtype's eps if that is larger."""
    return weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)


def _sort(chosen: Tensor, wanted: Tensor, sureness: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sort choices (top_k tokens), first choices before second ones, by expert; returns their order and slots. With
    `sureness` (tokens,) the surest tokens come first within an expert."""
    choices = chosen.flatten()
    if sureness is None:
        order = choices.argsort(stable=True)
    else:
        surest = sureness.argsort(descending=True, stable=True)
        turn = (surest + torch.arange(len(chosen), device=surest.device)[:, None] * len(surest)).flatten()
        order = turn[choices[turn].argsort(stable=True)]
    first = torch.cat((wanted.cumsum(0) - wanted, wanted.sum()[None]))  # of each expert's run, and of choices not made
    return order, torch.arange(len(order), device=order.device) - first[choices[order]]


def balancing_loss(gates: Tensor, wanted: Tensor, average: Average | None = None) -> Tensor:
    """E sum_e (mean probability of e) (share of tokens whose first choice is e), a scalar, of gates (tokens experts)
    and the first choices of each expert (experts,) (arXiv:2101.03961, section 2.2): 1 if the mean probabilities are
    equal, E if one expert gets all tokens. As in fairseq, padding has probabilities but makes no choice. `average` is
    applied to the shares, over ranks; then the mean of the ranks' losses is that of all their tokens as one group."""
    tokens = max(len(gates), 1)
    share = wanted.to(gates.dtype) / tokens
    return gates.shape[1] * (gates.sum(0) / tokens * (share if average is None else average(share))).sum()
