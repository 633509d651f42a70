"""Tests of the suite against known bugs of such libraries: each variant of the gallery is planted in the ranks,
and the test that it names must fail, in an assertion."""

from dataclasses import replace

import pytest

from cs336_systems.errors import UserError
from tests.support.gallery import Outcome, changes, run_broken
from writeup.gallery import GALLERY, variants

VARIANTS = {variant.name: variant for variant in variants()}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_suite_sees(name, tmp_path, record_property):
    """A broken variant makes the test fail that is named for it."""
    variant = VARIANTS[name]
    before = [function.__code__ for function, _ in changes(variant)]
    outcome = run_broken(variant, tmp_path)
    assert outcome.result == "failed", outcome
    assert variant.may_hang or not ("CommError" in outcome.message or "timeout" in outcome.message), outcome
    assert [function.__code__ for function, _ in changes(variant)] == before, "this process stays as it was"
    assert outcome.message != Outcome.message, "what it said is known"
    record_property("message", outcome.message)
    record_property("where", outcome.where)


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.slow_network])
def test_a_slow_network_alone_breaks_nothing(name, tmp_path):
    outcome = run_broken(VARIANTS[name], tmp_path, change=False)
    assert outcome.result == "passed", outcome


def test_a_variant_of_a_file_that_has_changed_is_refused(tmp_path):
    variant = VARIANTS["missing-wait"]
    for lines, times in (("        self.work.wait_for_all()", 0), ("        self.expect_all()", 2)):
        with pytest.raises(
            UserError, match=rf"from '.*' on are {times} times in cs336_systems/buffers/bucket.py, not once"
        ):
            run_broken(replace(variant, changes=((lines, "pass"),)), tmp_path)
    old, _ = variant.changes[0]
    with pytest.raises(AssertionError, match="changes nothing that is run"):
        run_broken(replace(variant, changes=((old, old.replace("\n", "\n\n", 1)),)), tmp_path)


def test_a_gallery_that_is_not_whole_is_refused(tmp_path):
    text, path = GALLERY.read_text(), tmp_path / "gallery.toml"
    for old, new, said in (
        ('name = "averaged-twice"', 'name = "missing-wait"', "two variants have one name"),
        ('title = "Nobody', 'titel = "Nobody', "unexpected keyword argument 'titel'"),
        ("[[variant.change]]", "[[variant.changes]]", "'change'"),
    ):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UserError, match=said):
            variants(path)
