"""Types: every strategy with conjugate pairs is accepted on 64 fake ranks, and refused without any one collective."""

import re
import sys
from contextlib import nullcontext
from functools import partial
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


def of_rank(model, tokens, own=(), alike=False):
    """A model with tokens of this rank's own, unless they are `alike`: its weights are R, but those that are `own`."""
    for name, parameter in model.named_parameters():
        parameter.spmd_type = "V" if name in own else "R"
    inputs = tuple(tokens.clone() for _ in range(2))
    for x, kind in zip(inputs, ("R" if alike else "V", "V"), strict=True):
        x.spmd_type = kind
    return model, (inputs[0], None, None, inputs[1])


def split_sequence(kind, alike=False):
    return of_rank(context_parallel(model_of(), default_group(), kind), torch.arange(4).view(2, 2), alike=alike)


def split_experts(alike=False):
    """On the meta device, where every expert gets as many rows."""
    model = model_of(num_experts=RANKS, expert_every=1).to("meta")
    plan = expert_parallel(model, default_group())
    return of_rank(model, torch.empty(2, 64, dtype=torch.long, device="meta"), plan.names, alike)


def forgotten():
    """Sequence parallelism in which nobody knows that a norm's gradient is a part of a sum."""
    plan, inputs = build(sequence=True)
    plan.partial.clear()
    return plan, inputs


SEQUENCE = partial(build, sequence=True)
OPTIONS = [
    {},
    {"bias": True, "norm": "layernorm", "attention": "sdpa"},
    {"positions": "rotary", "tied_head": False, "feed_forward": "swiglu"},
    {"recompute": "segments"},
]
ACCEPTED = [("tp", partial(build, sequence, **each)) for sequence in (False, True) for each in OPTIONS]
ACCEPTED += [("cp", partial(split_sequence, kind)) for kind in ("ring", "gather", "ulysses")] + [("ep", split_experts)]


@pytest.mark.parametrize(("axis", "model"), ACCEPTED)
def test_every_strategy_is_accepted(axis, model):
    assert type_check(model, axis, RANKS) == []


def own_part(x, dim, group, label=""):
    return x.chunk(group.size(), dim)[group.rank()]


def same(x, *args, **options):
    return x


def rows_alone(x, group, label, reduce=pairs.reduce):
    """All reductions but those of row-parallel layers."""
    return x if label == "row" else reduce(x, group, label)


def without(label):
    """All sums of the vocabulary's loss but one."""
    real = vocabulary.all_reduce
    return lambda x, group, what, how: mock.Mock(wait=lambda: None) if what == label else real(x, group, what, how)


COPY = r"attention.query: the input of the columns .*query.weight is Invariant \(I\) on axis tp, and must be Replicate"
GATHER = r"attention.query: the input of the columns .* is Varying \(V\) on axis tp, and must be Replicate \(R\)"
REDUCED = r"Partial \(P\) on axis tp, and must be Invariant \(I\): pairs.reduce is missing"
REFUSED = [  # what is there instead of what, for which model, and what is said
    ((pairs, "copy", same), "tp", build, COPY + r" \(R\): pairs.copy is missing"),
    ((pairs, "reduce", same), "tp", build, r"embedding: an operand of \w+ .*is Varying .* Invariant .* pairs.reduce "),
    ((pairs, "gather_sequence", same), "tp", SEQUENCE, GATHER + ": pairs.gather_sequence is missing"),
    ((pairs, "reduce_sequence", own_part), "tp", SEQUENCE, "blocks.0: .* is Partial .* Varying .* pairs.reduce_seq"),
    ((pairs, "scatter", same), "tp", SEQUENCE, r"attention_norm: .* is Invariant .* must be .* pairs.scatter "),
    ((pairs, "reduce", rows_alone), "tp", build, "^blocks.0: an operand of add is " + REDUCED),
    ((pairs, "reduce", rows_alone), "tp", partial(build, bias=True), "^blocks.0.attention.out: .* add .*" + REDUCED),
    (None, "tp", forgotten, r"attention_norm.*Invariant \(I\)"),
    # Each rank's queries differ, so the gradients of all keys are parts of a sum.
    ((pairs, "gather_sequence", pairs.gather), "cp", partial(split_sequence, "gather"),
     r"^blocks.0.attention: an operand of BlockAttention is Invariant \(I\) on axis cp"),
    (None, "cp", partial(split_sequence, "ring", True),
     r"the input of the ring is Replicate \(R\) on axis cp, and must be Varying \(V\)"),
    (None, "ep", partial(split_experts, True),
     "^blocks.0.feed_forward: an operand of all_to_all_single, axis ep: all_to_all_single: expected input type"),
    ((vocabulary, "all_reduce", without("softmax")), "tp", build,
     r"the loss is Partial \(P\) on axis tp, and must be Invariant \(I\)"),
]  # fmt: skip


@pytest.mark.parametrize(("instead", "axis", "model", "said"), REFUSED)
def test_a_collective_too_few_or_equal_inputs_are_refused(instead, axis, model, said):
    with mock.patch.object(*instead) if instead else nullcontext():
        (refusal,) = type_check(model, axis, RANKS)
    assert re.search(said, str(refusal)), refusal
    assert "\n" not in str(refusal)


def test_a_loss_without_the_largest_logit_is_wrong_and_equal_on_all_ranks():
    """Numbers show that, not types."""
    with mock.patch.object(vocabulary, "all_reduce", without("largest logit")):
        assert type_check(build, ranks=RANKS) == []


def test_the_gallerys_missing_conjugate_is_refused(monkeypatch):
    (variant,) = (each for each in variants() if each.name == "no-conjugate")
    ((function, code),) = changes(variant)
    monkeypatch.setattr(function, "__code__", code)
    (refusal,) = type_check(build, ranks=RANKS)
    assert re.search(COPY, str(refusal))


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
