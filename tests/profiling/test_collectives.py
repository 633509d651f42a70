"""Matching of gloo's spans to calls of torch.distributed, if several calls fit a span."""

from cs336_systems.profiling.collectives import Call, run_by
from cs336_systems.profiling.trace import Span

MICROSECOND = 1000


def call(start: float, deadline: float | None = None, group: str | None = "0") -> Call:
    """Times in microseconds; the deadline is when the wait was over."""
    begin = round(start * MICROSECOND)
    span = Span("c10d::allreduce_", "cpu_op", begin, begin + MICROSECOND, (1, 1), {"Input Dims": [[[8]], []]})
    return Call(span, group, None if deadline is None else round(deadline * MICROSECOND))


def ran(start: float, end: float, thread: int = 2) -> Span:
    args = {"Input Dims": [[8]]}
    return Span("gloo:all_reduce", "user_annotation", start * MICROSECOND, end * MICROSECOND, (1, thread), args)


def places(calls: list[Call], spans: list[Span]) -> list[int | None]:
    found = run_by(calls, spans)
    return [found.get(id(span)) for span in spans]


def test_equal_calls_run_in_the_order_in_which_they_were_made():
    assert places([call(0), call(10), call(20)], [ran(30, 40), ran(32, 35, 3), ran(36, 50, 3)]) == [0, 1, 2]
    assert places([call(0), call(50)], [ran(10, 20), ran(30, 40)]) == [0, None], "none was asked for yet"
    assert places([call(0, 90), call(1, 80)], [ran(3, 10), ran(11, 20)]) == [0, 1], "also if waits end in another"


def test_what_could_only_have_run_before_is_given_to_an_earlier_span():
    calls = [call(0, 300), call(10, 100, group="1")]
    assert places(calls, [ran(20, 80), ran(200, 280, 3)]) == [1, 0]


def test_waits_in_another_order_leave_every_span_a_call():
    first, second, third = call(0, 300), call(10, 200), call(20, 150)
    # The last to end can only be the first call, which therefore makes the others move, one after another.
    assert places([first, second, third], [ran(15, 50), ran(60, 100), ran(70, 250, 3)]) == [1, 2, 0]
    assert places([first, second, call(65, 150)], [ran(25, 100), ran(30, 250, 3), ran(105, 140)]) == [1, 0, 2]


def test_what_fits_no_call_moves_nothing():
    assert places([call(0, 50), call(10, 100), call(20, 100)], [ran(15, 40), ran(30, 90), ran(35, 200, 3)]) == [
        0,
        1,
        None,
    ]


def test_a_call_that_ran_unseen_takes_no_span_that_began_before_it():
    calls = [call(0, 400), call(100, 200), call(250, 400)]
    assert places(calls, [ran(50, 80), ran(300, 350)]) == [0, 2]


def test_a_call_that_ran_unseen_takes_no_span_whose_own_call_is_over():
    calls = [call(0, 90), call(10, 120), call(250, 400)]
    assert places(calls, [ran(30, 80), ran(300, 350)]) == [0, 2]


def test_the_profilers_clock_may_be_a_little_off():
    assert places([call(0, 90)], [ran(30, 104)]) == [0]
    assert places([call(0, 90)], [ran(30, 106)]) == [None]
