"""Implausible figures: every rule finds its case and lets a sound one pass, and those of the original are found."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.records import RESULTS, Record, read_records
from writeup import plausibility_rules as rules
from writeup.book import Book
from writeup.plausibility import doubtful_means, let_pass, suspects_of_published, suspects_of_records
from writeup.publications import publications
from writeup.tables import provenance

GB = 10**9
NVLINK, HBM = 450e9, 3350e9


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (rules.over_link(GB, 2, 2.57e-4, NVLINK), rules.over_link(GB, 2, 3.14e-3, NVLINK)),
        # In a switch that adds, a rank sends its numbers once: 2.3 ms is possible, whatever the bus bandwidth says.
        (rules.over_link(GB, 8, 2.0e-3, NVLINK), rules.over_link(GB, 8, 2.3e-3, NVLINK)),
        (rules.over_link(GB, 2, 1e-6, NVLINK), rules.over_link(GB, 1, 1e-6, NVLINK)),
        (rules.over_memory(4 * GB, 8e-4, HBM), rules.over_memory(4 * GB, 1.3e-3, HBM)),
        (rules.over_memory(GB, 1e-5, HBM), rules.over_memory(1e8, 1e-5, HBM)),  # a cache may hold the second
        (rules.over_peak(1e12, 9e-4, 989e12), rules.over_peak(1e12, 1.1e-3, 989e12)),
        (rules.no_growth({5e5: 2.4e-4, GB: 2.6e-4}, NVLINK), rules.no_growth({5e5: 2.4e-4, GB: 3e-3}, NVLINK)),
        # Below a hundredfold, and where the start-up hides the transfer, a constant time is nothing to wonder at.
        (rules.no_growth({5e5: 2.4e-4, GB: 2.6e-4}, NVLINK), rules.no_growth({1e8: 2.4e-4, GB: 2.6e-4}, NVLINK)),
        (rules.no_growth({5e5: 2.4e-4, GB: 2.6e-4}, NVLINK), rules.no_growth({1e3: 2.4e-4, 1e6: 2.4e-4}, NVLINK)),
        (rules.not_slower(0.08, 0.08), rules.not_slower(0.08, 0.09)),
        (rules.always_faster([(2, 1)] * 5), rules.always_faster([(2, 1)] * 4)),
        (rules.always_faster([(2, 1)] * 5), rules.always_faster([(2, 1)] * 8 + [(1, 2)])),
        (rules.deviation_over_mean(1.0, 1.1), rules.deviation_over_mean(1.0, 0.9)),
        (rules.slow_start([10, 2, 3, 2]), rules.slow_start([6, 2, 3, 2])),
        (rules.slow_start([10, 2, 3, 2]), rules.slow_start([10, 2, 11, 2])),
        (rules.narrow_above_wide(10.0, 16.0), rules.narrow_above_wide(10.0, 14.6)),
    ],
)
def test_a_rule_says_why_and_lets_the_sound_case_pass(wrong, right):
    assert wrong
    assert right == ""


def test_a_table_repeats_another_within_the_digits_that_are_printed():
    whole = [(2.480e-4, 1e-7), (3.302e-4, 1e-7), (8.141e-4, 1e-7), (6.453e-4, 1e-7), (5.846e-4, 1e-7)]
    part = [(2.48e-4, 1e-6), (3.30e-4, 1e-6), (8.14e-4, 1e-6), (6.45e-4, 1e-6), (5.85e-4, 1e-6)]
    assert "5 of 5" in rules.repeats(part, whole)
    assert rules.repeats([(value * 1.01, digit) for value, digit in part], whole) == ""
    assert rules.repeats(part[:3], whole[:3]) == ""


def test_a_shifted_point_is_found_and_its_neighbours_are_not_blamed():
    line = [(1, 40.6), (2, 7.93), (4, 123), (8, 192), (16, 197)]
    assert list(rules.misplaced(line)) == [1]
    assert rules.misplaced([(1, 40.6), (2, 79.3), (4, 123), (8, 192), (16, 197)]) == {}
    # Sizes that are a hundred times apart may differ a hundred times.
    assert rules.misplaced([(1, 1.0), (100, 100.0), (1000, 1000.0)]) == {}
    # A wrong figure must not make the sound one beside it look worse than itself.
    assert list(rules.misplaced([(1, 1.0), (2, 100.0), (3, 1.0), (4, 1.0)])) == [1]


def test_a_smaller_model_may_be_slower_by_chance_only():
    assert list(rules.smaller_yet_slower([(1, 33.3, 0.1), (2, 30.4, 0.1), (4, 40.9, 0.2)])) == [0]
    assert rules.smaller_yet_slower([(1, 33.3, 10.0), (2, 30.4, 0.1)]) == {}
    assert rules.smaller_yet_slower([(1, 33.3, 0.0), (2, 30.4, 0.0)]) == {}  # no deviation, nothing to compare with


@pytest.fixture(scope="module")
def published():
    return suspects_of_published(publications())


FOUND = {  # where the original has a figure, and which: its kind, and the reasons
    ("3.1.1", "nccl, cuda, 1 GB, 2 ranks: 2.57e-4 s"):
        ("limit", "8.6 times what the link carries, 450 GB/s", "to and from memory"),
    ("3.1.1", "1 node, nccl, cuda, 4 ranks, 512 KB to 1 GB: 7 figures"): ("neighbour", "the start of the transfer"),
    ("2.2.4 (a)", "the whole table"): ("neighbour", "12 of 12 figures"),
    ("3.4.2", "medium, 2 nodes: 9.27e-1 s"): ("neighbour", "9.8 times too much"),
    ("3.4.5 (b)", "medium, 2 nodes, stage 0: 7.93 ms"): ("neighbour", "9.9 times too little"),
    ("3.2.1", "an empty table"): ("empty", "one row that says Test"),
}  # fmt: skip


@pytest.mark.parametrize("figure", FOUND)
def test_what_is_wrong_with_the_original_is_found(figure, published):
    (found,) = (each for each in published if (each.where.split(", ")[1], each.text) == figure)
    kind, *reasons = FOUND[figure]
    assert found.kind == kind
    assert all(each in found.why for each in reasons), found.why


def test_a_start_up_that_was_to_be_shown_is_let_pass_and_listed():
    assert let_pass(publications()) == ["small, forward: 7.98e-2 s ± 1.03e-1 s"]


def test_no_other_published_figure_is_accused(published):
    counts = Counter(each.where.split(", ")[1] for each in published)
    # The norms forward and backward: the whole table, and six figures above the memory's bandwidth by themselves.
    assert counts == {
        **{"2.1.1 (b)": 1, "2.1.5 (b)": 1, "2.2.4 (a)": 7, "2.3.1 (c)": 1},
        **{"3.1.1": 10, "3.2.1": 1, "3.4.2": 1, "3.4.5 (b)": 2},
    }
    assert {each.where.split(", ")[0] for each in published} == {"rod-2024"}


def record(benchmark="norms", samples=(10.0, 10.0, 10.0), config=None, predicted=None, device="AMD EPYC", **metrics):
    middle = sorted(samples)[len(samples) // 2]
    figures = {"median_ms": middle, "mean_ms": sum(samples) / len(samples), "std_ms": 0.0, **metrics}
    said = {"bandwidth_bytes_per_s": 4e10} if predicted is None else predicted
    stamp = dict.fromkeys(("commit", "date"), "unknown") | {"device": device, "cores": 2}
    return Record(benchmark, config or {}, stamp, list(samples), figures, said)


def test_records_are_held_to_the_best_that_their_machine_has_measured():
    slow = record(config={"columns": 1024}, bytes=1e9, bytes_per_s=1e11)
    (suspect,) = suspects_of_records([slow])
    assert suspect.of == (slow,)
    assert "times what it gives, 40 GB/s" in suspect.why
    faster_copy = record(config={"columns": 8}, predicted={"bandwidth_bytes_per_s": 1e11})
    assert suspects_of_records([slow, faster_copy]) == []
    products = record("attention", config={"dtype": "bf16"}, predicted={"peak_flops_per_s": 1e12}, flops=5e10)
    assert "TFLOP/s" in suspects_of_records([products])[0].why
    assert suspects_of_records([replace(products, config={"dtype": "fp32"})])  # its own peak, of its own number type
    assert suspects_of_records([replace(products, status="out-of-memory")]) == []
    quick, idle = (record("e2e", config={"precision": "bf16"}, predicted={"peak_flops_per_s": p}) for p in (1e13, 1e11))
    assert suspects_of_records([products, quick, idle]) == []  # the best of all, whichever came last


def test_a_gpus_records_are_held_to_its_data_sheet():
    config = {"ranks": 2, "nodes": 1, "backend": "nccl", "device": "cuda", "bytes": GB}
    made = record("allreduce", (0.25,) * 3, config, {}, device="NVIDIA H200")
    small = replace(made, config=config | {"bytes": 512_000})
    reasons = [each.why for each in suspects_of_records([made, small])]
    assert any("450 GB/s" in why for why in reasons)
    assert any("the start of the transfer" in why for why in reasons)


def test_records_beside_each_other_are_compared():
    times = (("small", 10.0), ("medium", 250.0), ("large", 40.0))
    sizes = [record("e2e", (time,) * 3, {"size": size, "mode": "forward"}) for size, time in times]
    assert "times too much" in suspects_of_records(sizes)[0].why
    whole = record("e2e", (9.0,) * 3, {"size": "small", "mode": "forward-backward"})
    assert "no slower than its forward pass" in suspects_of_records([sizes[0], whole])[0].why
    wide = record("e2e", config={"size": "small", "precision": "fp32"}, peak_memory_bytes=1e9)
    narrow = record("e2e", config={"size": "small", "precision": "bf16"}, peak_memory_bytes=2e9)
    assert "2.00 times what 32 bits need" in suspects_of_records([wide, narrow])[0].why


def test_a_start_up_spoils_a_mean_and_not_a_median():
    spoiled = record(samples=(100.0, 10.0, 11.0, 10.0, 10.0))
    assert suspects_of_records([spoiled]) == []
    assert "its first sample took" in doubtful_means([spoiled])[0].why
    assert doubtful_means([replace(spoiled, config={"warmup": 0})]) == []  # there it is what was to be shown


@pytest.mark.parametrize("folder", sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
def test_all_committed_records_can_be_judged(folder):
    records = [each for path in sorted((RESULTS / folder).glob("*.jsonl")) for each in read_records(path)]
    assert all(each.why and each.of for each in suspects_of_records(records) + doubtful_means(records))


def test_the_chapter_lists_ours_and_theirs_and_can_do_without_ours(tmp_path):
    pytest.importorskip("jinja2", reason="jinja2 is in the extra `writeup`")
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
    from writeup.compose import chapter

    text, _ = chapter(Book(results=tmp_path), "plausibility")
    assert "nccl, cuda, 1 GB, 2 ranks: 2.57e-4 s" in text
    assert "There are no records of this machine yet" in text
    assert "10.1 GiB makes 14.8 GiB" in text
    (tmp_path / "here").mkdir()
    made = record(config={"columns": 1024}, bytes=1e9, bytes_per_s=1e11)
    (tmp_path / "here" / "norms.jsonl").write_text(json.dumps(made.__dict__) + "\n")
    book = Book(results=tmp_path, machine="here")
    text, _ = chapter(book, "plausibility")
    assert "| norms, AMD EPYC | columns 1024: 10 ms |" in text
    assert book.suspicions(book.everything[0])
    assert "⚠ columns 1024: 10 ms: " in provenance(book, book.everything, {}, noisy=False)
