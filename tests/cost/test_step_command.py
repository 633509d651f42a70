"""What `step` and `table` print besides the prediction: on narrow terminals, losses below the peak, a training."""

import json
import re

import pytest
from rich.console import Console

from cs336_systems.cost.commands import step
from cs336_systems.cost.commands.request import Request, take_request
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds

GPT = ["--tp", "8", "--sequence-parallel", "--dropout", "0.1"]
PIPELINE = [*GPT, "--pp", "8", "--chunks", "3", "--recompute", "selective", "--batch-size", "64"]
EXPERTS = ["--size", "fairseq-moe-15b", "--tp", "2", "--ep", "8", "--dp", "2", "--recompute", "full", "--zero", "1"]
REQUESTS = {"gpt": PIPELINE, "experts": EXPERTS, "llama": ["--size", "llama-8b", "--cp", "2", "--system", "h100"]}


def asked(*arguments: str) -> Request:
    """The request that these options make."""
    return take_request(step.command.make_context("step", list(arguments)).params)


@pytest.mark.parametrize("name", REQUESTS)
def test_on_a_narrow_terminal(printed, monkeypatch, name):
    wide = printed("table", *REQUESTS[name])
    monkeypatch.setattr(console, "console", lambda **_: Console(width=80))
    predicted, out = asked(*REQUESTS[name]).step(), printed("step", *REQUESTS[name])
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search("[▁-▐▔-▟…]", out)
    for seconds in [each for each in predicted.parts.values() if each] + [predicted.total]:
        assert f" {format_seconds(seconds)} " in out
    table = printed("table", *REQUESTS[name])
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    blank = [sum(not line.strip() for line in text.splitlines()) for text in (wide, table)]
    assert blank[0] == blank[1]
    for group in json.loads(printed("table", *REQUESTS[name], "--json"))["groups"]:
        assert all(f" {1e3 * one['backward']['seconds']:.3f} " in table for one in group["operators"])


def test_the_bar_shrinks_first(printed, monkeypatch):
    monkeypatch.setattr(console, "console", lambda **_: Console(width=100))
    out = printed("step", *PIPELINE)
    assert re.search("[▁-▐▔-▟]", out)
    assert "…" not in out
    assert f" {format_seconds(asked(*PIPELINE).step().total)} " in out


@pytest.mark.parametrize("name", REQUESTS)
def test_the_step_is_peak_and_losses(printed, name):
    predicted, found = asked(*REQUESTS[name]).step(), json.loads(printed("step", *REQUESTS[name], "--json"))
    least = predicted.model_flops / (predicted.plan.ranks * predicted.system.matmul_flops)
    assert found["losses"]["at_peak"] == pytest.approx(least, rel=1e-12)
    assert sum(found["losses"].values()) == pytest.approx(predicted.total, rel=1e-12)
    products = predicted.parts["forward"] + predicted.parts["backward"]
    assert found["losses"]["else"] == pytest.approx(predicted.total - products, rel=1e-12)
    assert f"= {format_seconds(least)} at the peak + " in printed("step", *REQUESTS[name])


def test_a_training(printed, run):
    found = json.loads(printed("step", *GPT, "--tokens", "3e11", "--json"))
    whole = found["training"]
    assert whole == {
        "tokens": 3e11,
        "seconds": 3e11 / found["tokens_per_second"],
        "accelerator_hours": pytest.approx(8 * 3e11 / found["tokens_per_second"] / 3600, rel=1e-12),
    }
    assert f"{whole['seconds'] / 86400 / 365.25:.1f} years  for 300 G tokens" in printed(
        "step", *GPT, "--tokens", "3e11"
    )
    assert "training" not in json.loads(printed("step", *GPT, "--json"))
    for tokens in ("0", "nan", "inf"):
        status, _, err = run("step", *GPT, "--tokens", tokens)
        assert status == 2
        assert err.startswith("error: --tokens must be a number from 1")


def test_the_first_lines_say_what_was_changed():
    assert asked(*GPT).lines()[0].startswith("gpt3-175b: 175 B")
    assert asked("--size", "llama-8b", "--attention", "flash", "--recompute", "full").title == "llama-8b"
    assert asked("--size", "llama-8b", "--num-layers", "31").lines()[0].startswith("llama-8b, changed: ")
    assert "; 1 sequence of" in asked(*GPT).lines()[1]
    assert "; 2 sequences of" in asked("--dp", "2").lines()[1]
    assert asked(*GPT).lines()[1].endswith("overlap data")
    assert asked(*GPT, "--system", "H100").lines()[1].endswith("overlap all")
    assert asked(*GPT, "--system", "H100", "--overlap", "none").lines()[1].endswith("overlap none")
