"""How long a step of a layout takes: FLOPs at the device's peak, element-wise work at its bandwidth, a start of each
operator, first touch of large tensors, every transfer over one link, and the schedule played through by
`schedule.simulate`.

Transfers of tensor and expert parallelism wait, those between stages travel while stages compute, and the reductions
of gradients hide behind the last microbatch's backward.
"""

from collections import Counter
from collections.abc import Iterable

from cs336_systems.cost.flops import (
    backward_flops,
    block_backward_flops,
    block_flops,
    forward_flops,
    head_flops,
    model_flops,
    recompute_flops,
    repeated_blocks,
)
from cs336_systems.cost.hardware import Hardware
from cs336_systems.cost.launches import (
    Casts,
    count_tensors,
    embedding_launches,
    head_launches,
    span_launches,
    update_launches,
)
from cs336_systems.cost.layout import Layout
from cs336_systems.cost.layout_memory import parameter_bytes, state_elements
from cs336_systems.cost.layout_traffic import gradient_traffic, message_traffic, pass_traffic, shard_traffic
from cs336_systems.cost.memory import Precision
from cs336_systems.cost.new_memory import new_bytes
from cs336_systems.cost.parallel import Link, exposed_seconds
from cs336_systems.cost.step import ADAMW_PASSES, forward_traffic
from cs336_systems.cost.transfer import Traffic, Transfer
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import schedule, simulate


def sample_flops(config: ModelConfig, seq: int, micro_batch: int = 1) -> tuple[int, int]:
    """(model, hardware) FLOPs of one sequence of a microbatch in a step: what the model asks for, and what is computed,
    with what backward repeats, with experts' empty slots and one-hot products.

    For s tokens, l layers, h wide, and V words, the second is 96 s l h^2 (1 + s / 6h + V / 16lh) where all blocks are
    recomputed (Narayanan et al., arXiv:2104.04473, section 5.1 and appendix). Without the repeated forward, the first
    is 72 s l h^2 (1 + s / 6h + V / 12lh). BERT's transform, pooler and pair count as well, 0.2% of BERT-345M.
    """
    model = model_flops(config, micro_batch, seq)
    spent = sum(forward_flops(config, micro_batch, seq).values()) + backward_flops(config, micro_batch, seq)
    return model // micro_batch, (spent + recompute_flops(config, micro_batch, seq)) // micro_batch


def pass_flops(config: ModelConfig, layout: Layout, seq: int, stage: int) -> tuple[int, int]:
    """(forward, backward) FLOPs of one rank of a stage for one microbatch through all its blocks, recompute included.

    A split vocabulary is computed with its padding; BERT's transform and pooler, routers and one-hot products by every
    tp rank alike. A rank's experts get as many rows as it sends.
    """
    layout.check(config, seq)
    rows, ahead, back = layout.micro_batch, 0, 0
    for layers in (layout.blocks(config, stage, chunk) for chunk in range(layout.chunks)):
        again = repeated_blocks(config, layers)
        for layer in layers:
            forward = _of_a_rank(block_flops(config, rows, seq, layer), layout)
            ahead += forward
            back += _of_a_rank(block_backward_flops(config, rows, seq, layer), layout) + again[layer] * forward
        if config.recompute == "attention":
            back += recompute_flops(config, rows, seq, layers) // layout.tp
    head = 0
    if layout.ends(stage)[1]:
        words = 2 * rows * seq * config.d_model
        head = head_flops(config, rows, seq) - words * config.vocab_size + words * layout.vocabulary(config)
    return ahead + head, back + 2 * head


def pass_launches(config: ModelConfig, layout: Layout, stage: int, casts: Casts = "none") -> tuple[int, int]:
    """Operators that one rank of a stage starts, forward and backward, for one microbatch through all its blocks; what
    tensor and expert parallelism add is left out."""
    found = [span_launches(config, layout.blocks(config, stage, chunk), casts) for chunk in range(layout.chunks)]
    first, last = layout.ends(stage)
    found += [embedding_launches(config)] if first else []
    found += [head_launches(config, casts)] if last else []
    return sum(each[0] for each in found), sum(each[1] for each in found)


