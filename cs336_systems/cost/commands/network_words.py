"""What a predicted step sends between the ranks of a microbatch, in words: collectives by axis, and the pipeline."""

from collections import Counter

from cs336_systems.console import format_bytes, format_count, format_seconds
from cs336_systems.cost.commands.told import Section, Told
from cs336_systems.cost.large.efficiency import collective_seconds
from cs336_systems.cost.large.operator_time import GROUPS
from cs336_systems.cost.large.operators import Collective
from cs336_systems.cost.large.stage_parts import Group, operators_of

AXES = {"tp": "tensor-parallel", "cp": "context-parallel", "ep": "expert-parallel"}
WAYS = ("forward", "backward", "run again")


def explain_axis(told: Told, axis: str) -> Section:
    """Collectives of one axis, each with bytes, ranks and bandwidth."""
    request = told.request
    plan, system, constants = request.plan, request.system, request.constants
    lines = [_links(told, axis)]
    if plan.overlap == "all" and plan.sequence and axis == "tp":
        lines.append(f"Gathers and scatters are cut into {plan.tp} parts, of which all but one are behind a product.")
    for group, _ in told.groups:
        for (each, way), count in sorted(_sent(told, group, axis).items(), key=lambda sent: WAYS.index(sent[0][1])):
            lines.append(
                f"{GROUPS[group].capitalize()}, {way}: {count} x {each.verb} of {format_bytes(each.nbytes)}, "
                f"{format_seconds(collective_seconds(each, plan, system, constants))} each."
            )
    one, m = float(getattr(told.spent, axis)), plan.microbatches
    lines.append(f"Stage {told.step.stage}: {format_seconds(one)} a microbatch; x {m} = {format_seconds(m * one)}.")
    return Section(f"Sends of {AXES[axis].replace('-parallel', ' parallelism')}", lines)


def _links(told: Told, axis: str) -> str:
    """Who sends how much over what."""
    system, constants = told.request.system, told.request.constants
    ranks, local = getattr(told.request.plan, axis), told.request.plan.local(axis, node=system.node)
    inside, between = system.inside.bandwidth * constants.inside, system.between.bandwidth * constants.between
    where = "all in one node" if local == ranks else f"{local} to a node"
    if axis == "ep":
        far = f", and of {ranks - local} others at {format_count(between)}B/s beside that" if local < ranks else ""
        return (
            f"{ranks} ranks, {where}: each has something for every rank, and sends that of {local - 1} in its node at "
            f"{format_count(inside)}B/s{far}. Then there is latency."
        )
    reached = inside if local == ranks else min(inside, local * between)
    return (
        f"{ranks} ranks, {where}, send at {format_count(reached)}B/s: an all-gather or a reduce-scatter {ranks - 1}/"
        f"{ranks} of the tensor, an all-reduce twice that. Then there is latency."
    )


def _sent(told: Told, group: Group, axis: str) -> Counter[tuple[Collective, str]]:
    """How often a group sends what, in which direction."""
    config = told.request.config
    found: Counter[tuple[Collective, str]] = Counter()
    again = config.recompute not in ("none", "attention") and group in ("dense", "sparse")
    for each in operators_of(told.request.rank, group):
        found.update((one, "forward") for one in each.sent if one.axis == axis)
        found.update((one, "backward") for one in each.returned if one.axis == axis)
        found.update((one, "run again") for one in each.sent if one.axis == axis and again)
    return found


def explain_pipeline(told: Told) -> Section:
    """Messages between stages, and the bubble."""
    request, parts = told.request, told.step.parts
    plan = request.plan
    nbytes = plan.width * plan.micro_batch * request.seq * request.config.d_model / (plan.cp * plan.tp)
    work = sum(told.spent) * plan.microbatches
    ideal = (plan.pp - 1) / (plan.microbatches * plan.chunks)
    per = f", divided by {plan.chunks} chunks," if plan.chunks > 1 else ""
    hidden = plan.overlap == "all" and plan.chunks > 1
    seen = f", of whose time behind computing {request.constants.hidden:g} is lost" if hidden else ""
    return Section(
        "The pipeline",
        [
            f"Messages: {2 * plan.chunks} to wait for a microbatch, forward and backward for each chunk, of "
            f"{format_bytes(nbytes)}{seen}: {format_seconds(parts['pipeline'])} for {plan.microbatches} microbatches.",
            f"Bubble: filling and draining takes what one microbatch takes in the other {plan.pp - 1} stages{per} = "
            f"{format_seconds(parts['bubble'])}, {parts['bubble'] / work:.1%} of the {format_seconds(work)} that "
            f"this stage works. With stages all alike it is (p - 1) / (m v) = {plan.pp - 1} / ({plan.microbatches} x "
            f"{plan.chunks}) = {ideal:.1%}.",
        ],
    )
