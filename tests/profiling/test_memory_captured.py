"""The memory of real runs, to the byte: captured bytes against the sum of the tensors."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.lib.profiling_record import memory_snapshot
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import model_preset
from cs336_systems.profiling import Capture, read_trace
from cs336_systems.profiling.labels import held_by
from cs336_systems.profiling.memory import CATEGORIES, largest, memory_markdown, memory_timeline
from cs336_systems.profiling.pictures import write_memory_picture
from tests.profiling.test_memory_timeline import levels, phase_peaks


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of a small transformer after one to warm up, and what its tensors add up to."""
    folder = tmp_path_factory.mktemp("capture")
    torch.manual_seed(0)
    model = TransformerLM(model_preset("tiny").override(num_layers=2, recompute="segments"))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (2, 33))
    gradients = []
    with Capture(folder, None, model, optimizer, warmup=1, steps=2) as capture:
        for _ in range(capture.total):
            with capture.step():
                with capture.phase("forward"):
                    loss = lm_loss(model, tokens[:, :-1], tokens[:, 1:])
                with capture.phase("backward"):
                    loss.backward()
                gradients.append(tensor_bytes(p.grad for p in model.parameters()))
                with capture.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                del loss
    state = tensor_bytes(value for each in optimizer.state.values() for value in each.values())
    trace = read_trace(folder / "rank0.trace.json.gz")
    sizes = SimpleNamespace(parameters=tensor_bytes(model.parameters()), gradients=gradients[0], state=state)
    return SimpleNamespace(trace=trace, timeline=memory_timeline(trace), sizes=sizes, tokens=tokens)


def test_a_real_steps_bytes_are_those_of_its_tensors(run):
    found, sizes = run.timeline, run.sizes
    ends = [each.end for each in found.phases if each.name == "backward"]
    assert len(ends) == 2
    for end in ends:
        level = levels(found)[found.highest_in(end, end)]
        assert level["gradients"] == sizes.gradients == sizes.parameters
        assert level["parameters"] == sizes.parameters
        assert level["optimizer state"] == sizes.state
    for level in levels(found):
        assert level["parameters"] == sizes.parameters
        assert level["optimizer state"] == sizes.state
    last = levels(found)[-1]
    assert (last["gradients"], last["activations"]) == (0, 0)
    start = levels(found)[0]
    assert last == start  # parameters, the optimizer's state and what the test holds, the tokens for example
    assert start["other"] >= tensor_bytes([run.tokens])


def test_a_real_steps_peak_is_that_of_its_events_played_back(run):
    found = run.timeline
    assert found.totals == [*accumulate((each.nbytes for each in run.trace.allocations), initial=found.totals[0])]
    at_peak = (block.nbytes for block in found.blocks if block.alive(found.peak_index))
    assert sum(found.at_peak.values()) == sum(at_peak) == found.peak
    peaks = phase_peaks(found)
    assert list(peaks) == ["forward", "backward", "optimizer"]
    assert max(peaks.values()) == found.peak
    recomputed = [source for source in largest(found, 1000) if source.module.endswith(", recomputed")]
    assert recomputed
    assert {source.category for source in recomputed} == {"activations"}
    backward = [source for source in largest(found, 1000) if source.module.startswith("backward of")]
    assert {source.category for source in backward} == {"gradients", "other"}


def test_tables_and_picture_of_a_real_step(run, tmp_path):
    (path,) = write_memory_picture(run.trace, tmp_path / "memory.svg")
    assert path.stat().st_size < 300_000
    picture = ElementTree.parse(path).getroot()
    words = " ".join(text for text in picture.itertext())
    assert f"peak {run.timeline.peak:,} bytes" in words
    assert all(word in words for word in (*CATEGORIES, "step 1", "forward", "backward", "optimizer"))
    hovers = re.findall(r"([a-z ]+): ([\d,]+) bytes at the peak", words)
    shown = {name.strip(): int(number.replace(",", "")) for name, number in hovers}
    assert {name: shown[name] for name in CATEGORIES} == run.timeline.at_peak
    assert f"{run.timeline.peak:,} bytes" in memory_markdown(run.trace, run.timeline)


def test_what_a_sharded_optimizer_holds_is_its_inner_ones():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.zeros(3)
    inner = torch.optim.AdamW([parameter])
    inner.step()
    outer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    outer.inner = inner
    found = [(category, tensor.numel()) for category, tensor in held_by(None, outer)]
    assert ("gradients", 3) in found
    assert ("parameters", 2) in found
    assert [numel for category, numel in found if category == "optimizer state"] == [1, 3, 3]


def test_a_snapshot_is_written_although_the_block_fails(tmp_path, monkeypatch):
    calls = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **arguments: calls.append(arguments),
        _dump_snapshot=lambda path: calls.append(path),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory", memory)
    path = tmp_path / "new" / "memory_snapshot.bin"
    with pytest.raises(MemoryError), memory_snapshot(path, entries=5):
        raise MemoryError
    assert calls == [{"max_entries": 5, "stacks": "python"}, str(path), {"enabled": None}]
