"""Prediction of a layout's step time from observed counts of its ranks: FLOPs at the device's peak, element-wise work
at its bandwidth, launches of operators, first touch of new memory, transfers over one link, and the pipeline schedule
as `schedule.simulate` runs it.

Transfers of tensor, expert and context parallelism wait, those between stages travel while stages compute, and the
reductions of gradients hide behind the last microbatch's backward.
"""

from collections.abc import Callable, Sequence

from cs336_systems.cost.closed_forms import Hardware, Link, exposed_seconds
from cs336_systems.layout import Layout, Observation, Transfer, Work
from cs336_systems.schedule import schedule, simulate

DATA = ("dp", "data", "world")


def work_seconds(work: Work, hardware: Hardware) -> float:
    """Seconds of a rank's own work, transfers apart."""
    busy = work.flops / hardware.matmul_flops + work.moved / hardware.bandwidth
    return busy + hardware.waiting(work.operators, busy) + hardware.first_touch * work.new


def traffic_seconds(seen: Observation, link: Link, wanted: Callable[[Transfer], bool]) -> float:
    """Seconds of some of a rank's transfers, one after another."""
    found = ((each, n) for each, n in seen.traffic.items() if wanted(each))
    return sum(n * link.seconds(each.nbytes, each.ranks, each.verb) for each, n in found)


def of_attention(each: Transfer) -> bool:
    """True for a transfer of context parallelism; of a message its sending, since another rank receives it."""
    return each.axis == "cp" and each.verb != "receive"


def predict_step(layout: Layout, stages: Sequence[Observation], hardware: Hardware, link: Link) -> dict[str, float]:
    """Seconds of one step by what they are spent on, and `total`, their sum, from an observation of each stage. All but
    `pipeline`, what messages between stages add to the simulated time, are of the stage that has most to do: `bubble`
    is what it waits for others meanwhile."""
    m, ways = layout.microbatches, ("forward", "backward")

    def is_routing(each: Transfer) -> bool:
        return each.axis == "ep" or each.what == "balance"

    def of_stage(seen: Observation, wanted: Callable[[Transfer], bool]) -> list[float]:
        return [traffic_seconds(seen, link, lambda each: each.phase == way and wanted(each)) / m for way in ways]  # noqa: B023

    computed = [[work_seconds(seen.work[way], hardware) / m for way in ways] for seen in stages]
    spoken = [of_stage(seen, lambda each: each.axis == "tp" or of_attention(each)) for seen in stages]
    routed = [of_stage(seen, is_routing) for seen in stages]
    times = [[sum(each) for each in zip(*parts, strict=True)] for parts in zip(computed, spoken, routed, strict=True)]
    busiest = max(range(layout.pp), key=lambda stage: sum(times[stage]))
    seen = stages[busiest]
    lists = schedule(layout.schedule, layout.pp, m, layout.chunks)
    forward, backward = ([each[way] for each in times] for way in (0, 1))
    alone = simulate(lists, forward, backward, turn=layout.turn).makespan
    messages = (each for each in seen.traffic if each.axis == "pp")
    transfer = max((link.seconds(each.nbytes, each.ranks, each.verb) for each in messages), default=0.0)
    together = simulate(lists, forward, backward, transfer, layout.turn).makespan

    buckets = [each for each in seen.traffic.elements() if each.what == "bucket"]
    seconds = [link.seconds(each.nbytes, each.ranks, each.verb) for each in buckets]
    hidden = layout.chunks == 1  # chunks have a last backward each, so reductions begin after them all
    exposed = exposed_seconds([each.nbytes for each in buckets], seconds, times[busiest][1] / layout.chunks, hidden)
    rest = traffic_seconds(
        seen, link, lambda each: each.axis in DATA and each.what != "bucket" and not is_routing(each)
    )  # of stage 3 an estimate from above: shards travel while layers compute
    parts = {
        "forward": m * computed[busiest][0],
        "backward": m * computed[busiest][1],
        "bubble": alone - m * sum(times[busiest]),
        "tensor-parallel": traffic_seconds(seen, link, lambda each: each.axis == "tp"),
        "context-parallel": traffic_seconds(seen, link, of_attention),
        "expert-parallel": m * sum(routed[busiest]),
        "pipeline": together - alone + traffic_seconds(seen, link, lambda each: each.axis == "ends"),
        "data-parallel": (exposed if buckets else 0.0) + rest,
        "optimizer": work_seconds(seen.work["after"], hardware),
    }
    return parts | {"total": sum(parts.values())}
