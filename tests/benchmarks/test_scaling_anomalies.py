"""Findings on the published rows, on rows made wrong on purpose, and none on rows that are well."""

from dataclasses import replace

import pytest

from benchmarks.lib.scaling_anomalies import anomalies, rounding
from benchmarks.lib.scaling_logs import ScalingRun, read_runs, top_level_ms
from benchmarks.lib.scaling_tables import PUBLISHED
from tests.support.scaling_rows import clean, with_timers


@pytest.fixture(scope="module")
def published() -> list[ScalingRun]:
    return read_runs([PUBLISHED])


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
    assert "sched_getaffinity" in starved
    assert "40.6 ms (11%) and 113.8 ms (26%) of the iteration, 2.6 ms in the row" in stragglers
    assert "W = 1 (1/1/1): 8 samples a rank and iteration (m = 2), 4 in most rows" in uneven
    assert "cost of tp 2 and pp 2" in uneven


def test_a_clean_grid_has_no_findings():
    assert kinds([clean(world) for world in (4, 8, 16, 32, 64)]) == []
    # A sweep of layouts on as many ranks, strong scaling, and a network that makes forward slow but no copy.
    sweep = [clean(8), clean(8, tp=4, dp=1), clean(8, tp=1, pp=1, dp=8)]
    assert kinds(sweep) == []
    assert kinds([clean(world, global_batch_size=64, ms_per_sample=227 / 64, samples=6400) for world in (4, 8)]) == []
    slow = clean(16, forward=600.0, ms_per_sample=780.0 / 64)
    assert kinds([clean(4), clean(8), slow]) == []
    assert kinds([clean(8)]) == []


def test_starvation_is_found_in_any_row_and_judged_by_micro_batch():
    slow = {"optimizer_copy_to_main_grad": 6.0, "optimizer_copy_main_to_model_params": 5.0}
    starved = with_timers(clean(32, forward=600.0, ms_per_sample=800.0 / 128), **slow)
    assert kinds([starved, clean(8), clean(16)]) == [("starved", (0,))]
    assert kinds([clean(8), starved]) == [("starved", (1,))]
    # Slow copies alone, or a forward that is longer because it has more micro-batches, are something else.
    assert kinds([clean(8), with_timers(clean(16), **slow)]) == []
    longer = clean(8, forward=240.0, global_batch_size=128, samples=12_800, ms_per_sample=3.2)
    assert kinds([clean(4), clean(8), clean(16), with_timers(longer, **slow)]) == [("uneven batch", (3,))]
    other_layout = replace(starved, tp=4, dp=4)
    assert kinds([clean(8), other_layout]) == []


def test_samples_that_do_not_fit_the_iterations():
    assert kinds([clean(8, samples=3201)]) == [("samples", (0,))]
    assert kinds([clean(8, samples=None)]) == []
    # Here the count is right and the batch is not: the timers say so.
    run = clean(8, samples=6400, ms_per_sample=230.0 / 64)
    assert findings([run])[0].endswith("6,400 fits.")


def test_sums_that_exceed_or_miss_the_iteration():
    # 32 samples of 6.7 ms may have been 6.75 ms, 1.6 ms more an iteration; were they 6.70001 ms, they were not.
    just = clean(8, forward=59.2, ms_per_sample=6.7)
    assert 1.0 < top_level_ms(just) - just.iteration_ms < 0.05 * 32
    assert kinds([just]) == []
    assert kinds([replace(just, ms_per_sample=6.70001)]) == [("excess", (0,))]
    run = clean(8)
    timed = top_level_ms(run)
    over = replace(run, ms_per_sample=(timed - 5.0) / 32)
    assert kinds([over]) == [("excess", (0,))]
    assert "another window" in findings([over])[0]
    assert "most over the ranks" in findings([replace(over, over_ranks=True)])[0]
    assert kinds([replace(run, ms_per_sample=timed / 0.81 / 32)]) == []
    assert kinds([replace(run, ms_per_sample=timed / 0.79 / 32)]) == [("unaccounted", (0,))]
    assert [rounding(value) for value in (0.87, 44.9, 3.0)] == pytest.approx([0.005, 0.05, 0.05])


def test_stragglers_need_a_share_of_the_iteration():
    late = {"optimizer_unscale_and_check_inf": 30.0, "optimizer": 38.0}
    slow = with_timers(clean(16, ms_per_sample=250.0 / 64), **late)
    assert kinds([clean(8), slow, clean(32)]) == [("stragglers", (1,))]
    small = with_timers(clean(16), optimizer_unscale_and_check_inf=10.0, optimizer=18.0)
    assert kinds([clean(8), small]) == []
    assert kinds([clean(8), replace(slow, tp=4, dp=2)]) == []


def test_batches_that_differ_by_rank():
    odd = clean(4, global_batch_size=32, samples=3200, ms_per_sample=227 / 32)
    assert kinds([odd, clean(8), clean(16)]) == [("uneven batch", (0,))]
    assert "tp" not in findings([odd, clean(8), clean(16)])[0]
    batches = ((4, 16), (8, 48), (16, 128))
    neither = [clean(w, global_batch_size=n, samples=100 * n, ms_per_sample=227 / n) for w, n in batches]
    assert kinds(neither) == [("uneven batch", (0, 1, 2))]
    assert "(4, 6, 8)" in findings(neither)[0]
