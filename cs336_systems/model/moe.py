"""Mixture of experts: a router sends each token to one or two of many feed-forwards: more parameters at equal FLOPs.

    x -> router -> routing.py -> dispatch -> experts (feed_forward.py) -> combine -> weighted, added up

(Shazeer et al., arXiv:1701.06538; Lepikhin et al., GShard, arXiv:2006.16668; Fedus et al., arXiv:2101.03961.) In one
process nothing moves between dispatch and combine. Expert parallelism (`expert_parallel.py`) replaces the layer's
dispatcher by one that sends rows to the rank of their expert, and back.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.model.attention import Places
from cs336_systems.model.feed_forward import Experts, FeedForward
from cs336_systems.model.one_hot import one_hot_gate
from cs336_systems.model.routing import Average, ExpertLoad, draw_noise, gate
from cs336_systems.presets import ModelConfig
from kernels.checks import once_differentiable
from kernels.reference import no_autocast

# Second half of a dispatch: wait for the rows of this rank's experts, call a function with them (rows d_model), sorted
# by expert, and their counts (experts,), and send the results back: (rows d_model) in the order of the rows sent.
Combine = Callable[[Callable[[Tensor, Tensor], Tensor]], Tensor]


class LocalDispatcher:
    """Dispatcher of a process that has all experts: nothing moves."""

    def dispatch(self, rows: Tensor, counts: Tensor) -> Combine:
        """Start to send rows (rows d_model), sorted by expert, of which each expert gets counts (experts,)."""
        return lambda experts: experts(rows, counts)

    def run_slots(self, slots: Tensor, experts: Callable[[Tensor], Tensor]) -> Tensor:
        """Send slots (experts slots d_model) to their experts, apply `experts` to those of this rank, and send back."""
        return experts(slots)


class _AddLoss(torch.autograd.Function):
    """Return y; backward gives `loss` the gradient that it has if weight x loss is added to the model's loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(loss)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.full_like(loss, ctx.weight), None


def set_balance_scale(model: nn.Module, scale: float) -> None:
    """Set the factor of the balancing losses of a model's expert layers (default 1). It must be the factor of the loss
    on which backward is called, for example one over the number of microbatches, or the loss scale."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.balance_scale = scale


class MoELayer(nn.Module):
    """Mixture of experts in place of a feed-forward: (batch seq d_model) -> the same. All tokens of one call are a
    group, which shares the experts' capacity. So that no pipeline stage must pass on the balancing loss, only backward
    adds it: gradients are as if the loss had the term aux_weight x `balance_scale` x balancing loss."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.mixture, self.layer = config, config.mixture, layer
        self.router = nn.Linear(config.d_model, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared = FeedForward(config) if self.mixture.shared_expert else None
        self.dispatcher = LocalDispatcher()
        self.average: Average | None = None  # mean over the ranks that compute one balancing loss together
        self.balance_scale, self.copies = 1.0, 1  # copies: number of ranks that compute the same balancing loss
        self.balance: Tensor | None = None  # balancing loss of the last call, without a gradient
        self.load: ExpertLoad | None = None  # load of the last call; None with einsum

    def forward(
        self, x: Tensor, real: Tensor | None = None, key: Tensor | None = None, places: Places | None = None
    ) -> Tensor:
        """Route the tokens and run their experts. `real` (batch seq) is False at padding; `key` sets random numbers."""
        mixture, tokens, noise = self.mixture, x.reshape(-1, x.shape[-1]), None
        logits = self.logits(tokens)
        capacity = mixture.capacity(len(tokens), self.config.num_experts, self.training)
        if self.training and mixture.is_random:
            noise = draw_noise(mixture, logits, x.shape[:2], key, f"blocks.{self.layer}.router", places)
        real = real.flatten() if real is not None and mixture.mask_padding else None
        run = self.by_einsum if mixture.dispatch == "einsum" else self.by_sort
        y, balance = run(tokens, logits, mixture, capacity, real, noise, self.average if self.training else None)
        self.balance = balance.detach()
        weight = mixture.aux_weight * self.balance_scale / self.copies
        added: Tensor = _AddLoss.apply(y, balance, weight) if self.training and weight else y
        return added.view(x.shape)

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute the router's scores (tokens experts), in float32 at least if `gating_fp32`."""
        if not self.mixture.gating_fp32:
            return self.router(tokens)
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with no_autocast(tokens):
            return F.linear(tokens.to(wide), self.router.weight.to(wide))

    def by_sort(self, tokens: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
        """Send a row for each kept choice: (tokens d_model) -> the same, and the balancing loss; see `gate`."""
        routing = gate(*rules)
        self.load = routing.load
        combine = self.dispatcher.dispatch(tokens.index_select(0, routing.tokens), routing.counts)
        shared = None if self.shared is None else self.shared(tokens)  # while the rows travel
        rows = combine(self.experts)
        weighted = rows * routing.weights.to(rows.dtype)[:, None]
        y = torch.zeros_like(tokens, dtype=rows.dtype).index_add_(0, routing.tokens, weighted)
        return y if shared is None else y + shared, routing.balance

    def by_einsum(self, tokens: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
        """Do the same, but send all slots of all experts, full or empty."""
        self.load = None
        combine, balance = one_hot_gate(*rules)  # (tokens experts slots)
        results = self.dispatcher.run_slots(  # empty slots are zero; only the dispatcher holds them all, and frees them
            torch.mm((combine > 0).to(tokens.dtype).flatten(1).t(), tokens).unflatten(0, combine.shape[1:]),
            self.experts.one_by_one,
        )
        y = torch.mm(combine.to(results.dtype).flatten(1), results.flatten(0, 1))
        return y if self.shared is None else y + self.shared(tokens), balance
