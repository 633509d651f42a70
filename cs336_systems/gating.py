"""Which experts a token is sent to, and which of them take it: one stable sort makes the whole plan.

Every token chooses one or two experts; an expert has so many slots, and who comes too late is dropped. GShard writes
that with one-hot tensors of tokens x experts x slots (arXiv:2006.16668, algorithm 1; see `one_hot.py`). Here all first
choices in the order of the tokens, then all second choices, are sorted by expert, and a stable sort keeps that order
inside an expert's run. So an entry's rank inside its run is GShard's slot number: first choices before second ones,
earlier tokens before later ones. Capacity is `slot < capacity`; dropless is the same code without that line.

    choices, choice-major      2 0 2 1 | 0 2 0 0         tokens 0 1 2 3, first choices | second choices
    sorted by expert           0 0 0 0   1   2 2 2       of tokens 1 0 2 3, 3, 0 2 1
    slot                       0 1 2 3   0   0 1 2       with two slots, the second choices of 2 3 and of 1 are dropped
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cs336_systems.dropout import DropoutKey, keyed_uniform
from cs336_systems.mixture import Mixture

Average = Callable[[Tensor], Tensor]  # the mean of a tensor over the ranks that balance together


class Plan(NamedTuple):
    """Who goes where, for `tokens` tokens and E experts. A kept choice is a row; rows are in the order of experts, in
    an expert's run in that of slots."""

    tokens: Tensor  # (rows,) int64: each row's token
    weights: Tensor  # (rows,): what the expert's output is multiplied by
    counts: Tensor  # (experts,) int64: rows of each expert
    slots: Tensor  # (rows,) int64: its place in its expert's run
    balance: Tensor  # the balancing loss, a scalar: 1 if all experts are as likely
    load: "Load"


class Load(NamedTuple):
    """What the router wanted and what came of it; nothing here has a gradient."""

    wanted: Tensor  # (top_k experts): first and second choices of each expert, before any was dropped
    kept: Tensor  # (top_k,): choices that found a slot


class Noise(NamedTuple):
    """Random numbers of a group's tokens for the second of two choices, uniform between 0 and 1, both excluded; what a
    policy does not need is None."""

    logits: Tensor | None  # (tokens experts), for `sampling`
    second: Tensor | None  # (tokens,), for `random`


def draw_noise(mixture: Mixture, like: Tensor, shape: tuple[int, int], key: DropoutKey | None, site: str) -> Noise:
    """Noise for logits `like` (tokens experts) of `shape` (batch seq) tokens: by place with a key, so that no layout
    changes it, else from torch's generator. In float32 at least: bfloat16 would round one number in 512 to 1."""
    wide = torch.promote_types(like.dtype, torch.float32)

    def uniform(*shape: int) -> Tensor:
        if key is None:
            return torch.rand(shape, device=like.device, dtype=wide).clamp_(min=torch.finfo(wide).tiny)
        return keyed_uniform(shape, key, site, like.device).to(wide)

    if mixture.second_policy == "sampling":
        return Noise(uniform(*shape, like.shape[-1]).flatten(0, 1), None)
    return Noise(None, uniform(*shape).flatten())


def choose(logits: Tensor, gates: Tensor, mixture: Mixture, noise: Noise | None) -> Tensor:
    """The experts of every token, the best first: logits and their softmax, gates (tokens experts) -> (top_k tokens).

    As in fairseq, the first choice has the largest probability and the second the largest logit but for that, and of
    equal ones the first is taken. With noise for the logits the second choice is a sample of the router's distribution
    without the first (Gumbel's trick).
    """
    first = gates.argmax(dim=-1)
    if mixture.top_k == 1:
        return first[None]
    if noise is not None and noise.logits is not None:
        logits = logits - noise.logits.log().neg().log()
    return torch.stack((first, logits.scatter(-1, first[:, None], -torch.inf).argmax(dim=-1)))


