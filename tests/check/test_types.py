"""Types: every strategy with conjugate pairs is accepted on 64 fake ranks, and refused without any one collective."""

import re
import sys
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from cs336_systems.check.__main__ import main
from cs336_systems.comm import default_group, pairs
from cs336_systems.context_parallel import context_parallel
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import ModelConfig
from cs336_systems.tensor_parallel import vocabulary
from cs336_systems.tensor_parallel.plan import tensor_parallel
from tests.support.gallery import changes
from writeup.gallery import variants

pytest.importorskip("spmd_types")
from cs336_systems.check.types import type_check

RANKS = 64


def model_of(**options):
    sizes = {"vocab_size": 128, "context_length": 128, "d_model": 128, "d_ff": 128, "num_layers": 1, "num_heads": 64}
    return TransformerLM(ModelConfig(**sizes, **options), "cpu")


def build(sequence=False, **options):
    """A tensor-parallel model and its loss; `sequence` splits the stream as well."""
    plan = tensor_parallel(model_of(**options), default_group(), sequence=sequence)
    tokens = torch.arange(128).view(2, 64)
    return plan, (tokens, None, None, tokens)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "norm": "layernorm", "attention": "sdpa"},
        {"positions": "rotary", "tied_head": False, "feed_forward": "swiglu"},
        {"recompute": "segments"},
    ],
    ids=["gpt", "biases", "llama", "recompute"],
)
def test_tensor_parallelism_is_accepted(sequence, options):
    assert type_check(lambda: build(sequence, **options), ranks=RANKS) == []


def own_part(x, dim, group, label=""):
    return x.chunk(group.size(), dim)[group.rank()]


def same(x, *args, **options):
    return x


COPY = r"attention.query: the input of the columns .*query.weight is Invariant \(I\) on axis tp, and must be Replicate"
GATHER = r"attention.query: the input of the columns .* is Varying \(V\) on axis tp, and must be Replicate \(R\)"
MISSING = (
    ("copy", same, False, {}, COPY + r" \(R\): pairs.copy is missing"),
    ("reduce", same, False, {}, r"embedding: an operand of \w+ .*is Varying .* must be Invariant .* pairs.reduce "),
    ("gather_sequence", same, True, {}, GATHER + ": pairs.gather_sequence is missing"),
    (
        "reduce_sequence",
        own_part,
        True,
        {},
        r"blocks.0: .* is Partial .*tp.* must be Varying .*: pairs.reduce_sequence ",
    ),
    ("scatter", same, True, {}, r"attention_norm: .* is Invariant \(I\) on axis tp, and must be .*pairs.scatter "),
)


@pytest.mark.parametrize(("name", "instead", "sequence", "options", "said"), MISSING, ids=[row[0] for row in MISSING])
def test_without_a_collective_it_is_refused(name, instead, sequence, options, said):
    with mock.patch.object(pairs, name, instead):
        refusals = type_check(lambda: build(sequence, **options), ranks=RANKS)
    assert len(refusals) == 1
    assert re.search(said, str(refusals[0])), refusals
    assert "\n" not in str(refusals[0])


@pytest.mark.parametrize("bias", [False, True])
def test_without_the_reduce_of_row_parallel_layers_alone_it_is_refused(bias):
    reduce = pairs.reduce
    with mock.patch.object(pairs, "reduce", lambda x, group, label: x if label == "row" else reduce(x, group, label)):
        (refusal,) = type_check(lambda: build(bias=bias), ranks=RANKS)
    where = "blocks.0.attention.out: an operand of add with" if bias else "blocks.0: an operand of add is Partial"
    assert str(refusal).startswith(where)
    assert "is Partial (P) on axis tp, and must be Invariant (I): pairs.reduce is missing" in str(refusal)


def test_the_gallerys_missing_conjugate_is_refused(monkeypatch):
    (variant,) = (each for each in variants() if each.name == "no-conjugate")
    ((function, code),) = changes(variant)
    monkeypatch.setattr(function, "__code__", code)
    (refusal,) = type_check(build, ranks=RANKS)
    assert re.search(COPY, str(refusal))


def test_a_partial_gradient_that_nobody_knows_of_is_refused():
    """Under sequence parallelism a norm's gradient is a part of a sum."""

    def forgotten():
        plan, inputs = build(sequence=True)
        plan.partial.clear()
        return plan, inputs

    (refusal,) = type_check(forgotten, ranks=RANKS)
    assert "attention_norm" in str(refusal)
    assert "Invariant (I)" in str(refusal)


