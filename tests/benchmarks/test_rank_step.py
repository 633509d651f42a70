"""Time of a step from observations of its ranks."""

from dataclasses import replace

import pytest

from benchmarks.lib.rank_step import predict_step, work_seconds
from cs336_systems.cost import Hardware
from cs336_systems.cost.closed_forms import Link
from cs336_systems.layout import Layout, Observation, Work
from cs336_systems.presets import Mixture, ModelConfig
from cs336_systems.schedule.lists import bubble_fraction
from cs336_systems.train.observation import observe
from cs336_systems.train.recipe import Recipe
from tests.test_layout import layout_of

SEQ = 8
SMALL = ModelConfig(vocab_size=44, context_length=SEQ, d_model=48, d_ff=112, num_layers=4, num_heads=4)
FAST, SLOW = Link(0.0, 1e30), Link(1.0, 1e30)
MACHINE = Hardware("some", 1e12, 1e30, "made up")


def stages_of(layout: Layout, config: ModelConfig = SMALL) -> list[Observation]:
    recipe = Recipe.of(context=SEQ)
    return [observe(recipe, config, layout, stage * layout.tp * layout.data) for stage in range(layout.pp)]


def spent(config: ModelConfig = SMALL, link: Link = SLOW, **changes) -> dict[str, float]:
    layout = layout_of(**changes)
    return predict_step(layout, stages_of(layout, config), MACHINE, link)


def test_work_takes_its_flops_bytes_starts_and_new_memory():
    hardware = Hardware("some", 10.0, 100.0, "made up", launch=1e-3, first_touch=0.5)
    assert work_seconds(Work(20, 3, 50, 4), hardware) == pytest.approx(2.0 + 0.5 + 3e-3 + 2.0)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_predicted_bubble_is_the_schedules(name, chunks):
    layout = layout_of(pp=2, chunks=chunks, schedule=name, m=8)
    stages = stages_of(layout, replace(SMALL, vocab_size=1))  # all stages have almost as much to do
    parts = predict_step(layout, stages, MACHINE, FAST)
    busy = parts["forward"] + parts["backward"]
    assert parts["total"] == pytest.approx(busy + parts["bubble"])
    assert parts["bubble"] / parts["total"] == pytest.approx(bubble_fraction(name, 2, 8, chunks), rel=0.01)
    assert parts["backward"] == pytest.approx(2 * parts["forward"])
    assert busy == pytest.approx(sum(stages[1].work[way].flops for way in ("forward", "backward")) / 1e12)


def test_every_link_adds_what_it_carries():
    # A block has four transfers; embedding, head and its two for the loss; then the norm.
    assert spent(tp=2, m=3)["tensor-parallel"] == pytest.approx(3 * (4 * 4 + 4))
    assert spent(dp=2)["data-parallel"] == pytest.approx(1 + 1 + 1)  # a bucket, the vote, the norm
    assert spent(dp=2, zero=1)["data-parallel"] == pytest.approx(3 + 2)
    assert spent(pp=2, m=1)["pipeline"] == pytest.approx(2 + 1)  # there and back, and the tied embedding
    alone = spent()
    assert alone["total"] == pytest.approx(alone["forward"] + alone["backward"])
    for changes in ({}, {"tp": 2, "pp": 2, "dp": 2}):
        parts = spent(**changes)
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
    # Two gathers and a reduction of each of 26 matrices, and a third of the tied one; then the vectors, vote and norm.
    assert spent(dp=2, zero=3, m=2)["data-parallel"] == pytest.approx(2 * (3 * 26 + 1) + 3)


def test_the_all_to_alls_take_their_time():
    config = replace(SMALL, num_experts=4, expert_every=2, mixture=Mixture(aux_scope="global"))
    parts = spent(config, ep=2, m=3)
    # Two layers: counts, there, back and the balance forward, there and back backward; three microbatches.
    assert parts["expert-parallel"] == pytest.approx(3 * 2 * (4 + 2))
    assert parts["data-parallel"] == pytest.approx(1 + 1 + 1)  # a bucket of dense parameters, the vote, the norm
    wide = spent(config, Link(0.0, 1e6), ep=2)
    rows = 2 * SEQ * 48 * 4
    counts = 4 * 8 + 2 * 4 * 4  # and the balance's sum over both ranks, which sends twice as much
    assert wide["expert-parallel"] == pytest.approx(2 * (4 * rows + counts) / 2 / 1e6)
    assert spent(config, FAST)["expert-parallel"] == 0
