"""Pipeline schedules: small ones simulated against their formulas, some against lists by hand, broken ones refused."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs336_systems.errors import UserError
from cs336_systems.schedule import Action, gpipe, interleaved, one_f_one_b, schedule, simulate
from cs336_systems.schedule.lists import TURNING, blocks_of, bubble_fraction, receives_from, sends_to
from cs336_systems.schedule.simulation import ScheduleError

STAGES, MICROBATCHES = (1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 7, 8, 12, 15, 16)
# (name, p, m, v): interleaving with v > 1 needs m to be a multiple of p.
GRID = [(name, p, m, 1) for name, p, m in product(("gpipe", "1f1b", "interleaved"), STAGES, MICROBATCHES)]
GRID += [("interleaved", p, m, v) for p, m, v in product(STAGES, MICROBATCHES, (2, 3, 4)) if m % p == 0]
# 12 is a multiple of every v, so that all times are whole numbers and floats compute them exactly.
TIMES = ((12.0, 24.0), (60.0, 12.0))


def actions(text: str) -> list[Action]:
    """F0 and B0 are microbatch 0's forward and backward; F0b is its forward in chunk 1."""
    kinds = {"F": "forward", "B": "backward", "W": "weights"}
    return [Action(kinds[word[0]], int(word[1]), "ab".index(word[2:] or "a")) for word in text.split()]


def formulas(name: str, p: int, m: int, v: int) -> tuple[tuple[int, int], list[int]]:
    """The bubble as a fraction, and the peak of every stage, from the papers."""
    if name == "gpipe":
        peaks = [m] * p
    elif v == 1:
        peaks = [min(p - r, m) for r in range(p)]
    elif m == p:
        peaks = [m * v] * p
    else:
        peaks = [2 * (p - 1 - r) + (v - 1) * p + 1 for r in range(p)]
    return (p - 1, v * m + p - 1), peaks


@pytest.mark.parametrize(("forward", "backward"), TIMES)
def test_bubble_and_peak_equal_their_formulas(forward, backward):
    for name, p, m, v in GRID:
        ran = simulate(schedule(name, p, m, v), forward, backward)
        (idle, whole), peaks = formulas(name, p, m, v)
        assert ran.bubble == idle / whole == bubble_fraction(name, p, m, v), (name, p, m, v)
        assert ran.idle == [(p - 1) * (forward + backward) / v] * p, (name, p, m, v)
        assert ran.makespan == (m * v + p - 1) * (forward + backward) / v, (name, p, m, v)
        assert ran.peak_live == peaks, (name, p, m, v)


def test_zero_bubble_is_idle_for_one_time_of_three():
    """Forward and both parts of backward take the same time, of which a stage of 1F1B is idle for 3 (p - 1)."""
    for p, m in product(STAGES, MICROBATCHES):
        ran = simulate(schedule("zb-h1", p, m), 12.0, 24.0)
        idle = p - 1 if m >= p else 2 * p - 1 - m
        assert ran.makespan == (3 * m + idle) * 12.0, (p, m)
        assert ran.bubble == pytest.approx(bubble_fraction("zb-h1", p, m), rel=1e-12)
        assert ran.peak_live == [min(p, m)] * p, (p, m)


def test_zero_bubble_in_a_v_is_idle_for_half_a_time_of_three():
    for p, m in product(STAGES, MICROBATCHES):
        lists = schedule("zbv", p, m, 2)
        ran = simulate(lists, 2.0, 4.0, turn=True)  # a chunk's forward and both parts of its backward take 1 each
        idle = max(p - 1, 2 * (2 * p - 1 - m))
        assert ran.makespan == 6 * m + idle, (p, m)
        assert ran.bubble == pytest.approx(bubble_fraction("zbv", p, m, 2), rel=1e-12)
        assert ran.peak_live == [min(2 * p, 2 * m, m + 1 + r) for r in range(p)], (p, m)


def test_zero_bubbles_are_what_torch_calls_so():
    """torch.distributed.pipelining makes the same lists, that of ZB-H1 where it takes the same numbers of
    microbatches."""
    from torch.distributed.pipelining import schedules as theirs  # 0.3 s

    kinds = {"FORWARD": "forward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weights"}
    for p, m, stage in product((1, 2, 3, 4, 8), (1, 4, 7, 8, 16), range(8)):
        if stage >= p:
            continue
        one = SimpleNamespace(
            pp_group_size=p, n_local_stages=1, rank=stage, number_of_rounds=m // p, microbatches_per_round=p,
            num_stages=2 * p, _n_microbatches=m,
        )  # fmt: skip
        cases = [(theirs.ScheduleZBVZeroBubble, schedule("zbv", p, m, 2))]
        cases += [(theirs.ScheduleInterleavedZeroBubble, schedule("zb-h1", p, m))] * (p > 1 and m % p == 0)
        for cls, ours in cases:
            found = [a for a in cls._calculate_single_rank_operations(one, stage) if a]
            found = [Action(kinds[a.computation_type.name], a.microbatch_index, int(a.stage_index >= p)) for a in found]
            assert found == ours[stage], (p, m, stage)


