"""The memory of one rank of a layout: what it owns, by ZeRO stage and precision, what it keeps for the backward of all
microbatches under way, and what it works in."""

from itertools import accumulate
from math import ceil, prod

from cs336_systems.cost.layout import (
    Layout,
    Shapes,
    alone_names,
    buckets,
    is_matrix,
    is_sharded,
    rank_shapes,
    wrapped,
)
from cs336_systems.cost.layout_activations import pass_activations, sizes_of
from cs336_systems.cost.memory import Activations, Precision, Sizes, gradients_inside
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import schedule


def parameter_bytes(precision: Precision) -> tuple[int, int, int]:
    """Bytes a parameter of weight, gradient and AdamW's state: 4 + 4 + 8 in float32, 2 + 2 + 12 with a float32 master
    in half precision (Rajbhandari et al., arXiv:1910.02054, section 3.1)."""
    return (2, 2, 12) if precision in ("bf16", "fp16") else (4, 4, 8)


def state_elements(config: ModelConfig, layout: Layout, stage: int, precision: Precision) -> tuple[int, int, int]:
    """(parameters, gradients, parameters with optimizer state) that dp rank 0 keeps, which has most.

    ZeRO stage 1 cuts what decays and what does not, two groups, into equal slices, stage 2 each bucket of gradients,
    and stage 3 the rows of each matrix; buffers are padded to a multiple of the ranks.
    """
    shapes, alone = rank_shapes(config, layout, stage), alone_names(config, layout, stage)
    width = parameter_bytes(precision)[0]
    found = [_state(each, ranks, zero, buckets(each, alone, width)) for each, _, ranks, zero in wrapped(shapes, layout)]
    parameters, gradients, owned = (sum(each) for each in zip(*found, strict=True))
    return parameters, gradients, owned


def _state(shapes: Shapes, ranks: int, zero: int, groups: list[list[str]]) -> tuple[int, int, int]:
    """`state_elements` of what one wrapper synchronises."""
    whole = sum(map(prod, shapes.values()))
    if zero == 0:
        return whole, whole, whole
    if zero == 3:
        resting = sum(
            ceil(shape[0] / ranks) * shape[1] if is_sharded(name, shape) else prod(shape)
            for name, shape in shapes.items()
        )
        return resting, resting, resting
    if zero == 1:
        slices = [ceil(size / ranks) for size in decay_sizes(shapes)]
        return ranks * sum(slices), whole, sum(slices)
    slices = [ceil(sum(prod(shapes[name]) for name in names) / ranks) for names in groups]
    return ranks * sum(slices), sum(slices), sum(slices)


def decay_sizes(shapes: Shapes) -> tuple[int, int]:
    """Elements of matrices, which decay, and of vectors, which do not: AdamW's two groups."""
    matrices = sum(prod(shape) for name, shape in shapes.items() if is_matrix(name, shape))
    return matrices, sum(map(prod, shapes.values())) - matrices


def live_activations(config: ModelConfig, layout: Layout, seq: int, stage: int, precision: Precision = "fp32") -> int:
    """The most bytes that a stage keeps for backward at once: its list of the schedule, played through.

    Every pass under way keeps what autograd saves and, unless the loss follows it, its output. With one chunk that is
    `schedule.peak_live` times one pass.
    """
    output = sizes_of(config, layout, seq, precision).stream
    passes = [pass_activations(config, layout, seq, stage, chunk, precision).kept for chunk in range(layout.chunks)]
    final = layout.chunks - 1 if layout.ends(stage)[1] else None
    passes = [kept + (0 if chunk == final else output) for chunk, kept in enumerate(passes)]
    actions = schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)[stage]
    return max(accumulate((1 if each.kind == "forward" else -1) * passes[each.chunk] for each in actions))


def _work(config: ModelConfig, layout: Layout, s: Sizes, found: Activations, layers: range, last: bool) -> int:
    """The most that a pass makes beside what it keeps: an estimate, of whole tensors."""
    inside = max(max(gradients_inside(config, s, layer)) for layer in layers)
    again = max(0, max(found.held) + found.scores - found.blocks)
    # What was gathered again, and its gradient before that is scattered.
    gathered = 2 * layout.tp * s.stream if layout.sequence and layout.tp > 1 else 0
    loss = 2 * s.logits if last else 0
    messages = 2 * s.stream if layout.pp > 1 else 0  # one that comes, one that goes
    return max(again + inside + gathered, loss) + messages


def rank_memory(
    config: ModelConfig, layout: Layout, seq: int, precision: Precision = "fp32", stage: int = 0
) -> dict[str, int]:
    """Bytes by part at the fullest moment of a step on a rank of a stage; their sum is the prediction.

    Parameters, gradients and optimizer state are exact (dp rank 0, which has most), activations too as far as autograd
    knows; workspace is an estimate. Raises UserError for a layout that does not divide.
    """
    layout.check(config, seq)
    weight, gradient, state = parameter_bytes(precision)
    parameters, gradients, owned = state_elements(config, layout, stage, precision)
    if layout.zero == 2 and layout.microbatches * layout.chunks > 1:  # they add up whole before they are cut
        gradients = max(gradients, parameters)
    activations = live_activations(config, layout, seq, stage, precision)
    last, s = layout.ends(stage)[1], sizes_of(config, layout, seq, precision)
    chunks = [(chunk, layout.blocks(config, stage, chunk)) for chunk in range(layout.chunks)]
    workspace = max(
        _work(config, layout, s, pass_activations(config, layout, seq, stage, chunk, precision), layers, last)
        for chunk, layers in chunks
    )
    # AdamW makes a temporary the size of one parameter, with masters also a float32 copy of every gradient.
    largest = max(map(prod, rank_shapes(config, layout, stage).values()))
    update = 4 * (owned if weight == 2 else 0) + 4 * min(largest, owned)
    if update > activations + workspace:
        activations, workspace = 0, update
    return {
        "parameters": weight * parameters,
        "gradients": gradient * gradients,
        "optimizer state": state * owned,
        "activations": activations,
        "workspace": workspace,
    }


def layout_memory(config: ModelConfig, layout: Layout, seq: int, precision: Precision = "fp32") -> dict[str, int]:
    """`rank_memory` of the stage that needs most."""
    stages = (rank_memory(config, layout, seq, precision, stage) for stage in range(layout.pp))
    return max(stages, key=lambda parts: sum(parts.values()))