def _of_a_rank(parts: dict[str, int], layout: Layout) -> int:
    """A block's FLOPs on one rank of tp."""
    return sum(count if name in ("router", "one-hot products") else count // layout.tp for name, count in parts.items())


def transfer_seconds(link: Link, transfer: Transfer, layout: Layout) -> float:
    """How long one transfer takes on a link that is free."""
    if transfer.verb in ("send", "receive"):
        return link.latency + transfer.nbytes / link.bandwidth
    ranks = {"tp": layout.tp, "ep": layout.ep, "dp": layout.dp, "data": layout.data, "ends": 2, "world": layout.ranks}
    return link.seconds(transfer.nbytes, ranks[transfer.axis], transfer.verb)


def traffic_seconds(link: Link, traffic: Traffic, layout: Layout, axes: Iterable[str]) -> float:
    """How long the transfers along some axes take, one after another."""
    return sum(n * transfer_seconds(link, each, layout) for each, n in traffic.items() if each.axis in axes)


def predict_step(
    config: ModelConfig, layout: Layout, seq: int, hardware: Hardware, link: Link, precision: Precision = "fp32"
) -> dict[str, float]:
    """Seconds of one step by what they are spent on, and `total`, their sum.

    All but `pipeline`, what messages between stages add to the simulated time, are of the stage that has most to do:
    `bubble` is what it waits for others meanwhile. Raises UserError for a layout that does not divide.
    """
    layout.check(config, seq)
    width, m, stages = parameter_bytes(precision)[0], layout.microbatches, range(layout.pp)
    computed = [_computing(config, layout, seq, stage, hardware, precision) for stage in stages]
    spoken = [_spoken(config, layout, seq, stage, link, width, ("tp",)) for stage in stages]
    routed = [_spoken(config, layout, seq, stage, link, width, ("ep", layout.data_axis)) for stage in stages]
    times = [[sum(each) for each in zip(*ways, strict=True)] for ways in zip(computed, spoken, routed, strict=True)]
    busiest = max(stages, key=lambda stage: sum(times[stage]))
    lists = schedule(layout.schedule, layout.pp, m, layout.chunks)
    forward, backward = ([each[way] for each in times] for way in (0, 1))
    alone = simulate(lists, forward, backward).makespan
    messages = message_traffic(config, layout, seq, busiest, width)
    transfer = max((transfer_seconds(link, each, layout) for each in messages), default=0.0)
    gradients = gradient_traffic(config, layout, busiest, precision)
    parts = {
        "forward": m * computed[busiest][0],
        "backward": m * computed[busiest][1],
        "bubble": alone - m * sum(times[busiest]),
        "tensor-parallel": m * sum(spoken[busiest]) + traffic_seconds(link, gradients, layout, ("tp",)),
        "expert-parallel": m * sum(routed[busiest]),
        "pipeline": simulate(lists, forward, backward, transfer).makespan - alone,
        "data-parallel": _data_parallel(gradients, layout, link, times[busiest][1] / layout.chunks),
        "optimizer": _updating(config, layout, seq, busiest, hardware, precision),
    }
    # An estimate from above: shards travel while layers compute.
    shards = shard_traffic(config, layout, busiest, width)
    parts["data-parallel"] += traffic_seconds(link, shards, layout, ("dp", "data"))
    parts["pipeline"] += traffic_seconds(link, gradients, layout, ("ends",))
    return parts | {"total": sum(parts.values())}


def _casts(precision: Precision) -> Casts:
    """Under a layout the weights are in half precision as well."""
    return "weights" if precision in ("bf16", "fp16") else "none"


def _touching(
    config: ModelConfig, layout: Layout, seq: int, hardware: Hardware, precision: Precision
) -> dict[str, float]:
    """Seconds of the first touch of new memory by phase, of a microbatch and of the update. A rank's even share of the
    model's is an estimate: tensors that tp does not split are more, and those that it splits may no longer be large."""
    if not hardware.first_touch:
        return {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    found = new_bytes(config, layout.micro_batch, seq, "step", precision, ep=layout.ep)
    return {phase: hardware.first_touch * nbytes / layout.tp / layout.pp for phase, nbytes in found.items()}


def _computing(
    config: ModelConfig, layout: Layout, seq: int, stage: int, hardware: Hardware, precision: Precision
) -> tuple[float, float]:
    """Seconds, forward and backward, that one microbatch computes on a rank of a stage. Of element-wise work it has
    its even share, too."""
    flops, started = pass_flops(config, layout, seq, stage), pass_launches(config, layout, stage, _casts(precision))
    traffic = forward_traffic(config, layout.micro_batch, seq, precision, layout.ep)
    moved = traffic / hardware.bandwidth / layout.pp / layout.tp
    touched = _touching(config, layout, seq, hardware, precision)
    ahead, back = flops[0] / hardware.matmul_flops + moved, flops[1] / hardware.matmul_flops + 2 * moved
    ahead, back = ahead + hardware.waiting(started[0], ahead), back + hardware.waiting(started[1], back)
    return ahead + touched["forward"], back + touched["backward"]


def _updating(
    config: ModelConfig, layout: Layout, seq: int, stage: int, hardware: Hardware, precision: Precision
) -> float:
    """Seconds of the optimizer's update on a rank of a stage."""
    moved = ADAMW_PASSES * 4 * state_elements(config, layout, stage, precision)[2] / hardware.bandwidth
    touched = _touching(config, layout, seq, hardware, precision)["optimizer"]
    if layout.zero > 0:  # shards are few and flat
        return moved + touched / layout.data
    started = update_launches(_casts(precision)) * count_tensors(config) // layout.pp
    return moved + hardware.waiting(started, moved) + touched


def _spoken(
    config: ModelConfig, layout: Layout, seq: int, stage: int, link: Link, width: int, axes: tuple[str, ...]
) -> tuple[float, float]:
    """Seconds, forward and backward, that one microbatch's transfers along some axes take in all chunks of a stage."""
    found = [pass_traffic(config, layout, seq, stage, chunk, width) for chunk in range(layout.chunks)]
    ahead, back = (sum(traffic_seconds(link, each[way], layout, axes) for each in found) for way in (0, 1))
    return ahead, back


def _data_parallel(gradients: Traffic, layout: Layout, link: Link, backward: float) -> float:
    """Seconds of the reductions that the last backward does not hide, and of all that follows them."""
    buckets = [each for each in gradients.elements() if each.what == "bucket"]
    seconds = [transfer_seconds(link, each, layout) for each in buckets]
    hidden = layout.chunks == 1  # chunks have a last backward each, so reductions begin after them all
    rest = +Counter({each: n for each, n in gradients.items() if each.what != "bucket"})
    exposed = exposed_seconds([each.nbytes for each in buckets], seconds, backward, hidden) if buckets else 0.0
    return exposed + traffic_seconds(link, rest, layout, ("dp", "data", "world"))
