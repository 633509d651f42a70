"""The domain of predictions: no warning inside, and one sentence for each way in which a request is outside."""

import json

import pytest

from cs336_systems.cost import domain
from cs336_systems.cost.__main__ import main
from cs336_systems.cost.domain import RANKS, SEQUENCES, time_range, warnings
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.runs import PUBLISHED, read_run
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import step_time
from cs336_systems.host.console import run_command
from cs336_systems.presets import model_preset

A100, V100 = system_preset("A100-80GB"), system_preset("V100-32GB-DGX2")
GPT = model_preset("gpt3-175b").override(d_model=6144, d_ff=24_576, num_heads=64, num_layers=48, recompute="segments")
INSIDE = Plan(tp=8, micro_batch=4, global_batch=4)
MEMORY, HOST = "is predicted to need", "waits for the host"


RUNS = [read_run(row) for row in json.loads(PUBLISHED.read_text()) if row["fitted"]]


def test_no_fitted_run_lies_outside():
    """But for memory, which is not what was fitted, and for the host, which another computer has."""
    assert len(RUNS) == domain.COUNT
    for run in RUNS:
        found = warnings(run.config, run.plan, run.seq, run.system)
        assert [each for each in found if MEMORY not in each and HOST not in each] == [], run.id


def test_the_limits_are_those_of_the_fitted_runs():
    sequences, widths = [run.seq for run in RUNS], [run.config.d_model for run in RUNS]
    assert (min(sequences), max(sequences)) == domain.SEQUENCES
    assert (min(widths), max(widths)) == domain.WIDTHS
    assert min(run.config.d_model // run.plan.tp for run in RUNS) == domain.NARROWEST
    assert max(run.plan.ranks for run in RUNS) == domain.RANKS
    assert tuple(sorted({run.system.name for run in RUNS})) == domain.MACHINES
    assert {name for run in RUNS for name in domain.features(run.config, run.plan)} == set(domain.FEATURES)
    assert all(run.plan.local("tp", node=run.system.node) == run.plan.tp for run in RUNS)


@pytest.mark.parametrize(
    ("words", "model", "plan", "seq", "system"),
    [
        ("256 tokens is shorter", {}, {"micro_batch": 16, "global_batch": 16}, 256, A100),
        ("tokens is longer", {}, {"micro_batch": 1, "global_batch": 1}, 2 * SEQUENCES[1], A100),
        ("no run on B200", {}, {}, 2048, system_preset("b200")),
        (f"more than the {RANKS}", {}, {"dp": RANKS // 4, "global_batch": RANKS}, 2048, A100),
        ("router were balanced", {"num_experts": 8, "expert_every": 2}, {"ep": 8, "global_batch": 32}, 2048, A100),
        ("32-bit products", {}, {"width": 4, "micro_batch": 2}, 2048, A100),
        ("does not stay within a node", {}, {"tp": 16}, 2048, A100),
        (MEMORY, {"recompute": "none"}, {}, 2048, A100),
    ],
)
def test_each_way_out_has_its_sentence(words, model, plan, seq, system):
    assert warnings(GPT, INSIDE, 2048, A100) == []
    found = warnings(GPT.override(**model), INSIDE.override(**plan), seq, system)
    assert sum(words in each for each in found) == 1, found
    assert all("\n" not in each for each in found)


def test_a_range_is_wider_outside():
    for system, wider in ((A100, 1.0), (system_preset("b200"), domain.WIDER)):
        step = step_time(GPT, INSIDE, 2048, system)
        low, high = (each * step.total for each in STACKS["megatron"].range)
        assert time_range(step) == (low / wider, high * wider)


def test_a_narrow_rank_and_a_wide_model():
    narrow = GPT.override(d_model=2048, d_ff=8192, num_heads=16)
    limit = 2048 // domain.NARROWEST
    for tp, expected in ((limit, 0), (2 * limit, 1)):
        plan = Plan(tp=tp, micro_batch=32, global_batch=32)
        assert sum("leaves" in each for each in warnings(narrow, plan, 2048, A100)) == expected
    wide = GPT.override(d_model=32_768, d_ff=131_072, num_heads=256, num_layers=1)
    assert any("d_model 32768 lies outside" in each for each in warnings(wide, INSIDE, 2048, A100))


def test_bert_on_thetagpu_is_bound_by_its_host():
    """The runs whose logs say so, one GPU and many."""
    bert, theta = model_preset("bert-345m").override(recompute="segments"), system_preset("ThetaGPU")
    for plan in (Plan(micro_batch=4, global_batch=8), Plan(tp=2, pp=2, dp=32, micro_batch=4, global_batch=512)):
        assert sum("host" in each for each in warnings(bert, plan, 512, theta)) == 1
    # With enough rows the same model's kernels are long.
    large = warnings(bert, Plan(micro_batch=128, global_batch=128), 512, theta)
    assert not any("host" in each for each in large)


@pytest.mark.parametrize("command", ["step", "table", "search"])
def test_commands_that_print_times_warn(command, capsys):
    model = ["--size", "llama-8b", "--num-layers", "2"]
    where = ["--gpus", "1", "--batch-size", "1"] if command == "search" else []
    assert run_command(main, [command, *model, *where, "--system", "B200"]) == 0
    assert capsys.readouterr().out.count("no run on B200 was fitted") == 1
