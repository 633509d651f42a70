"""The published study's figures to their printed digits, and what is wrong with its rows; formulas, tables, plot."""

from dataclasses import replace

import pytest

from benchmarks import scaling
from benchmarks.lib import scaling_plot
from benchmarks.lib.scaling_anomalies import anomalies, marks
from benchmarks.lib.scaling_logs import (
    ScalingRun,
    bubble,
    efficiency,
    ideal_bubble,
    parent,
    read_runs,
    top_level,
    top_level_ms,
)
from benchmarks.lib.scaling_tables import PUBLISHED, markdown, sample_flops, scaling_sheet, timer_sheet, utilisation
from benchmarks.scaling import import_log
from cs336_systems.cost.plots import style
from cs336_systems.host.console import run_command
from tests.support.scaling_rows import clean, with_timers

# Computed by hand from the study's printed lines: W, ms an iteration, samples/s, thousands of tokens/s, efficiency
# relative to 1 and to 8 GPUs, bubble, ideal bubble, HFU, sum of the outermost timers, what they leave.
STUDY = """
1    179.1   44.7  22.9 100.0%      -  0.0%  0.0% 20.5%  169.1  10.0
8    232.0  137.9  70.6  38.6% 100.0% 18.8% 20.0%  7.9%  208.4  23.6
16  2873.6   22.3  11.4   3.1%   8.1% 18.1% 20.0%  0.6% 2733.9 139.7
32   377.6  339.0 173.6  23.7%  61.4% 18.0% 20.0%  4.9%  347.7  29.9
64   368.6  694.4 355.6  24.3%  62.9% 16.2% 20.0%  5.0%  355.2  13.4
128  445.4 1149.4 588.5  20.1%  52.1% 16.4% 20.0%  4.1%  452.1  -6.7
"""
ROWS = [line.split() for line in STUDY.strip().splitlines()]


@pytest.fixture(scope="module")
def published() -> list[ScalingRun]:
    return read_runs([PUBLISHED])


def test_the_published_rows_give_the_studys_figures(published):
    sheet = scaling_sheet(published)
    assert sheet.heads[8:10] == ["eff. vs 1", "eff. vs 8"]
    for cells, want in zip(sheet.rows, ROWS, strict=True):
        assert [cells[0], *cells[5:13]] == [*want[:3], f"{want[3]}k", *want[4:9]]
    assert [cells[-1] for cells in sheet.rows] == marks(published) == ["5", "", "3", "1, 4", "", "2, 4"]
    flops = "HFU: 1.43 TFLOP a sample with recompute full, MFU: 1.1 TFLOP without, over 312 TFLOP/s a device."
    assert flops in sheet.note
    assert "66% to 88% of the time" in sheet.note
    timers = {row[0]: row[1:] for row in timer_sheet(published).rows}
    assert len(timers) == 13 + 4
    assert timers["forward-recv"] == ["", "-", "11.05", "222.47", "12.34", "13.24", "12.54"]
    assert timers["batch-generator"][0] == "forward-compute"
    assert timers["unaccounted"][1:] == [row[-1] for row in ROWS]
    assert timers["memory, MiB"][1:3] == ["8,430", "5,624-6,176"]
    assert "| 16 | 2/2/4 | 64 | 4 | 44.9 | 2873.6 | 22.3 | 11.4k | 3.1% | 8.1% |" in markdown(published)
    first = scaling_sheet(published[3:])  # a base that is the first run has one column
    assert [head for head in first.heads if head.startswith("eff.")] == ["eff. vs 32"]
    assert [row[8] for row in first.rows] == ["100.0%", "102.4%", "84.8%"]
    for run in published:
        parts = scaling_plot.breakdown(run)
        assert sum(parts.values()) == pytest.approx(max(run.iteration_ms, top_level_ms(run)), rel=1e-12)
    parts = scaling_plot.breakdown(published[1])
    assert (parts["bubble"], parts["sent between stages"]) == (11.05 + 24.96, 0.2 + 1.98)
    assert (parts["gradients' all-reduce"], parts["optimizer"], parts["other timers"]) == (6.46, 10.59, 0.0)


