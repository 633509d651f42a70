"""Expert parallelism: the experts of a layer are split over the ranks of a group, and tokens travel to them.

    rank 0    its tokens -> plan -> rows ->              -> experts 0 1 ->             -> its tokens
                                            all-to-all                     all-to-all
    rank 1    its tokens -> plan -> rows ->              -> experts 2 3 ->             -> its tokens

(Lepikhin et al., GShard, arXiv:2006.16668, section 3.2.) Only rows that an expert takes are sent: first the counts, a
few numbers, then the rows, uneven. Each rank of the group has other tokens, so for all other parameters it is a
data-parallel group.

Backward brings to an expert what the losses of all ranks of the group say, added up. Data parallelism takes the mean
over the ranks, so an expert's gradient is divided by the group's size: then every gradient is the sum over the ranks
that hold a replica, divided by all data-parallel ranks, as in one process.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cs336_systems.comm import Exchange, Group, all_reduce, all_to_all, pairs
from cs336_systems.cost.layout import check_experts
from cs336_systems.experts import Experts, GroupedLinear
from cs336_systems.model import Block, TransformerLM
from cs336_systems.moe import MoELayer


class AllToAll(pairs.SharesGroup):
    """A mover of rows between the tokens of a group's ranks and the experts, of which each has `local` in turn."""

    def __init__(self, group: Group, local: int) -> None:
        self.group, self.local = group, local

    def send(self, rows: Tensor, counts: Tensor) -> "Travel":
        """Begin to send rows to the ranks that have their experts. The host waits once for the device: it must know
        how many rows go where."""
        ranks, theirs = self.group.size(), torch.empty_like(counts)
        even = [self.local] * ranks
        all_to_all(theirs, counts, even, even, self.group, "expert counts").wait()
        theirs = theirs.view(ranks, self.local)
        given, taken = torch.stack((counts.view(ranks, self.local).sum(1), theirs.sum(1))).tolist()
        return Travel(Exchange(rows, given, taken, self.group, "dispatch"), theirs)

    def spread(self, slots: Tensor) -> Tensor:
        """(experts slots d_model) of every rank -> (local (ranks slots) d_model): each expert's slots of all ranks,
        which must be as many on each."""
        ranks, even = self.group.size(), [self.local] * self.group.size()
        received = Exchange(slots, even, even, self.group, "dispatch").wait()
        return received.view(ranks, self.local, *slots.shape[1:]).transpose(0, 1).flatten(1, 2)

    def collect(self, slots: Tensor) -> Tensor:
        """The way back: (local (ranks slots) d_model) -> (experts slots d_model)."""
        ranks, even = self.group.size(), [self.local] * self.group.size()
        by_rank = slots.view(self.local, ranks, -1, slots.shape[-1]).transpose(0, 1).flatten(0, 1)
        return Exchange(by_rank, even, even, self.group, "combine").wait()


class Travel:
    """Rows on their way: counts (ranks local) of what each rank sends to each expert here."""

    def __init__(self, exchange: Exchange, counts: Tensor) -> None:
        self.exchange, self.counts = exchange, counts

    def arrive(self) -> tuple[Tensor, Tensor]:
        """What has come by rank and expert is put in the order of experts; within one, in that of ranks."""
        rows = self.exchange.wait()
        ranks, local = self.counts.shape
        expert = torch.arange(local, device=rows.device).repeat(ranks)
        self.order = expert.repeat_interleave(self.counts.flatten(), output_size=len(rows)).argsort(stable=True)
        return rows.index_select(0, self.order), self.counts.sum(0)

    def bring_back(self, rows: Tensor) -> Tensor:
        """Back to the ranks that sent them, in their order."""
        there = torch.empty_like(self.order)
        there[self.order] = torch.arange(len(there), device=there.device)
        sent = self.exchange.route
        return Exchange(rows.index_select(0, there), sent.taken, sent.given, sent.group, "combine").wait()


@dataclass
class ExpertParallel:
    """What `expert_parallel` did to a model. A parameter's name is the same as in the whole model; `names` are the
    experts' parameters, (experts ...), of which this rank has `local` from `first` on, by their global numbers."""

    model: TransformerLM
    group: Group
    first: int
    local: int
    names: set[str] = field(default_factory=set)

    def layers(self) -> Iterator[MoELayer]:
        """The expert layers that are here."""
        for block in self.model.blocks:
            if isinstance(block, Block) and isinstance(block.feed_forward, MoELayer):
                yield block.feed_forward

    def experts(self) -> nn.ModuleList:
        """The experts of all layers, to be wrapped apart from what else the model has."""
        return nn.ModuleList(layer.experts for layer in self.layers())

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's experts of a tensor for all (experts ...), such as a parameter or an optimizer's state of it;
        other tensors as they are."""
        return whole.narrow(0, self.first, self.local) if name in self.names and whole.dim() else whole

    def whole(self, name: str, part: Tensor) -> Tensor:
        """All experts' of a tensor (local ...), by global number. Every rank must call this."""
        if name not in self.names or not part.dim():
            return part
        return pairs.gather(part.detach(), 0, self.group, name)


def expert_parallel(model: TransformerLM, group: Group, data: Group | None = None) -> ExpertParallel:
    """Split the experts of a model over a group, in place; every rank has the same whole model before.

    `data` are the ranks that see different tokens (default: the group itself); it may hold the group several times, and
    each time has all experts. Of a pipeline's stage, what is there is split.

    Raises UserError, with the numbers, if the experts do not divide.
    """
    config, data = model.config, data or group
    check_experts(config, group.size())
    local = config.num_experts // group.size()
    plan = ExpertParallel(model, group, group.rank() * local, local)
    for layer in plan.layers():
        scale = math.sqrt(data.size()) if config.mixture.expert_gradient == "sqrt" else 1.0
        _split(layer.experts, plan, scale / group.size())
        if group.size() > 1:
            layer.mover = AllToAll(group, local)
        if config.mixture.aux_scope == "global":
            layer.average = Mean(data)
    plan.names = {name for name, _ in model.named_parameters() if ".experts." in name}
    return plan


class Mean(pairs.SharesGroup):
    """The mean of a tensor over a group, whose ranks count alike; it has no gradient."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        mean = x.detach().clone()
        all_reduce(mean, self.group, "balance").wait()
        return mean


def _split(experts: Experts, plan: ExpertParallel, gradient_scale: float) -> None:
    experts.first = plan.first
    for layer in experts.modules():
        if not isinstance(layer, GroupedLinear):
            continue
        layer.gradient_scale = gradient_scale
        for name, parameter in list(layer.named_parameters(recurse=False)):
            part = parameter.detach().narrow(0, plan.first, plan.local).clone()
            setattr(layer, name, nn.Parameter(part, parameter.requires_grad))
