"""The chapters on kernels: what they count, what they say of made-up records, and that they can be filled on a GPU."""

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import product

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
from benchmarks.records import Record, append_record, open_records
from cs336_systems.cost.course import question
from cs336_systems.cost.machines import system_preset
from cs336_systems.presets import model_preset
from writeup.book import Book, Citation
from writeup.chapters import flash_attention
from writeup.chapters.flash_attention import attention_flops, peak_share
from writeup.chapters.norms import norm_floor
from writeup.compose import chapter
from writeup.model_pairs import BASE, in_turn, pass_seconds
from writeup.publications import publications
from writeup.tables import plain

WHERE = {"device": "Test", "device_type": "cuda", "cores": 2, "threads": 2, "torch": "2.13", "triton": "3.8"}
WHERE |= {"python": "3.11.7", "commit": "a" * 40, "dirty": False, "date": "2026-01-02T03:04:05"}


def made(benchmark: str, median: float, config: dict, **metrics) -> Record:
    known = {"median_ms": median, "mean_ms": median, "std_ms": 0.0, "bytes_per_s": 1e12}
    return Record(benchmark, config, WHERE, [median] * 5, known | metrics, {"median_ms": median / 2})


def norm(candidate: str, what: str, columns: int, median: float) -> Record:
    config = {"candidate": candidate, "pass": what, "rows": 50_000, "columns": columns, "dtype": "fp32"}
    return made("norms", median, config)


def attention(candidate: str, what: str, seq: int, median: float, grid: str = "flash") -> Record:
    config = {"candidate": candidate, "pass": what, "grid": grid, "batch": 1, "seq": seq, "dim": 64, "dtype": "bf16"}
    config |= {"causal": True, "keeps": True}
    if grid == "course":
        config |= {"batch": 8, "dtype": "fp32", "causal": False}
    return made("attention", median, config, before_backward_bytes=2**20 * seq)


def e2e(norm_name: str, compiled: bool, median: float) -> Record:
    config = {"year": 2024, "size": "small", "mode": "forward-backward", "norm": norm_name, "compile": compiled}
    config |= {"precision": "fp32", "recompute": "none", "warmup": 2, "attention": "naive"}
    return made("e2e", median, config | {"batch_size": 16, "context": 128})


def compared(variant: str, median: float, base: float, seconds: int = 0) -> Record:
    config = {"year": 2024, "size": "small", "mode": "forward-backward", "variant": variant, "baseline": BASE}
    config |= {"batch_size": 16, "context": 128, "precision": "fp32", "warmup": 2, "attention": "naive"}
    date = (datetime.fromisoformat(WHERE["date"]) + timedelta(seconds=seconds)).isoformat()
    record = made("compare", median, config, ratio_median=median / base, ratio_low=median / base, ratio_high=median)
    return replace(record, environment={**WHERE, "date": date})


@pytest.fixture
def book(tmp_path):
    """A GPU on which everything was measured, our kernels too."""
    norms = {"layernorm": 1.0, "eager": 4.0, "compiled": 2.0, "ours": 0.5}
    kernels = {"eager": 3.0, "ours": 1.0, "tiled": 6.0}
    passes = ("forward", "backward", "forward-backward")
    records = [norm(*each, norms[each[0]] * each[2]) for each in product(norms, passes[::2], (1024, 2048))]
    records += [attention(*each, kernels[each[0]] * each[2]) for each in product(kernels, passes, (512, 1024))]
    records += [attention(*each, 512, 2.0, "course") for each in product(("eager", "compiled"), passes)]
    records += [e2e("rmsnorm", False, 100.0), e2e("layernorm", False, 80.0), e2e("rmsnorm", True, 50.0)]
    times = {BASE: 100.0, "norm=layernorm": 80.0, "compile": 50.0, "precision=bf16": 25.0}
    records += [compared(variant, time, times[BASE]) for variant, time in times.items()]
    for record in records:
        append_record(record, open_records(tmp_path / "test-gpu", record.benchmark))
    return Book(tmp_path, "test-gpu")


FILLED = {
    "norms": [
        "| 50000 x 1024 | RMSNorm, eager | 4.10 s | 2.0 s (0.50) | 4.00 (4.00 to 4.00) |",
        "| 50000 x 1024 | RMSNorm, Triton | 512 ms | 256 ms (0.50) | 0.50 (0.50 to 0.50) | - |",
        "| small | forward-backward | 100 ms | 80.0 ms | 1.25 (1.25 to 1.25) | 1.25 |",
        "| small | forward-backward | 100 ms | 50.0 ms | 2.00 (2.00 to 2.00) | 2.00 |",
    ],
    "flash-attention": ["| 512 | ours, Triton |", "| 1,024 | eager | 3.07 s |"],
    "step": ["| small | forward-backward | 100 ms | 25.0 ms | 4.00 (4.00 to 4.00) | 4.00 | 0.79 |"],
}


