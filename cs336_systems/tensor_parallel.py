"""Tensor parallelism: every layer's matrices are split over the ranks of a group, applied to a model from outside.

    x ->  copy -> [ column parallel: some heads, or some of d_ff ] -> [ row parallel ] -> reduce -> + bias

The first matrix is cut by its outputs and the second by its inputs, so that nothing needs to be said between them; the
sum of the ranks' results is the layer's. That is one all-reduce forward and one backward for attention, and the same
for the feed-forward (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3).

Sequence parallelism keeps the stream between them, its norms and dropout, split along the sequence: reduce becomes a
reduce-scatter and copy an all-gather, which move as many bytes as the all-reduce did, and what was kept on every rank
alike is kept once (Korthikanti et al., arXiv:2205.05198, section 4.2.2). What is gathered is not kept for backward but
gathered again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.comm import Group, pairs
from cs336_systems.cost.layout import check_divides, padded_vocabulary
from cs336_systems.errors import UserError
from cs336_systems.heads import TokenLoss
from cs336_systems.model import Block, TransformerLM, first_expert, initial_weight
from cs336_systems.moe import MoELayer
from cs336_systems.presets import ModelConfig
from cs336_systems.regather import SequenceGather
from cs336_systems.vocabulary_parallel import VocabParallelEmbedding, VocabParallelLoss, VocabParallelTiedHead, my_part

Move = Callable[[Tensor], Tensor]


class ColumnParallelLinear(nn.Module):
    """Some outputs of a linear layer, (... in) -> (... out/ranks): rows of its weight, which torch keeps as (out in).

    `enter` is how x gets to all ranks first; by default it is there already.
    """

    def __init__(self, linear: nn.Linear, group: Group, padded: int | None = None, enter: Move | None = None) -> None:
        super().__init__()
        padded = padded or divided(linear.out_features, group, "outputs of a linear layer")
        self.enter = enter
        self.weight = nn.Parameter(my_part(linear.weight, 0, padded, group), linear.weight.requires_grad)
        self.bias = linear.bias
        if linear.bias is not None:
            self.bias = nn.Parameter(my_part(linear.bias, 0, padded, group), linear.bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x) if self.enter else x, self.weight, self.bias)


class RowParallelLinear(pairs.SharesGroup, nn.Module):
    """Some inputs of a linear layer, (batch seq in/ranks) -> (batch seq out), the sum over the ranks; with `sequence`,
    this rank's part of it along seq. The bias is whole, and is added once, to the sum."""

    def __init__(self, linear: nn.Linear, group: Group, sequence: bool = False) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        padded = divided(linear.in_features, group, "inputs of a linear layer")
        self.weight = nn.Parameter(my_part(linear.weight, 1, padded, group), linear.weight.requires_grad)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        y = pairs.reduce_sequence(y, 1, self.group, "row") if self.sequence else pairs.reduce(y, self.group, "row")
        return y if self.bias is None else y + self.bias


