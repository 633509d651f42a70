"""Chapters on profiles, precision and memory: sentences chosen from records, and pictures found."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
from benchmarks.lib.profiling_record import TABLES
from benchmarks.records import Record
from cs336_systems.presets import preset
from writeup.book import Book, Citation
from writeup.chapters.memory import more_work, one_shape
from writeup.chapters.mixed_precision import differing
from writeup.chapters.operators import flops_ratio
from writeup.profiles import profile_picture, with_tables

SIZE = {"size": "small", "year": 2024, "norm": "rmsnorm", "attention": "naive"}
SHAPE = SIZE | {"context": 128, "batch_size": 16, "precision": "fp32", "recompute": "none", "recompute_every": 1}


def cited(*records: Record) -> Citation:
    return Citation("any", "run", records, frozenset(key for each in records for key in each.config))


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
    both, full = dict.fromkeys(("forward", "backward"), "fp16"), dict.fromkeys(("forward", "backward"), "fp32")
    parts = {"parameters": full, "fc1 (Linear)": both, "ln (LayerNorm)": both, "fc2 (Linear)": both, "loss": full}
    cuda = {"fc1 (Linear)": "fp16", "ln (LayerNorm)": "fp32", "loss": "fp32"}
    record = Record("mixed_precision", {}, {}, metrics={"parts": parts, "documented_for_cuda": cuda})
    assert differing(Book(), record) == {"loss": ("fp16", "fp32"), "gradients": ("fp16", "fp32")}
    cuda["loss"] = "fp16"
    assert differing(Book(), record).keys() == {"gradients"}, "torch's lists decide where the two devices differ"


def test_one_shape_is_that_of_the_first_record_whatever_it_recomputes():
    def swept(every: int, peak: int) -> Record:
        config = SHAPE | {"recompute": "segments", "recompute_every": every}
        return Record("memory", config, {}, metrics={"peak_bytes": peak}, predicted={"peak_by_length": [5, 4, 6]})

    plain, other = replace(swept(1, 9), config=SHAPE), replace(swept(1, 9), config=SHAPE | {"size": "medium"})
    assert list(one_shape(cited(plain, swept(2, 8), other))) == [plain, swept(2, 8)]
    assert 0.3 < more_work(swept(1, 1)) < 1 / 3, "one more forward pass, without the head's"
