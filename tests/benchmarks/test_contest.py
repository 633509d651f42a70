"""Candidates for one shape: who is let in, in what order they are timed, and how long that may take."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.lib import contest
from benchmarks.lib.contest import Contest, Entry, Stopwatch, UnavailableError
from benchmarks.lib.kernel import theirs

CPU = torch.device("cpu")


def test_candidates_take_turns_and_are_refused_for_a_reason():
    order, held = [], Contest(Stopwatch(CPU), faults=[])

    def candidate(name):
        return lambda: Entry({"forward": lambda: order.append(name), "backward": lambda: None})

    def broken():
        raise KeyError("block size\nand more")

    held.enter("a", candidate("a"))
    held.enter("b", candidate("b"))
    held.enter("ours", broken)
    held.enter("liger", broken)
    for entry in held.entries.values():
        entry.calls = 1
    order.clear()
    held.play(3)
    assert order == ["a", "b"] * 3
    assert set(held.entries["a"].samples) == {"forward", "backward", "forward-backward"}
    why = "KeyError: 'block size\\nand more'"
    assert held.refusals == dict.fromkeys(("ours", "liger"), ("unsupported", why))
    assert held.faults == [f"ours: {why}"]
    held.entries["a"].samples["forward"], held.entries["b"].samples["forward"] = [2.0, 9.0, 4.0], [1.0, 3.0, 4.0]
    against = {"best_other": "b", "ratio_median": 2.0, "ratio_low": 1.5, "ratio_high": 2.5}
    assert held.against_others("a", "forward") == against
    held.entries["c"] = Entry({}, samples={"forward": [5.0, 5.0, 5.0]})
    assert held.against_others("a", "forward")["best_other"] == "b"
    del held.entries["c"]
    assert held.against_others("a", "forward", ignored="b") == {}


@pytest.mark.parametrize("driver", ["CUDA error: ", "Triton Error [CUDA]: "])
def test_a_lost_device_ends_the_run_but_memory_that_ran_out_one_candidate(driver):
    lost, full = (RuntimeError(driver + what) for what in ("an illegal memory access was encountered", "out of memory"))
    for name in ("ours", "liger"):
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            contest.refuse(name, lost, [])
        assert contest.refuse(name, full, []) == ("out-of-memory", "out of memory")

    def explode():
        if timed:
            raise full

    held, timed = Contest(Stopwatch(CPU), faults=[]), False
    held.enter("ours", lambda: Entry({"forward": explode}))
    timed = True
    held.play(2)
    assert held.refusals["ours"] == ("out-of-memory", "out of memory")
    assert held.faults == []


def test_a_peer_that_is_missing_says_so():
    with pytest.raises(UnavailableError, match="Nobody's is not installed"):
        theirs("Nobody's", "nobodys_package.ops", "norm")(None, CPU)
    with pytest.raises(UnavailableError, match="torch: "):
        theirs("torch", "torch", "no_such_norm")(None, CPU)


class FakeGPU:
    """A fake GPU that lists a stopwatch's calls in order; each event is a second later than the last."""

    def __init__(self):
        self.log, self.clock = [], 0.0

    def event(self, enable_timing):
        def record(stream):
            self.clock += 1.0
            made.at = self.clock
            self.log.append("event")

        made = SimpleNamespace(record=record, elapsed_time=lambda stop: stop.at - made.at)
        return made

    def install(self, monkeypatch):
        found = SimpleNamespace(L2_cache_size=100)
        filler = SimpleNamespace(zero_=lambda: self.log.append("flush"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.log.append(("sleep", cycles)))
        monkeypatch.setattr(torch, "empty", lambda *size, **_: self.log.append(size) or filler)


def test_on_a_gpu_a_call_meets_a_cold_cache_and_is_launched_before_its_turn(monkeypatch):
    gpu = FakeGPU()
    gpu.install(monkeypatch)
    clock = Stopwatch(SimpleNamespace(type="cuda"))
    assert gpu.log[-1] == (200,)  # twice the L2 cache
    gpu.log.clear()
    entry = Entry({"forward": lambda: gpu.log.append("run")}, calls=2, lead=0.001)
    assert clock.sample(entry) == 1.0
    assert gpu.log == ["flush", ("sleep", 2_000_000), "event", "run", "event"] * 2
    assert entry.samples == {"forward": [1.0]}
    clock.settle(entry)
    assert 0 < entry.lead <= contest.LONGEST_LEAD
    assert entry.calls == 5
