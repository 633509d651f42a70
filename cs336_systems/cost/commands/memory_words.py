"""The prediction of memory in words: what the fullest rank holds, and why."""

from cs336_systems.console import format_bytes, format_count
from cs336_systems.cost.commands.request import Request
from cs336_systems.cost.commands.told import Section
from cs336_systems.cost.large.data_parallel_time import GRADIENT, stage_weights
from cs336_systems.cost.large.operator_time import GROUPS
from cs336_systems.cost.large.plan_memory import RESERVE, live_passes, peak_bytes, room, unit
from cs336_systems.cost.large.stage_parts import stage_groups


def explain_memory(request: Request) -> list[Section]:
    """The derivation of `plan_memory.peak_bytes`. Raises UserError as it does."""
    stage, parts = peak_bytes(request.config, request.plan, request.seq)
    return [
        _state(request, stage, parts),
        _activations(request, stage, parts),
        _workspace(parts),
        _sum(request, stage, parts),
    ]


def _state(request: Request, stage: int, parts: dict[str, float]) -> Section:
    plan = request.plan
    shared, owned, _ = stage_weights(request.config, plan, request.seq, stage)
    held = [f"{format_count(shared, 'B')} that all replicas share"] if shared else []
    held += [f"{format_count(owned, 'B')} of experts of its own"] if owned else []
    split = {
        0: "nothing is split over replicas",
        1: f"ZeRO 1 splits the optimizer's state over {plan.replicas} replicas",
        2: f"ZeRO 2 splits the optimizer's state over {plan.replicas} replicas, and gradients where a step is one pass",
        3: f"ZeRO 3 splits all of it over {plan.replicas} replicas",
    }[plan.zero]
    moments = 12 if plan.width < 4 else 8
    master = "master weight and two moments" if plan.width < 4 else "two moments"
    return Section(
        "Weights, gradients, optimizer",
        [
            f"Stage {stage}'s rank has {' and '.join(held)}.",
            f"{plan.width} bytes each for products, {GRADIENT} for a gradient in 32 bits, {moments} for AdamW's "
            f"{master}; {split}: "
            f"{', '.join(f'{name} {format_bytes(parts[name])}' for name in ('weights', 'gradients', 'optimizer'))}.",
        ],
    )


def _activations(request: Request, stage: int, parts: dict[str, float]) -> Section:
    config, plan = request.config, request.plan
    lines = []
    for group, times in stage_groups(config, plan, stage):
        one = unit(config, plan.alone(), request.seq, group)
        again = f"; backward makes {format_bytes(one.again)} anew" if one.again else ""
        lines.append(f"{GROUPS[group].capitalize()}, {times:g} on the stage: keeps {format_bytes(one.kept)}{again}.")
    live = live_passes(stage, plan.pp, plan.microbatches, plan.chunks)
    under_way = max(sum(moment) for moment in live)
    most = (
        f"At most {under_way} passes of a microbatch through one of its {plan.chunks} chunks are under way"
        if plan.chunks > 1
        else f"At most {under_way} microbatch{' is' if under_way == 1 else 'es are'} under way"
    )
    lines.append(f"{most} on stage {stage} of {plan.pp}: {format_bytes(parts['activations'])}.")
    return Section("Activations", lines)


def _workspace(parts: dict[str, float]) -> Section:
    return Section(
        "Workspace",
        [
            "What a block's backward needs for a moment, gradients of activations and gathered tensors, about "
            f"{format_bytes(parts['workspace'])}: this part is an estimate."
        ],
    )


def _sum(request: Request, stage: int, parts: dict[str, float]) -> Section:
    need, there = sum(parts.values()), room(request.system)
    terms = " + ".join(format_bytes(count) for count in parts.values() if count)
    return Section(
        "Together",
        [
            f"{terms} = {format_bytes(need)} on stage {stage}, which needs most.",
            f"{request.system.name} has {format_bytes(request.system.memory)}, of which {RESERVE:.0%} goes to its "
            f"context, the communication library and fragmentation: {format_bytes(there)} can be used, so it "
            f"{'fits' if need <= there else 'does not fit'}.",
        ],
    )