def test_flops_are_those_of_the_papers(published):
    for run in published:
        s, l, h, v = run.seq_length, run.num_layers, run.hidden_size, run.vocab_size  # noqa: E741
        with_recompute = 96 * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
        without = 72 * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
        # Exact integers against formulas with a handful of roundings.
        assert sample_flops(run) == pytest.approx(with_recompute, rel=1e-14)
        assert sample_flops(run, model_only=True) == pytest.approx(without, rel=1e-14)
        assert sample_flops(replace(run, recompute="none")) == sample_flops(run, model_only=True)
        selective = sample_flops(replace(run, recompute="selective")) - sample_flops(run, model_only=True)
        assert selective == l * 4 * s**2 * h
    assert sample_flops(replace(published[0], vocab_size=None)) is None
    assert utilisation(replace(published[0], peak_flops=None)) is None


def test_timers_inside_others_are_not_added_twice():
    old = {"forward-compute", "batch-generator", "optimizer", "optimizer-clip-main-grad", "backward-params-all-reduce"}
    assert [name for name in sorted(old) if parent(name, old)] == ["batch-generator", "optimizer-clip-main-grad"]
    assert parent("optimizer-clip-main-grad", {"forward-compute"}) is None
    newer = dict.fromkeys(
        ("forward-backward", "forward-compute", "backward-compute", "forward-send-backward-recv", "batch-generator",
         "all-grads-sync", "embedding-grads-all-reduce", "params-all-gather", "optimizer", "optimizer-inner-step"), 1.0,
    )  # fmt: skip
    assert list(top_level(clean(8, timers=newer))) == ["forward-backward", "params-all-gather", "optimizer"]


def test_a_bubble_needs_its_timers_and_counts_waits_with_their_collective():
    run = clean(8)
    assert bubble(run) == pytest.approx(37 / (60 + 12 + 100 + 0.2 + 2 + 25))
    waiting = {name: value for name, value in run.timers.items() if name != "backward-embedding-all-reduce"}
    split = {"backward-embedding-all-reduce-wait": 24.0, "backward-embedding-all-reduce": 1.0}
    assert bubble(replace(run, timers=waiting | split)) == pytest.approx(bubble(run))
    assert bubble(replace(run, timers={"forward-compute": 1.0})) is None
    assert bubble(clean(8, pp=1, dp=4)) == 0.0
    assert ideal_bubble(replace(run, pp=4, dp=1, global_batch_size=20)) == 3 / 8


def test_runs_that_look_alike_are_told_apart_by_name():
    alike = [clean(8, name="gpipe"), clean(8, name="1f1b")]
    sheet = scaling_sheet(alike)
    assert [sheet.heads[0], *(row[0] for row in sheet.rows)] == ["run", "gpipe", "1f1b"]
    assert scaling_sheet([clean(4), clean(8)]).heads[0] == "W"
    runs = [clean(4), alike[0], clean(8, tp=4, dp=1), alike[1]]
    assert timer_sheet(runs).heads == ["timer", "inside", "W = 4", "gpipe", "4x2x1", "1f1b"]
    assert timer_sheet(runs[1:3]).heads[2:] == ["2x2x2", "4x2x1"]


def test_what_is_unknown_is_a_dash_and_what_is_small_has_small_units():
    (row,) = scaling_sheet([clean(8, iterations=None)]).rows
    assert row[4:] == ["7.16", "229.0", "139.7", "-", "100.0%", "18.6%", "20.0%", "-", "-", "-", ""]
    assert "memory, MiB" not in [row[0] for row in timer_sheet([clean(8)]).rows]
    times = (0.012345, 12345.678)
    assert [scaling_sheet([clean(8, ms_per_sample=ms)]).rows[0][4] for ms in times] == ["0.0123", "12,345.7"]
    shape = {"num_layers": 1, "hidden_size": 10, "seq_length": 10, "vocab_size": 100}
    # Three times (24 s h^2 + 4 s^2 h + 2 s h V)
    flops = "HFU: 144 kFLOP a sample with recompute none, MFU: 144 kFLOP without, over 20 GFLOP/s a device."
    assert scaling_sheet([clean(4, **shape, peak_flops=2e10)]).note.endswith(flops)


