"""Models cut over ranks against the whole one in one process: losses and every gradient, in float64."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from cs336_systems.comm import Mesh, fake_ranks, record
from cs336_systems.context_parallel import context_parallel
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.pipeline import Stage
from cs336_systems.tensor_parallel.plan import ColumnParallelLinear, RowParallelLinear, check_divides, tensor_parallel
from tests.support import ranks
from tests.support.parallel_models import (
    CONFIGS,
    SEQ,
    combine,
    compare_gradients,
    gradients,
    make_batch,
    only_rank,
    rounding,
    run,
    whole_model,
    whole_of,
    with_recompute,
)
from tests.support.tolerances import likely_bound, relative_error

ROWS, MULTIPLE = 3, 8  # a vocabulary of 37 is padded to 40: with tp 4 the last rank has three words of padding
RECOMPUTE = ("none", "segments", "attention", "nested")


def test_two_layers_by_hand():
    """Collectives of a forward and a backward of a decoder with dropout, every layer of which is run again."""
    config = replace(CONFIGS["gpt"], recompute="segments", dropout=0.1)
    stream, tokens = ROWS * SEQ * config.d_model, ROWS * SEQ
    ends = {("all-reduce", "embedding"): 1, ("all-reduce", "largest logit"): 1, ("all-reduce", "softmax"): 1}
    branches = ("attention, gradient", "feed-forward, gradient")
    whole = ends | {("all-reduce", "row"): 8, ("all-reduce", "head, gradient"): 1}
    whole |= {("all-reduce", label): 2 for label in branches}
    parts = ends | {("all-gather", "attention"): 4, ("all-gather", "feed-forward"): 4, ("reduce-scatter", "row"): 8}
    parts |= {("reduce-scatter", label): 2 for label in branches} | {("all-gather", "row, gradient"): 4}
    parts |= {
        ("all-gather", "embedding, gradient"): 1,
        ("all-gather", "head"): 1,
        ("reduce-scatter", "head, gradient"): 1,
    }
    sizes = {"largest logit": tokens, "softmax": 2 * tokens}
    for sequence, by_hand in ((False, whole), (True, parts)):
        with fake_ranks(0, 2) as group:
            model = with_recompute(whole_model(config), config.recompute)
            tensor_parallel(model, group, sequence, MULTIPLE)
            with record() as events:
                combine(run(model, make_batch(config, ROWS))).backward()
        found = Counter((event.verb, event.label, event.numel) for event in events)
        assert found == {(*key, sizes.get(key[1], stream)): times for key, times in by_hand.items()}


def check_model(dense: TransformerLM, config, batch, sequence: bool, mesh: Mesh, wanted) -> None:
    """One layout: there and back, losses, gradients."""
    model = with_recompute(dense, config.recompute)
    plan = tensor_parallel(model, mesh.tp, sequence, MULTIPLE)
    whole = dict(dense.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(whole)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plan.part(name, whole[name])), name
        assert plan.whole_shape(name, parameter.shape) == whole[name].shape
        assert parameter.numel() < whole[name].numel() or name not in plan.cut
        if config.recompute == "none":
            assert torch.equal(whole_of(plan, name, parameter), whole[name]), name
            assert torch.equal(whole_of(plan, name, plan.part(name, whole[name].grad)), whole[name].grad), name
    losses = run(model, batch)
    combine(losses).backward()
    tolerance = rounding(config, torch.float64, batch.tokens.numel())
    for got, want in zip(losses, wanted, strict=True):
        assert (got is None) == (want is None)
        assert got is None or relative_error(got.detach(), want.detach()) <= tolerance
    compare_gradients(gradients(model, plan), plan, dense, tolerance)


def models_case(group, recompute: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(tp=group.size())
    for kind, config in CONFIGS.items():
        dense, batch = whole_model(config), make_batch(config, ROWS)
        losses = run(dense, batch)
        combine(losses).backward()
        for i, each in enumerate(recompute):  # in turn with sequence parallelism, so that any two options meet
            sequence = (list(CONFIGS).index(kind) + i) % 2 == 0
            check_model(dense, replace(config, recompute=each), batch, sequence, mesh, losses)


@pytest.mark.parametrize(("world_size", "recompute"), [(2, RECOMPUTE), (4, RECOMPUTE[:2])], ids=["2", "4"])
def test_losses_and_gradients_equal_one_process(world_size, recompute):
    ranks.run(models_case, world_size, recompute=recompute)


def others_case(group) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(tp=group.size())
    for kind, config in CONFIGS.items():
        check_initial_weights(config, mesh.tp)
        for sequence in (False, True):
            check_use(config, sequence, mesh)
        check_half(kind, config, mesh)


def check_initial_weights(config, group) -> None:
    """Built without values, a part gets those of the whole model."""
    whole = TransformerLM(config, "meta")
    whole.to_empty(device="cpu")
    whole.init_weights(5)
    part = TransformerLM(config, "meta")
    plan = tensor_parallel(part, group, False, MULTIPLE)
    plan.init_weights(5, torch.device("cpu"))
    for (name, want), got in zip(whole.named_parameters(), part.parameters(), strict=True):
        assert torch.equal(whole_of(plan, name, got), want), name
        assert torch.equal(got, plan.part(name, want)), name


def check_use(config, sequence: bool, mesh: Mesh) -> None:
    """Whole logits and the mean loss where they are asked for; a copy of the model is a model."""
    dense, batch = whole_model(config), make_batch(config, ROWS)
    model = copy.deepcopy(dense)
    plan = tensor_parallel(model, mesh.tp, sequence, MULTIPLE)
    again = copy.deepcopy(model)
    inputs = batch.tokens, batch.token_types, batch.padding_mask
    tolerance = rounding(config, torch.float64, batch.tokens.numel())
    for each in (dense, model, again):
        each.eval()
    with torch.no_grad():
        outputs = [each(*inputs) for each in (dense, model, again)]
        if config.bert_heads:
            assert relative_error(outputs[1].pair, outputs[0].pair) <= tolerance
            outputs = [output.tokens for output in outputs]
        assert relative_error(outputs[1], outputs[0]) <= tolerance
        assert torch.equal(outputs[2], outputs[1])
        means = [lm_loss(each, batch.tokens, batch.targets) for each in (dense, model)]
    assert relative_error(means[1], means[0]) <= tolerance
    for each in (dense, model, again):
        each.train()
        combine(run(each, batch)).backward()
    for (name, first), second in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad), name
        assert first is not second
    compare_gradients(gradients(again, plan), plan, dense, tolerance)


def check_half(kind: str, config, mesh: Mesh) -> None:
    """Parameters in bf16 give losses and gradients near those of the same weights in float64. Roundings to bf16 are of
    random sign: their path alone counts, not the length of its sums, which are in float32."""
    half, batch = whole_model(config, torch.bfloat16), make_batch(config, ROWS)
    wide = copy.deepcopy(half).double()
    want = combine(run(wide, batch))
    want.backward()
    stages = 20 * config.num_layers + 10
    for sequence in (False, True):
        model = copy.deepcopy(half)
        plan = tensor_parallel(model, mesh.tp, sequence, MULTIPLE)
        got = combine(run(model, batch))
        got.backward()
        assert relative_error(got.detach(), want.detach()) <= likely_bound(torch.bfloat16, stages), kind
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
        compare_gradients(gradients(model, plan), plan, wide, likely_bound(torch.bfloat16, 2 * stages))


def test_weights_logits_copies_and_half_precision():
    ranks.run(others_case, 2)


def kernels_case(group) -> None:
    """Fused norm, gate and attention on parts; the fused loss, which wants all words, gives way."""
    mesh = Mesh(tp=group.size())
    config = replace(CONFIGS["llama"], num_layers=1, dropout=0.0)
    dense, batch = whole_model(config, torch.float32), make_batch(config, 2)
    fused = TransformerLM(replace(config, kernels="triton", attention="flash"))
    assert fused.fused_loss
    fused.load_state_dict(dense.state_dict())
    want = combine(run(dense, batch))
    want.backward()
    plan = tensor_parallel(fused, mesh.tp, True, MULTIPLE)
    assert not fused.fused_loss
    got = combine(run(fused, batch))
    got.backward()
    tolerance = rounding(config, torch.float32, batch.tokens.numel())
    assert relative_error(got.detach(), want.detach()) <= tolerance
    compare_gradients(gradients(fused, plan), plan, dense, tolerance)


def test_fused_kernels():
    ranks.run(kernels_case, 2)


def again_case(group) -> None:
    model = whole_model(CONFIGS["bert"]).requires_grad_(False)
    tensor_parallel(model, group, False, MULTIPLE)
    assert not any(parameter.requires_grad for parameter in model.parameters()), "frozen in the parts, too"
    with pytest.raises(UserError, match="split over tensor-parallel ranks already"):
        tensor_parallel(model, group, False, MULTIPLE)
    parts = (tensor_parallel, context_parallel, expert_parallel, lambda module, group: Stage(module, 0, 1))
    for function in parts:
        with pytest.raises(UserError, match="only a TransformerLM can be split, and this is a ModuleList"):
            function(model.blocks, group)


def test_a_model_is_split_once():
    ranks.run(again_case, 2)


def differing_case(group, layers: list[int]) -> None:
    """Each rank has drawn other weights, and gets its part of the first rank's."""
    torch.manual_seed(group.rank())
    config = replace(CONFIGS["gpt"], num_layers=layers[group.rank()])
    model = TransformerLM(config)
    plan = tensor_parallel(model, group, False, MULTIPLE)
    torch.manual_seed(0)
    for name, want in TransformerLM(config).named_parameters():
        assert torch.equal(model.get_parameter(name), plan.part(name, want)), name


