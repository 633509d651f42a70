"""Machines: every figure has a source, figures agree with each other, and names in lists of runs find them."""

from dataclasses import fields

import pytest

from cs336_systems.cost.machines import SYSTEMS, nearest_system, system_preset
from cs336_systems.errors import UserError

# A name and a reserve are no figures; a machine that is measured has `touch` and `measured`.
FIGURES = {each.name for each in fields(SYSTEMS["h100"])}
FIGURES -= {"name", "sources", "touch", "measured", "constants", "reserve"}
NARROW = {"narrow_flops", "narrow_attainable"}  # of accelerators with 8-bit GEMMs


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_every_figure_says_where_it_is_from(system):
    assert set(system.sources) == (FIGURES if system.narrow_flops else FIGURES - NARROW)
    assert all(source.strip() for source in system.sources.values())


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_figures_are_of_one_accelerator_in_one_direction(system):
    assert system.matmul_flops >= 2 * system.wide_flops
    assert 0.5 < system.attainable < 1
    assert system.rate(2) == system.attainable * system.matmul_flops
    assert system.rate(4) == system.attainable * system.wide_flops
    # Memory is faster than links within a node, and these than those between nodes; latency the other way round.
    assert system.bandwidth > system.inside.bandwidth > system.between.bandwidth
    assert 0 < system.inside.latency < system.between.latency
    # Whole links: of 25 GB/s each (NVLink 2 to 4) or 50 (NVLink 5); ports of 100, 200 or 400 Gb/s, some shared by two.
    assert system.inside.bandwidth % 25e9 == 0
    assert system.between.bandwidth * 8 in (50e9, 100e9, 200e9, 400e9)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("A100-80GB", "A100-80GB"),
        ("a100", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 40GB PCIe", "A100-40GB"),
        ("H100-SXM5-80GB", "H100"),
        ("H100 NVL", "H100"),
        ("H200_141GB", "H200"),
        ("Tesla V100", "V100-32GB-DGX2"),
        ("thetagpu", "ThetaGPU"),
        ("DGX B200", "B200"),
    ],
)
def test_a_runs_own_words_find_the_machine(words, name):
    found = nearest_system(words)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("words", ["", "TPU v4", "RTX 4090", "MI300X", "100"])
def test_other_machines_are_not_taken_for_known_ones(words):
    assert nearest_system(words) is None


def test_an_unknown_preset_names_those_that_there_are():
    with pytest.raises(UserError, match=r"no machine is called 'abacus': choose from .*A100-80GB.*B200"):
        system_preset("abacus")
    assert system_preset("h100") is system_preset("H100")
