"""Expert parallelism: the experts of a layer are split over the ranks of a group, and tokens travel to them.

    rank 0    tokens -> routing -> rows ->            -> experts 0 1 ->            -> tokens
                                          all-to-all                   all-to-all
    rank 1    tokens -> routing -> rows ->            -> experts 2 3 ->            -> tokens
                                          (dispatch)                   (combine)

(Lepikhin et al., GShard, arXiv:2006.16668, section 3.2.) Only rows that an expert takes are sent: first the counts of
rows for each expert, then the rows, in an uneven all-to-all. The ranks of the group have different tokens, so for all
other parameters it is a data-parallel group.

An expert's gradient comes from the tokens of all ranks, so it is the sum over the ranks' losses, where data parallelism
takes their mean. It is divided by the group's size, so that all gradients are means, as in one process.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cs336_systems.comm import Exchange, Group, all_reduce, all_to_all, default_group
from cs336_systems.errors import UserError
from cs336_systems.layout import check_experts
from cs336_systems.model.feed_forward import GroupedLinear, even_shares
from cs336_systems.model.moe import Combine, LocalDispatcher, MoELayer
from cs336_systems.model.transformer import TransformerLM, require_transformer


class AllToAllDispatcher(LocalDispatcher):
    """Sends rows to the ranks of their experts, and the results back; each rank has `local` experts."""

    def __init__(self, group: Group, local: int) -> None:
        self.group, self.local = group, local

    def dispatch(self, rows: Tensor, counts: Tensor) -> Combine:
        """Start to send rows (rows d_model), sorted by expert, of which each expert gets counts (experts,). The host
        waits once for the device, to know how many rows go to each rank."""
        ranks, received = self.group.size(), torch.empty_like(counts)
        even = [self.local] * ranks
        all_to_all(received, counts, even, even, self.group, "expert counts").wait()
        received = received.view(ranks, self.local)
        if counts.is_meta:  # without values: as if the router were balanced
            to_send = even_shares(len(rows), ranks)
            to_receive = [to_send[self.group.rank()]] * ranks
        else:
            to_send, to_receive = torch.stack((counts.view(ranks, self.local).sum(1), received.sum(1))).tolist()
        exchange = Exchange(rows, to_send, to_receive, self.group, "dispatch")

        def combine(experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            """Sort the rows, which arrive in the order of ranks, by expert; undo this before the results are sent."""
            rows = exchange.wait()
            expert = torch.arange(self.local, device=rows.device).repeat(ranks)
            order = expert.repeat_interleave(received.flatten(), output_size=len(rows)).argsort(stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
            rows = rows.index_select(0, order)
            rows = experts(rows, received.sum(0))
            return Exchange(rows.index_select(0, inverse), to_receive, to_send, self.group, "combine").wait()

        return combine

    def run_slots(self, slots: Tensor, experts: Callable[[Tensor], Tensor]) -> Tensor:
        """Send a fixed number of slots to each expert and back; a rank's experts get (local (ranks slots) d_model)."""
        ranks, even = self.group.size(), [self.local] * self.group.size()
        slots = Exchange(slots, even, even, self.group, "dispatch").wait().unflatten(0, (ranks, -1))
        slots = slots.transpose(0, 1).flatten(1, 2)
        slots = experts(slots).unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        return Exchange(slots, even, even, self.group, "combine").wait()


@dataclass
class ExpertParallel:
    """A model whose experts are split. Parameters keep the names of the whole model. Those in `names` are experts'
    (experts ...), of which this rank has `local`, beginning with expert number `first`."""

    model: TransformerLM
    first: int
    local: int
    names: set[str]

    def layers(self) -> list[MoELayer]:
        """Expert layers of this rank's part of the model."""
        return [module for module in self.model.modules() if isinstance(module, MoELayer)]

    def experts(self) -> nn.ModuleList:
        """Experts of all layers, for a data-parallel wrapper of their own."""
        return nn.ModuleList(layer.experts for layer in self.layers())


def expert_parallel(model: TransformerLM, group: Group | None = None, data: Group | None = None) -> ExpertParallel:
    """Split the experts of a model, or of a pipeline's `stage.model`, over a group, in place. `data` are the ranks that
    see different tokens (default: the group). Raises UserError if the experts do not divide."""
    config, group = require_transformer(model).config, default_group(group)
    data = data or group
    check_experts(config, group.size())
    local = config.num_experts // group.size()
    names = {name for name, _ in model.named_parameters() if ".experts." in name}
    plan = ExpertParallel(model, group.rank() * local, local, names)
    if any(len(parameter) < config.num_experts for parameter in plan.experts().parameters()):
        raise UserError("the model's experts are split over ranks already: split a new one")
    for layer in plan.layers():
        scale = math.sqrt(data.size()) if config.mixture.expert_gradient == "sqrt" else 1.0
        layer.experts.first = plan.first
        for linear in layer.experts.children():
            assert isinstance(linear, GroupedLinear)
            linear.gradient_scale = scale / group.size()
            for name, parameter in list(linear.named_parameters()):
                part = parameter.detach().narrow(0, plan.first, plan.local).clone()
                setattr(linear, name, nn.Parameter(part, parameter.requires_grad))
        if group.size() > 1:
            layer.dispatcher = AllToAllDispatcher(group, local)
        if config.mixture.aux_scope == "global":
            layer.average = partial(mean_over, group=data)
    return plan


def mean_over(x: Tensor, group: Group) -> Tensor:
    """Mean of a tensor over a group, each rank with the same weight; without a gradient."""
    mean = x.detach().clone()
    all_reduce(mean, group, "balance").wait()
    return mean
