"""What one rank of a layout sends in a step: every collective and message, as `comm.record()` lists them.

For b s tokens, h wide, tensor parallelism needs for each block two all-reduces of b s h forward and two backward
(Shoeybi et al., arXiv:1909.08053, section 3). Under sequence parallelism each is an all-gather and a reduce-scatter,
as many bytes, and backward gathers two inputs again (Korthikanti et al., arXiv:2205.05198, section 4.2). What is
recomputed repeats its forward's. A pipeline sends b s h, or 1/t of it under sequence parallelism, from stage to stage
and back for each microbatch and chunk (Narayanan et al., arXiv:2104.04473, section 3.2).
"""

from collections import Counter
from math import ceil, prod
from typing import NamedTuple

from cs336_systems.cost.layout import (
    TIED,
    Layout,
    Shapes,
    buckets,
    is_tied_copy,
    partial_names,
    rank_shapes,
)
from cs336_systems.cost.layout_memory import parameter_bytes
from cs336_systems.cost.memory import Precision
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import Action, receives_from, sends_to


class Transfer(NamedTuple):
    """One collective or message: along which axis of the mesh ("tp", "pp", "dp", "ends" or "world"), what it is for,
    how many elements of how many bytes."""

    verb: str
    axis: str
    what: str
    elements: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.width


Traffic = Counter[Transfer]


def pass_traffic(
    config: ModelConfig, layout: Layout, seq: int, stage: int, chunk: int = 0, width: int = 4
) -> tuple[Traffic, Traffic]:
    """What tensor parallelism sends, forward and backward, for one microbatch through one chunk of a stage."""
    ahead, back = Traffic(), Traffic()
    if layout.tp == 1:
        return ahead, back
    tokens = layout.micro_batch * seq
    (first, last), sequence, blocks = layout.ends(stage), layout.sequence, layout.blocks(config)

    def add(where: Traffic, verb: str, what: str, times: int = 1, elements: int = 0, size: int = width) -> None:
        where[Transfer(verb, "tp", what, elements or tokens * config.d_model, size)] += times

    rows = 2 * blocks
    runs, cut = repeats(config, blocks)
    for where, times, unneeded in ((ahead, blocks, 0), (back, runs, cut)):
        add(where, "reduce-scatter" if sequence else "all-reduce", "row", 2 * times - unneeded)
        for branch in ("attention", "feed-forward") if sequence else ():
            add(where, "all-gather", branch, times)
    for branch in ("attention", "feed-forward"):
        add(back, "reduce-scatter" if sequence else "all-reduce", f"{branch}, gradient", blocks)
        if sequence and config.recompute in ("none", "attention"):
            add(back, "all-gather", f"{branch} again", blocks)
    if sequence:
        add(back, "all-gather", "row, gradient", rows)
    if first and chunk == 0:
        add(ahead, "all-reduce", "embedding")
        if sequence:
            add(back, "all-gather", "embedding, gradient")
    if last and chunk == layout.chunks - 1:
        parted = sequence and not config.bert_heads  # BERT's classifiers have gathered it already
        if sequence:
            add(ahead, "all-gather", "head" if parted else "heads")
        add(back, "reduce-scatter" if parted else "all-reduce", "head, gradient")
        add(ahead, "all-reduce", "largest logit", 1, tokens, 4)
        add(ahead, "all-reduce", "softmax", 1, 2 * tokens, 4)
    return +ahead, +back


