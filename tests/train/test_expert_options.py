"""The settings of experts: their checks, an expert's capacity, and the options that stand for them."""

from dataclasses import fields, replace

import click
import pytest

from cs336_systems.errors import UserError
from cs336_systems.host.console import options
from cs336_systems.presets import Mixture, model_preset
from cs336_systems.train import recipe
from cs336_systems.train.options import MIXTURE, ExpertOptions

TINY = model_preset("tiny")
FAIRSEQ = model_preset("fairseq-moe-15b")


def parse(line: str = "") -> ExpertOptions:
    """Options of a command line, parsed by click."""
    found = []

    @click.command()
    @options(ExpertOptions)
    def command(**settings: object) -> None:
        found.append(ExpertOptions(**settings))

    command(line.split(), standalone_mode=False)
    return found[0]


# Each option with a value that is not the default's, in our words and where fairseq has it in fairseq's.
OPTIONS = {
    "top_k": (1, "--top-k 1"),
    "expert_d_ff": (96, "--expert-d-ff 96", "--moe-expert-ffn-dim 96"),
    "gating_fp32": (False, "--no-gating-fp32"),
    "second_policy": ("random", "--second-expert random", "--moe-second-expert-policy random"),
    "normalize": ("before", "--normalize-gates before"),
    "capacity_factor": (1.25, "--capacity-factor 1.25"),
    "eval_fraction": (0.5, "--eval-fraction 0.5", "--moe-eval-capacity-token-fraction 0.5"),
    "mask_padding": (True, "--mask-padding", "--use-moe-pad-mask"),
    "prioritized": (True, "--prioritized", "--moe-batch-prioritized-routing"),
    "aux_weight": (0.5, "--aux-weight 0.5", "--moe-gate-loss-wt 0.5"),
    "aux_scope": ("global", "--aux-scope global"),
    "shared_expert": (True, "--shared-expert"),
    "dispatch": ("einsum", "--moe einsum"),
    "expert_gradient": ("sqrt", "--expert-gradient sqrt"),
}


def test_every_setting_has_an_option_and_is_tested():
    ours = {MIXTURE.get(each.name, each.name) for each in fields(ExpertOptions)} - {"num_experts", "expert_every"}
    assert ours == {each.name for each in fields(Mixture)} == set(OPTIONS)
    assert {each.name for each in fields(ExpertOptions)} <= recipe.OPTIONS.keys()


def test_an_option_changes_its_setting_and_no_other():
    for name, (value, *lines) in OPTIONS.items():
        assert getattr(FAIRSEQ.mixture, name) != value
        refused = f"^{lines[0].split()[0].replace('--no-', '--')} is about experts, and the model has"
        for line in lines:
            changed = parse(line).with_experts(FAIRSEQ)
            assert changed == replace(FAIRSEQ, mixture=replace(FAIRSEQ.mixture, **{name: value}))
            with pytest.raises(UserError, match=refused):
                parse(line).with_experts(TINY)


def test_without_options_everything_is_the_presets():
    low = replace(FAIRSEQ, mixture=Mixture(gating_fp32=False, shared_expert=True))
    for config in (TINY, FAIRSEQ, low):
        assert parse().with_experts(config) == config
    for flag in ("--gating-fp32", "--moe-gating-use-fp32"):  # whose opposite is tested above
        assert parse(flag).with_experts(low).mixture.gating_fp32


def test_experts_are_put_into_a_dense_model_and_taken_out_of_a_sparse_one():
    for line in ("--num-experts 8 --expert-every 1", "--moe-expert-count 8 --moe-freq 1"):
        config = parse(f"{line} --top-k 1").with_experts(TINY)
        assert config == replace(TINY, num_experts=8, expert_every=1, mixture=Mixture(top_k=1))
    assert parse("--num-experts 0").with_experts(FAIRSEQ) == replace(FAIRSEQ, num_experts=0)
    assert parse("--num-experts 1 --top-k 1").with_experts(TINY).num_experts == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-experts 1", "a token is sent to 2 experts, and the layer has 1: use more, or top_k 1"),
        ("--expert-every 2", "--expert-every is about experts, and the model has none: set --num-experts"),
        ("--num-experts 0 --expert-every 2", "--expert-every is about experts, and the model has none"),
        ("--num-experts 8 --expert-every 9", "one layer in 9 would have experts, and there are 4: lower --expert-eve"),
        ("--num-experts 8 --top-k 1 --second-expert random", "--second-expert is about a token's second expert"),
        ("--num-experts 8 --top-k 1 --normalize-gates before", "--normalize-gates is about a token's second expert"),
    ],
)
def test_settings_that_cannot_be_or_have_no_effect_are_refused(line, message):
    with pytest.raises(UserError, match=f"^{message}"):
        parse(line).with_experts(TINY)


def test_what_no_mixture_has_is_refused():
    for settings, message in (
        ({"top_k": 3}, "a token is sent to 1 or 2 experts, not 3"),
        ({"second_policy": "best"}, "second_policy 'best' does not exist; choose from all, sampling, random"),
        ({"normalize": "never"}, "normalize 'never' does not exist; choose from after, before"),
        ({"dispatch": "loop"}, "dispatch 'loop' does not exist; choose from sort, einsum"),
        ({"aux_scope": "rank"}, "aux_scope 'rank' does not exist; choose from local, global"),
        ({"expert_gradient": "mean"}, "expert_gradient 'mean' does not exist; choose from exact, sqrt"),
        ({"expert_d_ff": -1}, "expert_d_ff must be a finite number of at least 0, not -1"),
        ({"aux_weight": float("nan")}, "aux_weight must be a finite number of at least 0, not nan"),
        ({"capacity_factor": float("inf")}, "capacity_factor must be a finite number of at least 0, not inf"),
        ({"eval_fraction": 1.01}, r"eval_fraction must lie in \[0, 1\], not 1.01"),
    ):
        with pytest.raises(UserError, match=f"^{message}$"):
            Mixture(**settings)
    for line in ("--top-k 3", "--num-experts -1", "--eval-fraction 1.5", "--moe loop", "--expert-d-ff 0"):
        with pytest.raises(click.BadParameter):
            parse(line)


def test_capacity():
    for settings, tokens, training, slots in (
        ({}, 100, True, None),
        ({"eval_fraction": 0.05}, 2060, False, 103),  # 103.00000000000001 in floats
        ({"eval_fraction": 0.05}, 2061, False, 104),
        ({"eval_fraction": 0.001}, 5, False, 1),
        ({"eval_fraction": 1.0}, 100, False, 100),
        ({"eval_fraction": 0.5}, 0, False, 0),
        ({"capacity_factor": 2.0}, 100, True, 26),
        ({"capacity_factor": 2.0}, 100, False, 26),  # as in training
        ({"capacity_factor": 1.0, "top_k": 1}, 96, True, 12),
        ({"capacity_factor": 1.0, "top_k": 1}, 97, True, 13),
        ({"capacity_factor": 1.15}, 800, True, 115),  # 114.99999999999999
        ({"capacity_factor": 0.5}, 8, True, 1),  # a layer that is off would not show
        ({"capacity_factor": 1e308}, 800, True, 800),
        ({"capacity_factor": 2.0}, 0, True, 0),
        ({"capacity_factor": 2.0, "eval_fraction": 0.25}, 100, False, 25),
    ):
        assert Mixture(**settings).capacity(tokens, 8, training) == slots, (settings, tokens)
