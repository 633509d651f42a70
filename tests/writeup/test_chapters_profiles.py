"""Chapters on profiles, precision and memory: sentences chosen from records, and pictures found."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
from benchmarks.lib.profiling_record import TABLES
from benchmarks.records import Record
from cs336_systems.presets import preset
from writeup.book import Book, Citation
from writeup.chapters.activation_checkpointing import best, more_work, one_shape
from writeup.chapters.function_calls import command_of
from writeup.chapters.mixed_precision import stuck, verdicts
from writeup.chapters.peaks import error, moments
from writeup.operators import OUTSIDE, answers, changed, counted, flops_ratio
from writeup.profiles import profile_picture, with_tables

SIZE = {"size": "small", "year": 2024, "norm": "rmsnorm", "attention": "naive"}
SHAPE = SIZE | {"context": 128, "batch_size": 16, "precision": "fp32", "recompute": "none", "recompute_every": 1}


def cited(*records: Record) -> Citation:
    return Citation("any", "run", records, frozenset(key for each in records for key in each.config))


def row(name: str, calls: int, share: float, flops: int | None = None) -> dict:
    return {"name": name, "calls": calls, "cpu_self": int(1e6 * share), "cpu_self_share": share, "flops": flops}


def test_operators_are_counted_as_the_shape_says():
    """Small has 12 blocks of 6 weights, and the head."""
    profile = {"clock": "cpu", "steps": 2, "operators": {
        "forward": [row("aten::gelu", 24, 0.1), row("aten::mm", 146, 0.6, 1), row(OUTSIDE, 1, 0.3)],
        "step": [row("aten::mul", 500, 0.5), row("aten::mm", 438, 0.3, 1)],
    }}  # fmt: skip
    metrics = {"share_matrix_products_of_forward": 0.6, "share_matrix_products": 0.3}
    said = answers(Record("profiling", SHAPE, {}, metrics=metrics), profile)
    assert said[0].startswith(
        "In the forward pass `aten::mm` takes the most time, 60%, in 73 calls, as the model's shape"
    )
    assert said[1] == "Over the whole step `aten::mul` takes the most time, 50%, in 250 calls."
    assert said[2] == "Of what is no product, these take most of the forward pass: `aten::gelu` (10.0%)."
    assert said[3].endswith("the share of products falls from 60% to 30%.")
    small = preset("small", 2024).model
    assert "three for each of 73 weights" in counted("aten::mm", small, "step", 219)
    assert counted("aten::mm", small, "step", 100) == " (219 by the model's shape)"
    assert "stays about the same" in changed(0.5, 0.51)
    assert "rises" in changed(0.5, 0.6)


def test_softmax_has_five_flops_for_four_of_each_width():
    config = preset("small", 2024).model
    assert flops_ratio(config) == pytest.approx(5 / (4 * config.head_dim))


def test_pictures_are_shown_only_with_their_own_record(tmp_path):
    folder = tmp_path / "here" / "profiling" / "small-none-naive"
    folder.mkdir(parents=True)
    record = Record("profiling", SHAPE, {}, [1.0], {"pictures": "profiling/small-none-naive"})
    (folder / TABLES).write_text(json.dumps({"config": SHAPE, "samples_ms": [1.0]}))
    (folder / "flame.svg").write_text("<svg/>")
    book = Book(tmp_path, "here", "flame-graph")
    found = profile_picture(book, record, "flame", "caption", "alt")
    assert (found.name, found.svg) == ("flame-graph-small-none-naive-flame", "<svg/>")
    assert profile_picture(book, record, "memory", "caption", "alt") is None
    other, old = replace(record, samples_ms=[2.0]), replace(record, metrics={})
    assert profile_picture(book, other, "flame", "caption", "alt") is None
    assert profile_picture(book, None, "flame", "caption", "alt") is None
    assert list(with_tables(book, cited(record, other, old))) == [record]


def test_what_the_original_says_of_the_toy_model_is_judged():
    both = {"forward": "fp16", "backward": "fp16"}
    full = {"forward": "fp32", "backward": "fp32"}
    parts = {"parameters": full, "fc1 (Linear)": both, "ln (LayerNorm)": both, "fc2 (Linear)": both, "loss": full}
    cuda = {
        "parameters": "fp32",
        "fc1 (Linear)": "fp16",
        "ln (LayerNorm)": "fp32",
        "fc2 (Linear)": "fp16",
        "loss": "fp32",
    }
    record = Record("mixed_precision", {}, {}, metrics={"parts": parts, "documented_for_cuda": cuda})
    loss, gradients = verdicts(Book(), record)
    assert loss.startswith(
        "the original has the loss in fp16; here it is fp32; torch's lists say fp32 for a GPU as well."
    )
    assert gradients.startswith("the original has the gradients in fp16; here they are fp32. A `.grad`")
    cuda["loss"] = "fp16"
    assert len(verdicts(Book(), record)) == 1, "torch's lists decide where the two devices differ"


def test_a_sum_that_stops():
    sums = {"bf16 += bf16": {"sum": 4.0, "added": 0.0}}
    record = Record("mixed_precision", {"terms": 1000}, {}, metrics={"sums": sums})
    assert stuck(record) == "in bfloat16 the sum of 1,000 terms stops at 4"
    sums["bf16 += bf16"]["added"] = 0.01
    assert stuck(record) == stuck(None) == ""


def test_the_best_segment():
    def swept(every: int, peak: int) -> Record:
        config = SHAPE | {"recompute": "segments", "recompute_every": every}
        return Record("memory", config, {}, metrics={"peak_bytes": peak}, predicted={"peak_by_length": [5, 4, 6]})

    assert best(cited(swept(1, 9), swept(2, 8))) == "of the lengths measured, 2 needs least, as predicted"
    assert best(cited(swept(1, 7), swept(2, 8))).endswith("1 needs least, where 2 was predicted")
    assert best(cited()) == ""
    plain, other = replace(swept(1, 9), config=SHAPE), replace(swept(1, 9), config=SHAPE | {"size": "medium"})
    assert list(one_shape(cited(plain, swept(2, 8), other))) == [plain, swept(2, 8)]
    assert 0.3 < more_work(swept(1, 1)) < 1 / 3, "one more forward pass, without the head's"


def test_the_command_for_a_gap_names_what_the_size_does_not_have_by_itself():
    assert command_of(Record("profiling", SHAPE, {})) == "python -m benchmarks.e2e --size small"
    tiny = Record("profiling", SHAPE | {"size": "tiny", "batch_size": 4}, {})
    assert command_of(tiny) == "python -m benchmarks.e2e --size tiny --attention naive --batch-size 4"


def test_all_peaks_are_judged_and_placed_in_their_step():
    def step(precision: str, gradients: int, off: float) -> Record:
        found = {"peak_memory_bytes": 1000, "memory_by_part": {"gradients": gradients}}
        config = SHAPE | {"mode": "step", "precision": precision}
        return Record("memory", config, {}, metrics=found, predicted={"peak_memory_bytes": 1000 * off})

    full, low, bare = step("fp32", 0, 1.001), step("bf16", 8, 0.99), replace(step("fp16", 0, 2.0), predicted={})
    assert error(cited(full, low, bare)) == (
        "all 2 predicted peaks are within 1.00% of the measured ones (step of small in bf16 is the worst)"
    )
    before, there = moments(cited(full, low))
    assert before.startswith("A step of small in fp32 peaks before there is any gradient")
    assert there.startswith("A step of small in bf16 peaks with its gradients there")
