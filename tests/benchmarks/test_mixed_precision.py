"""The lessons on mixed precision: sums as exact arithmetic foretells them, and dtypes as torch was seen to use them."""

import json
from fractions import Fraction

import pytest
import torch

from benchmarks import mixed_precision as mixed
from benchmarks.records import read_records
from cs336_systems.host.console import run_command

CPU = torch.device("cpu")
BITS = {"fp32": 24, "fp16": 11, "bf16": 8}  # of the significand, the leading one included


def rounded(x: Fraction, bits: int) -> Fraction:
    """To the nearest number of so many bits, ties to even, by exact arithmetic; subnormal numbers are not met."""
    exponent = 0
    while x >= 2 ** (exponent + 1):
        exponent += 1
    while x < Fraction(2) ** exponent:
        exponent -= 1
    spacing = Fraction(2) ** (exponent - bits + 1)
    return round(x / spacing) * spacing


def foretold(case: mixed.Sum) -> Fraction:
    term, total = rounded(Fraction(0.01), BITS[case.term]), Fraction(0)
    for _ in range(1000):
        total = rounded(total + term, BITS[case.total])
    return total


@pytest.mark.parametrize("case", mixed.SUMS, ids=str)
def test_a_sum_is_what_exact_arithmetic_foretells_and_its_error_is_split_without_remainder(case):
    result = mixed.accumulate(case, CPU)
    assert Fraction(result) == foretold(case)
    facts = mixed.account(case, result)
    assert facts["error"] == facts["error_of_term"] + facts["error_of_additions"] == result - 10
    assert Fraction(facts["term"]) == rounded(Fraction(0.01), BITS[case.term])
    total = torch.tensor(result, dtype={name: dtype for dtype, name in mixed.NAMES.items()}[case.total])
    above = torch.nextafter(total, torch.full_like(total, 100))
    assert facts["spacing"] == (above - total).item()
    assert facts["added"] == (total + facts["term"]).item() - result  # one more addition does just that


def test_the_reasons_are_read_off_the_numbers():
    def reason(total: str, term: str, result: float, cast: bool = False, uncast: float | None = None) -> str:
        case = mixed.Sum(total, term, cast)
        return mixed.why(case, mixed.account(case, result), uncast)

    assert "spaced 0.0078125 at 9.9531, so an addition there adds 0.0078125" in reason("fp16", "fp16", 9.953125)
    assert "spaced 0.03125 at 4, the term is less than half of that" in reason("bf16", "bf16", 4.0)
    assert "no addition rounds" in reason("fp32", "fp16", 10.00213623046875)
    assert "no addition rounds" not in reason("fp32", "fp16", 10.0021)
    assert "equal to the last bit" in reason("fp32", "fp16", 10.0021, cast=True, uncast=10.0021)
    assert "equal to the last bit" not in reason("fp32", "fp16", 10.0021, cast=True, uncast=10.0022)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_dtypes_of_the_transformer_on_a_cpu(precision):
    parts = mixed.probe_transformer(CPU, precision)
    low = mixed.Part(precision, precision)
    linear = [part for name, part in parts.items() if name.endswith("(Linear)")]
    assert len(linear) == 4 + 3 + 1
    assert all(part == low for part in [*linear, parts[mixed.PRODUCTS], parts["blocks.0.attention (SelfAttention)"]])
    wide = [part for name, part in parts.items() if name.endswith(("(RMSNorm)", "(Block)", "(Embedding)"))]
    assert len(wide) == 3 + 1 + 2  # the stream that runs through the blocks stays wide
    inside = [parts["softmax of attention"], parts[mixed.LOG_SOFTMAX], parts[mixed.LOSS], parts[mixed.PARAMETERS]]
    assert all(part == mixed.Part("fp32", "fp32") for part in [*wide, *inside])
    assert parts["RMSNorm's mean of squares"] == mixed.Part("fp32")


def test_what_is_seen_is_what_runs():
    """A model whose parts disagree with each other: nothing here is known beforehand."""
    first, second = torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4, dtype=torch.float64)
    model = torch.nn.Sequential(first, second)

    def loss() -> torch.Tensor:
        return second(first(torch.ones(2, 4, dtype=torch.bfloat16)).double()).float().sum()

    assert mixed.probe(model, loss, CPU, "fp32") == {
        mixed.PARAMETERS: mixed.Part("bf16, float64", "bf16, float64"),
        "0 (Linear)": mixed.Part("bf16", "bf16"),
        "1 (Linear)": mixed.Part("float64", "float64"),
        mixed.LOSS: mixed.Part("fp32", "fp32"),
        mixed.PRODUCTS: mixed.Part("bf16, float64", "float64, bf16"),
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_cuda_does_what_is_documented(precision):
    parts = mixed.probe_toy(torch.device("cuda"), precision)
    documented = mixed.documented_for_cuda(precision)
    assert {name: parts[name].forward for name in documented} == documented


def test_the_command_prints_and_records_both_lessons(in_tmp, capsys):
    assert run_command(mixed.main, ["--device", "cpu", "--results", "out", "--commit", "abc"]) == 0
    out = capsys.readouterr().out
    for figure in ("10.0001", "9.9531", "10.0021", "4.0000"):
        assert f" {figure} " in out
    assert "bf16 += bf16: stuck: " in out
    assert "CUDA, documented" in out
    assert out.endswith("7 records appended to out/mixed_precision.jsonl\n")
    records = read_records(in_tmp / "out/mixed_precision.jsonl")
    assert len(records) == 7  # none replaces another
    assert {(r.config["model"], r.config["precision"]) for r in records[1:]} == {
        (model, precision) for model in (mixed.TOY, mixed.TRANSFORMER) for precision in ("fp32", "bf16", "fp16")
    }
    toy = next(r for r in records if r.config.get("model") == mixed.TOY and r.config["precision"] == "fp16").metrics
    low, wide = {"forward": "fp16", "backward": "fp16"}, {"forward": "fp32", "backward": "fp32"}
    on_cuda = dict.fromkeys(("fc1 (Linear)", "relu (ReLU)", "fc2 (Linear)", mixed.PRODUCTS), low)
    norm = {"ln (LayerNorm)": low, mixed.STATISTICS: {"forward": "fp32", "backward": ""}}
    assert toy["parts"] == on_cuda | norm | dict.fromkeys((mixed.PARAMETERS, mixed.LOSS, mixed.LOG_SOFTMAX), wide)
    documented = dict.fromkeys(on_cuda, "fp16") | dict.fromkeys(
        (mixed.PARAMETERS, "ln (LayerNorm)", mixed.LOSS, mixed.LOG_SOFTMAX), "fp32"
    )
    assert toy["documented_for_cuda"] == documented
    assert [r.environment["commit"] for r in records] == ["abc"] * 7


def test_one_lesson(in_tmp, capsys):
    assert run_command(mixed.main, ["dtypes", "--device", "cpu", "--smoke"]) == 0
    assert "bf16: forward" in (out := capsys.readouterr().out)
    assert "+=" not in out
    assert not list(in_tmp.iterdir())  # as it is a smoke run
    assert run_command(mixed.main, ["accumulation", "--device", "cpu", "--results", "."]) == 0
    assert "1 record appended" in (out := capsys.readouterr().out)
    assert "LayerNorm" not in out
    assert json.loads((in_tmp / "mixed_precision.jsonl").read_text())["samples_ms"] == []
