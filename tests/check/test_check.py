"""Verdicts of `check`: no false alarm on right candidates, and the cause of each planted or published mistake named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cs336_systems.check import Report, assert_right, check
from cs336_systems.check.candidates import Candidate, candidate, load
from cs336_systems.check.cases import CASES
from cs336_systems.errors import UserError
from tests.check.planted import DDP, MISTAKES, OPTIMIZER, PUBLISHED, SEQUENCE, STEP, TENSOR, Planted, make
from tests.support.gallery import plant, slow_down
from writeup.gallery import Variant, variants

PATIENCE = 2.0  # seconds that a rank waits for another one
BUCKETED, WAITS = "ours:ddp-bucketed", "waits for what it launches"
MUST = tuple(each.name for each in CASES if each.must)
SOME = ("training", WAITS, "tied weights", "unused on one rank", "accumulation in no_sync", "state saved and loaded")
RIGHT = ("torch:ddp", "torch:fsdp2", "torch:zero", "ours:ddp-naive", "ours:ddp-flat", "ours:ddp-overlapped",
         "ours:ddp-bucketed", "ours:zero0", "ours:zero1", "ours:zero2", "ours:zero3")  # fmt: skip
STUDENTS = {"a DDP with buckets": DDP, "a sharded optimizer": OPTIMIZER, "a training step": STEP,
            "split matrices": TENSOR, "split matrices and sequences": SEQUENCE}  # fmt: skip
SEEN = {  # the gallery's variants of data parallelism: candidate, the property that shows it, and the cause
    "missing-wait": ("ours:ddp-naive", "gradients", "never synchronised"),
    "averaged-twice": (BUCKETED, "gradients", "averaged twice"),
    "not-averaged": (BUCKETED, "gradients", "summed"),
    "skipped-bucket": (BUCKETED, "unused on every rank", "never synchronised"),
    "sticky-no-sync": (BUCKETED, "accumulation in no_sync", "never synchronised"),
    "wrong-slice": ("ours:zero2", "gradients", "another tensor's"),
    "lost-tail": ("ours:zero1", "weights after 3 steps", "unmoved"),
    "lost-rows": ("ours:zero3", "gradients", "zero"),
    "no-all-gather": ("ours:zero1", "weights after 3 steps", "unmoved"),
    "norm-counts-replicas": ("ours:zero1", "clipping by the norm", "norm of replicas"),
}
LOUD = {  # variants that the library's own guards or torch refuse
    "order-of-readiness": ("ours:ddp-overlapped", "unused on one rank", "refused"),
    "freed-too-early": ("ours:zero3", "training", "FAILED"),
}


def with_variant(variant: Variant, base: Candidate) -> Candidate:
    """The candidate with a broken variant of the library planted in its ranks."""

    def build(*arguments: Any) -> Any:
        if variant.slow_network:
            slow_down()
        plant(variant)
        return base.build(*arguments)

    return replace(base, build=build)


def wrong(report: Report) -> list[tuple[str, str]]:
    return [(each.name, each.says) for each in report.verdicts if each.status in ("WRONG", "FAILED")]


@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name):
    report = check(load(name)[0][0], only=MUST if name.startswith("torch") else SOME, timeout=PATIENCE)
    assert wrong(report) == [], report
    assert report.exit_code() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RIGHT if name.startswith("ours")])
def test_this_library_is_right_in_everything(name):
    report = check(load(name)[0][0], timeout=PATIENCE)
    assert [each.name for each in report.verdicts if each.status != "right"] == ["unequal parts of the batch"], report


@pytest.mark.parametrize("name", STUDENTS)
def test_no_false_alarm_on_what_students_write(name):
    assert_right(make(STUDENTS[name]), timeout=PATIENCE, only=MUST)


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("name", ["ours:zero2", "torch:ddp"])
def test_no_false_alarm_on_three_ranks(name, ranks):
    assert_right(load(name)[0][0], ranks=ranks, timeout=PATIENCE, only=("training", "unequal parts of the batch"))


@pytest.mark.parametrize("mistake", MISTAKES + PUBLISHED, ids=lambda each: each.where or each.name)
def test_a_mistake_is_named(mistake: Planted):
    report = check(make(*mistake[1:4]), timeout=PATIENCE, only=("training", mistake.property))
    assert report.exit_code() == 1
    found = {each.cause for each in report.verdicts if each.status == "WRONG"} - {""}
    assert found == {mistake.cause} or (mistake.cause in found and mistake.name == "nobody waits"), report


@pytest.mark.parametrize("name", SEEN | LOUD)
def test_the_gallery_is_seen(name):
    target, where, expected = (SEEN | LOUD)[name]
    variant = next(each for each in variants() if each.name == name)
    report = check(with_variant(variant, load(target)[0][0]), timeout=PATIENCE, only=("training", where))
    verdict = report.of(where)
    assert (verdict.cause if name in SEEN else verdict.status) == expected, report
