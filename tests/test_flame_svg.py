"""The flame graph's picture and files: what they show, escape, leave out, and that they are always the same."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from cs336_systems.profiling.flame import flames
from cs336_systems.profiling.flame_svg import HEADER, MARGIN, ROW, WIDTH, draw, write_flame
from tests.flame_cases import TWO_STEPS, check_speedscope, frame, on_a_gpu, span, stacks, trace_of, two_steps


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
    svg, _, _ = write_flame(odd_names(), tmp_path, "odd")
    titles = [each.text for each in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith('a "b" <c> & d; e f\n') for title in titles)


def shapes(drawing):
    """({title's first line: rectangle}, texts) of a picture."""
    found = ElementTree.fromstring(drawing.render())
    rects = [each for each in found.iter("{http://www.w3.org/2000/svg}rect") if len(each)]
    return [(each[0].text.split("\n"), each.attrib) for each in rects], list(
        found.iter("{http://www.w3.org/2000/svg}text")
    )


def test_the_picture():
    drawing = draw(flames(two_steps(), collapse_blocks=True), "A title")
    rects, texts = shapes(drawing)
    places = {lines[0]: {key: float(each[key]) for key in ("x", "y", "width", "height")} for lines, each in rects}
    inner = WIDTH - 2 * MARGIN
    assert places["forward"]["x"] == MARGIN
    assert places["forward"]["width"] == pytest.approx(0.4 * inner, abs=1)
    assert places["backward"]["x"] == pytest.approx(MARGIN + 0.4 * inner, abs=0.01)
    assert [places[name]["y"] for name in ("step", "forward")] == [HEADER + ROW, HEADER + 2 * ROW]
    assert places["gloo:all_reduce"]["width"] == pytest.approx(0.28 * inner, abs=1)
    lowest = max(places[name]["y"] for name in places if name not in ("gloo:all_reduce", "aten::div_"))
    assert places["gloo:all_reduce"]["y"] > lowest
    hovers = {lines[0]: lines[1:] for lines, _ in rects}
    assert hovers["backward"] == ["0.0400 ms a step, 40.00% of the step; 0.0060 ms itself", "1 call a step"]
    assert hovers["aten::mm"] == ["0.0150 ms a step, 15.00% of the step; 0.0150 ms itself", "2 calls a step"]
    assert all(float(text.get("x")) + 7.2 * len(text.text) < WIDTH for text in texts if text.get("font-size") == "12")
    assert all(place["y"] + place["height"] < drawing.height for place in places.values())
    assert any(text.text == "backward 0.04 ms (40.0%)" for text in texts)


def test_the_picture_names_all_that_a_frame_adds_up():
    kinds = ("MoE", "FeedForward", "SwiGLU", "Identity", "Mixer")
    trace = trace_of(*[span(f"blocks.{i}.mix ({kind})", 2 * i, 2 * i + 2) for i, kind in enumerate(kinds)])
    names = [lines[0] for lines, _ in shapes(draw(flames(trace, collapse_blocks=True), "A title"))[0]]
    three = "blocks.*.mix (FeedForward), blocks.*.mix (Identity), blocks.*.mix (Mixer) and 2 more"
    assert names == ["rank 0 main thread", three]


def test_frames_too_narrow_to_see_are_not_drawn():
    trace = trace_of(span("step 0", 0, 10_000), span("aten::seen", 0, 3), span("aten::unseen", 3, 5))
    names = [lines[0] for lines, _ in shapes(draw(flames(trace), "A title"))[0]]
    assert names == ["rank 0 main thread", "step", "aten::seen"]


def test_48_blocks_fit_in_a_megabyte(tmp_path):
    events = [span("forward", 0, 48 * 60)]
    for block in range(48):
        events.append(span(f"blocks.{block} (Block)", 60 * block, 60 * block + 60))
        events += [span(f"aten::op{i}", 60 * block + i, 60 * block + i + 1) for i in range(60)]
    svg, _, _ = write_flame(trace_of(*events), tmp_path, "deep")
    assert svg.stat().st_size < 50_000
    assert len(draw(flames(trace_of(*events)), "every block by itself").render()) < 1_000_000


def test_files_are_the_same_every_time(tmp_path):
    first = write_flame(two_steps(), tmp_path / "one", "flame_rank0")
    second = write_flame(two_steps(), tmp_path / "two", "flame_rank0")
    assert [path.name for path in first] == [f"flame_rank0.{x}" for x in ("svg", "collapsed.txt", "speedscope.json")]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[1].read_text() == TWO_STEPS
    assert json.loads(first[2].read_text())["profiles"][0]["endValue"] == 200_000
    gpu = write_flame(on_a_gpu(), tmp_path, "gpu")
    assert [path.name for path in gpu[3:]] == [f"gpu_device.{x}" for x in ("svg", "collapsed.txt", "speedscope.json")]
    assert "36.46% of all kernels" in gpu[3].read_text()


def test_an_empty_trace(tmp_path):
    svg, text, _ = write_flame(trace_of(), tmp_path, "nothing")
    assert text.read_text() == ""
    assert "<svg" in svg.read_text()
