"""Constants from times: recovered if the data determine them, unchanged if not, and their uncertainties."""

import json
from dataclasses import asdict, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest

from cs336_systems.cost.commands.fit import command, summary
from cs336_systems.cost.fitting.calibration import fit
from cs336_systems.cost.fitting.observations import Observation, observe_step
from cs336_systems.cost.machines import CONSTANTS, NAMES, load_constants, system_preset, write_json
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.runs import TrainingRun
from cs336_systems.cost.template import fill_file
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.presets import ModelConfig

NOTES = Path(__file__).resolve().parents[1] / "files" / "megatron_bert_345m.txt"
A100 = system_preset("A100-40GB")
ONE = replace(CONSTANTS, **dict.fromkeys(NAMES, 1.0))


def run(width: int, seq: int, **plan) -> TrainingRun:
    config = ModelConfig(
        vocab_size=8192, context_length=seq, d_model=width, d_ff=4 * width, num_layers=4, num_heads=width // 64
    )
    return TrainingRun(config, Plan(**plan), seq, A100, f"{width} {seq} {plan}", None)


RUNS = [
    run(256, 128), run(512, 256), run(2048, 1024), run(4096, 2048), run(1024, 4096), run(4096, 2048, tp=8),
    run(2048, 1024, tp=4, sequence=True), run(4096, 512, dp=16, global_batch=16, overlap="none"),
    run(4096, 1024, pp=2, dp=32, global_batch=128, overlap="none"),
]  # fmt: skip


def observed(runs, truth) -> list[Observation]:
    times = [each.under(truth).step.total for each in runs]
    return [
        each for one, seconds in zip(runs, times, strict=True) for each in observe_step(replace(one, seconds=seconds))
    ]


def powers(seconds: float, **exponents: float) -> Observation:
    """Something that takes a product of powers of constants: linear in their logarithms."""

    def predict(constants) -> float:
        return exp(sum(power * log(getattr(constants, name)) for name, power in exponents.items()))

    return Observation(replace(RUNS[0], id=str(exponents)), "step", seconds, predict)


def test_constants_are_recovered_from_what_the_model_says():
    which = ("product", "memory", "host", "inside", "between")
    truth = replace(CONSTANTS, product=0.7, memory=0.5, host=60e-6, inside=0.5, between=0.3)
    found = fit(observed(RUNS, truth), which=which, width=10.0, noise=1e-6)
    assert asdict(found.constants) == pytest.approx(asdict(truth), rel=1e-5)
    assert min(map(found.determined, which)) > 0.999
    assert max(abs(exp(each) - 1) for each in found.before) > 0.2
    assert max(abs(exp(each) - 1) for each in found.after) < 1e-5
    assert found.noise == 1e-6


def test_what_the_data_do_not_determine_stays():
    alone = [each for each in RUNS if each.plan.ranks == 1]
    found = fit(observed(alone, replace(CONSTANTS, memory=0.4)), which=("memory", "inside", "between", "hidden"))
    for name in ("inside", "between", "hidden"):
        assert found.determined(name) == pytest.approx(0.0, abs=1e-12)
        assert found.deviation[name] == pytest.approx(found.width)
    assert found.constants.memory == pytest.approx(0.4, rel=0.02)
    rest = [asdict(replace(each, memory=1.0)) for each in (found.constants, CONSTANTS)]
    assert rest[0] == pytest.approx(rest[1], rel=1e-12)


@pytest.mark.parametrize(("width", "noise"), [(0.5, 0.1), (0.2, 0.4)])
def test_one_measurement_of_one_constant_in_closed_form(width, noise):
    """The mean of prior and measurement, each weighted with the inverse of its variance."""
    found = fit([powers(3.0, host=1.0)], ONE, ("host",), width, noise)
    share = width**2 / (width**2 + noise**2)
    assert log(found.constants.host) == pytest.approx(share * log(3.0), rel=1e-4)
    assert found.deviation["host"] == pytest.approx(width * noise / sqrt(width**2 + noise**2), rel=1e-4)
    assert found.determined("host") == pytest.approx(share, rel=1e-4)
    assert found.before == pytest.approx([-log(3.0)])
    assert found.left_out == pytest.approx([-log(3.0)], rel=1e-3)  # without it nothing is known but the prior
    assert fmean(abs(exp(each) - 1) for each in found.before) == pytest.approx(2 / 3)


def test_left_out_is_what_a_fit_without_it_predicts():
    data = [
        powers(2.0, host=1.0), powers(1.5, host=0.5, memory=-1.0), powers(0.7, memory=1.0),
        powers(1.2, host=1.0, memory=1.0),
    ]  # fmt: skip
    which, noise = ("host", "memory"), 1.0  # more than they scatter, so that it stays
    found = fit(data, ONE, which, 0.8, noise)
    for index, each in enumerate(data):
        rest = fit(data[:index] + data[index + 1 :], ONE, which, 0.8, noise)
        assert found.left_out[index] == pytest.approx(log(each.predict(rest.constants) / each.seconds), abs=1e-4)
        assert abs(found.left_out[index]) > abs(found.after[index])


