"""The recipe: what it takes for granted, and what it refuses, in one line with the numbers."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.run

from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.optim.loss_scaler import DynamicLossScaler, LossScaler
from cs336_systems.presets import model_preset
from cs336_systems.train import __main__ as training
from cs336_systems.train import megatron
from cs336_systems.train.__main__ import main
from cs336_systems.train.batches import LEARNED_PIECES, most_tokens
from cs336_systems.train.recipe import Recipe


@pytest.mark.parametrize(
    ("ranks", "settings", "line"),
    [
        (6, {"tp": 2, "pp": 2}, "tp 2 x pp 2 x ep 1 = 4 does not divide the 6 ranks: start a multiple of 4, or lower"),
        (2, {"tp": 2, "d_ff": 129}, "129 of d_ff do not divide over tp 2: choose a tp that divides 129"),
        (
            2,
            {"sequence_parallel": True},
            "--sequence-parallel splits the sequence over tensor-parallel ranks; use --tp",
        ),
        (4, {"batch_size": 7, "tp": 2}, "a global batch (--batch-size) of 7 sequences is not a multiple of micro-bat"),
        (2, {"pp": 2, "chunks": 2, "zero": 3}, "ZeRO stage 3 gathers a stage's layers in one order; use --zero 0, 1"),
        (1, {"context": 200, "max_context": 100}, "--context 200 exceeds the model's 100 positions"),
        (1, {"size": "bert-345m", "objective": "lm"}, "bert-345m is an encoder, which cannot predict the next token;"),
        (2, {"pp": 2, "chunks": 2, "batch_size": 3, "micro_batch_size": 1}, "microbatches 3 is not a multiple of "),
        (1, {"tokenizer": "wordpiece"}, "--tokenizer is about BERT's text: leave it out, or say --objective bert"),
        (1, {"vocab_file": Path("v")}, "--vocab-file is about BERT's text: leave it out, or say --objective bert"),
        (1, {"split": "8,1,1"}, "--split is about BERT's text: leave it out, or say --objective bert"),
        (2, {"pp": 2, "schedule": "zbv", "recompute": "nested"}, "--schedule zbv does not go with --recompute nested"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_with_the_numbers(ranks, settings, line):
    recipe = Recipe.of(**settings)
    with pytest.raises(UserError, match=f"^{re.escape(line)}.*$"):
        recipe.check(recipe.model_config(), ranks)
    # The same, but for two chunks, which zbv need not be asked for.
    Recipe.of(pp=2, batch_size=3, micro_batch_size=1, schedule="zbv").check(model_preset("tiny"), 2)


def test_batches():
    for ranks, settings, batch, micro in (
        (1, {}, 16, 16),  # the preset's batch, at once
        (4, {}, 16, 4),  # a rank's rows
        (1, {"size": "bert-345m"}, 4, 4),
        (2, {"micro_batch_size": 3}, 6, 3),  # one a rank
        (2, {"micro_batch_size": 3, "batch_size": 12}, 12, 3),
        (2, {"pp": 2}, 16, 2),  # of 16 rows, four microbatches a stage
        (4, {"pp": 4}, 16, 1),
        (8, {"pp": 2, "tp": 2}, 16, 1),  # of 8 rows
        (2, {"pp": 2, "batch_size": 30}, 30, 3),  # 30 over 8 is 3
        (2, {"pp": 2, "batch_size": 40}, 40, 5),
        (2, {"pp": 2, "batch_size": 46}, 46, 2),  # 5 at most, of which 2 divides 46
        (2, {"pp": 2, "batch_size": 7}, 7, 1),
    ):
        layout = Recipe.of(**settings).layout(ranks)
        assert (layout.global_batch, layout.micro_batch) == (batch, micro), (ranks, settings)


def test_the_warm_up_is_a_number_of_steps_or_a_share():
    recipe = Recipe.of(lr=1.0, min_lr=0.0, warmup_steps=3, warmup_fraction=0.2, decay_steps=20, decay="linear")
    assert [recipe.optimizer.learning_rate(step) for step in (0, 1, 3, 4, 12, 20)] == [0.25, 0.5, 1.0, 1.0, 0.5, 0.0]
    assert Recipe.of(lr=1.0, warmup_steps=3, decay_steps=20).optimizer.learning_rate(0) == 1 / 3
    assert Recipe.of(lr=1.0, warmup_fraction=0.0, decay_steps=20).optimizer.learning_rate(0) == 1.0
    with pytest.raises(UserError, match="a warm-up of 30 steps ends after the decay, at step 20"):
        Recipe.of(warmup_steps=30, decay_steps=20).optimizer.learning_rate(0)


def test_the_loss_scaler_is_that_of_the_precision():
    for precision, scale in (("fp32", 1.0), ("tf32", 1.0), ("bf16", 1.0), ("fp16", 8.0)):
        scaler = Recipe.of(precision=precision, loss_scale=8.0).loss_scaler()
        assert (type(scaler), scaler.scale) == (LossScaler, scale)
    given = {"initial_loss_scale": 64.0, "loss_scale_window": 5, "hysteresis": 3, "min_loss_scale": 2.0}
    for settings, wanted in (({}, (2.0**32, 1000, 2, 1.0)), (given, (64.0, 5, 3, 2.0))):
        found = Recipe.of(precision="fp16", **settings).loss_scaler()
        assert isinstance(found, DynamicLossScaler)
        assert (found.scale, found.window, found.hysteresis, found.floor) == wanted


def test_a_decoders_shape_becomes_berts():
    config = Recipe.of(objective="bert").model_config(260)
    shape = {"num_layers": 4, "d_model": 128, "d_ff": 512, "num_heads": 4, "vocab_size": 260, "causal": False}
    kind = {"positions": "learned", "token_types": 2, "norm": "layernorm", "feed_forward": "gelu"}
    assert config == replace(config, **shape, **kind, bias=True, tied_head=True, bert_heads=True)
    assert Recipe.of(size="tiny").model_config(260).causal  # the tokenizer is of no concern to a decoder
    assert Recipe.of(objective="bert", vocab_size=512).model_config(260).vocab_size == 512
    # A shape by hand is that of 345M with other numbers.
    recipe = Recipe.of(objective="bert", num_layers=2, d_model=64, num_heads=4, context=32, max_context=48)
    config = recipe.model_config(300)
    shape = {"num_layers": 2, "d_model": 64, "d_ff": 256, "num_heads": 4, "vocab_size": 300, "context_length": 48}
    assert config == replace(config, **shape, dropout=0.1)
    assert (recipe.model.name, recipe.seq(config)) == ("2 layers x 64", 32)
    assert (recipe.layout(2).global_batch, recipe.layout(2).micro_batch) == (4, 2)
    assert Recipe.of(size="bert-345m").model_config(300).vocab_size == 29_056
    assert not Recipe.of(d_model=64).model.is_bert


def test_megatrons_names_and_defaults_are_those_of_options():
    options = {name: parameter for parameter in main.params for name in parameter.opts}
    used = {name.rstrip("=*") for name in megatron.SHARED.split()} | {*megatron.REQUIRED.values(), *megatron.BERT_DATA}
    assert used | {name for pair in megatron.WARMUP.items() for name in pair} <= set(options)
    for ours in (*map(" ".join, (megatron.DEFAULTS | megatron.GPT).items()), *megatron.RENAMED.values()):
        name, *value = ours.split()
        if value:
            options[name].type.convert(value[0], options[name], None)
        assert name in options


def test_torchrun_leaves_our_options_alone():
    """Also after the script's name torchrun refuses what could be short for two options of its own. --nproc is one,
    and serves those who start ranks without torchrun."""
    names = {name for parameter in main.params for name in parameter.opts if name.startswith("--")} - {"--nproc"}
    arguments = [word for name in sorted(names) for word in (name, "1")]
    parsed = torch.distributed.run.get_args_parser().parse_args(["--nproc-per-node", "2", "-m", "module", *arguments])
    assert parsed.training_script_args == arguments
    assert parsed.nproc_per_node == "2"


def test_a_run_that_does_not_fit_is_refused_before_any_rank_is_started(monkeypatch, capsys):
    monkeypatch.setattr(training, "usable_memory", lambda device: 2 * 10**6)
    monkeypatch.setattr(training, "start_ranks", lambda *arguments, **settings: pytest.fail("ranks were started"))
    line = "--data random --device cpu --batch-size 2 --context 16"
    assert run_command(main, line.split()) == 2
    assert capsys.readouterr().err.startswith("error: tiny with batch 2 x 16 needs ")
    assert run_command(main, f"{line} --nproc 2".split()) == 2
    assert "tiny with microbatches of 1 x 16 at tp 1 x pp 1 x dp 2 needs" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_no_batch_would_fit_is_refused_without_being_observed(monkeypatch, capsys, ranks):
    monkeypatch.setattr(training, "usable_memory", lambda device: ranks * 2**39)
    monkeypatch.setattr(training, "fullest", lambda *arguments: pytest.fail("the model was observed"))
    line = f"--size gpt3-175b --data random --device cpu --batch-size 8 --zero 2 --precision bf16 --nproc {ranks}"
    assert run_command(main, line.split()) == 2
    said, gradients = capsys.readouterr().err, {1: "325.2 GiB", 4: "81.3 GiB"}[ranks]
    assert f"(parameters 325.2 GiB, gradients {gradients}, optimizer state " in said
    assert ("; use a smaller --size" in said) is (ranks == 1)


def test_a_vocabulary_that_the_text_decides_is_counted_at_its_largest(in_tmp, capsys):
    """Also by a dry run, which counts what the run will hold."""
    (in_tmp / "pieces").write_text("[PAD]\na\nb\n")
    by_hand, pieces = {"num_layers": 1, "d_model": 64, "num_heads": 4}, {"vocab_file": Path("pieces")}
    for settings, most in (
        ({}, 260),
        ({"tokenizer": "wordpiece"}, LEARNED_PIECES),
        ({"tokenizer": "wordpiece"} | by_hand, 29_056),  # as in bert-345m
        ({"data": ("random",)}, LEARNED_PIECES),
        ({"data": ("random",)} | pieces, LEARNED_PIECES),
        ({"tokenizer": "wordpiece"} | pieces, 3),
        ({"tokenizer": "wordpiece", "vocab_size": 300}, 300),
    ):
        assert most_tokens(Recipe.of(objective="bert", **settings)) == most
    line = "--objective bert --context 16 --batch-size 1 --dry-run --tokenizer wordpiece --vocab-file pieces"
    assert run_command(main, line.split()) == 0
    assert " 3 words." in " ".join(capsys.readouterr().out.split())


def test_a_recipe_has_finite_numbers_and_no_other_options():
    for name, value in (("clip", math.inf), ("lr", math.nan), ("aux_weight", -math.inf)):
        with pytest.raises(UserError, match=rf"^--{name.replace('_', '-')} {value} is not a finite number$"):
            Recipe.of(**{name: value})
    with pytest.raises(TypeError, match="'tpp' is no option of a recipe"):
        Recipe.of(tpp=2)