def test_the_command_line(capsys, monkeypatch, tmp_path):
    path = tmp_path / "runs.json"
    assert run_command(scaling.main, ["import-log"]) == 0
    whole = capsys.readouterr().out
    assert "20.5%" in whole
    assert "12,800 fits." in whole
    path.write_text(PUBLISHED.read_text().replace('"peak_flops": 312000000000000.0', '"peak_flops": null'))
    assert run_command(import_log, [str(path)]) == 0
    assert "20.5%" not in capsys.readouterr().out
    assert run_command(import_log, ["--peak-tflops", "312", str(path)]) == 0
    assert capsys.readouterr().out == whole
    assert run_command(import_log, ["--peak-tflops", "0"]) == 2
    assert run_command(scaling.main, ["--size", "xl", "import-log"]) == 2
    assert "error: import-log measures nothing: drop --size" in capsys.readouterr().err
    log = tmp_path / "empty.log"
    log.write_text("nothing")
    assert run_command(import_log, [str(log)]) == 2
    assert "empty.log has no timers" in capsys.readouterr().err
    monkeypatch.setattr(style, "can_plot", lambda: False)
    assert run_command(import_log, ["--plot", str(tmp_path / "x.png")]) == 2
    assert "no plot without matplotlib" in capsys.readouterr().err


def test_the_plot(published, tmp_path):
    pytest.importorskip("matplotlib")
    figure = scaling_plot.draw(published)
    throughput, ratio, bars = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in throughput.lines}
    assert lines["tp 2, pp 2"] == [[run.world, run.samples_per_s] for run in published[1:]]
    ideal = published[1].samples_per_s / 8
    assert lines["ideal, from W = 8"] == [[1, ideal], [128, 128 * ideal]]
    relative = [each.get_ydata() for each in ratio.lines if str(each.get_label()).startswith("relative to W = 8")]
    assert relative[0].tolist() == [100 * efficiency(run, published[1]) for run in published[1:]]
    tops = [max(b.get_y() + b.get_height() for b in bars.patches if abs(b.get_x() + 0.35 - i) < 1e-9) for i in range(6)]
    assert tops[1] == pytest.approx(published[1].iteration_ms)
    assert tops[2] == pytest.approx(tops[5])  # drawn smaller, to the height of the highest other
    assert any("2,874 ms" in text.get_text() and "drawn at 1/6.4" in text.get_text() for text in bars.texts)
    once, again = (style.save(each, tmp_path / "a.svg").read_bytes() for each in (figure, scaling_plot.draw(published)))
    assert once == again


def findings(runs: list[ScalingRun]) -> list[str]:
    return [each.text for each in anomalies(runs)]


def kinds(runs: list[ScalingRun]) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.kind, each.runs) for each in anomalies(runs)]


def test_what_is_wrong_with_the_published_rows(published):
    assert kinds(published) == [
        ("samples", (3,)), ("excess", (5,)), ("starved", (2,)), ("stragglers", (3, 5)), ("uneven batch", (0,)),
    ]  # fmt: skip
    samples, excess, starved, stragglers, uneven = findings(published)
    assert "1,280 samples in 100 iterations, but a global batch of 128 makes 12,800" in samples
    assert "377.6 ms an iteration with 12,800 samples and 37.8 ms with 1,280" in samples
    assert samples.endswith("the timers add up to 347.7 ms: 12,800 fits.")
    assert "452.1 ms, 6.7 ms more than the iteration of 445.4 ms (rounding explains 2.6 ms)" in excess
    assert "3.5 and 3.9 times the median of the 4 other rows with tp 2 and pp 2, a forward pass 8.9 times" in starved
    assert "--bind-to none" in starved
    assert "40.6 ms (11%) and 113.8 ms (26%) of the iteration, 2.6 ms in the row" in stragglers
    assert "W = 1 (1/1/1): 8 samples a rank and iteration (m = 2), 4 in most rows" in uneven


