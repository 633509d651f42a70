"""Named timers, exact under clocks of the tests' own: sums, spreads over ranks, and waiting apart from transferring."""

import time
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.comm import all_gather, all_reduce, record, subgroup
from cs336_systems.errors import UserError
from cs336_systems.train import timers as module
from cs336_systems.train.timers import Spread, Timers
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
        if milliseconds < 0:
            raise ValueError("negative")
        self.ns += round(milliseconds * MS)


def lap(timers: Timers, name: str, milliseconds: float) -> None:
    with timers(name):
        timers.clock.pass_(milliseconds)


def test_laps_add_up_by_name_and_an_outer_timer_includes_the_inner():
    timers = Timers(CPU, clock=Clock())
    for _ in range(3):
        with timers("optimizer"):
            timers.clock.pass_(1)
            lap(timers, "optimizer-clip", 0.25)
        timers.clock.pass_(100)  # between laps nothing counts
    timers("copy").start()
    timers.clock.pass_(2)
    timers("copy").stop()
    assert timers.milliseconds() == {"optimizer": 3.75, "optimizer-clip": 0.75, "copy": 2.0}
    assert timers.milliseconds() == timers.milliseconds()  # reading changes nothing


def test_the_line_is_that_of_megatron():
    timers = Timers(CPU, clock=Clock())
    lap(timers, "forward-compute", 434.2)
    lap(timers, "backward-compute", 907.4)
    assert timers.line(normaliser=10, reset=False) == "time (ms) | forward-compute: 43.42 | backward-compute: 90.74"
    line = timers.line(10, kind="minmax")
    assert line == "time (ms) | forward-compute: (43.42, 43.42) | backward-compute: (90.74, 90.74)"
    assert timers.line() == "time (ms)"


def test_a_report_begins_anew_and_what_is_under_way_counts_in_the_next():
    timers = Timers(CPU, clock=Clock())
    lap(timers, "forward-compute", 5)
    with timers("iteration"):
        timers.clock.pass_(3)
        assert timers.line() == "time (ms) | forward-compute: 5.00"
        timers.clock.pass_(4)
    assert timers.line() == "time (ms) | iteration: 7.00"


def test_a_block_that_fails_ends_its_lap():
    timers = Timers(CPU, clock=Clock())
    with pytest.raises(ValueError, match="negative"), timers("forward-compute"):
        lap(timers, "loss", -2)
    lap(timers, "forward-compute", 1)
    assert timers.milliseconds() == {"forward-compute": 1.0, "loss": 0.0}


def test_misuse_is_named():
    timers = Timers(CPU, clock=Clock())
    with pytest.raises(UserError, match=r"^timer 'loss' is not running: start it before it stops$"):
        timers("loss").stop()
    assert timers.milliseconds() == {}
    timers("loss").start()
    timers.clock.pass_(1)
    with pytest.raises(UserError, match=r"^timer 'loss' is running already: stop it before it starts again$"):
        timers("loss").start()
    timers.clock.pass_(1)
    timers("loss").stop()  # the lap that ran was not touched
    assert timers.milliseconds() == {"loss": 2.0}
    with pytest.raises(UserError, match="not running"):
        timers("loss").stop()
    with pytest.raises(UserError, match=r"no kind of report 'all'; choose from max, minmax"):
        timers.line(kind="all")
    for steps in (0, -1, float("nan")):
        with pytest.raises(UserError, match="must be positive"):
            timers.line(steps)
    assert timers.line() == "time (ms) | loss: 2.00"  # the refused reports forgot nothing


def test_alone_there_is_nobody_to_wait_for():
    timers = Timers(CPU, clock=Clock())
    with record() as events, timers.collective("all-reduce"):
        timers.clock.pass_(5)
    assert not events
    assert timers.over_ranks() == {
        "all-reduce-wait": Spread(0.0, 0.0, 0.0, 0, 0, 1),
        "all-reduce": Spread(5.0, 5.0, 5.0, 0, 0, 1),
    }


@pytest.fixture
def fake_gpu(monkeypatch):
    """What a GPU's timer calls, in a list, with a stream whose time is the fake clock's."""
    gpu = SimpleNamespace(calls=[], clock=Clock())

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            gpu.calls.append(f"event on {stream}")
            self.ns = gpu.clock.ns

        def elapsed_time(self, other: "Event") -> float:
            assert gpu.calls[-1].startswith("synchronise"), "the stream may not have come here yet"
            return (other.ns - self.ns) / MS

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.calls.append(f"synchronise {device}"))
    return gpu


def test_a_gpu_is_not_waited_for_before_the_report(fake_gpu):
    timers = Timers(GPU, clock=lambda: pytest.fail("the host's clock knows nothing of the stream"))
    for _ in range(2):
        with timers("forward"):
            fake_gpu.clock.pass_(3)
        fake_gpu.clock.pass_(100)
    assert fake_gpu.calls == ["event on the stream of cuda"] * 4
    assert timers.milliseconds() == {"forward": 6.0}
    assert timers.milliseconds() == {"forward": 6.0}
    assert fake_gpu.calls[4:] == ["synchronise cuda"]  # and once only
    with timers("forward"):
        fake_gpu.clock.pass_(1)
    timers.reset()
    assert timers.milliseconds() == {}
    with timers("forward"):
        fake_gpu.clock.pass_(2)
    assert timers.milliseconds() == {"forward": 2.0}  # without the lap that was never read