@pytest.mark.parametrize("name", FILLED)
def test_a_gpu_fills_every_chapter(book, name, undrawn):
    text = plain(chapter(book, name)[0])
    assert [words for words in FILLED[name] if words not in text] == []


def test_a_sweep_that_was_stopped_after_its_first_pass_is_drawn(tmp_path):
    append_record(attention("eager", "forward", 512, 2.0), open_records(tmp_path / "test-gpu", "attention"))
    assert "flash-attention" in chapter(Book(tmp_path, "test-gpu"), "flash-attention")[1]


def test_what_backward_needs_is_counted():
    config = {"candidate": "eager", "batch": 2, "seq": 100, "dim": 8, "dtype": "fp32"}
    for change, elements in (
        ({}, (100 + 3 * 8) * 4),
        ({"candidate": "tiled"}, 4 * 8 * 4 + 4),
        ({"candidate": "tiled", "dtype": "bf16"}, 4 * 8 * 2 + 4),
    ):
        assert flash_attention.kept_bytes(config | change) == 2 * 100 * elements
    assert flash_attention.kept_bytes(config | {"dtype": "bf16"}) is None
    assert flash_attention.kept_bytes(config | {"candidate": "compiled"}) is None


def test_shares_of_the_ceilings():
    h100 = system_preset("H100")
    assert norm_floor(8192, "forward", h100) == pytest.approx(2 * 4 * 50_000 * 8192 / 3.35e12, rel=1e-3)
    assert norm_floor(8192, "forward-backward", h100) == pytest.approx(5 * 4 * 50_000 * 8192 / 3.35e12, rel=5e-3)
    best = publications().value("leaderboard-2025", "flash attention", place="1")
    work = attention_flops({"batch": 16, "seq": 16_384, "dim": 64, "causal": True, "pass": "forward-backward"})
    assert best
    assert peak_share(best, work, "H100") == pytest.approx(3.5 * 2 * 16 * 16_384**2 * 64 / 5.364e-3 / 989.4e12)
    assert peak_share(best, work, "H100", processors=2) == pytest.approx(peak_share(best, work, "H100") / 2)


def test_only_variants_of_one_run_are_compared():
    base, variant = compared(BASE, 100.0, 100.0), compared("compile", 50.0, 100.0, seconds=9)
    (plain, record), *more = in_turn(Citation("compare", "", (base, variant)), "compile").values()
    assert (plain.samples_ms, record, more) == (base.samples_ms, variant, [])
    assert plain.environment == record.environment
    other_run = replace(base, samples_ms=[90.0] * 5)
    assert not in_turn(Citation("compare", "", (other_run, variant)), "compile")


def test_a_step_counts_as_the_course_chapter_of_cost_does():
    work = flash_attention.step_flops(flash_attention.FULL, 2, 32_768)
    best = publications().value("leaderboard-2026", "step", place="1")
    assert work / 1e15 == pytest.approx(5.044, abs=5e-4)
    assert "29.21%" in question("leaderboard-step").result
    assert peak_share(best, work, "B200", 2) == pytest.approx(0.2921, abs=5e-5)


def test_a_pass_of_a_published_model_is_predicted():
    small, h100 = model_preset("small", 2024), system_preset("H100")

    def seconds(what: str, precision: str = "fp32", seq: int = 128) -> float:
        return pass_seconds(small, 16, seq, precision, what, h100)

    assert seconds("forward") < seconds("backward")
    assert seconds("forward") + seconds("backward") == pytest.approx(seconds("forward-backward"))
    assert seconds("step") > seconds("forward-backward")
    # A short pass waits for the host, which launches as many kernels for half the tokens; a long one does not.
    assert seconds("forward-backward") == seconds("forward-backward", seq=64) < seconds("forward-backward", seq=512)
    assert seconds("forward-backward", "bf16", 512) < seconds("forward-backward", "fp32", 512)


def test_cells_of_the_grid_that_were_not_measured_are_predicted():
    cells = [attention("eager", "forward", seq, 1.0, "course") for seq in (256, 1024)]
    table = str(flash_attention.sweep(Book(machine=None), Citation("attention", "", tuple(cells))))
    assert "| 128 | 16,384 | - |" in table
