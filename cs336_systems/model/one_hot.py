"""Routing with one-hot tensors, as GShard and fairseq compute it: the reference and the baseline of `routing.py`.

A choice is a one-hot vector over experts, its slot a one-hot vector over slots. Together they form a tensor of tokens x
experts x slots, almost all zeros, with which dispatch and combine are matrix products (GShard, arXiv:2006.16668,
algorithm 1 and section 3.2). For T tokens, E experts of C slots and width D this takes 4 T E C D FLOPs and T E C
numbers; the sort moves 2 T rows. The code shares nothing with `routing.py`, so that the two can be compared.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.model.routing import Average
from cs336_systems.presets import Mixture


def one_hot_gate(
    logits: Tensor, mixture: Mixture, capacity: int | None = None, real: Tensor | None = None,
    noise: Tensor | None = None, average: Average | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights (tokens experts slots) of each slot's result for each token, and the balancing loss. The arguments are
    those of `routing.gate`. Without a capacity an expert has as many slots as there are tokens."""
    tokens, experts = logits.shape
    slots = tokens if capacity is None else capacity
    gates = F.softmax(logits, dim=1)
    masks = [F.one_hot(gates.argmax(dim=1), experts)]  # integers: bfloat16 could not count to 257
    if mixture.top_k == 2:
        scores = logits.detach()
        if noise is not None and mixture.second_policy == "sampling":
            scores = scores + -torch.log(-torch.log(noise))  # Gumbel's distribution
        masks.append(F.one_hot(scores.masked_fill(masks[0].bool(), -torch.inf).argmax(dim=1), experts))
    weights = torch.stack([(gates * mask).sum(dim=1) for mask in masks])
    if mixture.top_k == 2 and mixture.normalize == "before":
        weights = _normalized(weights)
    if noise is not None and mixture.second_policy == "random":
        masks[1] = masks[1] * (2 * weights[1] > noise)[:, None]
    if real is not None:
        masks = [mask * real[:, None] for mask in masks]
    places = _places(masks, gates if mixture.prioritized else None)
    share = masks[0].sum(dim=0).to(gates.dtype) / max(tokens, 1)
    share = share if average is None else average(share)
    balance = (gates.sum(dim=0) / max(tokens, 1) * share).mean() * experts * experts
    masks = [mask * (place < slots) for mask, place in zip(masks, places, strict=True)]
    if mixture.top_k == 2 and mixture.normalize == "after":
        weights = _normalized(torch.stack([w * mask.sum(dim=1) for w, mask in zip(weights, masks, strict=True)]))
    combine = torch.zeros((), dtype=gates.dtype, device=gates.device)
    for weight, mask, place in zip(weights, masks, places, strict=True):
        slot = F.one_hot((place * mask).sum(dim=1), max(slots, 1))
        # The outer product over experts and slots, token by token.
        both = torch.bmm((weight[:, None] * mask)[:, :, None], slot.to(gates.dtype)[:, None, :])
        combine = combine + both[:, :, :slots]
    return combine, balance


def _normalized(weights: Tensor) -> Tensor:
    """Divide weights (top_k tokens) by each token's sum."""
    return weights / torch.clamp(weights[0] + weights[1], min=torch.finfo(weights.dtype).eps)


def _places(masks: list[Tensor], gates: Tensor | None) -> list[Tensor]:
    """Slot that each token would get in each expert (tokens experts): the number of tokens before it. All first choices
    come before any second one; with `gates`, tokens with the largest probability come first."""
    places, taken = [], masks[0].new_zeros(masks[0].shape[1])
    order = None if gates is None else (-gates.max(dim=1).values).argsort(stable=True)
    for mask in masks:
        queue = mask if order is None else mask[order]
        place = queue.cumsum(dim=0) - queue
        place = place if order is None else torch.empty_like(place).index_copy(0, order, place)
        places.append(place + taken)
        taken = taken + mask.sum(dim=0)
    return places
