"""The flame graph's picture and files: what they show, escape, leave out, and that they are always the same."""

import pytest

from cs336_systems.profiling.pictures import WIDTH, write_flame_pictures
from tests.support.flame_cases import on_a_gpu, span, trace_of, two_steps
from tests.support.svg_shapes import placed_texts, shapes, texts


def test_names_are_escaped(tmp_path):
    trace = trace_of(span("forward", 0, 10), span('a "b" <c> & d; e\nf at 0x7f01', 2, 8, category="cpu_op"))
    (svg,) = write_flame_pictures(trace, tmp_path)
    assert any(each.tooltip.startswith('a "b" <c> & d; e f\n') for each in shapes(svg.read_text()))


def drawn(trace, path):
    """The SVG of a trace's CPU time, and the shapes in it by the first line of their tooltips."""
    (svg,) = write_flame_pictures(trace, path)
    return svg.read_text(), {each.tooltip.split("\n")[0]: each for each in shapes(svg.read_text())}


def test_the_picture(tmp_path):
    svg, places = drawn(two_steps(), tmp_path)
    step = places["step"]

    def share(name):
        return (places[name].right - places[name].left) / (step.right - step.left)

    assert places["forward"].left == pytest.approx(step.left, abs=0.01)
    assert share("forward") == pytest.approx(0.4, abs=0.001)
    assert share("gloo:all_reduce") == pytest.approx(0.28, abs=0.001)
    assert places["backward"].left == pytest.approx(places["forward"].right, abs=0.01)
    assert places["main thread"].bottom < step.top < step.bottom < places["forward"].top
    lowest = max(places[name].top for name in places if name not in ("gloo:all_reduce", "aten::div_"))
    assert places["gloo:all_reduce"].top > lowest
    assert places["backward"].tooltip == "backward\n0.04 ms, 40.00% of the main thread; 0.006 ms itself"
    assert places["aten::mm"].tooltip == "aten::mm\n0.015 ms, 15.00% of the main thread; 0.015 ms itself"
    assert all(x + 0.6 * size * len(words) < WIDTH for x, _, size, words in placed_texts(svg))
    assert all(0 <= place.left < place.right <= WIDTH for place in places.values())
    assert {"backward 0.04 ms (40.0%)", "main thread", "time in ms, mean of 2 steps; backward lies below the modules "
            "whose forward made it"} <= {*texts(svg)}  # fmt: skip


def test_frames_too_narrow_to_see_are_not_drawn(tmp_path):
    trace = trace_of(span("step 0", 0, 10_000), span("aten::seen", 0, 4), span("aten::unseen", 4, 6))
    assert [*drawn(trace, tmp_path)[1]] == ["main thread", "step", "aten::seen"]


def test_48_blocks_make_no_huge_file(tmp_path):
    events = [span("forward", 0, 48 * 60)]
    for block in range(48):
        events.append(span(f"blocks.{block} (Block)", 60 * block, 60 * block + 60))
        events += [span(f"aten::op{i}", 60 * block + i, 60 * block + i + 1) for i in range(60)]
    (svg,) = write_flame_pictures(trace_of(*events), tmp_path)
    assert svg.stat().st_size < 50_000


def test_files_are_the_same_every_time(tmp_path):
    first, second = write_flame_pictures(two_steps(), tmp_path / "one"), write_flame_pictures(two_steps(), tmp_path)
    assert [path.name for path in first] == ["flame.svg"]
    assert first[0].read_bytes() == second[0].read_bytes()
    gpu = write_flame_pictures(on_a_gpu(), tmp_path)
    assert [path.name for path in gpu] == ["flame.svg", "flame_device.svg"]
    assert "36.46% of all kernels" in gpu[1].read_text()
    (empty,) = write_flame_pictures(trace_of(), tmp_path / "nothing")
    assert "<svg" in empty.read_text()
