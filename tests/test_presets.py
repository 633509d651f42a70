"""Names, years and refusals of the presets."""

from dataclasses import replace

import pytest

from cs336_systems.errors import UserError
from cs336_systems.presets import (
    COURSE_YEARS,
    ModelConfig,
    course_sizes,
    model_preset,
    preset,
    preset_names,
    with_edition,
)

# (d_model, d_ff, layers, heads) as the handouts' tables print them.
TO_LARGE = [(768, 3072, 12, 12), (1024, 4096, 24, 16), (1280, 5120, 36, 20)]
TO_2_7B = [*TO_LARGE, (1600, 6400, 48, 25), (2560, 10240, 32, 32)]
HANDOUT = {2024: TO_2_7B, 2025: TO_2_7B, 2026: [*TO_LARGE, (2560, 10240, 32, 32), (4608, 12288, 50, 36)]}


@pytest.mark.parametrize("year", COURSE_YEARS)
def test_course_sizes_are_the_handouts(year):
    configs = [model_preset(name, year) for name in course_sizes(year)]
    assert [(c.d_model, c.d_ff, c.num_layers, c.num_heads) for c in configs] == HANDOUT[year]
    assert all(c.vocab_size == 10_000 for c in configs)


def test_the_2024_edition_is_the_default():
    assert model_preset("xl") == model_preset("xl", 2024)
    chosen = preset("small")
    assert (chosen.batch_size, chosen.model.context_length) == (16, 128)
    parts = [(m.feed_forward, m.positions, m.tied_head) for m in (chosen.model, model_preset("small", 2026))]
    assert parts == [("gelu", "learned", True), ("swiglu", "rotary", False)]
    assert chosen.model.norm == "rmsnorm"


def test_names_ignore_case():
    assert model_preset("2.7b") == model_preset("2.7B")


@pytest.mark.parametrize(
    ("name", "year", "message"),
    [
        ("huge", 2024, r"no size 'huge' in 2024; choose from tiny, small, .*$"),
        ("10B", 2024, r"\(10B exists with --year 2026\)"),
        ("small", 2023, "no 2023 edition; the course's editions here are 2024, 2025, 2026"),
    ],
)
def test_unknown_names_are_refused(name, year, message):
    with pytest.raises(UserError, match=message):
        model_preset(name, year)


def test_every_preset_is_reachable():
    for year in COURSE_YEARS:
        assert all(preset(name, year).batch_size for name in preset_names(year))


SOUND = {"vocab_size": 8, "context_length": 4, "d_model": 12, "d_ff": 8, "num_layers": 1, "num_heads": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "d_model 12 is not a multiple of num_heads 5"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_kv_heads": -1}, "num_kv_heads must be at least 0, not -1"),
        ({"positions": "rotary"}, "the head dimension 3 must be even"),
        ({"positions": "sinusoidal", "d_model": 15, "num_heads": 3}, "d_model 15 must be even"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), not 1.0"),
        ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
        ({"d_ff": "48"}, "d_ff must be an integer, not '48'"),
        ({"norm": "batchnorm"}, "norm 'batchnorm' does not exist; choose from rmsnorm, layernorm"),
        ({"bert_heads": True}, "bert_heads need tied_head=True and bias=True"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    config = ModelConfig(**SOUND)
    with pytest.raises(UserError, match=message):
        replace(config, **changes)


def test_headings_name_the_edition_of_a_size_of_the_course():
    named = [with_edition(*each) for each in (("xl", 2024), ("XL", 2026), ("2.7B", 2024), ("tiny", 2026))]
    assert named == ["xl (2024)", "XL (2026)", "2.7B (2024)", "tiny"]
