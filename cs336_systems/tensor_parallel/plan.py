"""Tensor parallelism: split the matrices of every layer over the ranks of a group, without changes to the model's code.

    x ->  copy -> [ column parallel: some heads, or some of d_ff ] -> [ row parallel ] -> reduce -> + bias

The first matrix is split by its outputs and the second by its inputs, so that nothing is sent between them; the layer's
result is the sum of the ranks' results. This costs one all-reduce in forward and one in backward for attention, and the
same for the feed-forward (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3).

Sequence parallelism also splits the residual stream, norms and dropout, which lie between these layers, along the
sequence. Reduce becomes a reduce-scatter and copy an all-gather, which together move as many bytes as the all-reduce,
and each rank keeps its part only (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from cs336_systems.buffers.replicas import require_equal
from cs336_systems.comm import Group, broadcast, default_group, pairs
from cs336_systems.errors import UserError
from cs336_systems.layout import check_divides, padded_vocabulary
from cs336_systems.model.feed_forward import GroupedLinear
from cs336_systems.model.heads import TokenLoss
from cs336_systems.model.moe import MoELayer
from cs336_systems.model.transformer import Block, TransformerLM, require_transformer
from cs336_systems.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, gather_input, my_part, split
from cs336_systems.tensor_parallel.vocabulary import VocabParallelEmbedding, VocabParallelLoss

OF_VOCABULARY = ("embedding.tokens.weight", "bert_heads.bias", "head.weight")  # parameters with a row for every word


@dataclass
class TensorParallel:
    """A split model. Its parameters keep the names of the whole model; `cut` maps these names to the dimension along
    which a parameter is split. `partial` names parameters that are whole on every rank, but of whose gradient each rank
    has one term of a sum over the group: routers, biases of experts' second layers and, under sequence parallelism,
    parameters that see this rank's tokens only."""

    model: TransformerLM
    group: Group
    padded: int  # size of the vocabulary
    cut: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Shape that a parameter with `shape` on this rank has in the whole model."""
        sizes = list(shape)
        if (dim := self.cut.get(name)) is not None:
            sizes[dim] = self.model.config.vocab_size if name in OF_VOCABULARY else sizes[dim] * self.group.size()
        return torch.Size(sizes)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole model, such as a parameter or its gradient."""
        if (dim := self.cut.get(name)) is None:
            return whole
        return my_part(whole, dim, self.padded if name in OF_VOCABULARY else whole.shape[dim], self.group)

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device) -> None:
        """Fill a model on the meta device with this rank's part of the whole model's initial values for a seed."""
        self.model.to_empty(device=device)
        for name, parameter in self.model.named_parameters():
            shape = self.whole_shape(name, parameter.shape)
            parameter.copy_(self.part(name, self.model.initial_weight(name, shape, seed, device)))


def tensor_parallel(
    model: TransformerLM, group: Group | None = None, sequence: bool = False, vocabulary_multiple: int = 1
) -> TensorParallel:
    """Split a model, or a pipeline's stage, over a group, in place. All ranks take the first rank's values. `sequence`
    also splits the residual stream between layers, along the sequence. The vocabulary is padded to a multiple of
    `vocabulary_multiple`. A group of one leaves the model as it is. Raises UserError, with the numbers, for heads, d_ff
    or a vocabulary that do not divide, and for ranks whose models differ in structure."""
    config, group = require_transformer(model).config, default_group(group)
    check_divides(config, group.size())
    plan = TensorParallel(model, group, padded_vocabulary(config.vocab_size, vocabulary_multiple, group.size()))
    if group.size() == 1:
        return plan
    if any(hasattr(parameter, "partition_dim") for parameter in model.parameters()):
        raise UserError("the model is split over tensor-parallel ranks already: split a new one")
    _begin_alike(model, group)
    for block in model.blocks:
        if isinstance(block, Block):
            _split_block(block, group, sequence)
    if isinstance(getattr(model.embedding, "tokens", None), nn.Embedding):
        tokens = VocabParallelEmbedding(model.embedding.tokens, plan.padded, group)
        model.set_submodule("embedding.tokens", tokens)
    if sequence:
        model.embedding.register_forward_hook(lambda module, args, x: pairs.scatter(x, 1, group, "embedding"))
    if isinstance(model.get_submodule("token_loss"), TokenLoss):
        _split_head(model, plan, sequence)
    for name, parameter in model.named_parameters():
        some_tokens = sequence and name.startswith(("blocks.", "final_norm."))
        if (dim := getattr(parameter, "partition_dim", None)) is not None:
            plan.cut[name] = dim
        elif some_tokens or name.endswith((".router.weight", ".experts.down.bias", ".shared.down.bias")):
            plan.partial.add(name)
    return plan