def repeats(config: ModelConfig, blocks: int) -> tuple[int, int]:
    """(blocks that backward runs again, in all, and how many of their last reductions it does without).

    Torch stops a recomputation once the last tensor that backward needs is back: without dropout that is before the
    last block's sum over the ranks, and between two halves of nested recomputation before the second.
    """
    needless = 0 if config.dropout else 1
    if config.recompute == "segments":
        return blocks, needless * ceil(blocks / config.recompute_every)
    if config.recompute != "nested" or blocks == 1:
        return 0, 0

    def half(size: int) -> tuple[int, int]:
        if size == 1:
            return 1, needless
        parts = half(size // 2), half(size - size // 2)
        return size // 2 + parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]

    (a, b), (c, d) = half(blocks // 2), half(blocks - blocks // 2)
    return a + c, b + d


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
    config: ModelConfig, layout: Layout, stage: int, precision: Precision = "fp32", dp_rank: int = 0
) -> Traffic:
    """What follows the last backward: buckets over dp and the vote on them, partial sums over tp, the tied embedding
    over the first and last stage, the norm over all ranks, and updated parameters.

    ZeRO stage 3 gathers and reduces while it computes: see `shard_traffic`; what is left are the vectors' gradients.
    """
    width, found, shapes = parameter_bytes(precision)[0], Traffic(), rank_shapes(config, layout, stage)
    groups, dp = buckets(config, layout, stage, width), layout.dp
    sizes = [sum(prod(shapes[name]) for name in names) for names in groups]

    def add(verb: str, axis: str, what: str, elements: int, size: int = width) -> None:
        found[Transfer(verb, axis, what, elements, size)] += 1

    if dp > 1 and layout.zero == 3:
        add("all-reduce", "dp", "replicated", sum(prod(shape) for shape in shapes.values() if len(shape) == 1))
        add("all-reduce", "dp", "ballot", len(shapes) + 1, 4)
    elif dp > 1:
        for size in sizes:
            if layout.zero == 2:
                add("reduce-scatter", "dp", "bucket", ceil(size / dp) * dp)
            else:
                add("all-reduce", "dp", "bucket", size)
        add("all-reduce", "dp", "ballot", len(shapes) + 1, 4)
        matrices = sum(prod(shape) for shape in shapes.values() if len(shape) > 1)
        stores = {0: [], 1: [matrices, sum(sizes) - matrices], 2: sizes}[layout.zero]
        for size in stores:
            add("all-gather", "dp", "updated parameters", ceil(size / dp) * dp)
    kept = _kept(shapes, groups, layout, dp_rank)
    if partial := sum(kept[name] for name in partial_names(shapes, layout)):
        add("all-reduce", "tp", "norms", partial)
    if is_tied_copy(config, layout, stage) and kept[TIED]:
        add("all-reduce", "ends", "tied embedding", kept[TIED])
    if layout.ranks > 1:
        add("all-reduce", "world", "gradient norm", 1, 8)
    return found


def _kept(shapes: Shapes, groups: list[list[str]], layout: Layout, dp_rank: int) -> dict[str, int]:
    """Elements of each gradient that a dp rank has after the reduction: in stage 2 its slice of each bucket."""
    if layout.zero < 2:
        return {name: prod(shape) for name, shape in shapes.items()}
    if layout.zero == 3:
        return {name: _rows(shape, layout.dp, dp_rank) * prod(shape[1:]) for name, shape in shapes.items()}
    found = {}
    for names in groups:
        slice_, start = ceil(sum(prod(shapes[name]) for name in names) / layout.dp), 0
        for name in names:
            end = start + prod(shapes[name])
            found[name] = max(0, min(end, (dp_rank + 1) * slice_) - max(start, dp_rank * slice_))
            start = end
    return found


def _rows(shape: tuple[int, ...], dp: int, dp_rank: int) -> int:
    """Of a tensor that ZeRO stage 3 shards if it is a matrix: the first ranks have as many as each other."""
    if len(shape) == 1:
        return shape[0]
    rows = ceil(shape[0] / dp)
    return max(0, min(shape[0], (dp_rank + 1) * rows) - dp_rank * rows)


def shard_traffic(config: ModelConfig, layout: Layout, stage: int, width: int = 4) -> Traffic:
    """What ZeRO stage 3 sends over dp for each microbatch: every matrix is gathered for forward and for backward, and
    its gradient reduce-scattered (Rajbhandari et al., arXiv:1910.02054, section 7.2.2).

    A tied embedding that is the head as well is gathered once more. A bound from below where a last stage has a copy
    of the embedding: that is gathered up to twice more.
    """
    found = Traffic()
    if layout.zero < 3 or layout.dp == 1:
        return found
    both = config.tied_head and layout.pp == 1
    for name, shape in rank_shapes(config, layout, stage).items():
        if len(shape) > 1:
            elements = ceil(shape[0] / layout.dp) * layout.dp * prod(shape[1:])
            times = 3 if both and name == TIED else 2
            found[Transfer("all-gather", "dp", "weight", elements, width)] += times
            found[Transfer("reduce-scatter", "dp", "weight, gradient", elements, width)] += 1
    return found


def step_traffic(
    config: ModelConfig, layout: Layout, seq: int, stage: int = 0, precision: Precision = "fp32", dp_rank: int = 0
) -> Traffic:
    """Every collective and message of one step on a rank of a stage, counted: equal to what `comm.record()` lists.

    That is forward and backward of all microbatches, and what `gradient_traffic` names; a group of one rank sends
    nothing. What a trainer sums besides, the number of targets and its losses, is not in it. Raises UserError for a
    layout that does not divide.
    """
    layout.check(config, seq)
    width, total = parameter_bytes(precision)[0], Traffic()
    for chunk in range(layout.chunks):
        for each in pass_traffic(config, layout, seq, stage, chunk, width):
            for transfer, times in each.items():
                total[transfer] += times * layout.microbatches
    for transfer, times in shard_traffic(config, layout, stage, width).items():
        total[transfer] += times * layout.microbatches
    total += message_traffic(config, layout, seq, stage, width)
    return total + gradient_traffic(config, layout, stage, precision, dp_rank)