def gate(
    logits: Tensor,
    mixture: Mixture,
    capacity: int | None = None,
    real: Tensor | None = None,
    noise: Noise | None = None,
    average: Average | None = None,
) -> Plan:
    """The plan for one group of tokens: logits (tokens experts).

    `capacity` is the slots of an expert, None for all that are needed. `real` (tokens,) is False at padding. `average`
    is for the balancing loss. Where nothing can be dropped, the host does not wait for the device; else it waits once,
    since how many choices are kept decides the shapes.
    """
    tokens, experts = logits.shape
    gates = logits.softmax(dim=-1)
    chosen = choose(logits.detach(), gates.detach(), mixture, noise)
    weights = gates.gather(-1, chosen.T).T  # (top_k tokens)
    if mixture.top_k == 2 and mixture.normalize == "before":
        weights = weights / _total(weights)
    chosen, all_stay = _withdraw(chosen, weights.detach(), experts, real, noise)
    wanted = torch.zeros(len(chosen), experts + 1, dtype=torch.int64, device=logits.device)
    wanted = wanted.scatter_add_(1, chosen, torch.ones_like(chosen))[:, :experts]
    order, slots = _sort(chosen, wanted.sum(0), gates.detach().amax(-1) if mixture.prioritized else None)
    if capacity is not None or not all_stay:
        keep = chosen.flatten()[order] < experts
        if capacity is not None:
            keep &= slots < capacity
        rows = keep.nonzero()[:, 0]  # the one wait
        order, slots = order[rows], slots[rows]
    kept = torch.zeros(weights.shape, dtype=torch.bool, device=logits.device)
    kept.view(-1).index_fill_(0, order, True)
    if mixture.top_k == 2 and mixture.normalize == "after":
        weights = weights * kept
        weights = weights / _total(weights)
    counts = wanted.sum(0) if capacity is None else wanted.sum(0).clamp(max=capacity)
    balance = balancing_loss(gates, wanted[0], average)
    load = Load(wanted, kept.sum(dim=1))
    return Plan(order % tokens, weights.flatten().index_select(0, order), counts, slots, balance, load)


def _withdraw(
    chosen: Tensor, weights: Tensor, nobody: int, real: Tensor | None, noise: Noise | None
) -> tuple[Tensor, bool]:
    """(choices (top_k tokens), of which those of padding and improbable second ones are `nobody`, a number that sorts
    behind all experts'; whether there can be none of these)."""
    all_stay = real is None
    if noise is not None and noise.second is not None:
        first, second = chosen
        chosen, all_stay = torch.stack((first, second.masked_fill(noise.second >= 2 * weights[1], nobody))), False
    if real is not None:
        chosen = chosen.masked_fill(~real, nobody)
    return chosen, all_stay


def _total(weights: Tensor) -> Tensor:
    """What the weights (top_k tokens) of a token add up to, never zero."""
    return weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)


def _sort(chosen: Tensor, wanted: Tensor, sureness: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choices (top_k tokens) by expert, numbered choice-major, and the slot of each; those of no expert come last."""
    choices = chosen.flatten()
    if sureness is None:
        order = choices.argsort(stable=True)
    else:
        surest = sureness.argsort(descending=True, stable=True)
        turn = (surest + torch.arange(len(chosen), device=surest.device)[:, None] * len(surest)).flatten()
        order = turn[choices[turn].argsort(stable=True)]
    first = torch.cat((wanted.cumsum(0) - wanted, wanted.sum()[None]))  # of each expert's run, and of what is left
    return order, torch.arange(len(order), device=order.device) - first[choices[order]]


def balancing_loss(gates: Tensor, wanted: Tensor, average: Average | None = None) -> Tensor:
    """E sum_e (mean probability of e) (share of tokens whose first choice is e), of gates (tokens experts) and first
    choices of each expert (experts,): a scalar (arXiv:2101.03961, section 2.2).

    It is 1 where the mean probabilities are equal, E where one expert is sure to get all tokens, and at least the sum
    of the squared shares: it may lie below 1 where many tokens barely choose what the others surely do not. Padding
    has probabilities but makes no choice, as in fairseq. With `average` the share is that of all ranks' tokens, so that
    the mean of the ranks' losses is that of one group.
    """
    tokens = max(len(gates), 1)
    share = wanted.to(gates.dtype) / tokens
    return gates.shape[1] * (gates.sum(0) / tokens * (share if average is None else average(share))).sum()