class RowPart(nn.Module):
    """What this rank contributes to the sum that a row-parallel layer is, (... in/ranks) -> (... out), for somebody
    else to add up; the bias is the first rank's."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        padded = divided(linear.in_features, group, "inputs of a linear layer")
        self.weight = nn.Parameter(my_part(linear.weight, 1, padded, group), linear.weight.requires_grad)
        self.bias, self.bias_share = linear.bias, float(group.rank() == 0)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if self.bias is None else y + self.bias * self.bias_share


def divided(size: int, group: Group, what: str) -> int:
    """The size. Raises UserError if it does not divide over the group."""
    if size % group.size():
        raise UserError(f"{size} {what} do not divide over {group.size()} tensor-parallel ranks")
    return size


@dataclass
class TensorParallel:
    """What `tensor_parallel` did to a model: how its parameters were cut, and how to put them together again.

    A parameter's name is the same as in the whole model. `cut` has the dimension along which it is split, `partial`
    those that are whole on every rank but whose gradient is a part of a sum over the group: routers and what
    experts add to their result, and under sequence parallelism what was computed of this rank's tokens only.
    """

    model: TransformerLM
    group: Group
    padded: int  # size of the vocabulary
    cut: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The shape in the whole model of a parameter that has `shape` here."""
        dim, sizes = self.cut.get(name), list(shape)
        if dim is not None:
            sizes[dim] *= self.group.size()
            sizes[dim] = self.model.config.vocab_size if of_vocabulary(name) else sizes[dim]
        return torch.Size(sizes)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole model, such as a parameter or its gradient."""
        if (dim := self.cut.get(name)) is None:
            return whole
        return my_part(whole, dim, self.padded if of_vocabulary(name) else whole.shape[dim], self.group)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The whole of a tensor that the ranks have their parts of. Every rank must call this."""
        if (dim := self.cut.get(name)) is None or self.group.size() == 1:
            return part
        whole = pairs.gather(part.detach(), dim, self.group, name)
        return whole.narrow(dim, 0, self.whole_shape(name, part.shape)[dim]).contiguous()

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device) -> None:
        """Give a model that was built on the meta device the values that the whole one would have from this seed."""
        self.model.to_empty(device=device)
        for name, parameter in self.model.named_parameters():
            shape = self.whole_shape(name, parameter.shape)
            first = first_expert(self.model, name)
            whole = initial_weight(self.model.config, name, shape, seed, device, first)
            parameter.copy_(self.part(name, whole))


def of_vocabulary(name: str) -> bool:
    """Whether a parameter, by its name in the model, has a row for every word."""
    return name in ("embedding.tokens.weight", "bert_heads.bias", "head.weight")


def tensor_parallel(
    model: TransformerLM, group: Group, sequence: bool = False, vocabulary_multiple: int = 1
) -> TensorParallel:
    """Split a model over a group, in place: every rank has the same whole model before and its part of it after.

    With `sequence` the stream between layers is split along the sequence, too. The vocabulary is padded to a multiple
    of `vocabulary_multiple`. Of a pipeline's stage, what is there is split. A group of one leaves the model as it is.
    Raises UserError, with the numbers, for heads, d_ff or a vocabulary that do not divide.
    """
    config = model.config
    check_divides(config, group.size())
    plan = TensorParallel(model, group, padded_vocabulary(config.vocab_size, vocabulary_multiple, group.size()))
    if group.size() == 1:
        return plan
    for block in model.blocks:
        if isinstance(block, Block):
            _split_block(block, config, group, sequence)
    if isinstance(getattr(model.embedding, "tokens", None), nn.Embedding):
        tokens = VocabParallelEmbedding(model.embedding.tokens, plan.padded, group)
        model.set_submodule("embedding.tokens", tokens)
    if sequence:
        model.embedding.register_forward_hook(lambda module, args, x: pairs.scatter(x, 1, group, "embedding"))
    _split_head(model, plan, sequence)
    for name, _ in model.named_parameters():
        if ".feed_forward.experts." in name:
            _note_experts(name, plan)
        elif name.endswith(".router.weight") or name.endswith(".shared.down.bias"):
            plan.partial.add(name)
        elif name.endswith(("attention.out.weight", "down.weight")):
            plan.cut[name] = 1
        elif any(f".{layer}." in name for layer in ("query", "key", "value", "up", "gate")) or of_vocabulary(name):
            plan.cut[name] = 0
        elif sequence and name.startswith(("blocks.", "final_norm.")):
            plan.partial.add(name)
    return plan


def _split_block(block: Block, config: ModelConfig, group: Group, sequence: bool) -> None:
    attention, feed_forward = block.attention, block.feed_forward
    _split_columns(attention, ("query", "key", "value"), group)
    block.set_submodule("attention.out", RowParallelLinear(attention.out, group, sequence))
    attention.first_head = group.rank() * config.num_heads // group.size()
    block.part = group.rank() if sequence else 0
    layers: list[tuple[nn.Module, str]] = [(attention, "attention")]
    if isinstance(feed_forward, MoELayer):
        split_experts(feed_forward, group, sequence)
    else:
        _split_columns(feed_forward, ("up", "gate"), group)
        block.set_submodule("feed_forward.down", RowParallelLinear(feed_forward.down, group, sequence))
        layers.append((feed_forward, "feed-forward"))
    for module, label in layers:
        if sequence:
            # What is recomputed anyway need not be gathered a second time by itself.
            SequenceGather(group, label, again=config.recompute in ("none", "attention")).install(module)
        else:
            module.register_forward_pre_hook(_enter(partial(pairs.copy, group=group, label=label)))