def test_data_that_scatter_count_for_less():
    logs = [0.1, 0.5, -0.2, 0.4]
    found = fit([powers(exp(each), host=1.0) for each in logs], ONE, ("host",), 50.0, 0.01)
    assert found.noise == pytest.approx(stdev(logs), rel=0.02)
    assert log(found.constants.host) == pytest.approx(fmean(logs), rel=1e-3)
    assert found.deviation["host"] == pytest.approx(stdev(logs) / 2, rel=0.02)
    # Beside a narrow prior, too: with the noise found, not the one assumed, the mean is drawn towards it.
    narrow = fit([powers(exp(each), host=1.0) for each in logs], ONE, ("host",), 0.2, 0.01)
    share = 0.2**2 / (0.2**2 + narrow.noise**2 / len(logs))
    assert log(narrow.constants.host) == pytest.approx(share * fmean(logs), rel=0.02)


def test_what_is_hidden_behind_another_is_found():
    """A host that is a little slower changes nothing: there is no slope to follow."""
    hidden = Observation(RUNS[0], "step", 2.5, lambda constants: max(1.0, constants.host / 2))
    found = fit([hidden], ONE, ("host", "memory"), noise=0.01)
    assert found.constants.host == pytest.approx(5.0, rel=0.02)
    assert found.constants.memory == 1.0


def test_constants_that_are_zero_stay_and_others_are_fitted():
    data = [powers(2.0, memory=1.0)]
    found = fit(data, replace(ONE, host=0.0, call=0.0), ("memory", "host", "call"), noise=0.001)
    assert (found.constants.host, found.constants.call, found.zeros) == (0.0, 0.0, ("host", "call"))
    assert found.which == ("memory",)
    assert found.constants.memory == pytest.approx(2.0, rel=1e-4)
    shown = " ".join(fill_file("fit", summary(found, data)))
    assert "kept at zero, since a fit changes constants by factors: host, call" in shown
    assert "warning: memory 2: a share above 1 is more than the machine can do" in shown
    with pytest.raises(UserError, match="host: zero before the fit"):
        fit(data, replace(ONE, host=0.0), ("host",))
    assert fit([powers(2.0, host=1.0)], ONE, ("host",)).impossible() == {}  # which is no share
    assert fit([powers(1.001, memory=1.0)], ONE, ("memory",), noise=1e-4).impossible() == {}  # shown as 1


def test_constants_in_a_file(tmp_path):
    path = tmp_path / "c.json"
    write_json(path, {"constants": asdict(replace(CONSTANTS, memory=0.123456789)), "fitted": ["memory"]})
    assert load_constants(path) == replace(CONSTANTS, memory=0.123456789)
    path.write_text('{"constants": {"host": 1e-4}}')
    assert load_constants(path) == replace(CONSTANTS, host=1e-4)
    path.write_text('{"constants": {"host": 0}}', encoding="utf-8-sig")  # as the fit on a probed machine has
    assert load_constants(path) == replace(CONSTANTS, host=0.0)
    for text, words in (
        ("[]", "it needs"),
        ('{"constants": {}}', "it needs"),
        ('{"constants": {"hots": 1}}', "has hots, but the constants are product"),
        ('{"constants": {"product": 0}}', "product must be a number above zero, not 0"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            load_constants(path)


def test_the_command(tmp_path, capsys):
    out = tmp_path / "fitted.json"
    common = [str(NOTES), "--system", "A100-40GB", "--only", "between,hidden", "--out", str(out)]
    assert run_command(command, common) == 0
    shown = capsys.readouterr().out
    assert "mean error over 14: " in shown
    assert "prior: the data do not say" in shown
    kept = json.loads(out.read_text())
    names = ["1 GPU", "8 GPUs", "32 GPUs", "64 GPUs", "128 GPUs"]
    assert (kept["fitted"], list(dict.fromkeys(each["id"] for each in kept["to"]))) == (["between", "hidden"], names)
    assert load_constants(out).between == kept["constants"]["between"] < kept["prior"]["between"]
    assert run_command(command, [*common[:3], "--only", "call", "--constants", str(out)]) == 0
    assert f" {kept['constants']['between']:.3g} " in capsys.readouterr().out


def test_what_the_command_refuses(tmp_path, capsys):
    log_file = tmp_path / "bare.log"
    log_file.write_text(" iteration 20/ 100 | elapsed time per iteration (ms): 232.5 | global batch size: 32 |\n")
    for arguments, words in (
        ([str(log_file), "--system", "A100-40GB"], "write the run into a list instead"),
        ([str(log_file), "--out", str(tmp_path / "no" / "c.json")], "cannot write"),
        ([str(NOTES), "--system", "A100-40GB", "--only", "hots"], "no constant is called hots"),
    ):
        assert run_command(command, arguments) == 2
        captured = capsys.readouterr().err
        assert words in captured
        assert captured.count("\n") == 1
