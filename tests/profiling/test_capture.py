"""Capture on one rank and on several: what is written, and what it leaves alone."""

import gc
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

from cs336_systems.comm import all_gather, all_reduce, reduce_scatter
from cs336_systems.comm.events import is_profiling
from cs336_systems.ddp import BucketedDDP
from cs336_systems.errors import UserError
from cs336_systems.profiling import Capture, read_trace
from cs336_systems.profiling.capture import quiet_profiler
from cs336_systems.profiling.names import LINE_UP
from cs336_systems.profiling.trace import Span, Trace, trace_files, trace_name
from tests.support import ranks


def named(trace: Trace, *beginnings: str) -> list[Span]:
    return [span for span in trace.spans if span.name.startswith(beginnings)]


def run_steps(folder, warmup: int = 1, steps: int = 2, taken: int | None = None, **options):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with Capture(folder, None, model, optimizer, warmup, steps, **options) as capture:
        for _ in range(capture.total if taken is None else taken):
            with capture.step():
                with capture.phase("forward"):
                    loss = model(torch.ones(3, 4)).sum()
                with capture.phase("backward"):
                    loss.backward()
                with capture.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                del loss
    return model, optimizer


def test_the_steps_after_the_warm_up_are_in_the_trace(tmp_path, capfd):
    model, optimizer = run_steps(tmp_path / "new")
    trace = read_trace(tmp_path / "new" / "rank0.trace.json.gz")
    names = [span.name for span in trace.spans if span.category == "user_annotation"]
    assert [name for name in names if name.startswith("step ")] == ["step 0", "step 1"]
    for phase in ("forward", "backward", "optimizer", "model (Sequential)", "0 (Linear)"):
        assert names.count(phase) == 2, phase
    assert not [name for name in names if "mark" in name]
    held = {category: 0 for category, *_ in trace.ours["held"]}
    for category, _, nbytes, device in trace.ours["held"]:
        held[category] += nbytes
        assert device == "cpu"
    parameters = sum(p.nbytes for p in model.parameters())
    state = sum(value.nbytes for each in optimizer.state.values() for value in each.values())
    assert (held["parameters"], held["optimizer state"]) == (parameters, state)
    assert "gradients" not in held
    marks = [category for _, category, _ in trace.ours["marks"]]
    assert marks == ["gradients"] * len(list(model.parameters())) * 2
    assert "USDT" not in capfd.readouterr().err


def test_the_first_step_marks_the_optimizers_state_and_leaves_out_sparse_gradients(tmp_path):
    table = nn.Embedding(10, 4, sparse=True)
    with Capture(tmp_path, model=table) as capture, capture.step(), capture.phase("backward"):
        table(torch.tensor([1])).sum().backward()
    assert trace_files(tmp_path)
    _, optimizer = run_steps(tmp_path, warmup=0, steps=1)
    marks = read_trace(tmp_path / "rank0.trace.json.gz").ours["marks"]
    state = [value for each in optimizer.state.values() for value in each.values()]
    addresses = {address for _, category, address in marks if category == "optimizer state"}
    assert addresses == {value.untyped_storage().data_ptr() for value in state}


def test_too_few_steps_and_exceptions_write_nothing(tmp_path):
    (tmp_path / "rank0.trace.json.gz").write_text("of an earlier run")
    with pytest.raises(UserError, match="2 steps were taken of 3"):
        run_steps(tmp_path, taken=2)
    with pytest.raises(ZeroDivisionError), Capture(tmp_path):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    run_steps(tmp_path)  # and the next one works
    assert len(trace_files(tmp_path)) == 1


def test_what_capture_cannot_do_is_said(tmp_path, capsys):
    for options in ({"steps": 0}, {"warmup": -1}):
        with pytest.raises(UserError, match="must not be negative"):
            Capture(tmp_path, **options)
    outside = Capture(tmp_path)
    for begin in (outside.step, lambda: outside.phase("forward"), lambda: outside.annotate("mine")):
        with pytest.raises(UserError, match="are captured inside `with Capture"), begin():
            pass
    with Capture(tmp_path / "a") as outer:
        with pytest.raises(UserError, match="a profiler runs already"), Capture(tmp_path / "b"):
            pass
        with outer.annotate("the outer one goes on"):
            pass
    assert named(read_trace(tmp_path / "a" / trace_name(0)), "the outer one")
    with pytest.raises(UserError, match="a profiler runs already"), outer, outer:
        pass
    assert not is_profiling(), "the outer one has stopped"
    again = Capture(tmp_path / "again", warmup=1)
    for _ in range(2):
        with again:
            for _ in range(again.total):
                with again.step():
                    torch.ones(1)
        assert [s.name for s in named(read_trace(tmp_path / "again" / trace_name(0)), "step")] == ["step 0"]
    both = Capture(tmp_path, warmup=1), Capture(tmp_path, warmup=1)
    with pytest.raises(UserError, match="a profiler runs already"), both[0], both[1], both[0].step(), both[1].step():
        pass
    with pytest.raises(UserError, match="has ended Capture's"), Capture(tmp_path), profile():
        pass
    with pytest.raises(UserError, match="0 steps were taken of 3"), Capture(tmp_path, warmup=2):
        nn.Linear(2, 2)(torch.ones(1, 2))
    capsys.readouterr()
    with Capture(tmp_path / "c"):
        pass
    assert capsys.readouterr().err.splitlines()[0].startswith("note: Capture saw no work in this process")


