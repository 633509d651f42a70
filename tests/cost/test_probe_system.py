"""Machines: the fit of this one's GEMM rates, files of machines, commands that read them, and presets."""

import json
from dataclasses import fields, replace
from math import log

import pytest
import torch

from cs336_systems.cost import probe
from cs336_systems.cost.__main__ import main
from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.commands.settings import MachineOptions
from cs336_systems.cost.machines import (
    CONSTANTS,
    SYSTEMS,
    Constants,
    System,
    nearest_system,
    read_machine,
    system_preset,
    write_json,
)
from cs336_systems.cost.operator_time import TILE, kernel_time, new_bytes, product_rate
from cs336_systems.cost.probe import fit_law
from cs336_systems.cost.rank import Kernel, sweep
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from tests.support import ranks

LAPTOP = System(
    "laptop", 8e11, 2e11, 1.0, 4e10, 2e10, 2, 1, Link(1e-4, 1e9), Link(1e-4, 1e9),
    {"bandwidth": "measured"}, touch=5e-10,
    measured={"product": 1.0, "ramp": 20.0, "wave": 0.05, "fused": 0.4, "host": 0.0, "start": 2e-6},
)  # fmt: skip
SIZES = [(64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (2048, 128, 512), (128, 2048, 64)]


def timed(ramp: float, wave: float, start: float) -> list[tuple[int, int, int, float]]:
    """Time of a machine that obeys the law of `operator_time.py`."""
    system = replace(LAPTOP, constants=Constants(product=1.0, ramp=ramp, wave=wave, start=start))
    works = [Kernel(2.0 * r * i * c, 0.0, r, c, i, width=4) for r, i, c in SIZES]
    seconds = (kernel_time(work, system).busy for work in works)
    return [(*size, took) for size, took in zip(SIZES, seconds, strict=True)]


def test_the_law_is_found_again():
    for ramp, wave in ((20.0, 0.05), (0.0, 0.0), (180.0, 0.5)):
        law = fit_law(timed(ramp, wave, 2e-6), 2 * TILE, 2e-6)
        assert (law.ramp, law.wave) == (ramp, wave)
        assert law.rate == pytest.approx(LAPTOP.rate(4))
        assert law.error < 1e-12
    # One product that was held up does not bend it; what starting took is not ten times as long.
    spoiled = timed(20.0, 0.05, 2e-6)
    spoiled[3] = (*spoiled[3][:3], 10 * spoiled[3][3])
    law = fit_law(spoiled, 2 * TILE, 2e-6)
    assert (law.ramp, law.wave) == (20.0, 0.05)
    assert law.rate == pytest.approx(LAPTOP.rate(4))
    assert law.error == pytest.approx(log(10) / len(SIZES), rel=1e-3)


def test_large_results_are_given_new_memory():
    small, large = sweep(2.0 * (2**25 - 4)), sweep(2.0 * 2**25, 3)
    assert new_bytes(small) == 0
    assert new_bytes(sweep(6.0 * 2**25, 3)) == 3 * 2**25
    assert new_bytes(large) == 0  # three kernels of a third each
    product = Kernel(2.0, 0.0, rows=4096, columns=2048, inner=1, width=4)
    assert new_bytes(product) == 2**25
    system = replace(LAPTOP, constants=Constants(start=0.0))
    added = kernel_time(product, system).busy - kernel_time(product, replace(system, touch=0.0)).busy
    assert added == pytest.approx(LAPTOP.touch * 2**25)


def test_a_machine_is_kept_in_a_file(tmp_path):
    write_json(tmp_path / "m.json", LAPTOP.record())
    found = read_machine(tmp_path / "m.json")
    assert found == LAPTOP
    assert (found.measured, found.sources) == (LAPTOP.measured, LAPTOP.sources)
    with pytest.raises(UserError, match="name another file"):
        write_json(tmp_path / "no" / "m.json", LAPTOP.record())
    older = LAPTOP.record()
    del older["overlap"]  # of before machines said what overlaps
    (tmp_path / "m.json").write_text(json.dumps(older), encoding="utf-8-sig")
    assert read_machine(tmp_path / "m.json") == LAPTOP
    (tmp_path / "text.json").write_text("{")
    for path, says in (
        (tmp_path / "none.json", "probe --out"), (tmp_path, r"Is a directory$"),
        (tmp_path / "text.json", "is no machine: it is not JSON"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            read_machine(path)


def test_constants_are_measured_ones_unless_a_file_has_others(tmp_path):
    assert MachineOptions().machine().constants == CONSTANTS
    own, constants = tmp_path / "own.json", tmp_path / "c.json"
    write_json(own, LAPTOP.record())
    assert MachineOptions(machine_file=own).machine().constants == replace(CONSTANTS, **LAPTOP.measured)
    write_json(constants, {"constants": {"host": 1e-3}})
    assert MachineOptions(machine_file=own, constants=constants).machine().constants == replace(CONSTANTS, host=1e-3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bandwidth": 0}, "bandwidth must be a number above zero, not 0"),
        ({"memory": True}, "memory must be a number above zero, not True"),
        ({"wide_flops": "fast"}, "wide_flops must be a number above zero, not 'fast'"),
        ({"inside": {"latency": 0}}, "inside must be an object of latency and bandwidth"),
        ({"between": {"latency": -1, "bandwidth": 1}}, "latency must be"),
        ({"measured": {"speed": 1.0}}, "measured speed, which the cost model does not know"),
        ({"overlap": "some"}, "overlap must be one of none, data, all, not 'some'"),
        ({"measured": [1]}, "measured must be an object"),
        ({"processors": 0.5}, "processors must be a whole number above zero, not 0.5"),
        ({"name": 3}, "name must be text, not 3"),
        ({"name": " "}, "name must be text, not ' '"),
        ({"bandwidth": 1e-300}, "bandwidth must be from 1e-18 to 1e.30, not 1e-300"),
        ({"memory": 1e300}, "memory must be from 1e-18 to 1e.30, not 1e.300"),
        ({"attainable": 7}, "attainable is a share, so it must be 1 at most, not 7"),
        ({"reserve": 5}, "reserve is a share, so it must be 0.9 at most, not 5"),
        ({"extra": 1}, "is no machine: it needs"),
    ],
)
def test_a_figure_that_is_none_is_one_line(change, says, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(LAPTOP.record() | change))
    with pytest.raises(UserError, match=says) as error:
        read_machine(path)
    assert "\n" not in str(error.value)


def predicted(capsys: pytest.CaptureFixture[str], *where: str) -> float:
    command = ["step", *where, "--size", "small", "--precision", "fp32", "--micro-batch-size", "16", "--json"]
    assert run_command(main, command) == 0
    seconds: float = json.loads(capsys.readouterr().out)["seconds"]
    return seconds


def test_the_commands_predict_for_it(tmp_path, capsys, monkeypatch):
    write_json(tmp_path / "m.json", LAPTOP.record())
    seconds = predicted(capsys, "--machine-file", str(tmp_path / "m.json"))
    slower = replace(LAPTOP, measured=LAPTOP.measured | {"ramp": 500.0})
    write_json(tmp_path / "slow.json", slower.record())
    assert predicted(capsys, "--machine-file", str(tmp_path / "slow.json")) > 1.2 * seconds  # its own constants count
    monkeypatch.setattr(probe, "probe_here", lambda: LAPTOP)
    assert predicted(capsys, "--system", "HERE") == seconds


def test_the_command_shows_each_figure_and_its_source(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probe, "probe_here", lambda budget, device: LAPTOP)
    assert run_command(main, ["probe", "--out", str(tmp_path / "m.json")]) == 0
    out = capsys.readouterr().out
    assert "200 GFLOP/s" in out
    assert "2.00 us" in out
    assert "to half at 20 terms" in out
    assert "to half at 57 x 57 numbers" in out  # 0.05 of two tiles of 128 x 256
    assert f"--machine-file {tmp_path / 'm.json'}".replace("\n", "") in out.replace("\n", "")
    assert read_machine(tmp_path / "m.json") == LAPTOP


def test_what_cannot_be_measured_or_written_is_said_before_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(probe, "probe_system", lambda *given: pytest.fail("measured"))
    for option, words in (
        (("--out", str(tmp_path / "no" / "m.json")), "there is no folder"),
        (("--out", str(tmp_path)), "it is a folder"),
        (("--device", "cuda"), "error: --device cuda, but torch finds no CUDA device here"),
    ):  # fmt: skip
        assert run_command(main, ["probe", *option]) == 2
        assert words in capsys.readouterr().err


def test_a_probe_that_dies_is_one_line(monkeypatch, capsys):
    def fail_on_a_rank(*given):
        raise RuntimeError(
            "rank 1 ended with exit code 1\nTraceback (most recent call last):\nValueError: no such file"
        )

    monkeypatch.setattr(probe, "run_ranks", fail_on_a_rank)
    assert run_command(main, ["probe", "--device", "cpu"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "error: cannot measure this machine: ValueError: no such file; try again, or name another with --system"
    )


def probe_case(rank: int, world: int, folder: str, out: str) -> None:
    """In a process of its own, for ranks are forked from one that has run no tensor code."""
    probe.CPU_SIZES, probe.LARGE_BYTES = ((64, 64, 64), (128, 32, 64)), 2**16
    probe.COPIED, probe.HEADS, probe.ROUNDS, probe.FRESH_BYTES = {"cpu": 2**16}, 1, 2, 2**20
    write_json(probe.Path(out), probe.probe_here(0.05, "cpu").record())


def test_this_machine_has_figures(tmp_path):
    ranks.run_alone(probe_case, 1, out=str(tmp_path / "m.json"))
    found = read_machine(tmp_path / "m.json")
    assert 1e7 < found.wide_flops < 1e15
    assert 1e7 < found.bandwidth < 1e14
    assert 0 < found.inside.latency < 10
    assert 0 < found.measured["start"] < 1
    assert found.measured["host"] == 0
    assert all("measured on" in found.sources[name] for name in ("wide_flops", "bandwidth", "inside", "touch", "ramp"))
    rate = product_rate(
        Kernel(1.0, 0.0, 64, 64, 64, width=4), replace(found, constants=replace(Constants(), **found.measured))
    )
    assert 0 < rate <= found.wide_flops


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_every_figure_has_a_source_and_is_of_one_accelerator_in_one_direction(system):
    # A name and a reserve are no figures; a machine that is measured has `touch` and `measured`.
    figures = {each.name for each in fields(system)}
    figures -= {"name", "sources", "touch", "measured", "constants", "reserve"}
    assert set(system.sources) == figures - (set() if system.narrow_flops else {"narrow_flops", "narrow_attainable"})
    assert all(source.strip() for source in system.sources.values())
    assert system.matmul_flops >= 2 * system.wide_flops
    assert 0.5 < system.attainable < 1
    # Memory is faster than links within a node, and these than those between nodes; latency the other way round.
    assert system.bandwidth > system.inside.bandwidth > system.between.bandwidth
    assert 0 < system.inside.latency < system.between.latency


def test_a_runs_own_words_find_the_machine():
    names = {
        "A100-80GB": ("A100-80GB", "a100"), "A100-40GB": ("A100-SXM4-40GB", "NVIDIA A100 40GB PCIe"),
        "H100": ("H100-SXM5-80GB", "H100 NVL"), "H200": ("H200_141GB",), "V100-32GB-DGX2": ("Tesla V100",),
        "ThetaGPU": ("thetagpu",), "B200": ("DGX B200",), None: ("", "TPU v4", "RTX 4090", "MI300X", "100"),
    }  # fmt: skip
    for name, many in names.items():
        for words in many:
            assert getattr(nearest_system(words), "name", None) == name, words
    with pytest.raises(UserError, match=r"no machine is called 'abacus': choose from .*A100-80GB.*B200"):
        system_preset("abacus")
    assert system_preset("h100") is system_preset("H100")