def test_ranks_begin_with_the_first_ones_model():
    ranks.run(differing_case, 2, layers=[1, 1])
    first, second = ranks.run_failing(differing_case, 2, layers=[1, 2])
    assert first == second
    assert first[0] == UserError.__name__
    assert first[1].startswith("the ranks' models differ: rank ")


def test_what_does_not_divide_is_refused():
    """The numbers of a model, as tests/test_layout.py has them; its padding, sequence and layers."""
    config = CONFIGS["gpt"]
    for changes, size, multiple, message in (
        ({"num_heads": 6, "d_model": 24}, 4, 4, "^6 heads do not divide over tp 4: choose a tp that divides 6$"),
        ({"vocab_size": 50}, 8, 4, r"50, padded to 52 \(a multiple of 4\), does not divide over tp 8: pad it to a"),
        ({}, 2, 0, r"padded to 0 \(a multiple of 0\), does not divide over tp 2: pad it to a multiple of 2$"),
    ):
        with pytest.raises(UserError, match=message):
            tensor_parallel(TransformerLM(replace(config, **changes), "meta"), only_rank(0, size), False, multiple)
    config = replace(config, context_length=6)
    for seq, tokens in ((None, 6), (10, 10)):
        check_divides(config, 4, False, seq)
        with pytest.raises(UserError, match=f"^a sequence of {tokens} tokens does not divide over tp 4$"):
            check_divides(config, 4, True, seq)
    check_divides(config, 4, True, 12)
    for dim, layer in enumerate((ColumnParallelLinear, RowParallelLinear)):
        what = rf"dimension {dim}, of {(3, 5)[dim]}, of a parameter of shape \(3, 5\)"
        with pytest.raises(UserError, match=f"{what} does not divide over 2 tensor-parallel ranks"):
            layer(nn.Linear(5, 3), only_rank(0, 2))


def test_a_group_of_one_changes_nothing():
    model = TransformerLM(CONFIGS["bert"])
    before = [type(module) for module in model.modules()]
    plan = tensor_parallel(model, only_rank(0, 1), True, MULTIPLE)
    assert [type(module) for module in model.modules()] == before
    assert not plan.cut
    assert not plan.partial
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
