"""The chapters on kernels: what they count, what they say of made-up records, and that they can be filled on a GPU."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from benchmarks.records import Record, append_record, open_records
from writeup import book as books
from writeup.book import Book, Citation
from writeup.ceilings import attention_flops, norm_floor, peak_share
from writeup.publications import publications
from writeup.words import apart

pytest.importorskip("jinja2", reason="jinja2 is in the extra `writeup`")
from cs336_systems.cost.large.systems import system_preset
from writeup.chapters import compile as compiling
from writeup.chapters import flash_attention, flash_published, layernorm, rmsnorm
from writeup.compose import chapter

WHERE = {"device": "Test", "device_type": "cuda", "cores": 2, "threads": 2, "torch": "2.13", "triton": "3.8"}
WHERE |= {"python": "3.11.7", "commit": "a" * 40, "dirty": False, "date": "2026-01-02T03:04:05"}


def made(benchmark: str, median: float, config: dict, **metrics) -> Record:
    known = {"median_ms": median, "mean_ms": median, "std_ms": 0.0, "bytes_per_s": 1e12}
    return Record(benchmark, config, WHERE, [median] * 3, known | metrics, {"median_ms": median / 2})


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
    config = layernorm.MODEL | {"size": "small", "mode": "forward-backward", "norm": norm_name, "compile": compiled}
    return made("e2e", median, config | {"attention": "naive"})


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A GPU on which everything was measured, our kernels too."""
    monkeypatch.setattr(books, "changed_since", lambda commit, files: [])
    norms = {"layernorm": 1.0, "eager": 4.0, "compiled": 2.0, "ours": 0.5}
    records = [
        norm(name, what, columns, time * columns)
        for name, time in norms.items()
        for what in ("forward", "forward-backward")
        for columns in (1024, 2048)
    ]
    kernels = {"eager": 3.0, "ours": 1.0, "tiled": 6.0}
    passes = ("forward", "backward", "forward-backward")
    records += [
        attention(name, what, seq, time * seq)
        for name, time in kernels.items()
        for what in passes
        for seq in (512, 1024)
    ]
    records += [attention(name, what, 512, 2.0, "course") for name in ("eager", "compiled") for what in passes]
    records += [e2e("rmsnorm", False, 100.0), e2e("layernorm", False, 80.0), e2e("rmsnorm", True, 50.0)]
    for record in records:
        append_record(record, open_records(tmp_path / "test-gpu", record.benchmark))
    return Book(tmp_path, "test-gpu")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layernorm", ["eager RMSNorm takes 4 times", "the model with LayerNorm is 1.2 times as fast as the one"]),
        ("rmsnorm", ["| 50000 x 1024 | forward | 512 ms", "12 of 12 figures of 2.2.4", "7 of 12 would need more"]),
        ("compile", ["(2 times as fast)", "the compiled model is 2 times as fast as the vanilla one"]),
        ("flash-attention", ["| 512 | ours, Triton |", "Ours, Triton is faster than eager", "takes 2 times eager"]),
    ],
)
def test_a_gpu_fills_every_chapter(book, name, said):
    text, _ = chapter(book, name)
    for words in said:
        assert words in text, words
    assert "Not measured" not in text.replace("benchmarks.profiling_run", "")


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "compile", "flash-attention"])
def test_without_records_each_says_what_to_run(tmp_path, name):
    text, _ = chapter(Book(tmp_path, None), name)
    assert "Not measured on this machine. Run: `python -m benchmarks." in text
    assert "†" not in text


def test_what_backward_needs_is_counted():
    config = {"candidate": "eager", "batch": 2, "seq": 100, "dim": 8, "dtype": "fp32"}
    assert flash_attention.kept_bytes(config) == 2 * 100 * (100 + 3 * 8) * 4
    assert flash_attention.kept_bytes(config | {"candidate": "tiled"}) == 2 * 100 * (4 * 8 * 4 + 4)
    assert flash_attention.kept_bytes(config | {"candidate": "tiled", "dtype": "bf16"}) == 2 * 100 * (4 * 8 * 2 + 4)
    assert flash_attention.kept_bytes(config | {"dtype": "bf16"}) is None
    assert flash_attention.kept_bytes(config | {"candidate": "compiled"}) is None


def test_a_prediction_to_the_byte_is_said_only_where_it_is_one():
    exact = attention("eager", "forward", 64, 1.0, "course")
    exact = replace(exact, metrics={**exact.metrics, "before_backward_bytes": flash_attention.kept_bytes(exact.config)})
    off = replace(exact, metrics={**exact.metrics, "before_backward_bytes": 1})
    assert "to the byte, in all 2 cases" in flash_attention.kept_error([exact, exact])
    assert "to the byte" not in flash_attention.kept_error([exact, off])


def test_shares_of_the_ceilings():
    h100 = system_preset("H100")
    assert norm_floor(8192, "forward", h100) == pytest.approx(2 * 4 * 50_000 * 8192 / 3.35e12, rel=1e-3)
    assert norm_floor(8192, "forward-backward", h100) == pytest.approx(5 * 4 * 50_000 * 8192 / 3.35e12, rel=5e-3)
    best = publications().value("leaderboard-2025", "flash attention", place="1")
    work = attention_flops({"batch": 16, "seq": 16_384, "dim": 64, "causal": True, "pass": "forward-backward"})
    assert best
    assert peak_share(best, work, "H100") == pytest.approx(3.5 * 2 * 16 * 16_384**2 * 64 / 5.364e-3 / 989.4e12)
    assert peak_share(best, work, "H100", processors=2) == pytest.approx(peak_share(best, work, "H100") / 2)


def test_measurements_far_apart_are_said_to_be():
    early = e2e("rmsnorm", False, 1.0)
    later = datetime.fromisoformat(WHERE["date"])
    for minutes, said in ((10, ""), (45, "45 minutes apart"), (300, "5 hours apart")):
        date = (later + timedelta(minutes=minutes)).isoformat()
        other = replace(early, environment={**WHERE, "date": date})
        assert said in apart(early, other)
        assert bool(said) == bool(apart(other, early))


def test_what_is_said_of_the_published_figures():
    book = Book(machine=None)
    assert rmsnorm.repeated(book) == "12 of 12"
    assert "at 1,024 columns and 0.9417 ms at 2,048" in compiling.shrinking(book)
    assert "slower in large forward" in compiling.original_models(book)
    assert flash_published.programs(book).startswith("On an H100 a student's kernel")
    assert layernorm.original_model(book).startswith("faster in 15 of 15 cells")


def test_what_one_call_is_worth_is_judged_by_its_time():
    def said(own: float) -> str:
        records = (norm("eager", "forward", 1024, 4.0), norm("torch", "forward", 1024, own))
        return layernorm.torch_own(Citation("norms", "", records))

    assert said(4.0).endswith("does not make it one pass over memory.")
    assert said(9.0).endswith("does not make it one pass over memory.")
    assert said(1.0) == "torch's own `rms_norm` is faster than the one written out at every size measured."