def _cut(module: nn.Module, name: str, dim: int, group: Group) -> None:
    """Leave a parameter's part along `dim`, if there is a parameter."""
    parameter = getattr(module, name)
    if parameter is not None:
        divided(parameter.shape[dim], group, "of the experts' hidden width")
        part = my_part(parameter, dim, parameter.shape[dim], group)
        setattr(module, name, nn.Parameter(part, parameter.requires_grad))


def _split_columns(module: nn.Module, names: tuple[str, ...], group: Group) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, ColumnParallelLinear(getattr(module, name), group))


def _note_experts(name: str, plan: TensorParallel) -> None:
    """Of (experts out in) the hidden width is cut, of a bias (experts out) likewise; what is added to the result is
    whole, and its gradient on one rank only."""
    if name.endswith("down.bias"):
        plan.partial.add(name)
    else:
        plan.cut[name] = 2 if name.endswith("down.weight") else 1


def split_experts(layer: MoELayer, group: Group, sequence: bool) -> None:
    """Split the hidden width of all experts of a layer over a group, in place.

    All ranks route alike, and each computes a part of every output, so the layer's result is reduced, once: less than
    every choice's. What follows the layer's input is different on each rank, so the router's gradient is a part of a
    sum, too; the balancing loss, which all ranks compute alike, counts by parts.
    """
    for module in (each for each in (layer.experts, layer.shared) if each is not None):
        if module is layer.shared:
            _split_columns(module, ("up", "gate"), group)
            module.set_submodule("down", RowPart(module.down, group))
            continue
        for name in (name for name in ("up", "gate") if hasattr(module, name)):
            _cut(getattr(module, name), "weight", 1, group)
            _cut(getattr(module, name), "bias", 1, group)
        _cut(module.down, "weight", 2, group)
        module.down.bias_share = float(group.rank() == 0)
    enter = partial(pairs.gather_sequence, dim=1) if sequence else pairs.copy
    leave = partial(pairs.reduce_sequence, dim=1) if sequence else pairs.reduce
    layer.register_forward_pre_hook(_enter(partial(enter, group=group, label="experts")))
    layer.register_forward_hook(lambda module, args, y: leave(y, group=group, label="experts"))
    layer.copies = group.size()


def _enter(move: Move) -> Callable[[nn.Module, Any], Any]:
    return lambda module, args: (move(args[0]), *args[1:])


def _split_head(model: TransformerLM, plan: TensorParallel, sequence: bool) -> None:
    """The head and the loss, if this stage has them."""
    group = plan.group
    if not isinstance(model.get_submodule("token_loss"), TokenLoss):
        return
    model.set_submodule("token_loss", VocabParallelLoss(model.config.vocab_size, plan.padded, group))
    model.fused_loss = False
    if model.bert_heads is not None:
        # Its classifiers look at the first token, and compute the same on every rank.
        if sequence:
            model.bert_heads.register_forward_pre_hook(_enter(lambda x: pairs.gather(x, 1, group, "heads")))
        bias = model.bert_heads.bias
        model.bert_heads.bias = nn.Parameter(my_part(bias, 0, plan.padded, group), bias.requires_grad)
        sequence = False

    def enter(x: Tensor) -> Tensor:
        return pairs.gather_sequence(x, 1, group, "head") if sequence else pairs.copy(x, group, "head")

    if model.head is None:
        model.set_submodule("tied_head", VocabParallelTiedHead(enter))
    else:
        model.set_submodule("head", ColumnParallelLinear(model.head, group, plan.padded, enter))
