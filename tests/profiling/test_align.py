"""Matching collectives of several ranks, and the clocks' offsets that follow."""

import pytest

from cs336_systems.profiling.align import CONVERSION, Alignment, aligned, match, offsets
from tests.support.traces import BASE, SECOND, flow, gloo, kernel, lined_up, memory, note, own, slice_, trace


def test_our_own_match_by_group_and_number():
    first = trace(0, *own("all-reduce", 4, 0, 10, 20), *own("all-reduce", 5, 30, 40, 50))
    other = trace(1, *own("all-reduce", 5, 35, 41, 51), *own("all-reduce", 6, 60, 70, 80))
    (found,) = match([first, other])
    assert found.key == "all-reduce 0#5 bucket"
    assert {rank: (span.start - BASE) // 1000 for rank, span in found.spans.items()} == {0: 30, 1: 35}
    assert {rank: (span.start - BASE) // 1000 for rank, span in found.waits.items()} == {0: 40, 1: 41}
    assert found.joins
    # Rank 0 sends to rank 1, and that to rank 2: messages of one number are not one collective.
    assert match([trace(r, *own("send", 1, r, 10, 20), world=3) for r in range(2)]) == []


@pytest.mark.parametrize(
    ("verb", "dims", "joins"),
    [
        ("all-reduce", [[8]], True),
        ("all-gather", [[8]], True),
        ("reduce-scatter", [[8]], True),
        ("barrier", [], True),
        ("broadcast", [[8]], False),
        ("all-to-all", [[8]], False),
        ("all-reduce", [[0]], False),
        ("all-reduce", [[3, 0, 2]], False),
        ("all-reduce", [[10, 20]], True),
    ],
)
def test_what_joins_its_ranks(verb, dims, joins):
    (found,) = match([trace(r, *own(verb, 1, r, 10, 20, dims=dims)) for r in range(2)])
    assert found.joins is joins
    (found,) = match([trace(r, gloo(r, 20, f"gloo:{verb.replace('-', '_')}", dims)) for r in range(2)])
    assert found.joins is joins
    unsent = [note(f"launch {verb} 0#1", 0, 2), note(f"wait {verb} 0#1", 3, 4)]
    assert not match([trace(r, *unsent) for r in range(2)])[0].joins, "an empty one joins no ranks"


def test_spans_of_a_backend_match_in_order_by_name_and_shape():
    first = trace(0, gloo(0, 9, dims=[[4]]), gloo(1, 9, tid=81), gloo(20, 29), gloo(5, 6, "gloo:send"))
    other = trace(1, gloo(30, 31), gloo(21, 22), gloo(3, 5, dims=[[4]]), gloo(5, 6, "gloo:send"))
    found = [(each.key, [(s.start - BASE) // 1000 for s in each.spans.values()]) for each in match([first, other])]
    assert found == [
        ("gloo:all_reduce [[4]] #0", [0, 3]),
        ("gloo:all_reduce [[8]] #0", [1, 21]),
        ("gloo:all_reduce [[8]] #1", [20, 30]),
    ]
    found = match([trace(0, gloo(0, 1), gloo(2, 3), gloo(4, 5)), trace(1, gloo(0, 1))])
    assert [each.joins for each in found] == [False], "unequal counts are not used for clocks"


def of_groups(events, *named: dict) -> list[list[int]]:
    """The ranks of each match of four ranks' events, if these groups are known to their members."""
    traces = [trace(r, *events(r), world=4) for r in range(4)]
    for rank, each in enumerate(traces):
        groups = [group for group in named if not group["ranks"] or rank in group["ranks"]]
        each.chrome["distributedInfo"]["pg_config"] = groups
    return [sorted(found.spans) for found in match(traces)]


def test_groups_stay_apart():
    def ours(r: int, group: str = "s") -> list[dict]:
        return own("all-reduce", 1, r, 10, 20, group=group)

    def ran(r: int) -> list[dict]:
        return [gloo(r, 9)]

    def halves(*names: str) -> list[dict]:
        return [{"pg_name": name, "ranks": ranks} for name, ranks in zip(names, ([0, 1], [2, 3]), strict=True)]

    everyone, pairs = {"pg_name": "0", "ranks": []}, [[0, 1], [2, 3]]
    assert of_groups(lambda r: ours(r, str(r // 2))) == pairs
    # Halves may share a name.
    assert of_groups(ours, everyone, *halves("s", "s")) == pairs
    assert of_groups(ours, everyone, {"pg_name": "s", "ranks": [0, 1, 2, 3]}) == [[0, 1, 2, 3]]
    # What a backend ran in groups that cannot be told apart is not matched; a group of one sends nothing.
    assert of_groups(ran, everyone) == [[0, 1, 2, 3]]
    assert of_groups(ran, *halves("", "")) == pairs
    assert of_groups(ran, everyone, *halves("", "")) == []
    assert of_groups(ran, everyone, {"pg_name": "1", "ranks": [0, 1, 2, 3]}) == []
    assert of_groups(ran, everyone, *({"pg_name": "s", "ranks": [r]} for r in range(4))) == [[0, 1, 2, 3]]


def test_nccl_goes_by_its_kernels():
    """Nobody waits on the CPU there: our `wait` says nothing, and `nccl:` only when the kernel was enqueued."""
    traces = [
        trace(r, *own("all-reduce", 1, 10 * r, 5, 6), gloo(0, 1, "nccl:all_reduce"), kernel(10 * r, 30 + r))
        for r in range(2)
    ]
    ours, kernels = match(traces)
    assert (ours.waits, ours.leaving(0), ours.leaving(1)) == ({}, None, None)
    assert kernels.key == "ncclDevKernel_AllReduce_Sum_f32_RING_LL 8 Float #0"
    assert kernels.joins
    assert offsets(traces)[1].nanoseconds == (10_000 - 30_000 + 31_000) // 2
    assert match([trace(r, kernel(0, 1, **{"Process Group Name": str(r)})) for r in range(2)]) == []


def test_collectives_hold_the_offset_in_an_interval():
    ahead = 7_000_000  # us
    first = trace(0, gloo(100, 200), gloo(300, 380))
    other = trace(1, gloo(ahead + 160, ahead + 230), gloo(ahead + 310, ahead + 390))
    # At least start - end over there, 160 - 200 and 310 - 380; at most end - start, 230 - 100 and 390 - 300.
    low, high = ahead - 40, ahead + 90
    want = Alignment((low + high) * 500, (high - low) * 500, "collectives")
    assert offsets([other, first]) == {0: Alignment(0, 0, "reference"), 1: want}


def test_clocks_that_drift_apart_have_the_offset_of_the_middle():
    times = [10_000.0 * k for k in range(101)]  # one second; by 40 us the clocks drift apart, by 10 they are known
    drifting = [gloo(SECOND + 1.00004 * time, SECOND + 1.00004 * time + 10) for time in times]
    found = offsets([trace(0, *(gloo(time, time + 10) for time in times)), trace(1, *drifting)])[1]
    assert found.source == "collectives"
    assert found.nanoseconds == pytest.approx(1000 * SECOND + 20_000, abs=1000)
    assert 20_000 <= found.bound <= 150_000


def test_ranks_that_never_meet_are_joined_by_others():
    def pair(number, start, end):
        return own("all-reduce", number, start, start + 4, end, group=str(number))

    chain = [trace(0, *pair(1, 0, 10), world=3), trace(1, *pair(1, 102, 112), *pair(2, 200, 210), world=3)]
    chain.append(trace(2, *pair(2, 255, 265), world=3))
    found = offsets(chain)
    assert found[1] == Alignment(102_000, 10_000, "collectives")
    assert found[2] == Alignment(157_000, 20_000, "collectives")


def test_bounds_are_intersected_and_contradicting_ones_dropped():
    def judged(*events, host="", late=0.0, **ours):
        first = trace(0, lined_up(0, 100), gloo(100, 1100), host=host, clock_offset_ns=0, clock_bound_ns=0)
        return offsets([first, trace(1, gloo(100 + late, 1100 + late), *events, host=host, **ours)])[1]

    assert judged() == Alignment(0, 1_000_000, "collectives")
    # At least start - end over there, 0.99 - 0.1 ms; at most end - start, 1.05 ms, of which up to 1 can be.
    assert judged(lined_up(990, 1050)) == Alignment(945_000, 55_000, "collectives")
    assert judged(host="vm") == Alignment(0, 2 * CONVERSION, "collectives, same host")
    assert judged(host="vm", late=2000) == Alignment(2_000_000, 1_000_000, "collectives; contradicted: same host")
    measured = {"clock_offset_ns": SECOND, "clock_bound_ns": 50_000}  # by a ping-pong, in traces of earlier versions
    assert judged(**measured) == judged()


def test_without_collectives():
    alone = [trace(r, slice_("aten::mm", 0, 1)) for r in range(2)]
    assert offsets(alone)[1] == Alignment(0, None, "nothing: taken to agree")
    same = [trace(r, slice_("aten::mm", 0, 1), host="vm") for r in range(2)]
    assert offsets(same)[1] == Alignment(0, 2 * CONVERSION, "same host")
    met = [trace(r, lined_up(0, 10 + 20 * r), world=3, base=BASE + r * SECOND) for r in range(3)]
    assert offsets(met)[1] == Alignment(SECOND + 10_000, 20_000, "collectives")
    # Without rank 0 the lowest is the measure.
    assert offsets(met[1:]) == {1: Alignment(0, 0, "reference"), 2: Alignment(SECOND + 10_000, 40_000, "collectives")}
    assert offsets([]) == {}


def test_contradicting_spans_of_a_backend_are_not_used():
    """One of rank 0's is missing at the start and one of rank 1's at the end: counting matches the wrong ones."""
    first, other = trace(0, gloo(100, 110), gloo(200, 210)), trace(1, gloo(0, 10), gloo(150, 160))
    assert offsets([first, other])[1] == Alignment(0, None, "nothing: taken to agree")
    exact = [trace(0, gloo(100, 110), gloo(200, 210), *own("all-reduce", 1, 0, 1, 50))]
    exact.append(trace(1, gloo(0, 10), gloo(150, 160), *own("all-reduce", 1, 0, 1, 50)))
    assert offsets(exact)[1] == Alignment(0, 50_000, "collectives")


def test_everything_is_shifted_and_made_once_of_the_same_traces():
    events = [slice_("aten::mm", 5, 9), *flow(1, 5, 5), memory(6.0, 8)]
    first, ahead = trace(0, lined_up(0, 1), *events), 3 * SECOND
    late = trace(1, lined_up(ahead / 1000, ahead / 1000 + 1), *events, marks=[[BASE, "x", 5]])
    assert match([first, late]) is match([first, late])
    same, moved = aligned([first, late])
    assert (same is first, moved.cache, moved.base) == (True, {}, late.base - ahead)
    assert [(s.start, s.end) for s in moved.spans] == [(s.start - ahead, s.end - ahead) for s in late.spans]
    assert moved.allocations[0].time == late.allocations[0].time - ahead
    (((lane, to), (from_lane, time)),) = late.links.items()
    assert moved.links == {(lane, to - ahead): (from_lane, time - ahead)}
    assert moved.ours["marks"] == [[BASE - ahead, "x", 5]]
    assert offsets([same, moved])[1].nanoseconds == 0
    assert sorted(offsets([first, late, trace(2, lined_up(0, 1), world=3)])) == [0, 1, 2]
