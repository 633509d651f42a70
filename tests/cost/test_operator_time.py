"""One operator alone takes what it adds to its stage, for each of its reasons."""

from dataclasses import replace

import pytest

from cs336_systems.cost.__main__ import main
from cs336_systems.cost.machines import CONSTANTS, system_preset
from cs336_systems.cost.operator_time import timed_part
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.step_time import stage_seconds
from cs336_systems.host.console import run_command
from tests.support.cost_cases import LLAMA


def test_new_memory_counts_alone_as_in_a_stage():
    config, plan, seq = replace(LLAMA, context_length=2**20, num_layers=1), Plan(), 2**20
    constants = replace(CONSTANTS, host=0.0)
    for touch in (0.0, 1e-9):
        system = replace(system_preset("A100-80GB"), touch=touch)
        parts = [timed_part(config, plan, seq, group, system, constants) for group in ("dense", "embedding", "head")]
        alone = [sum(getattr(part, way).busy for part in parts) for way in ("forward", "backward")]
        found = stage_seconds(config, plan, seq, 0, system, constants)
        assert alone == pytest.approx([found.forward, found.backward], rel=1e-12)


def test_a_stage_without_blocks_is_explained(capsys):
    arguments = ["--size", "llama-8b", "--num-layers", "2", "--pp", "3"]
    assert run_command(main, ["explain", "step", *arguments]) == 0
    assert '"logits" is' in capsys.readouterr().out
