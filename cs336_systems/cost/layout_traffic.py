"""What one rank of a layout sends in a step: every collective and message, as `comm.record()` lists them.

For b s tokens, h wide, tensor parallelism needs for each block two all-reduces of b s h forward and two backward
(Shoeybi et al., arXiv:1909.08053, section 3). Under sequence parallelism each is an all-gather and a reduce-scatter,
as many bytes, and backward gathers two inputs again (Korthikanti et al., arXiv:2205.05198, section 4.2). What is
recomputed repeats its forward's. A pipeline sends b s h, or 1/t of it under sequence parallelism, from stage to stage
and back for each microbatch and chunk (Narayanan et al., arXiv:2104.04473, section 3.2).

Expert parallelism needs for each expert layer two all-to-alls of its rows forward and two backward (Lepikhin et al.,
GShard, arXiv:2006.16668, section 3.2), and one of how many go to each expert. An all-to-all counts what a rank gives:
on the way to the experts that is exact without a capacity, on the way back only if the router is balanced.
"""

from collections import Counter
from math import ceil, prod

from cs336_systems.cost.experts import computed_rows
from cs336_systems.cost.fsdp_traffic import closing_traffic, count_walks, whole_rows
from cs336_systems.cost.layout import (
    TIED,
    Layout,
    Shapes,
    alone_names,
    buckets,
    is_matrix,
    is_sharded,
    partial_names,
    rank_shapes,
    wrapped,
)
from cs336_systems.cost.layout_memory import parameter_bytes
from cs336_systems.cost.memory import Precision
from cs336_systems.cost.transfer import Parameter, Traffic, Transfer
from cs336_systems.cost.wrapper_traffic import construction_traffic, zero_traffic
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import Action, receives_from, schedule, sends_to


def pass_traffic(
    config: ModelConfig, layout: Layout, seq: int, stage: int, chunk: int = 0, width: int = 4
) -> tuple[Traffic, Traffic]:
    """What tensor and expert parallelism send, forward and backward, for one microbatch through a stage's chunk."""
    layers = layout.blocks(config, stage, chunk)
    again, cut = repeats(config, layers)
    ahead, back = _end_traffic(config, layout, seq, stage, chunk, width)
    for layer in layers:
        for forward, backward in (
            _tensor_traffic(config, layout, seq, layer, width),
            _expert_traffic(config, layout, seq, layer, width) if config.has_experts(layer) else (Traffic(), Traffic()),
        ):
            ahead += forward
            back += backward
            for transfer, times in forward.items():
                back[transfer] += times * again[layer]
        back[_sum(config, layout, seq, layer, width)] -= cut[layer]
    return +ahead, +back


def _sum(config: ModelConfig, layout: Layout, seq: int, layer: int, width: int) -> Transfer:
    """The sum over tp at the end of a block."""
    what = "experts" if config.has_experts(layer) else "row"
    verb = "reduce-scatter" if layout.sequence else "all-reduce"
    return Transfer(verb, "tp", what, layout.micro_batch * seq * config.d_model, width)


def _tensor_traffic(config: ModelConfig, layout: Layout, seq: int, layer: int, width: int) -> tuple[Traffic, Traffic]:
    """What tensor parallelism sends, forward and backward, for one block. An expert layer enters and leaves once."""
    ahead, back = Traffic(), Traffic()
    if layout.tp == 1:
        return ahead, back
    elements, sequence, sparse = layout.micro_batch * seq * config.d_model, layout.sequence, config.has_experts(layer)
    whole, parts = ("all-gather", "reduce-scatter") if sequence else ("all-reduce", "all-reduce")
    for branch, leave in (("attention", "row"), ("experts", "experts") if sparse else ("feed-forward", "row")):
        ahead[Transfer(parts, "tp", leave, elements, width)] += 1
        back[Transfer(parts, "tp", f"{branch}, gradient", elements, width)] += 1
        if sequence:
            ahead[Transfer(whole, "tp", branch, elements, width)] += 1
            back[Transfer(whole, "tp", f"{leave}, gradient", elements, width)] += 1
            if branch != "experts" and config.recompute in ("none", "attention"):
                back[Transfer(whole, "tp", f"{branch} again", elements, width)] += 1
    return ahead, back


def _expert_traffic(config: ModelConfig, layout: Layout, seq: int, layer: int, width: int) -> tuple[Traffic, Traffic]:
    """What an expert layer sends, forward and backward, over ep; and over all ranks that balance together."""
    ahead, back, mixture = Traffic(), Traffic(), config.mixture
    elements = computed_rows(config, layout.micro_batch * seq) * config.d_model
    if layout.ep > 1:
        if mixture.dispatch == "sort":
            ahead[Transfer("all-to-all", "ep", "expert counts", config.num_experts, 8)] += 1
        for way in ("dispatch", "combine"):
            ahead[Transfer("all-to-all", "ep", way, elements, width)] += 1
            back[Transfer("all-to-all", "ep", f"{way}, gradient", elements, width)] += 1
    if mixture.aux_scope == "global" and layout.data > 1:
        gate = 4 if mixture.gating_fp32 else width
        ahead[Transfer("all-reduce", layout.data_axis, "balance", config.num_experts, gate)] += 1
    return ahead, back