def test_messages_between_two_stages_are_taken_in_the_order_in_which_they_are_sent():
    # What a transport without tags demands: with two stages, forwards and backwards even share a channel. In a V they
    # may overtake each other, as `Mesh.channel` lets them.
    cases = [each for each in GRID if each[0] == "interleaved"]
    for name, p, m, v in [*cases, *(("zbv", p, m, 2) for p, m in product(STAGES, MICROBATCHES))]:
        lists, turn = schedule(name, p, m, v), name == "zbv"
        sent: dict = {}
        taken: dict = {}
        for stage, row in enumerate(lists):
            for each in row:
                if target := sends_to(stage, each, p, v, turn):
                    assert receives_from(*target, p, v, turn) == (stage, each)
                    sent.setdefault((stage, target[0], each.kind * turn), []).append(target[1])
                if source := receives_from(stage, each, p, v, turn):
                    taken.setdefault((source[0], stage, each.kind * turn), []).append(each)
        assert sent == taken, (p, m, v)
        assert sum(map(len, sent.values())) == 2 * m * (p * v - 1)  # those that stay on a stage included


def test_lists_by_hand():
    assert schedule("gpipe", 2, 3) == [actions("F0 F1 F2 B0 B1 B2")] * 2
    assert schedule("1f1b", 2, 3) == [actions("F0 F1 B0 F2 B1 B2"), actions("F0 B0 F1 B1 F2 B2")]
    assert schedule("1f1b", 4, 8) == [
        actions("F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"),
        actions("F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"),
        actions("F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"),
        actions("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"),
    ]
    assert schedule("1f1b", 4, 2)[0] == actions("F0 F1 B0 B1")
    assert schedule("interleaved", 2, 4, 2) == [
        actions("F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"),
        actions("F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"),
    ]
    assert schedule("interleaved", 2, 2, 2) == [actions("F0a F1a F0b F1b B0b B1b B0a B1a")] * 2
    assert [list(blocks_of(r, c, 2, 2, 8)) for c in (0, 1) for r in (0, 1)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_unequal_stages():
    # The second stage waits for the first forward to reach it and, at the end, for the first stage's last backward.
    ran = simulate(schedule("1f1b", 2, 4), forward=[3.0, 4.0], backward=[6.0, 8.0], transfer=0.5)
    first, second = ran.timeline
    assert second[0].start == 3.5
    assert [each.end - each.start for each in second] == [4.0, 8.0] * 4
    assert ran.makespan == 3.5 + 4 * 12.0 + 0.5 + 6.0 == first[-1].end
    assert ran.idle == [58.0 - 4 * 9.0, 10.0]
    assert ran.bubble == 32.0 / 116.0
    # From the last stage's chunk to the first's a message takes as long as between neighbours.
    ran = simulate(schedule("interleaved", 3, 3, 2), 2.0, 4.0, transfer=5.0)
    when = {(each.stage, str(each.action)): each for row in ran.timeline for each in row}
    sent, used = when[2, "forward of microbatch 0 in chunk 0"], when[0, "forward of microbatch 0 in chunk 1"]
    assert used.start == sent.end + 5.0
    # Thirds do not add up exactly, and yet no idle time appears. A message to itself takes no time either.
    alone = simulate(schedule("interleaved", 1, 5, 3), transfer=9.0)
    assert (alone.idle, alone.bubble) == ([0.0], 0.0)


def test_drawings():
    # 21 thirds, which do not quite add up to 7, fill exactly two columns each.
    assert simulate(schedule("interleaved", 2, 2, 3)).drawing(width=8 + 2 * 21) == (
        "stage 0 0a1a0b1b0c1c......0CCC1CCC0BBB1BBB0AAA1AAA\n"
        "stage 1 ..0a1a0b1b0c1c0CCC1CCC0BBB1BBB0AAA1AAA...."
    )  # fmt: skip
    ran = simulate(schedule("gpipe", 2, 2))
    assert ran.drawing(width=17) == "stage 0 >>...0<1<\nstage 1 .>>0<1<.."
    assert ran.drawing(width=25) == ran.drawing(width=17), "columns stay whole"
    assert ran.drawing(width=26) != ran.drawing(width=17)
    wide = simulate(schedule("1f1b", 2, 11)).drawing(width=8 + 12 * 6)
    assert "9>" in wide
    assert "10<<" in wide
    assert "10>" not in wide
    for width in range(9, 120):
        lines = simulate(schedule("interleaved", 3, 6, 3)).drawing(width).split("\n")
        assert len({len(line) for line in lines}) == 1
        assert len(lines[0]) <= width


@pytest.mark.parametrize(
    ("name", "chunks", "width"),
    [("gpipe", 1, 74), ("1f1b", 1, 74), ("interleaved", 2, 122), ("zb-h1", 1, 89), ("zbv", 2, 112)],
)
def test_the_drawings_of_the_docs_are_the_schedules(name, chunks, width):
    page = (Path(__file__).resolve().parents[1] / "docs/model_parallelism.md").read_text()
    simulation = simulate(schedule(name, 4, 8, chunks), turn=name in TURNING)
    assert simulation.drawing(width) in page
    assert f"idle {simulation.bubble:.0%}, at most {simulation.peak_live[0]} " in page


def test_a_deadlock_names_the_waiting_stages():
    # Stage 0 wants the first gradient before it sends what stage 1 wants before that gradient.
    lists = [actions("F0 B0 F1 F2 B1 B2"), actions("F0 F1 B0 B1 F2 B2")]
    with pytest.raises(ScheduleError) as error:
        simulate(lists)
    assert str(error.value) == (
        "deadlock: stage 0 cannot run backward of microbatch 0 in chunk 0 "
        "before stage 1 has run backward of microbatch 0 in chunk 0; "
        "stage 1 cannot run forward of microbatch 1 in chunk 0 "
        "before stage 0 has run forward of microbatch 1 in chunk 0"
    )


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("F0 B0 F1", "stage 1 has no backward of microbatch 1 in chunk 0"),
        ("F0 B0 F1 B1 F1", "stage 1 has a forward of microbatch 1 in chunk 0 too many"),
        ("F0 B0 B1 F1", "stage 1 has a backward before the forward of microbatch 1 in chunk 0"),
        ("", "stage 1 has no forward of microbatch 0 in chunk 0"),
    ],
)
def test_lists_that_no_pipeline_can_run(second, words):
    with pytest.raises(ScheduleError, match=f"^{words}$"):
        simulate([actions("F0 F1 B0 B1"), actions(second)])


