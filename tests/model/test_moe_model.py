"""A model with experts: where they are, what reaches them, and that recomputing them changes nothing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.cost.flops import forward_flops, model_flops
from cs336_systems.data.corpus import Batch
from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.moe import MoELayer, set_balance_scale
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import Mixture, ModelConfig
from tests.support.tolerances import bound, relative_error

TOY = ModelConfig(
    vocab_size=19, context_length=7, d_model=8, d_ff=24, num_layers=4, num_heads=2, num_experts=4, bias=True
)
TOKENS = torch.randint(19, (2, 7), generator=torch.Generator().manual_seed(0))


def build(mixture: Mixture, **changes) -> TransformerLM:
    model = TransformerLM(replace(TOY, **changes, mixture=mixture))
    model.init_weights(seed=0)
    return model


def outcome(model: TransformerLM, key: Tensor | None) -> list[Tensor]:
    """The loss and all gradients."""
    batch = Batch(TOKENS, TOKENS)
    loss = model.losses(model.run_blocks(batch, key=key), batch, "mean").tokens
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("mode", ["segments", "nested"])
def test_recompute_changes_no_bit(mode, keyed):
    found = []
    for seed, recompute in enumerate(("none", mode)):
        for policy in ("sampling", "random"):
            torch.manual_seed(seed if keyed else 0)  # which noise with a key does not come from
            mixture = Mixture(second_policy=policy, capacity_factor=1.0, aux_weight=0.5)
            key = dropout_key(0, 0, torch.arange(2)) if keyed else None
            found.append(outcome(build(mixture, recompute=recompute), key))
    for plain, recomputed in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert not torch.equal(found[0][0], found[1][0])


def test_every_kth_layer_has_experts_which_learn():
    for every, kinds in ((1, "EEEE"), (2, "-E-E"), (3, "--E-")):
        model = build(Mixture(shared_expert=True), expert_every=every)
        assert "".join("E" if isinstance(b.feed_forward, MoELayer) else "-" for b in model.blocks) == kinds
    outcome(model, None)
    layer = model.blocks[2].feed_forward
    assert all(p.grad.any() for p in (layer.router.weight, layer.experts.up.weight, layer.shared.up.weight))
    assert layer.layer == 2


def test_the_padding_mask_reaches_the_experts():
    real = torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
    for masked, tokens in ((False, 14), (True, 10)):
        model = build(Mixture(mask_padding=masked))
        model(TOKENS, None, real)
        assert model.blocks[1].feed_forward.load.wanted.sum(1).tolist() == [tokens, tokens]


def test_an_experts_first_weights_depend_on_its_global_number_alone():
    name, device = "blocks.1.feed_forward.experts.down.weight", torch.device("cpu")
    model = TransformerLM(TOY, "meta")
    whole = model.initial_weight(name, torch.Size((4, 8, 24)), 5, device)
    model.blocks[1].feed_forward.experts.first = 2
    part = model.initial_weight(name, torch.Size((2, 8, 24)), 5, device)
    assert torch.equal(part, whole[2:])
    assert not any(torch.equal(whole[i], whole[j]) for i in range(4) for j in range(i))


def test_the_balancing_loss_follows_the_loss_if_told():
    model = build(Mixture(aux_weight=1.0)).double()
    router = next(module.router.weight for module in model.modules() if isinstance(module, MoELayer))
    gradients = []
    for parts in (1, 4):
        model.zero_grad()
        set_balance_scale(model, 1 / parts)
        for _ in range(parts):
            (lm_loss(model, TOKENS, TOKENS) / parts).backward()
        gradients.append(router.grad.clone())
    assert torch.allclose(*gradients, rtol=0, atol=1e-12 * gradients[0].norm())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_experts_survive_compilation():
    # One layer, as to trace one takes seconds; a dense one is compiled in tests/benchmarks/test_e2e.py.
    model = build(Mixture(), num_layers=1, expert_every=1)
    want = model(TOKENS)
    got = torch.compile(model, backend="eager")(TOKENS)
    assert relative_error(got, want) < bound(torch.float32, stages=20, longest_sum=24)


def test_whatever_computes_a_model_it_asks_for_the_same_work():
    sort, einsum = (replace(TOY, mixture=Mixture(dispatch=way, capacity_factor=1.0)) for way in ("sort", "einsum"))
    assert model_flops(sort, 2, 7) == model_flops(einsum, 2, 7) == sum(forward_flops(sort, 2, 7).values()) * 3
    assert sum(forward_flops(einsum, 2, 7).values()) > sum(forward_flops(sort, 2, 7).values())
