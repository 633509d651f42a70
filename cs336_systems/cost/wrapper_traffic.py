"""What data parallelism and ZeRO send in a step, of any module: every collective, as `comm.record()` lists them.

For P bytes of gradients, whatever the number of microbatches, if all but the last run inside `no_sync`:

    stage   wrapper                     after backward                       after the update
    0       NaiveDDP ... BucketedDDP    all-reduce each bucket, P in all
    1       BucketedDDP                 the same                             all-gather P
    2       ScatteredDDP                reduce-scatter each bucket           all-gather each bucket
    3       FSDP                        see `fsdp_traffic.py`

Each synchronisation ends with a vote of one number a parameter and one more, and with a broadcast of every buffer.
(Li et al., arXiv:2006.15704, section 3.2; Rajbhandari et al., arXiv:1910.02054, section 7.)
"""

from collections.abc import Collection, Sequence
from math import ceil, inf
from typing import Literal

from cs336_systems.cost.fsdp_traffic import fsdp_traffic
from cs336_systems.cost.transfer import Parameter, Traffic, Transfer, plan_buckets
from cs336_systems.errors import UserError

BUCKET_MB = 25.0  # BucketedDDP's, unless told otherwise, and that of ZeRO stages 0 to 2
MB = 10**6


def construction_traffic(
    parameters: Sequence[Parameter], ranks: int, buffers: Sequence[Parameter] = (), axis: str = "dp"
) -> Traffic:
    """What any wrapper sends when it is made: a broadcast of every parameter and buffer, frozen ones too."""
    found = Traffic()
    for each in (*parameters, *buffers) if ranks > 1 else ():
        found[Transfer("broadcast", axis, "initial value", each.elements, each.width)] += 1
    return found


def ddp_traffic(
    parameters: Sequence[Parameter],
    ranks: int,
    bucket_size_mb: float | None = BUCKET_MB,
    buffers: Sequence[Parameter] = (),
    alone: Collection[str] = (),
    scatters: bool = False,
    axis: str = "dp",
) -> Traffic:
    """A step of the data-parallel wrappers: NaiveDDP and OverlappedDDP have buckets of 0 MB, FlatDDP has one (None).

    Gradients are averaged, one all-reduce a bucket; with `scatters` (stage 2) each rank keeps its slice, which is
    padded so that all are equal. The parameters `alone` have buckets of their own.
    """
    found = Traffic()
    if ranks == 1:
        return found
    groups = plan_buckets(parameters, inf if bucket_size_mb is None else bucket_size_mb * MB, alone)
    for group in groups:
        size = sum(each.elements for each in group)
        verb = "reduce-scatter" if scatters else "all-reduce"
        found[Transfer(verb, axis, "bucket", padded(size, ranks) if scatters else size, group[0].width)] += 1
    found[Transfer("all-reduce", axis, "ballot", sum(map(len, groups)) + 1, 4)] += 1
    for buffer in buffers:
        found[Transfer("broadcast", axis, "buffer", buffer.elements, buffer.width)] += 1
    return found


def optimizer_traffic(
    groups: Sequence[Sequence[Parameter]], ranks: int, layout: Literal["flat", "whole"] = "flat", axis: str = "dp"
) -> Traffic:
    """A step of `ShardedOptimizer` for the groups of parameters that it was given, by layout.

    flat: each group's parameters of one dtype in equal slices, one all-gather of all, padding included. whole: they
    are dealt out, the largest first, to the rank that has least so far; a broadcast from each rank that has any.
    """
    found = Traffic()
    for group in groups if ranks > 1 else ():
        kinds: dict[int, list[int]] = {}
        for each in group:
            if each.trainable:
                kinds.setdefault(each.width, []).append(each.elements)
        for width, sizes in kinds.items():
            if layout == "flat":
                found[Transfer("all-gather", axis, "updated parameters", padded(sum(sizes), ranks), width)] += 1
                continue
            for load in filter(None, dealt(sizes, ranks)):
                found[Transfer("broadcast", axis, "updated parameters", load, width)] += 1
    return found


def dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """Elements of each rank if tensors are dealt out whole, the largest first, to whoever has least."""
    loads = [0] * ranks
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    return loads


def padded(elements: int, ranks: int) -> int:
    """Elements of a buffer that is cut into equal slices."""
    return ceil(elements / ranks) * ranks


def zero_traffic(
    parameters: Sequence[Parameter],
    ranks: int,
    stage: int,
    groups: Sequence[Sequence[Parameter]] | None = None,
    buffers: Sequence[Parameter] = (),
    alone: Collection[str] = (),
    passes: Sequence[str] = ("forward", "backward"),
    layers: Sequence[str] | None = None,
    calls: Sequence[int | str] | None = None,
    axis: str = "dp",
) -> Traffic:
    """A step of `zero.zero`: of the wrapper and the optimizer of a stage.

    `groups` are the optimizer's (default: one of all), which matter in stage 1; `passes`, `layers` and `calls` in
    stage 3 only (see `fsdp_traffic`). Raises UserError for a stage that does not exist.
    """
    if stage not in (0, 1, 2, 3):
        raise UserError(f"ZeRO has stages 0 to 3, not {stage}")
    if stage == 3:
        return fsdp_traffic(parameters, ranks, passes, layers, calls, buffers, axis=axis)
    found = ddp_traffic(parameters, ranks, BUCKET_MB, buffers, alone, stage == 2, axis)
    if stage == 1:
        found += optimizer_traffic([parameters] if groups is None else groups, ranks, "flat", axis)
    if stage == 2:  # every bucket lies in a buffer of its own
        found += optimizer_traffic(plan_buckets(parameters, BUCKET_MB * MB, alone), ranks, "flat", axis)
    return found


def clip_traffic(ranks: int, axis: str = "dp") -> Traffic:
    """`clip_grad_norm` of a wrapper: the norm of each rank's gradients in float64, gathered."""
    return Traffic({Transfer("all-gather", axis, "gradient norm", ranks, 8): 1}) if ranks > 1 else Traffic()
