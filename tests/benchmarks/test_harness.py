"""The harness: what is timed, kept, refused; and candidates for one shape: who is let in, and how they take turns."""

import ctypes
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import Timer, WrongResultError, measure, ratios, require_close, summarise, suspicions
from benchmarks.lib import contest
from benchmarks.lib.contest import Contest, Entry, Stopwatch
from cs336_systems.cost import Hardware
from cs336_systems.host.machine import PeakMemory

CPU = torch.device("cpu")
MACHINE = Hardware("test", matmul_flops=1e12, bandwidth=1e10, source="made up")


def test_every_sample_but_the_warm_up_is_kept_and_a_phase_is_charged_with_its_own_time(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr("benchmarks.harness.time.perf_counter", lambda: now[0])

    def takes(name, seconds):
        return lambda: calls.append(name) or now.__setitem__(0, now[0] + seconds)

    phases = {"long": takes("long", 2.0), "short": takes("short", 0.5)}
    done = measure(phases, CPU, warmup=2, steps=3, before=takes("before", 7.0))
    assert calls == ["before", "long", "short"] * 5
    assert done.samples_ms == {"long": [2000.0] * 3, "short": [500.0] * 3}
    assert done.total(("long", "short")) == [2500.0] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_lap_is_the_devices_time():
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device)
    for _ in range(3):
        torch.mm(a, a)
    torch.cuda.synchronize()
    timer, start = Timer(device), time.perf_counter()
    timer.lap(lambda: a @ a)
    (lap,) = timer.milliseconds()
    waited = (time.perf_counter() - start) * 1e3
    assert 0.5 * waited < lap <= waited  # the host only launches, which takes microseconds


def test_peak_memory_is_that_of_the_phase():
    memory = PeakMemory(CPU)
    if memory.read() is None:
        pytest.skip("this system does not let a process reset its peak")
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 2**16)  # M_MMAP_MAX, which the benchmarks of kernels set to 0 in this process
    size = 2**28
    done = measure({"big": lambda: torch.ones(size, dtype=torch.uint8), "small": lambda: None}, CPU, 0, 2, memory)
    for peaks in (done.first_peak, done.peak):
        assert peaks["big"] >= size * 0.99  # the kernel counts pages in batches
        assert peaks["small"] < size / 2


def test_figures_of_samples():
    summary = summarise([1.0, 2.0, 6.0])
    assert (summary["mean_ms"], summary["median_ms"], summary["min_ms"], summary["max_ms"]) == (3.0, 2.0, 1.0, 6.0)
    assert summary["std_ms"] == pytest.approx(7.0**0.5)
    assert summarise([4.0])["std_ms"] == 0.0
    drift = [1.0, 3.0, 9.0, 2.0]  # of the machine, which ratios survive
    against = ratios([2 * d for d in drift], drift)
    assert against == {"ratio_median": 2.0, "ratio_low": 2.0, "ratio_high": 2.0}
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])


def test_impossible_and_noisy_figures_are_flagged():
    second = summarise([1000.0, 1000.0])
    assert suspicions(second, flops=1e12, bytes_moved=1e10, hardware=MACHINE) == []
    assert suspicions(second, 1.2e12, 0, MACHINE) == ["faster than the measured matrix-product peak by 1.20 x"]
    assert suspicions(second, 0, 1.3e10, MACHINE) == ["faster than the measured memory bandwidth by 1.30 x"]
    # What fits a cache may be read faster than memory.
    assert suspicions(summarise([1e-3, 1e-3]), 0, 2**28, MACHINE) == []
    assert suspicions(summarise([900.0, 1100.0]), 0, 0, MACHINE) == ["noisy: standard deviation 14% of the mean"]


def test_the_gate_refuses_what_is_wrong():
    wanted = torch.tensor([3.0, 4.0])
    assert require_close("same", wanted.clone(), wanted, 0.0) == 0.0
    assert require_close("near", wanted + torch.tensor([0.0, 0.05]), wanted, 0.011) == pytest.approx(0.01, rel=1e-4)
    with pytest.raises(WrongResultError, match=r"far is off its reference by 2.00e-01, more than 1.00e-01"):
        require_close("far", wanted + torch.tensor([0.0, 1.0]), wanted, 0.1)
    nothing = torch.zeros(2)
    assert require_close("nothing", nothing, nothing, 0.0) == 0.0  # as the gradient of a query that has one key
    with pytest.raises(WrongResultError, match="inf"):
        require_close("something", wanted, nothing, 0.1)
    with pytest.raises(WrongResultError, match="nan"):
        require_close("broken", wanted * float("nan"), wanted, 0.1)


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
