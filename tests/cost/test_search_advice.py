"""Advice of a search that finds nothing: following it finds something; and the stack whose constants times use."""

import re
from dataclasses import replace

import pytest

from cs336_systems.cost import probe
from cs336_systems.cost.__main__ import main
from cs336_systems.cost.commands import plot
from cs336_systems.cost.commands.search import command
from cs336_systems.cost.commands.settings import MachineOptions, ModelOptions, SearchOptions
from cs336_systems.cost.machines import CONSTANTS, system_preset, write_json
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.search import search
from cs336_systems.cost.search_space import Space, option
from cs336_systems.cost.stacks import STACKS
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command

A100 = system_preset("A100-80GB")
LLAMA, GPT3 = (ModelOptions(size=name).model_config() for name in ("llama-8b", "gpt3-175b"))
OWN = replace(A100, name="own", measured={"host": 1.5e-4, "start": 2e-6})


def refusal(capsys, arguments: str) -> str:
    assert run_command(command, arguments.split()) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_limit_that_left_out_what_fits_is_named(capsys):
    asked = "--size llama-8b --gpus 16 --batch-size 16 --zero 0"
    line = refusal(capsys, f"{asked} --limit 3")
    assert "some does that --limit 3 left out" in line
    assert re.search(r"\d+ of 35 layouts", line)
    advised = int(re.search(r"--limit (\d+) tries every layout", line)[1])
    got = search(LLAMA, LLAMA.context_length, A100, 16, 16, fixed={"zero": 0}, limit=advised)
    assert got.running
    assert not any("layouts" in each for each in got.left_out)


def test_a_limit_is_not_blamed_where_nothing_fits(capsys):
    line = refusal(capsys, "--size gpt3-175b --gpus 36 --batch-size 511 --limit 1")
    assert line.startswith("error: nothing fits 36 x A100-80GB: none of the 1 tried divides, and a plan may fill")
    assert "limit" not in line


@pytest.mark.parametrize("fixed", [{"zero": 2}, {"micro_batch": 8}, {"chunks": 6}])
def test_what_is_held_is_not_cut(fixed):
    space, left_out = Space(GPT3, 2048, 64, Plan(global_batch=512), 8, fixed).within(1)
    axis, value = next(iter(fixed.items()))
    tried = {getattr(choice, axis) for each in space.layouts() if not space.refusal(each)
             for choice in space.choices(each)}  # fmt: skip
    assert tried == {value}
    assert left_out


def test_what_would_fit_keeps_what_is_held(capsys):
    line = refusal(capsys, "--size llama-8b --gpus 2 --tp 1 --pp 1 --zero 0")
    assert line.endswith("no number up to 1048576 would do with --tp 1 --pp 1 --zero 0: release one of these, or raise "
                         "the batch")  # fmt: skip
    assert refusal(capsys, "--size llama-8b --gpus 2 --tp 1 --pp 1").endswith("it would fit on 4")
    line = refusal(capsys, "--size gpt3-175b --gpus 32 --tp 2 --zero 0 --recompute none")
    enough = int(line.split("it would fit on ")[1])
    fixed = {"tp": 2, "zero": 0, "recompute": "none"}
    assert search(GPT3, 2048, A100, enough, 512, fixed=fixed, limit=500).running
    assert enough > Space(GPT3, 2048, 32, Plan(global_batch=512), 8).gpus_needed(A100)
    none, shallow = replace(A100, memory=1e3), GPT3.override(num_layers=2, num_heads=2)
    with pytest.raises(UserError, match="would do: raise the batch"):
        search(shallow, 64, none, 2, 2)


def test_options_are_those_of_the_command():
    said = {"micro_batch": 2, "sequence": False, "tp": 4, "zero": 1}
    words = [option(axis, value) for axis, value in said.items()]
    assert words == ["--micro-batch-size 2", "--no-sequence-parallel", "--tp 4", "--zero 1"]
    assert option("sequence", True) == "--sequence-parallel"
    assert option("recompute", "segments") == "--recompute full"
    assert SearchOptions(micro_batch_size=2, sequence_parallel=False, tp=4, zero=1).fixed() == said


def test_constants_are_measured_ones_unless_a_file_has_others(tmp_path):
    assert MachineOptions().machine().constants == CONSTANTS
    own, constants = tmp_path / "own.json", tmp_path / "c.json"
    write_json(own, OWN.record())
    assert MachineOptions(machine_file=own).machine().constants == replace(CONSTANTS, **OWN.measured) != CONSTANTS
    write_json(constants, {"constants": {"host": 1e-3}})
    found = MachineOptions(machine_file=own, constants=constants).machine()
    assert found.constants == replace(CONSTANTS, host=1e-3)


def test_pictures_use_measured_constants(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(plot, "check_path", lambda path: None)
    monkeypatch.setattr(plot, "_write", lambda figure, out: None)
    monkeypatch.setattr(plot.scaling, "draw", lambda study, *rest: seen.append(study.system))
    write_json(tmp_path / "own.json", OWN.record())
    monkeypatch.setattr(probe, "probe_here", lambda: replace(OWN, name="this"))
    own = replace(CONSTANTS, **OWN.measured)
    for words, expected in {
        f"scaling --machine-file {tmp_path / 'own.json'}": [("own", own)],
        "scaling": [("A100-80GB", CONSTANTS)],
        "scaling --system Here": [("this", own)],
        "scaling --kernels torch": [("A100-80GB", STACKS["other"].own())],
        "scaling --zero 3": [("A100-80GB", STACKS["fsdp"].own())],
        "scaling --stack nanotron": [("A100-80GB", STACKS["nanotron"].own())],
    }.items():
        seen.clear()
        assert run_command(main, ["plot", *words.split(), *["--size", "small", "--out", "a.svg"]]) == 0
        assert [(machine.name, machine.constants) for machine in seen] == expected