def test_other_lists_that_are_none():
    for nothing in ([], [[], []]):
        with pytest.raises(ScheduleError, match="at least one stage and one action"):
            simulate(nothing)
    with pytest.raises(ScheduleError, match="a forward of microbatch -1 in chunk 0 too many"):
        simulate([[Action("forward", -1), *actions("F0 B0")]])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zigzag", 2, 4, 1), "no schedule is called 'zigzag': choose from gpipe, 1f1b, interleaved, zb-h1, zbv"),
        (("1f1b", 0, 4, 1), "stages must be at least 1, not 0"),
        (("gpipe", 2, -1, 1), "microbatches must be at least 1, not -1"),
        (("interleaved", 2, 4, 0), "chunks must be at least 1, not 0"),
        (("1f1b", 2, 4, 2), "1f1b has one chunk per stage, not 2: use interleaved for other numbers"),
        (("gpipe", 2, 4, 3), "gpipe has one chunk per stage, not 3: use interleaved for other numbers"),
        (("interleaved", 4, 10, 2), "microbatches 10 is not a multiple of stages 4, as interleaved needs: use 8 or 12"),
        (("interleaved", 4, 3, 2), "microbatches 3 is not a multiple of stages 4, as interleaved needs: use 4"),
        (("zbv", 2, 4, 3), "zbv has 2 chunks per stage, not 3: use interleaved for other numbers"),
    ],
)
def test_refusals(arguments, words):
    name, *counts = arguments
    for refuse in (schedule, bubble_fraction):
        with pytest.raises(UserError) as error:
            refuse(name, *counts)
        assert str(error.value) == words


def test_other_refusals():
    one_stage = (
        gpipe,
        one_f_one_b,
        lambda *counts: interleaved(*counts, 2),
        lambda stage, p, _: blocks_of(stage, 0, p, 2, 24),
    )
    for of, stage in product(one_stage, (-1, 4)):
        with pytest.raises(UserError, match=f"stage {stage} does not exist: the 4 stages are 0 to 3"):
            of(stage, 4, 8)
    with pytest.raises(UserError, match="num_layers 24 is not a multiple of stages 5 x chunks 2 = 10: change one"):
        blocks_of(0, 0, 5, 2, 24)
    with pytest.raises(UserError, match="num_layers 0 is not a multiple"):
        blocks_of(0, 0, 2, 1, 0)
    with pytest.raises(UserError, match="chunk 2 does not exist: the 2 chunks of a stage are 0 to 1"):
        blocks_of(0, 2, 3, 2, 24)
    lists = schedule("1f1b", 2, 3)
    with pytest.raises(UserError, match=r"forward must be a time above 0, or one for each of the 2 stages, not 0\.0"):
        simulate(lists, forward=0.0)
    with pytest.raises(UserError, match=r"backward must be .* one for each of the 2 stages, not \[1.0, 2.0, 3.0\]"):
        simulate(lists, backward=[1.0, 2.0, 3.0])
    with pytest.raises(UserError, match=r"transfer must be at least 0, not -1\.0"):
        simulate(lists, transfer=-1.0)
