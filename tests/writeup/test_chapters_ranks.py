"""The chapters on several ranks: what their sentences and fits make of records that are made up here."""

from math import sqrt
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
from benchmarks.records import Record
from writeup.book import Citation
from writeup.chapters import gallery
from writeup.chapters.buckets import fastest, model_of
from writeup.chapters.ddp import whiskers
from writeup.chapters.optimizer_sharding import schemes, traffic_bytes
from writeup.rank_runs import fit, line_of, runs_of

SETTINGS = {"d_model": 64, "layers": 2, "ranks": 2, "link": ""}
STAMP = {"device": "AMD EPYC", "commit": "unknown", "date": "2026-11-22T10:00:00+00:00", "cores": 4}


def step(candidate: str, ms: float, **metrics: Any) -> Record:
    """A record of the benchmark `ddp` of 6 equal samples."""
    found = {"median_ms": ms, "mean_ms": ms, "std_ms": 0.0} | metrics
    return Record("ddp", {"candidate": candidate, **SETTINGS}, STAMP, [ms] * 6, found, {"mean_ms": ms / 2})


def test_the_gallery_shows_what_check_says(monkeypatch, tmp_path) -> None:
    table = gallery.what_check_says()
    assert table.startswith("| candidate | verdict |")
    assert "| `torch:ddp` | right; weak: " in table
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    assert gallery.what_check_says() == ""


def test_a_line_is_found_where_there_is_one() -> None:
    line = fit([(n, b, 1e-3 * n + b / 2e9) for n, b in ((1, 1e6), (5, 1e6), (1, 1e9), (7, 3e8))])
    assert line is not None
    assert (line.overhead, line.bandwidth) == pytest.approx((1e-3, 2e9))
    assert line.residual < 1e-9
    assert fit([(1, 1e6, 1.0), (1, 2e6, 2.0)]) is None, "two points"
    assert fit([(1, 1e6, 1.0), (1, 2e6, 2.5), (1, 3e6, 4.2)]) is None, "a call that gains time"
    assert fit([(1, 1e6, 1.0), (1, 1e6, 1.1), (1, 1e6, 1.2)]) is None, "one shape"


def test_the_bus_bandwidth_is_fitted() -> None:
    records = [
        Record("allreduce", {"ranks": 4, "bytes": size}, {}, [1.0], {"median_ms": 2.0 + 1.5 * size / 1e6})
        for size in (10**6, 10**7, 10**8)
    ]
    line = line_of(records)
    assert line is not None
    assert (line.overhead, line.bandwidth) == pytest.approx((2e-3, 1e9)), "a ring of 4 sends 3/2 of the tensor"


def test_the_best_bucket_follows_from_the_fit() -> None:
    o, w, s = 1e-3, 1e9, 1e8  # collectives take o n + s/w exactly
    records = [step("no communication", 30.0)]
    for size, count, ms in ((1, 100, 90.0), (4, 25, 60.0), (17, 6, 70.0)):
        spent = {"communication_ms": 1e3 * (o * count + s / w), "collectives": count, "bytes_sent": s}
        records.append(step(f"bucketed {size} MB", ms, **spent, exposed_ms=10.0, communication_share=0.5))
    run = Citation("ddp", "run this", tuple(records))
    model = model_of(run)
    assert model is not None
    assert model.best == pytest.approx(sqrt(s * w * o))
    assert fastest(run) == 4e6
    assert (model.exposed(10), model.backward) == pytest.approx((0.02, 0.02))


def test_a_spread_is_that_of_the_pairs() -> None:
    alone, with_it = step("no communication", 1.0), step("naive", 1.0, exposed_ms=5.0)
    alone.samples_ms[:], with_it.samples_ms[:] = [10.0, 20.0, 30.0, 40.0], [14.0, 25.0, 35.0, 46.0]
    assert whiskers(with_it, alone) == pytest.approx((0.25, 0.25))
    assert whiskers(with_it, None) == (0.0, 0.0)


def test_runs_are_told_apart_by_their_settings() -> None:
    small, large = step("flat", 1.0), step("flat", 2.0)
    large.config["d_model"] = 128
    found = runs_of(Citation("ddp", "", (small, large, small)))
    assert [[r.config["d_model"] for r in run] for run in found] == [[128], [64, 64]]


def test_the_assignment_sends_half_as_much_again() -> None:
    found = schemes("small").values()
    assignment, whole, flat, zero = (traffic_bytes(gradients + updates) for gradients, updates, _ in found)
    assert assignment == pytest.approx(whole) == pytest.approx(flat) == pytest.approx(1.5 * zero)
    first, *calls = (len(updates) for _, updates, _ in found)
    assert calls == [2, 1, 1]
    assert first > 90, "a broadcast for each of 12 blocks' tensors"
