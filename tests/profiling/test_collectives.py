"""Matching of gloo's spans to calls of torch.distributed, if several calls fit a span."""

import pytest

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


@pytest.mark.parametrize(
    ("calls", "spans", "places"),
    [
        # Equal calls run in the order in which they were made, also if their waits end in another.
        ([call(0), call(10), call(20)], [ran(30, 40), ran(32, 35, 3), ran(36, 50, 3)], [0, 1, 2]),
        ([call(0), call(50)], [ran(10, 20), ran(30, 40)], [0, None]),
        ([call(0, 90), call(1, 80)], [ran(3, 10), ran(11, 20)], [0, 1]),
        # What could only have run before is given to an earlier span.
        ([call(0, 300), call(10, 100, group="1")], [ran(20, 80), ran(200, 280, 3)], [1, 0]),
        # The last to end can only be the first call, which therefore makes the others move, one after another.
        ([call(0, 300), call(10, 200), call(20, 150)], [ran(15, 50), ran(60, 100), ran(70, 250, 3)], [1, 2, 0]),
        ([call(0, 300), call(10, 200), call(65, 150)], [ran(25, 100), ran(30, 250, 3), ran(105, 140)], [1, 0, 2]),
        # What fits no call moves nothing.
        ([call(0, 50), call(10, 100), call(20, 100)], [ran(15, 40), ran(30, 90), ran(35, 200, 3)], [0, 1, None]),
        # A call that ran unseen takes no span that began before it, nor one whose own call is over.
        ([call(0, 400), call(100, 200), call(250, 400)], [ran(50, 80), ran(300, 350)], [0, 2]),
        ([call(0, 90), call(10, 120), call(250, 400)], [ran(30, 80), ran(300, 350)], [0, 2]),
        # The profiler's clock may be a little off.
        ([call(0, 90)], [ran(30, 104)], [0]),
        ([call(0, 90)], [ran(30, 106)], [None]),
    ],
)
def test_as_many_spans_as_possible_have_a_call(calls, spans, places):
    found = run_by(calls, spans)
    assert [found.get(id(span)) for span in spans] == places
