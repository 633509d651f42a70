"""Named timers, exact under clocks of the tests' own: sums, times over ranks, and waiting apart from transferring."""

from types import SimpleNamespace

import pytest
import torch

from cs336_systems.comm import all_gather, all_reduce, record
from cs336_systems.train import timers as module
from cs336_systems.train.timers import Timers, timer_line
from tests.support import ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MS = 1_000_000


class Clock:
    """A clock that only `pass_` moves, in milliseconds; read in nanoseconds."""

    def __init__(self, start: float = 7000.0) -> None:
        self.ns = round(start * MS)

    def __call__(self) -> int:
        return self.ns

    def pass_(self, milliseconds: float) -> None:
        self.ns += round(milliseconds * MS)


def clocked(*arguments, clock) -> Timers:
    """Timers under a clock of the test's own."""
    timers = Timers(*arguments)
    timers.clock = clock
    return timers


def lap(timers: Timers, name: str, milliseconds: float) -> None:
    with timers(name):
        timers.clock.pass_(milliseconds)


def test_laps_add_up_by_name_and_an_outer_timer_includes_the_inner():
    timers = clocked(CPU, clock=Clock())
    for _ in range(3):
        with timers("optimizer"):
            timers.clock.pass_(1)
            lap(timers, "optimizer-clip", 0.25)
        timers.clock.pass_(100)  # between laps nothing counts
    with pytest.raises(TypeError), timers("a block that fails"):
        lap(timers, "inner", None)
    lap(timers, "a block that fails", 2)
    found = {"optimizer": 3.75, "optimizer-clip": 0.75, "a block that fails": 2.0, "inner": 0.0}
    assert timers.milliseconds() == found
    with timers("iteration"):  # what is under way counts in the next report
        timers.clock.pass_(3)
        assert timers.by_rank() == {name: [each] for name, each in found.items()}
        timers.reset()
        timers.clock.pass_(4)
    assert timers.by_rank() == {"iteration": [7.0]}
    timers.reset()
    with record() as events, timers.collective("all-reduce"):  # alone there is nobody to wait for
        timers.clock.pass_(5)
    assert not events
    assert timers.by_rank() == {"all-reduce-wait": [0.0], "all-reduce": [5.0]}


def test_a_gpu_is_not_waited_for_before_the_report(monkeypatch):
    """The stream's time is the fake clock's; the timer's calls are in a list."""
    calls, clock = [], Clock()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            calls.append(f"event on {stream}")
            self.ns = clock.ns

        def elapsed_time(self, other: "Event") -> float:
            assert calls[-1].startswith("synchronise"), "the stream may not have come here yet"
            return (other.ns - self.ns) / MS

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"synchronise {device}"))
    timers = clocked(GPU, clock=lambda: pytest.fail("the host's clock knows nothing of the stream"))

    def forward(milliseconds: float) -> None:
        with timers("forward"):
            clock.pass_(milliseconds)
        clock.pass_(100)

    forward(3)
    forward(3)
    assert calls == ["event on the stream of cuda"] * 4
    assert timers.milliseconds() == timers.milliseconds() == {"forward": 6.0}
    assert calls[4:] == ["synchronise cuda"]  # and once only
    forward(1)
    timers.reset()
    assert timers.milliseconds() == {}
    forward(2)
    assert timers.milliseconds() == {"forward": 2.0}  # without the lap that was never read


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_own_events_are_read():
    timers, x = Timers(GPU), torch.ones(1024, 1024, device=GPU)
    with timers("step"), timers("forward"):
        x @ x
    times = timers.milliseconds()
    assert times["step"] >= times["forward"] > 0


def ranks_case(group) -> list:
    """Rank r needs r + 1 ms for forward; only the last rank has a head, and it used its timers in another order."""
    timers, me = clocked(CPU, group, ["last", "idle", "forward"], clock=Clock()), group.rank()
    if me == group.size() - 1:
        lap(timers, "head", 8)
    lap(timers, "forward", me + 1)
    if me == 0:
        lap(timers, "first", 4)
        lap(timers, "last", 2)
    times = timers.by_rank()
    timers.reset()
    return [times, timer_line(times, 2), timer_line(times, 2, minmax=True), timers.by_rank()]


def test_every_rank_knows_the_times_of_all_whatever_timers_it_has():
    results = ranks.run(ranks_case, 3)
    assert all(result == results[0] for result in results)
    times, line, both, empty = results[0]
    others = [None, None]
    assert times == {
        "last": [2.0, *others], "forward": [1.0, 2.0, 3.0], "first": [4.0, *others], "head": [*others, 8.0]
    }  # fmt: skip
    assert list(times) == ["last", "forward", "first", "head"]  # as named at first, then as rank 0 used them
    assert line == "time (ms) | last: 1.00 | forward: 1.50 | first: 2.00 | head: 4.00"
    assert both == "time (ms) | last: (1.00, 1.00) | forward: (0.50, 1.50) | first: (2.00, 2.00) | head: (4.00, 4.00)"
    assert empty == {}


def late_case(group, busy: list[float]) -> list:
    """Each rank is busy for a while of its own, then all reduce for 5 ms. A collective ends when the last rank is
    there: so does this clock, which is told of the others' by a second collective."""
    clock, me = Clock(1000.0 * group.rank()), group.rank()  # the ranks' clocks have nothing to do with each other
    begin = clock.ns

    def logical_all_reduce(flat, group, label=""):
        all_reduce(flat, group, label).wait()
        times = torch.zeros(group.size(), dtype=torch.float64)
        times[me] = (clock.ns - begin) / MS
        all_gather(times, group).wait()
        clock.ns = begin + round(times.max().item() * MS)
        return SimpleNamespace(wait=lambda: None)

    module.all_reduce = logical_all_reduce
    timers = clocked(CPU, group, clock=clock)
    for _ in range(2):
        with timers("backward-compute"):
            clock.pass_(busy[me])
        with timers.collective("backward-params-all-reduce"):
            logical_all_reduce(torch.zeros(4), group)
            clock.pass_(5)
    return [timers.milliseconds(), timers.by_rank()]


def test_what_waits_for_a_late_rank_is_kept_apart():
    results = ranks.run(late_case, 3, busy=[10.0, 40.0, 25.0])
    for rank, busy in enumerate((10, 40, 25)):
        assert results[rank][0] == {
            "backward-compute": 2.0 * busy,
            "backward-params-all-reduce-wait": 2.0 * (40 - busy),
            "backward-params-all-reduce": 10.0,
        }
        waits = results[rank][1]["backward-params-all-reduce-wait"]
        assert waits == [60.0, 0.0, 30.0]  # who waits least is the late one