def of_rank(model, tokens, own=()):
    """A model with tokens of this rank's own: its weights are R, but those that are `own`."""
    for name, parameter in model.named_parameters():
        parameter.spmd_type = "V" if name in own else "R"
    inputs = tuple(tokens.clone() for _ in range(2))
    for x in inputs:
        x.spmd_type = "V"
    return model, (inputs[0], None, None, inputs[1])


def split_sequence(kind):
    return of_rank(context_parallel(model_of(), default_group(), kind), torch.arange(4).view(2, 2))


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_context_parallelism_is_accepted(kind):
    assert type_check(lambda: split_sequence(kind), "cp", RANKS) == []


def test_keys_that_are_gathered_for_equal_use_are_refused():
    """Each rank's queries differ, so the gradients of all keys are parts of a sum."""
    with mock.patch.object(pairs, "gather_sequence", pairs.gather):
        (refusal,) = type_check(lambda: split_sequence("gather"), "cp", RANKS)
    assert str(refusal).startswith("blocks.0.attention: an operand of BlockAttention is Invariant (I) on axis cp")


def test_the_ring_takes_keys_that_differ():
    def alike():
        model, inputs = split_sequence("ring")
        inputs[0].spmd_type = "R"
        return model, inputs

    (refusal,) = type_check(alike, "cp", RANKS)
    assert "the input of the ring is Replicate (R) on axis cp, and must be Varying (V)" in str(refusal)


@pytest.mark.parametrize(("label", "told"), [("softmax", 1), ("largest logit", 0)])
def test_sums_inside_the_vocabularys_loss(label, told, monkeypatch):
    """Without the sum the loss is a part. Without the maximum it is wrong and equal on all ranks: numbers show that."""
    real = vocabulary.all_reduce
    skipped = mock.Mock(wait=lambda: None)
    monkeypatch.setattr(
        vocabulary, "all_reduce", lambda x, group, what, how: skipped if what == label else real(x, group, what, how)
    )
    refusals = type_check(build, ranks=RANKS)
    assert len(refusals) == told
    assert all("the loss is Partial (P) on axis tp, and must be Invariant (I)" in str(each) for each in refusals)


def split_experts():
    """On the meta device, where every expert gets as many rows."""
    model = model_of(num_experts=RANKS, expert_every=1).to("meta")
    plan = expert_parallel(model, default_group())
    return of_rank(model, torch.empty(2, 64, dtype=torch.long, device="meta"), plan.names)


def test_expert_parallelism_is_accepted():
    assert type_check(split_experts, "ep", RANKS) == []


def test_rows_that_all_ranks_have_are_not_exchanged():
    def alike():
        model, inputs = split_experts()
        inputs[0].spmd_type = "R"
        return model, inputs

    (refusal,) = type_check(alike, "ep", RANKS)
    said = "blocks.0.feed_forward: an operand of all_to_all_single, axis ep: all_to_all_single: expected input type"
    assert str(refusal).startswith(said)
    assert "\n" not in str(refusal)


USERS = """
from torch import nn, ones
from cs336_systems.comm import default_group, pairs
from cs336_systems.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(nn.Linear(64, 64), default_group())
        self.down = RowParallelLinear(nn.Linear(64, 64), default_group())

    def forward(self, x):
        return self.down(self.up({}).relu()).sum()

def build():
    return Layer(), (ones(2, 3, 64, requires_grad=True),)
"""


@pytest.mark.parametrize(
    ("given", "parameters", "code", "said"),
    [
        ("pairs.copy(x, default_group())", "", 0, "accepted"),
        ("x", "", 1, "pairs.copy is missing"),
        ("pairs.copy(x, default_group())", "size=64", 0, "accepted"),
        ("x", "size, group=None", 1, "missing a required argument: 'size'; give each parameter a default"),
    ],
)
def test_the_command_line(given, parameters, code, said, tmp_path):
    (tmp_path / "layer.py").write_text(USERS.format(given).replace("build()", f"build({parameters})"))
    done = CliRunner().invoke(main, [f"{tmp_path}/layer.py:build", "--types"])
    assert (done.exit_code, said in done.output + str(done.exception)) == (code, True), done.output


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "spmd_types.checker", None)
    with pytest.raises(UserError, match=r"pip install 'cs336-systems\[types\]'"):
        type_check(build)


@pytest.mark.parametrize("returned", [
    (torch.nn.Linear(2, 2), torch.nn.functional.mse_loss, lambda step: ()),
    (torch.nn.Linear(2, 2), (torch.ones(2),), 3), (1, (torch.ones(2),)), torch.nn.Linear(2, 2),
])  # fmt: skip
def test_a_build_that_returns_something_else_is_refused(returned):
    with pytest.raises(UserError, match=r"returns \(split module, tuple of inputs\), not "):
        type_check(lambda: returned)
