"""Expert layers: a router sends each token to one or two of many feed-forwards: more parameters, not more FLOPs.

    x -> router -> plan (gating.py) -> rows to their experts -> experts (experts.py) -> rows back, weighted and added

(Shazeer et al., arXiv:1701.06538; Lepikhin et al., GShard, arXiv:2006.16668; Fedus et al., arXiv:2101.03961.) On one
process the rows are where the experts are. `expert_parallel.py` replaces the layer's `mover` by one that sends them to
the rank that has the expert; the layer does not know.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cs336_systems.dropout import DropoutKey
from cs336_systems.experts import Experts
from cs336_systems.feed_forward import FeedForward
from cs336_systems.gating import Average, Load, Noise, draw_noise, gate
from cs336_systems.one_hot import bring_back, one_hot_gate, send
from cs336_systems.presets import ModelConfig


class Delivery(Protocol):
    """Rows on their way to experts and back."""

    def arrive(self) -> tuple[Tensor, Tensor]:
        """(rows (rows d_model) in the order of the experts that are here, how many each of these has (experts,))."""

    def bring_back(self, rows: Tensor) -> Tensor:
        """What the experts made of the rows, back in the order in which they were sent."""


class Mover(Protocol):
    """Moves rows between tokens and experts, which may be on other ranks."""

    def send(self, rows: Tensor, counts: Tensor) -> Delivery:
        """Begin to send rows (rows d_model), in the order of all experts, of which each gets counts (experts,)."""

    def spread(self, slots: Tensor) -> Tensor:
        """Slots of all experts (experts slots d_model) -> all ranks' slots of the experts here."""

    def collect(self, slots: Tensor) -> Tensor:
        """The way back."""


class Arrived(NamedTuple):
    """Rows that were where their experts are from the start: the rows, and how many each expert has."""

    rows: Tensor  # (rows d_model)
    counts: Tensor  # (experts,)

    def arrive(self) -> tuple[Tensor, Tensor]:
        """What was sent."""
        return self.rows, self.counts

    def bring_back(self, rows: Tensor) -> Tensor:
        """The rows themselves."""
        return rows


class Here:
    """A mover for experts that are all on this process: there is nothing to do."""

    def send(self, rows: Tensor, counts: Tensor) -> Arrived:
        """The rows themselves."""
        return Arrived(rows, counts)

    def spread(self, slots: Tensor) -> Tensor:
        """The slots themselves."""
        return slots

    def collect(self, slots: Tensor) -> Tensor:
        """The slots themselves."""
        return slots


class _Attach(torch.autograd.Function):
    """y itself; backward also gives `loss` a gradient, as if loss x weight had been added to whatever y leads to."""

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
    """What the balancing losses of a model's expert layers are multiplied by: whatever the loss that is given to
    backward is, such as one over the microbatches whose gradients add up, or a loss scale. It is 1 before."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.balance_scale = scale


class MoELayer(nn.Module):
    """A mixture of experts in the place of a feed-forward: (batch seq d_model) -> the same.

    The balancing loss joins backward here and does not appear in the model's loss: its gradient is added as if
    aux_weight x `balance_scale` x it had been added to the loss, so that it needs no way through pipeline stages. All
    tokens of one call are a group, within which experts fill up. `load` and `balance` tell how the last call routed.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.mixture, self.layer = config, config.mixture, layer
        self.router = nn.Linear(config.d_model, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared = FeedForward(config) if self.mixture.shared_expert else None
        self.mover: Mover = Here()
        self.average: Average | None = None  # over the ranks that balance together
        self.balance_scale, self.copies = 1.0, 1  # copies: ranks that compute the same balancing loss
        self.balance: Tensor | None = None  # of the last call, without a gradient
        self.load: Load | None = None  # of the last call; None by einsum

    def forward(self, x: Tensor, real: Tensor | None = None, key: DropoutKey | None = None) -> Tensor:
        """`real` (batch seq) is False at padding; `key` chooses the random numbers of some policies by place."""
        mixture, tokens = self.mixture, x.reshape(-1, x.shape[-1])
        logits = self.logits(tokens)
        capacity = mixture.capacity(len(tokens), self.config.num_experts, self.training)
        noise = None
        if self.training and mixture.is_random:
            shape = x.shape[0], x.shape[1]
            noise = draw_noise(mixture, logits, shape, key, f"blocks.{self.layer}.router")
        real = real.flatten() if real is not None and mixture.mask_padding else None
        dispatch = self.by_einsum if mixture.dispatch == "einsum" else self.by_sort
        return dispatch(tokens, logits, capacity, real, noise).view(x.shape)

    def logits(self, tokens: Tensor) -> Tensor:
        """The router's scores (tokens experts), in float32 at least if the mixture says so."""
        if not self.mixture.gating_fp32:
            return F.linear(tokens, self.router.weight)
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.to(wide), self.router.weight.to(wide))

    def by_sort(
        self, tokens: Tensor, logits: Tensor, capacity: int | None, real: Tensor | None, noise: Noise | None
    ) -> Tensor:
        """Each kept choice is a row: (tokens d_model) -> the same. The shared expert computes while rows travel."""
        plan = gate(logits, self.mixture, capacity, real, noise, self.average if self.training else None)
        self.load = plan.load
        delivery = self.mover.send(tokens.index_select(0, plan.tokens), plan.counts)
        shared = None if self.shared is None else self.shared(tokens)
        rows = delivery.bring_back(self.experts(*delivery.arrive()))
        weighted = rows * plan.weights.to(rows.dtype)[:, None]
        y = torch.zeros_like(tokens, dtype=rows.dtype).index_add_(0, plan.tokens, weighted)
        return self._attach(y if shared is None else y + shared, plan.balance)

    def by_einsum(
        self, tokens: Tensor, logits: Tensor, capacity: int | None, real: Tensor | None, noise: Noise | None
    ) -> Tensor:
        """All slots of all experts, full or empty: (tokens d_model) -> the same."""
        average = self.average if self.training else None
        combine, balance = one_hot_gate(logits, self.mixture, capacity, real, noise, average)
        self.load = None
        here = self.mover.spread(send(combine, tokens))
        y = bring_back(combine, self.mover.collect(self.experts.one_by_one(here)))
        return self._attach(y if self.shared is None else y + self.shared(tokens), balance)

    def _attach(self, y: Tensor, balance: Tensor) -> Tensor:
        self.balance = balance.detach()
        weight = self.mixture.aux_weight * self.balance_scale / self.copies
        if not (self.training and weight):
            return y
        attached: Tensor = _Attach.apply(y, balance, weight)
        return attached