def test_an_exception_on_entry_leaves_no_hooks(tmp_path, monkeypatch):
    monkeypatch.setattr("cs336_systems.profiling.capture.live_storages", lambda held: 1 / 0)
    with pytest.raises(ZeroDivisionError), Capture(tmp_path):
        pass
    module = torch.nn.modules.module
    assert not module._global_forward_pre_hooks
    assert not module._global_forward_hooks


def test_blocks_allocated_in_one_step_and_freed_in_the_next_are_known(tmp_path):
    """The profiler runs one step early, so that it knows the blocks that the first step frees."""
    kept = torch.ones(1)
    with Capture(tmp_path, warmup=2) as capture:
        for step in range(capture.total):
            with capture.step():
                kept = torch.ones(1000 + step)
    assert kept.numel() == 1002
    trace = read_trace(tmp_path / trace_name(0))
    assert 4 * 1001 in [nbytes for _, _, nbytes, _ in trace.ours["held"]]
    assert [each.nbytes for each in trace.allocations] == [4 * 1002, -4 * 1001]


@pytest.mark.skipif(torch.version.cuda and not torch.cuda.is_available(), reason="this torch would look for a driver")
def test_a_cpu_run_leaves_the_gpu_alone(tmp_path, monkeypatch):
    """Forked ranks of a machine with a GPU must not touch it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: pytest.fail("touches the GPU"))
    run_steps(tmp_path / "by its model")
    with Capture(tmp_path / "told", device="cpu"):
        torch.ones(1)


def test_of_warnings_only_that_about_cycles_is_kept_back():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_profiler():
            for text in ("Warning: Profiler clears events at the end of each cycle.", "another"):
                warnings.warn(text, UserWarning, stacklevel=1)
    assert [str(each.message) for each in caught] == ["another"]


def test_nvtx_ranges_bear_the_same_names(tmp_path, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    run_steps(tmp_path, warmup=0, steps=1, nvtx=True)
    inner = ["0 (Linear)", "pop", "1 (ReLU)", "pop", "2 (Linear)", "pop"]
    phases = ["backward", "pop", "optimizer", "pop"]
    assert calls == ["step 0", "forward", "model (Sequential)", *inner, "pop", "pop", *phases, "pop"]


def joint_case(group, folder: str) -> list[str]:
    torch.manual_seed(group.rank())
    gc.collect()
    model = BucketedDDP(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)), bucket_size_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(Path(folder), group, model, optimizer, warmup=1) as capture:
        for _ in range(capture.total):
            with capture.step():
                with capture.phase("forward"):
                    loss = model(torch.ones(2, 16)).sum()
                with capture.phase("backward"):
                    loss.backward()
                with capture.phase("synchronise"):
                    model.finish_gradient_synchronization()
                with capture.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    with (
        pytest.raises(UserError, match=r"cannot write to .*; choose another folder"),
        Capture(Path(folder, "file" if group.rank() == 1 else "folder"), group),
    ):
        pass
    with Capture(Path(folder, "verbs"), group):
        for verb in (all_reduce, reduce_scatter, all_gather):
            work = verb(torch.ones(4), group, "it")
            work.wait()
            work.wait()  # the second has nothing to wait for
    return [bucket.label for bucket in model.buckets]


def test_every_rank_writes_and_names_its_collectives(tmp_path):
    (tmp_path / "file").write_text("")  # where one rank cannot write, none does
    labels = ranks.run(joint_case, 2, folder=str(tmp_path))[0]
    assert len(labels) == 2
    traces = [read_trace(path) for path in trace_files(tmp_path)]
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, 2), (1, 2)]
    told = [[s.name for s in t.spans if s.name.startswith(("launch ", "wait "))] for t in traces]
    assert sorted(told[0]) == sorted(told[1])
    for label in labels:
        assert len([name for name in told[0] if name.startswith("launch all-reduce 0#") and label in name]) == 1
        assert len([name for name in told[0] if name.startswith("wait all-reduce 0#") and label in name]) == 1
    numbers = [name.split("#")[1].split()[0] for name in told[0] if name.startswith("launch")]
    assert len(set(numbers)) == len(numbers)
    assert traces[0].ours["run"] == traces[1].ours["run"]
    for trace in traces:
        (met,), (step,) = named(trace, LINE_UP), named(trace, "step 0")
        assert met.category == LINE_UP, "that of no annotation, so that nothing counts it"
        assert met.end <= step.start
        assert all(s.start >= step.start for s in trace.spans if s is not met)
    assert not list(tmp_path.glob("folder/*"))
    found = [s.name.split(" 0#")[0] for s in named(read_trace(tmp_path / "verbs" / trace_name(1)), "launch", "wait")]
    assert found == [
        f"{what} {verb}" for verb in ("all-reduce", "reduce-scatter", "all-gather") for what in ("launch", "wait")
    ]


def spawned_case(rank: int, world: int, folder: str, out: str) -> None:
    """A worker without steps that joins the others by torch itself, inside the block, and leaves before its end."""
    with Capture(out):
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        dist.barrier()  # a rank that left while the other still connects would end both
        dist.destroy_process_group()


def test_a_worker_that_joins_by_itself_is_known_by_its_rank_and_profiled_whole(tmp_path):
    ranks.run_alone(spawned_case, 2, out=str(tmp_path))
    traces = [read_trace(path) for path in trace_files(tmp_path)]
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, 2), (1, 2)]
    assert {"model (Linear)", "aten::addmm", "AddmmBackward0"} <= {span.name for span in traces[0].spans}