COPIES = {"optimizer_copy_to_main_grad": 6.0, "optimizer_copy_main_to_model_params": 5.0}
STARVED = with_timers(clean(32, forward=600.0, ms_per_sample=800.0 / 128), **COPIES)
LONGER = clean(8, forward=240.0, global_batch_size=128, samples=12_800, ms_per_sample=3.2)
# 32 samples of 6.7 ms may have been 6.75 ms, 1.6 ms more an iteration; were they 6.70001 ms, they were not.
JUST = clean(8, forward=59.2, ms_per_sample=6.7)
TIMED = top_level_ms(clean(8)) / 32
OVER = clean(8, ms_per_sample=TIMED - 5.0 / 32)
LATE = {"optimizer_unscale_and_check_inf": 30.0, "optimizer": 38.0}
SLOW = with_timers(clean(16, ms_per_sample=250.0 / 64), **LATE)
ODD = clean(4, global_batch_size=32, samples=3200, ms_per_sample=227 / 32)
BATCHES = [
    clean(world, global_batch_size=n, samples=100 * n, ms_per_sample=227 / n)
    for world, n in ((4, 16), (8, 48), (16, 128))
]
FOUND = {
    "a clean grid": ([clean(world) for world in (4, 8, 16, 32, 64)], []),
    "layouts on as many ranks": ([clean(8), clean(8, tp=4, dp=1), clean(8, tp=1, pp=1, dp=8)], []),
    "strong scaling": ([clean(n, global_batch_size=64, ms_per_sample=227 / 64, samples=6400) for n in (4, 8)], []),
    "a network that makes forward slow": ([clean(4), clean(8), clean(16, forward=600.0, ms_per_sample=780 / 64)], []),
    "one row": ([clean(8)], []),
    "starved first": ([STARVED, clean(8), clean(16)], [("starved", (0,))]),
    "starved last": ([clean(8), STARVED], [("starved", (1,))]),
    "slow copies alone": ([clean(8), with_timers(clean(16), **COPIES)], []),
    "more micro-batches": ([clean(4), clean(8), clean(16), with_timers(LONGER, **COPIES)], [("uneven batch", (3,))]),
    "starved in another layout": ([clean(8), replace(STARVED, tp=4, dp=4)], []),
    "samples": ([clean(8, samples=3201)], [("samples", (0,))]),
    "unknown samples": ([clean(8, samples=None)], []),
    "rounding": ([JUST], []),
    "more than rounding": ([replace(JUST, ms_per_sample=6.70001)], [("excess", (0,))]),
    "excess": ([OVER], [("excess", (0,))]),
    "a fifth, almost": ([clean(8, ms_per_sample=TIMED / 0.81)], []),
    "more than a fifth": ([clean(8, ms_per_sample=TIMED / 0.79)], [("unaccounted", (0,))]),
    "stragglers": ([clean(8), SLOW, clean(32)], [("stragglers", (1,))]),
    "few stragglers": ([clean(8), with_timers(clean(16), optimizer_unscale_and_check_inf=10.0, optimizer=18.0)], []),
    "stragglers in another layout": ([clean(8), replace(SLOW, tp=4, dp=2)], []),
    "an odd batch": ([ODD, clean(8), clean(16)], [("uneven batch", (0,))]),
    "odd batches": (BATCHES, [("uneven batch", (0, 1, 2))]),
}


@pytest.mark.parametrize(("runs", "found"), FOUND.values(), ids=FOUND)
def test_what_is_found_and_what_is_not(runs, found):
    assert kinds(runs) == found


def test_findings_say_what_explains_them():
    run = clean(8, samples=6400, ms_per_sample=230.0 / 64)  # here the count is right and the batch is not
    assert findings([run])[0].endswith("6,400 fits.")
    assert "another window" in findings([OVER])[0]
    assert "most over the ranks" in findings([replace(OVER, over_ranks=True)])[0]
    assert "tp" not in findings([ODD, clean(8), clean(16)])[0]
    assert "(4, 6, 8)" in findings(BATCHES)[0]
