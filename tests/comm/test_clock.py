"""Offsets of clocks by ping-pong, between real ranks whose clocks are set wrong on purpose."""

import time

import pytest

from cs336_systems.comm import subgroup
from cs336_systems.comm.clock import clock_offset, narrow
from tests.support import ranks

SECOND = 10**9


def offset_case(group, wrong: list) -> list:
    found = clock_offset(group, now=lambda: time.time_ns() + wrong[group.rank()])
    return [found.nanoseconds, found.bound]


@pytest.mark.parametrize(
    "wrong",
    [[0, SECOND], [0, -330_000_000], [5 * SECOND, 0], [0, SECOND, -SECOND]],
    ids=["ahead", "behind", "0", "three"],
)
def test_a_wrong_clock_is_found_within_the_bound_it_states(wrong):
    found = ranks.run(offset_case, len(wrong), wrong=wrong)
    assert found[0] == [0, 0]
    for (nanoseconds, bound), ahead in zip(found[1:], wrong[1:], strict=True):
        assert 0 < bound < 200_000
        assert abs(nanoseconds - (ahead - wrong[0])) <= bound


def subgroup_case(group) -> list:
    """A group that does not begin with rank 0: its first rank's clock is the measure."""
    mine = subgroup([1, 2])
    if mine is None:
        return []
    found = clock_offset(mine, now=lambda: time.time_ns() + group.rank() * SECOND)
    return [found.nanoseconds, found.bound]


def test_a_subgroup_goes_by_its_own_first_rank():
    nobody, first, second = ranks.run(subgroup_case, 3)
    assert (nobody, first) == ([], [0, 0])
    assert abs(second[0] - SECOND) <= second[1] < 200_000


def test_alone_a_clock_is_right():
    assert ranks.run(offset_case, 1, wrong=[SECOND]) == [[0, 0]]


def test_every_round_narrows_the_interval():
    """The first round's way there was fast, the second's way back: together they know more than either."""
    ahead = 7_000_000
    rounds = [(ahead + 0, 50_000, ahead + 400_000), (ahead + 500_000, 850_000, ahead + 900_000)]
    found = narrow(rounds)
    # low: 0 - 50_000 and 500_000 - 850_000; high: 400_000 - 50_000 and 900_000 - 850_000
    assert (found.nanoseconds, found.bound) == (ahead, 50_000)
    assert narrow(rounds[:1]).bound == 200_000
    slow = (ahead + 2_000_000, 2_500_000, ahead + 3_000_000)
    assert narrow([*rounds, slow]) == found


def test_a_clock_set_anew_between_rounds_is_believed():
    before, after = (0, 50_000, 100_000), (SECOND, 150_000, SECOND + 200_000)
    assert narrow([before]).nanoseconds == 0
    assert narrow([before, after]).nanoseconds == SECOND - 50_000