def _begin_alike(model: TransformerLM, group: Group) -> None:
    """Broadcast the first rank's values, unless there are none yet, as on the meta device."""
    tensors = {name: p for name, p in (*model.named_parameters(), *model.named_buffers()) if not p.is_meta}
    if tensors:
        require_equal("models", [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in tensors.items()], group)
    for tensor in tensors.values():
        broadcast(tensor.data, 0, group, "initial value").wait()


def _split_block(block: Block, group: Group, sequence: bool) -> None:
    attention, feed_forward, config = block.attention, block.feed_forward, block.attention.config
    block.part = group.rank() if sequence else 0
    again = config.recompute in ("none", "attention")  # else the input is recomputed, and so gathered again, anyway
    attention.first_head = group.rank() * config.num_heads // group.size()
    _split_columns(attention, group)
    block.set_submodule("attention.out", RowParallelLinear(attention.out, group, sequence))
    _enter(attention, group, "attention", sequence, again)
    if isinstance(feed_forward, MoELayer):
        _split_experts(feed_forward, group, sequence)
    else:
        _split_columns(feed_forward, group)
        block.set_submodule("feed_forward.down", RowParallelLinear(feed_forward.down, group, sequence))
        _enter(feed_forward, group, "feed-forward", sequence, again)


def _split_columns(module: nn.Module, group: Group) -> None:
    for name in ("query", "key", "value", "up", "gate"):
        if hasattr(module, name):
            setattr(module, name, ColumnParallelLinear(getattr(module, name), group))


def _split_experts(layer: MoELayer, group: Group, sequence: bool) -> None:
    """Split the hidden width of a layer's experts. All ranks route alike, and each computes a term of every expert's
    output, so only the layer's result is reduced. The router's gradient is also one term of a sum over the ranks. All
    ranks compute the same balancing loss, so each adds its share of that loss only."""
    for name, linear in layer.experts.named_children():
        assert isinstance(linear, GroupedLinear)
        linear.weight = split(linear.weight, 2 if name == "down" else 1, group)
        if linear.bias is not None and name != "down":
            linear.bias = split(linear.bias, 1, group)
    layer.experts.down.bias_share = float(group.rank() == 0)
    if layer.shared is not None:
        _split_columns(layer.shared, group)
        layer.shared.set_submodule("down", RowParallelLinear(layer.shared.down, group, reduces=False))
    leave = partial(pairs.reduce_sequence, dim=1) if sequence else pairs.reduce
    _enter(layer, group, "experts", sequence)
    layer.register_forward_hook(lambda module, args, y: leave(y, group=group, label="experts"))
    layer.copies = group.size()


def _enter(module: nn.Module, group: Group, label: str, sequence: bool, again: bool = False) -> None:
    """Make a module's forward begin with the whole input on every rank."""
    if sequence:
        gather_input(module, group, label, again)
    else:
        module.register_forward_pre_hook(lambda module, args: (pairs.copy(args[0], group, label), *args[1:]))


def _split_head(model: TransformerLM, plan: TensorParallel, sequence: bool) -> None:
    group = plan.group
    model.set_submodule("token_loss", VocabParallelLoss(model.config.vocab_size, plan.padded, group))
    model.fused_loss = False
    if model.bert_heads is not None:
        # BERT's classifiers read the first token, and every rank computes the same.
        if sequence:
            model.bert_heads.register_forward_pre_hook(lambda module, args: (pairs.gather(args[0], 1, group, "heads"),))
        model.bert_heads.bias = split(model.bert_heads.bias, 0, group, plan.padded)
        sequence = False
    if model.head is not None:
        model.set_submodule("head", ColumnParallelLinear(model.head, group, plan.padded))
    _enter(model.get_submodule("head" if model.tied_head is None else "tied_head"), group, "head", sequence)
