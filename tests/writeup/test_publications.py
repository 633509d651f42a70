"""Published figures: the committed files are sound, and malformed ones are refused by name."""

import re

import pytest

from cs336_systems.cost.machines import SYSTEMS
from cs336_systems.errors import UserError
from cs336_systems.presets import preset_names
from writeup.errors import CitationError
from writeup.publications import publications

SOURCE = """
[[source]]
id = "someone"
title = "a title"
author = "an author"
year = 2024
hardware = "a GPU"
system = "H100"
where = "a place"
"""
TABLE = """
[[table]]
source = "someone"
name = "times"
problem = "ddp"
fixed = {ranks = 2}
keys = ["size", "pass"]
values = ["mean", "std"]
units = ["ms", "s"]
rows = [
    ["small", "forward", 1.10, "2.0e-3 s"],
    ["small", "backward", "0.0030 s", ""],
]
"""


@pytest.fixture
def folder(tmp_path):
    def write(text):
        (tmp_path / "file.toml").write_text(text)
        publications.cache_clear()
        return publications(tmp_path)

    yield write
    publications.cache_clear()


def test_a_value_has_si_units_its_printed_digits_and_its_source(folder):
    found = folder(SOURCE + TABLE)
    mean = found.value("someone", "times", size="small", pass_="forward")
    assert (mean.value, mean.text, mean.source.id) == (1.1e-3, "1.10 ms", "someone")
    assert (mean.shown("ms"), mean.shown("s")) == ("1.10", "0.00110")
    assert mean.ms == pytest.approx(1.1)
    assert mean.resolution == pytest.approx(1e-5)
    assert found.value("someone", "times", "std", size="small", pass_="forward").shown("ms") == "2.0"
    assert found.value("someone", "times", size="small", pass_="backward").value == 3e-3
    table = found.table("someone", "times")
    assert (table.hardware, table.system, table.source.when) == ("a GPU", "H100", "2024")


def test_what_the_source_left_out_is_none(folder):
    value, small = folder(SOURCE + TABLE).value, {"size": "small", "pass_": "forward"}
    assert value("someone", "times", size="xl", pass_="forward") is None
    assert value("someone", "times", "std", size="small", pass_="backward") is None
    assert value("someone", "times", **small, ranks=2) is not None
    assert value("someone", "times", **small, ranks=4) is None


def test_other_hardware_of_a_table_does_not_inherit_the_sources_ceilings_nor_a_source_without_a_year_one(folder):
    other = folder(SOURCE.replace("year = 2024", "") + TABLE.replace("fixed", 'hardware = "another"\nfixed'))
    table = other.table("someone", "times")
    assert (table.hardware, table.system, table.source.when) == ("another", "", "undated")


@pytest.mark.parametrize(
    ("cite", "message"),
    [
        (lambda p: p.table("nobody", "times"), "no source is called 'nobody'; there are someone"),
        (lambda p: p.table("someone", "memory"), "someone has no table 'memory'; it has 'times'"),
        (lambda p: p.value("someone", "times", size="small"), "needs the keys size, pass, not size"),
        (lambda p: p.value("someone", "times", size="s", pass_="f", rank=1), "needs the keys size, pass, not"),
        (lambda p: p.value("someone", "times", "median", size="small", pass_="forward"), "columns mean, std"),
        (lambda p: p.value("someone", "times", size="small", pass_="forward").shown("GiB"), "no figure in 'GiB'"),
    ],
)
def test_a_wrong_citation_says_what_there_is(folder, cite, message):
    found = folder(SOURCE + TABLE)
    with pytest.raises(CitationError, match=re.escape(message)):
        cite(found)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('author = "an author"\n', "", "source 1 (someone): missing 1 required positional argument: 'author'"),
        ('where = "a place"', 'where = "a place"\ncolour = "red"', "unexpected keyword argument 'colour'"),
        ('source = "someone"', 'source = "nobody"', "table 1 (times): no source is called 'nobody'"),
        ('units = ["ms", "s"]', 'units = ["ms"]', "table 1 (times): 2 values need as many units, not 1"),
        ('units = ["ms", "s"]', 'units = ["ms", "h"]', "table 1 (times): unit 'h' is not known"),
        ("1.10,", "", "table 1 (times), row 1: needs 2 keys and 2 values"),
        ("1.10,", '"fast",', "row 1: 'fast' is not a number"),
        ("1.10,", '"1.1 GiB",', "row 1: '1.1 GiB' is not in a unit like its column's, ms"),
        ("1.10,", "nan,", "row 1: 'nan' is no figure"),
        ("1.10,", "-1.10,", "row 1: '-1.10' is no figure"),
        ('"small", "backward"', '"small", "forward"', "row 2: its keys ['small', 'forward'] are those of a row before"),
        ("[[table]]", "[[tables]]", "file.toml: tables: there are only"),
        ("[[table]]", "[[table", "file.toml cannot be read"),
        ("[[table]]", TABLE + "[[table]]", "has a table of this name already"),
        ("[[source]]", SOURCE + "[[source]]", "'someone' is there already"),
    ],
)
def test_a_malformed_file_is_refused_with_its_entry(folder, old, new, message):
    assert old in SOURCE + TABLE
    with pytest.raises(UserError, match=re.escape(message)):
        folder((SOURCE + TABLE).replace(old, new, 1))


def test_the_committed_tables_use_this_projects_words():
    found = publications()
    assert found.sources.keys() >= {"rod-2024", "brandon-snider", "enzo-ding", "leaderboard-2026"}
    for table in found.tables.values():
        assert not table.system or table.system.lower() in SYSTEMS
        for row in table.rows:
            settings = {**table.fixed, **row.keys}
            assert "size" not in settings or settings["size"] in preset_names(table.source.year), table.name
            assert settings.get("pass", "step") in ("forward", "backward", "forward-backward", "step")
            assert settings.get("backend", "gloo") in ("gloo", "nccl")
            assert settings.get("device", "cpu") in ("cpu", "cuda")
            assert not {"bytes", "ranks", "nodes", "columns"} & {k for k, v in settings.items() if type(v) is not int}