def _end_traffic(
    config: ModelConfig, layout: Layout, seq: int, stage: int, chunk: int, width: int
) -> tuple[Traffic, Traffic]:
    """What tensor parallelism sends, forward and backward, at the embedding, the head and the loss."""
    ahead, back = Traffic(), Traffic()
    if layout.tp == 1:
        return ahead, back
    tokens, (first, last), sequence = layout.micro_batch * seq, layout.ends(stage), layout.sequence

    def add(where: Traffic, verb: str, what: str, elements: int = tokens * config.d_model, size: int = width) -> None:
        where[Transfer(verb, "tp", what, elements, size)] += 1

    if first and chunk == 0:
        add(ahead, "all-reduce", "embedding")
        if sequence:
            add(back, "all-gather", "embedding, gradient")
    if last and chunk == layout.chunks - 1:
        parted = sequence and not config.bert_heads  # BERT's classifiers have gathered it already
        if sequence:
            add(ahead, "all-gather", "head" if parted else "heads")
        add(back, "reduce-scatter" if parted else "all-reduce", "head, gradient")
        add(ahead, "all-reduce", "largest logit", tokens, 4)
        add(ahead, "all-reduce", "softmax", 2 * tokens, 4)
    return ahead, back


def repeats(config: ModelConfig, layers: range) -> tuple[Counter[int], Counter[int]]:
    """(how often backward runs each block again, how many of its last reductions it does without).

    Torch stops a recomputation once the last tensor that backward needs is back: without dropout that is before the
    last block's sum over the ranks, and between two halves of nested recomputation before the second.
    """
    needless = 0 if config.dropout else 1
    again: Counter[int] = Counter()
    cut: Counter[int] = Counter()
    if config.recompute == "segments":
        ends = (*layers[config.recompute_every - 1 :: config.recompute_every], layers[-1])
        return Counter(layers), Counter(dict.fromkeys(ends, needless))
    if config.recompute != "nested" or len(layers) == 1:
        return again, cut

    def half(part: range) -> None:
        middle = len(part) // 2
        again.update(part[: max(middle, 1)])
        if len(part) == 1:
            cut[part[0]] += needless
        else:
            half(part[:middle])
            half(part[middle:])

    half(layers[: len(layers) // 2])
    half(layers[len(layers) // 2 :])
    return again, cut


def message_traffic(config: ModelConfig, layout: Layout, seq: int, stage: int, width: int = 4) -> Traffic:
    """Activations and gradients between stages, of all microbatches."""
    found = Traffic()
    elements = layout.micro_batch * seq * config.d_model // (layout.tp if layout.sequence else 1)
    for chunk in range(layout.chunks if layout.pp > 1 else 0):
        for action in (Action("forward", 0, chunk), Action("backward", 0, chunk)):
            for verb, other in (("receive", receives_from), ("send", sends_to)):
                if other(stage, action, layout.pp, layout.chunks) is not None:
                    found[Transfer(verb, "pp", action.kind, elements, width)] += layout.microbatches
    return found


def gradient_traffic(
    config: ModelConfig, layout: Layout, stage: int, precision: Precision = "fp32", data_rank: int = 0
) -> Traffic:
    """What follows the last backward: buckets over the data-parallel ranks and the vote on them, partial sums over tp,
    the tied embedding over the first and last stage, the norm over all ranks, and updated parameters.

    ZeRO stage 3 gathers and reduces while it computes: see `shard_traffic`; what is left are the gradients of what it
    does not shard, and experts that are split, which are treated as in stage 2.
    """
    width, found, shapes = parameter_bytes(precision)[0], Traffic(), rank_shapes(config, layout, stage)
    alone = alone_names(config, layout, stage)
    kept: dict[str, int] = {}
    for each, axis, ranks, zero in wrapped(shapes, layout):
        groups = buckets(each, alone, width)
        parameters = [Parameter(name, shape, width) for name, shape in each.items()]
        found += _wrapper_traffic(parameters, alone, axis, ranks, zero)
        kept |= _kept(each, groups, ranks, zero, data_rank if axis == layout.data_axis else data_rank // layout.ep)
    if partial := sum(kept[name] for name in partial_names(shapes, layout)):
        found[Transfer("all-reduce", "tp", "norms", partial, width)] += 1
    if alone and kept[TIED]:
        found[Transfer("all-reduce", "ends", "tied embedding", kept[TIED], width)] += 1
    if layout.ranks > 1:
        found[Transfer("all-reduce", "world", "gradient norm", 1, 8)] += 1
    return found


def _wrapper_traffic(parameters: list[Parameter], alone: list[str], axis: str, ranks: int, zero: int) -> Traffic:
    """What one data-parallel wrapper and its AdamW, of which one group decays, send after the last backward."""
    if zero == 3:
        return closing_traffic(parameters, ranks, axis=axis)
    groups = [[each for each in parameters if is_matrix(each.name, each.shape) is decays] for decays in (True, False)]
    return zero_traffic(parameters, ranks, zero, groups, alone=alone, axis=axis)


def _kept(shapes: Shapes, groups: list[list[str]], ranks: int, zero: int, rank: int) -> dict[str, int]:
    """Elements of each gradient that a rank has after the reduction: in stage 2 its slice of each bucket."""
    if zero < 2:
        return {name: prod(shape) for name, shape in shapes.items()}
    if zero == 3:
        return {name: _rows(name, shape, ranks, rank) * prod(shape[1:]) for name, shape in shapes.items()}
    found = {}
    for names in groups:
        slice_, start = ceil(sum(prod(shapes[name]) for name in names) / ranks), 0
        for name in names:
            end = start + prod(shapes[name])
            found[name] = max(0, min(end, (rank + 1) * slice_) - max(start, rank * slice_))
            start = end
    return found


def _rows(name: str, shape: tuple[int, ...], ranks: int, rank: int) -> int:
    """Of a tensor that ZeRO stage 3 shards if it is a matrix: the first ranks have as many as each other."""
    if not is_sharded(name, shape):
        return shape[0]
    rows = ceil(shape[0] / ranks)
    return max(0, min(shape[0], (rank + 1) * rows) - rank * rows)


def shard_traffic(config: ModelConfig, layout: Layout, stage: int, width: int = 4) -> Traffic:
    """What ZeRO stage 3 sends over the data-parallel ranks in all passes of a step: for each microbatch every matrix
    is gathered for forward and for backward, and its gradient reduce-scattered (Rajbhandari et al., arXiv:1910.02054,
    section 7.2.2); what is read outside its layer, such as a tied embedding, is gathered more often (`Walk`).

    Interleaved chunks are not for stage 3: `Recipe` refuses them.
    """
    found, axis, ranks = Traffic(), layout.data_axis, layout.data
    if layout.zero < 3 or ranks == 1:
        return found
    shapes = wrapped(rank_shapes(config, layout, stage), layout)[0][0]
    layers = [name for name, shape in shapes.items() if is_sharded(name, shape)]
    # The table of positions and the weights of routers are read by what has them.
    calls = [name if name.endswith(("positions.weight", "router.weight")) else n for n, name in enumerate(layers)]
    first, last = layout.ends(stage)
    if config.tied_head and last:
        calls = [*(calls if first else calls[1:]), TIED]
    actions = schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)[stage]
    gathers, reductions = count_walks(layers, calls, [action.kind for action in actions])
    for name in layers:
        elements = whole_rows(Parameter(name, shapes[name]), ranks)
        found[Transfer("all-gather", axis, "weight", elements, width)] += gathers[name]
        found[Transfer("reduce-scatter", axis, "weight, gradient", elements, width)] += reductions[name]
    return found


def start_traffic(config: ModelConfig, layout: Layout, stage: int = 0, precision: Precision = "fp32") -> Traffic:
    """What a rank of a stage sends when its model is wrapped: each replica gets the first one's values."""
    width, found = parameter_bytes(precision)[0], Traffic()
    for each, axis, ranks, _ in wrapped(rank_shapes(config, layout, stage), layout):
        found += construction_traffic([Parameter(name, shape, width) for name, shape in each.items()], ranks, axis=axis)
    return found


def trainer_traffic(config: ModelConfig, layout: Layout, logged: bool = True) -> Traffic:
    """What `Trainer` sums besides in a step: targets, where masks decide how many there are, and, if the step is
    `logged`, the losses and how balanced experts are. Timers that are gathered over ranks are not in it."""
    found = Traffic()
    if config.bert_heads and layout.data > 1:
        found[Transfer("all-reduce", layout.data_axis, "targets", 1, 4)] += 1
    if logged and layout.ranks > 1:
        found[Transfer("all-reduce", "world", "losses", 2, 8)] += 1
        if config.num_experts:
            found[Transfer("all-reduce", "world", "balance", 4, 8)] += 1
    return found


def step_traffic(
    config: ModelConfig, layout: Layout, seq: int, stage: int = 0, precision: Precision = "fp32", data_rank: int = 0
) -> Traffic:
    """Every collective and message of one step on a rank of a stage, counted: equal to what `comm.record()` lists.

    That is forward and backward of all microbatches, and what `gradient_traffic` names; a group of one rank sends
    nothing. What a trainer sums besides is `trainer_traffic`, what comes before the first step `start_traffic`. Raises
    UserError for a layout that does not divide.
    """
    layout.check(config, seq)
    width, total = parameter_bytes(precision)[0], Traffic()
    for chunk in range(layout.chunks):
        for each in pass_traffic(config, layout, seq, stage, chunk, width):
            for transfer, times in each.items():
                total[transfer] += times * layout.microbatches
    total += shard_traffic(config, layout, stage, width)
    total += message_traffic(config, layout, seq, stage, width)
    return total + gradient_traffic(config, layout, stage, precision, data_rank)
