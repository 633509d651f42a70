"""The flame graph's picture and files: what they show, escape, leave out, and that they are always the same."""

import json

import pytest

from cs336_systems.profiling.flame import flames, write_flame
from cs336_systems.profiling.flame_picture import HEADER, MARGIN, ROW, draw, write_flame_pictures
from cs336_systems.profiling.pictures import CHARACTER, WIDTH
from tests.support.flame_cases import TWO_STEPS, check_speedscope, frame, on_a_gpu, span, stacks, trace_of, two_steps
from tests.support.svg_shapes import placed_texts, shapes


def odd_names():
    return trace_of(
        span("forward", 0, 10),
        frame("loop.py(1): <lambda>", 1, 9),
        span('a "b" <c> & d; e\nf', 2, 8, category="cpu_op"),
    )


def test_names_are_escaped(tmp_path):
    expected = 'main thread;forward;loop.py(1): <lambda>;a "b" <c> & d, e f'
    assert stacks(flames(odd_names()))[expected] == 6000
    check_speedscope(flames(odd_names()))
    (svg,) = write_flame_pictures(odd_names(), tmp_path, "odd")
    assert any(each.tooltip.startswith('a "b" <c> & d; e f\n') for each in shapes(svg.read_text()))


def test_the_picture():
    picture = draw(flames(two_steps(), collapse_blocks=True), "A title")
    drawn = shapes(picture.render())
    places = {each.tooltip.split("\n")[0]: each for each in drawn}
    inner = WIDTH - 2 * MARGIN
    assert places["forward"].left == MARGIN
    assert places["forward"].right - MARGIN == pytest.approx(0.4 * inner, abs=1)
    assert places["backward"].left == pytest.approx(MARGIN + 0.4 * inner, abs=0.01)
    assert [places[name].top for name in ("step", "forward")] == [HEADER + ROW, HEADER + 2 * ROW]
    assert places["gloo:all_reduce"].right - places["gloo:all_reduce"].left == pytest.approx(0.28 * inner, abs=1)
    lowest = max(places[name].top for name in places if name not in ("gloo:all_reduce", "aten::div_"))
    assert places["gloo:all_reduce"].top > lowest
    hovers = {each.tooltip.split("\n")[0]: each.tooltip.split("\n")[1:] for each in drawn}
    assert hovers["backward"] == ["0.0400 ms a step, 40.00% of the step; 0.0060 ms itself", "1 call a step"]
    assert hovers["aten::mm"] == ["0.0150 ms a step, 15.00% of the step; 0.0150 ms itself", "2 calls a step"]
    written = placed_texts(picture.render())
    assert all(x + CHARACTER * size * len(words) < WIDTH for x, _, size, words in written)
    assert all(place.bottom < picture.height for place in places.values())
    assert "backward 0.04 ms (40.0%)" in [words for *_, words in written]


def test_the_picture_names_all_that_a_frame_adds_up():
    kinds = ("MoE", "FeedForward", "SwiGLU", "Identity", "Mixer")
    trace = trace_of(*[span(f"blocks.{i}.mix ({kind})", 2 * i, 2 * i + 2) for i, kind in enumerate(kinds)])
    names = [
        each.tooltip.split("\n")[0] for each in shapes(draw(flames(trace, collapse_blocks=True), "A title").render())
    ]
    three = "blocks.*.mix (FeedForward), blocks.*.mix (Identity), blocks.*.mix (Mixer) and 2 more"
    assert names == ["rank 0 main thread", three]


def test_frames_too_narrow_to_see_are_not_drawn():
    trace = trace_of(span("step 0", 0, 10_000), span("aten::seen", 0, 3), span("aten::unseen", 3, 5))
    names = [each.tooltip.split("\n")[0] for each in shapes(draw(flames(trace), "A title").render())]
    assert names == ["rank 0 main thread", "step", "aten::seen"]


def test_48_blocks_fit_in_a_megabyte(tmp_path):
    events = [span("forward", 0, 48 * 60)]
    for block in range(48):
        events.append(span(f"blocks.{block} (Block)", 60 * block, 60 * block + 60))
        events += [span(f"aten::op{i}", 60 * block + i, 60 * block + i + 1) for i in range(60)]
    (svg,) = write_flame_pictures(trace_of(*events), tmp_path, "deep")
    assert svg.stat().st_size < 50_000
    assert len(draw(flames(trace_of(*events)), "every block by itself").render()) < 1_000_000


def write(trace, folder, stem):
    return [*write_flame(trace, folder, stem), *write_flame_pictures(trace, folder, stem)]


def test_files_are_the_same_every_time(tmp_path):
    first = write(two_steps(), tmp_path / "one", "flame_rank0")
    second = write(two_steps(), tmp_path / "two", "flame_rank0")
    assert [path.name for path in first] == [f"flame_rank0.{x}" for x in ("collapsed.txt", "speedscope.json", "svg")]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_text() == TWO_STEPS
    assert json.loads(first[1].read_text())["profiles"][0]["endValue"] == 200_000
    gpu = [path.name for path in write(on_a_gpu(), tmp_path, "gpu")]
    assert gpu[2:4] == ["gpu_device.collapsed.txt", "gpu_device.speedscope.json"]
    assert gpu[4:] == ["gpu.svg", "gpu_device.svg"]
    assert "36.46% of all kernels" in (tmp_path / "gpu_device.svg").read_text()


def test_an_empty_trace(tmp_path):
    text, _, svg = write(trace_of(), tmp_path, "nothing")
    assert text.read_text() == ""
    assert "<svg" in svg.read_text()