def test_a_synchronising_timer_finds_the_device_idle_at_both_ends(fake_gpu):
    def clock() -> int:
        assert len(fake_gpu.calls) == len(reads) + 1, "the device was not waited for"
        reads.append(fake_gpu.clock.ns)
        return fake_gpu.clock.ns

    reads: list[int] = []
    timers = Timers(GPU, synchronise=True, clock=clock)
    with timers("forward"):
        fake_gpu.clock.pass_(3)
    assert fake_gpu.calls == ["synchronise cuda"] * 2
    assert timers.milliseconds() == {"forward": 3.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("synchronise", [False, True])
def test_a_gpus_own_events_are_read(synchronise):
    timers, x = Timers(GPU, synchronise=synchronise), torch.ones(1024, 1024, device=GPU)
    with timers("step"), timers("forward"):
        x @ x
    times = timers.milliseconds()
    assert times["step"] >= times["forward"] > 0


def spread_case(group) -> list:
    """Rank r needs r + 1 ms for forward; only the last rank has a head, and it used its timers in another order."""
    timers, me = Timers(CPU, group, clock=Clock()), group.rank()
    if me == group.size() - 1:
        lap(timers, "head", 8)
    lap(timers, "forward", me + 1)
    if me == 0:
        timers("idle")  # made, never used
        lap(timers, "first", 4)
    spreads = {name: vars(spread) for name, spread in timers.over_ranks().items()}
    return [spreads, timers.line(2, reset=False), timers.line(2, kind="minmax"), timers.line()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_knows_the_spread_whatever_timers_it_has(world_size):
    results = ranks.run(spread_case, world_size)
    assert all(result == results[0] for result in results)
    spreads, line, both, empty = results[0]
    last = world_size - 1
    alone = {"least": 4.0, "most": 4.0, "mean": 4.0, "least_rank": 0, "most_rank": 0, "ranks": 1}
    forward = {"least": 1.0, "most": world_size, "mean": (world_size + 1) / 2, "least_rank": 0, "most_rank": last}
    assert spreads == {
        "forward": forward | {"ranks": world_size},
        "first": alone,
        "head": {"least": 8.0, "most": 8.0, "mean": 8.0, "least_rank": last, "most_rank": last, "ranks": 1},
    }
    assert line == f"time (ms) | forward: {world_size / 2:.2f} | first: 2.00 | head: 4.00"
    assert both == f"time (ms) | forward: (0.50, {world_size / 2:.2f}) | first: (2.00, 2.00) | head: (4.00, 4.00)"
    assert empty == "time (ms)"


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
    timers = Timers(CPU, group, clock=clock)
    for _ in range(2):
        with timers("backward-compute"):
            clock.pass_(busy[me])
        with timers.collective("backward-params-all-reduce"):
            logical_all_reduce(torch.zeros(4), group)
            clock.pass_(5)
    return [timers.milliseconds(), {name: vars(spread) for name, spread in timers.over_ranks().items()}]


def test_what_waits_for_a_late_rank_is_kept_apart():
    results = ranks.run(late_case, 3, busy=[10.0, 40.0, 25.0])
    for rank, busy in enumerate((10, 40, 25)):
        assert results[rank][0] == {
            "backward-compute": 2.0 * busy,
            "backward-params-all-reduce-wait": 2.0 * (40 - busy),
            "backward-params-all-reduce": 10.0,
        }
        spreads = results[rank][1]
        assert spreads["backward-compute"]["most_rank"] == 1
        wait = {"least": 0.0, "most": 60.0, "mean": 30.0, "least_rank": 1, "most_rank": 0, "ranks": 3}
        assert spreads["backward-params-all-reduce-wait"] == wait  # who waits least is the late one
        assert (spreads["backward-params-all-reduce"]["least"], spreads["backward-params-all-reduce"]["most"]) == (
            10,
            10,
        )


def arrival_case(group) -> list:
    timers, store = Timers(CPU, group), group.get_group_store()
    if group.rank() == 1:
        time.sleep(0.1)
        store.set("rank 1 is there", "yes")
    with record() as events, timers.collective("all-reduce"):
        arrived = store.check(["rank 1 is there"])
        flat = torch.full((2,), float(group.rank()))
        all_reduce(flat, group, "gradients").wait()
    return [arrived, [event.label for event in events], flat.tolist(), list(timers.milliseconds())]


def test_a_collective_begins_when_every_rank_is_there():
    want = [True, ["line up", "gradients"], [0.5, 0.5], ["all-reduce-wait", "all-reduce"]]
    assert ranks.run(arrival_case, 2) == [want, want]


def subgroup_case(group) -> dict | None:
    part = subgroup([1, 2])
    if part is None:
        return None
    timers = Timers(CPU, part, clock=Clock())
    lap(timers, "forward", 10 - group.rank())
    return vars(timers.over_ranks()["forward"])


def test_ranks_of_a_subgroup_have_their_number_among_all():
    spread = {"least": 8.0, "most": 9.0, "mean": 8.5, "least_rank": 2, "most_rank": 1, "ranks": 2}
    assert ranks.run(subgroup_case, 3) == [None, spread, spread]
