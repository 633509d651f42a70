"""An expert layer by sort against the one-hot formulation, gradients included, and by hand; models with such layers."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.cost.flops import forward_flops, model_flops
from cs336_systems.data.corpus import Batch
from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.feed_forward import FeedForward
from cs336_systems.model.moe import MoELayer
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import Mixture, ModelConfig
from tests.support.tolerances import bound, likely_bound, relative_error

TOY = ModelConfig(
    vocab_size=19, context_length=7, d_model=8, d_ff=24, num_layers=4, num_heads=2, num_experts=4, bias=True
)
HIDDEN = 16
# Router, gating, experts and weighted sum, forward and backward; the longest sum is over an expert's width or 14 rows.
ROUNDING = bound(torch.float64, stages=60, longest_sum=HIDDEN)
PADDING = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
ROUTES = [
    {},
    {"top_k": 1},
    {"top_k": 1, "prioritized": True},
    {"normalize": "before"},
    {"second_policy": "sampling"},
    {"second_policy": "sampling", "normalize": "before", "prioritized": True},
    {"second_policy": "random"},
    {"second_policy": "random", "normalize": "before"},
    {"prioritized": True},
]
EXPERTS = [{}, {"bias": False}, {"feed_forward": "gelu-tanh"}, {"feed_forward": "swiglu"}]


def build(changes: dict | None = None, dtype=torch.float64, seed: int = 0, **route) -> MoELayer:
    """A layer whose every parameter is random, biases too."""
    config = replace(TOY, **changes or {}, mixture=Mixture(**{"expert_d_ff": HIDDEN, **route}))
    torch.manual_seed(seed)
    layer = MoELayer(config, layer=1).to(dtype)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer


def some_x(batch: int = 2, seq: int = 7, dtype=torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, seq, TOY.d_model, generator=generator, dtype=torch.float64).to(dtype)


def outcome(layer: MoELayer, x: Tensor, real: Tensor | None = None, keyed: bool = True) -> dict[str, Tensor]:
    """The output and the gradients of x and of every parameter, for one direction of the output."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(3)  # for noise without a key
    y = layer(x, real, dropout_key(0, 1, torch.arange(len(x))) if keyed else None)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (y * direction.to(y.dtype)).sum().backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def assert_alike(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = ROUNDING) -> None:
    """In float64 relative to the largest of them, since a gradient may be nothing but what rounding has left."""
    largest = max(each.double().norm() for each in want.values())
    assert got.keys() == want.keys()
    for name, each in want.items():
        assert got[name].dtype == each.dtype
        scale = largest if each.dtype == torch.float64 else each.double().norm()
        assert (got[name].double() - each.double()).norm() <= tolerance * scale, name


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_sort_equals_einsum_over_all_routes(route):
    for factor, masked in product((0.0, 0.5, 1.0, 2.0), (False, True)):
        settings = {**route, "capacity_factor": factor, "mask_padding": masked, "aux_weight": 0.3}
        sort, einsum = (build(dispatch=dispatch, **settings) for dispatch in ("sort", "einsum"))
        keyed = factor != 1.0  # else the noise is torch's
        assert_alike(outcome(sort, some_x(), PADDING, keyed), outcome(einsum, some_x(), PADDING, keyed))
        assert abs(sort.balance - einsum.balance) < ROUNDING * einsum.balance


@pytest.mark.parametrize("dispatch", ["sort", "einsum"])
def test_padding_is_routed_unless_it_is_masked(dispatch):
    x, layers = some_x(), [build(mask_padding=masked, dispatch=dispatch) for masked in (False, True)]
    assert torch.equal(layers[0](x, PADDING), layers[0](x))
    assert torch.equal(layers[1](x), layers[0](x))
    assert layers[0](x, PADDING)[~PADDING].any()
    assert not layers[1](x, PADDING)[~PADDING].any()
    assert relative_error(layers[1](x, PADDING)[PADDING], layers[0](x)[PADDING]) < ROUNDING


@pytest.mark.parametrize("fraction", [0.0, 1e-9, 0.01, 0.2, 1.0])
def test_sort_equals_einsum_in_evaluation(fraction):
    for route in ({}, {"top_k": 1}, {"second_policy": "random", "capacity_factor": 1.0}):
        sort, einsum = (build(dispatch=each, eval_fraction=fraction, **route).eval() for each in ("sort", "einsum"))
        assert_alike(outcome(sort, some_x()), outcome(einsum, some_x()))
        slots = {0.0: 4 if route.get("capacity_factor") else 14, 1e-9: 1, 0.01: 1, 0.2: 3, 1.0: 14}[fraction]
        assert sort.load.kept.sum() == sort.load.wanted.sum(0).clamp(max=slots).sum()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("changes", EXPERTS, ids=str)
def test_sort_equals_einsum_over_all_experts(changes, shared):
    for factor in (0.0, 1.0):
        route = {"shared_expert": shared, "capacity_factor": factor}
        assert_alike(*(outcome(build(changes, dispatch=each, **route), some_x()) for each in ("sort", "einsum")))


@pytest.mark.parametrize("wide", [False, True], ids=["router as stream", "router fp32"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_sort_equals_einsum_in_low_precision(precision, wide):
    """Both round every matrix product, bias, activation, weight and sum once: twelve times one after another, and as
    often in backward; products of bfloat16 are added up in float32, and its roundings are independent."""
    autocast, dtype = precision == "autocast", torch.bfloat16 if precision == "bfloat16" else torch.float32
    low = torch.bfloat16 if autocast else dtype
    tolerance = bound(low, 24, HIDDEN) if low == torch.float32 else likely_bound(low, stages=2 * 24)
    for route in ({}, {"top_k": 1}, {"second_policy": "sampling", "capacity_factor": 1.0}):
        layers = [build({}, dtype, gating_fp32=wide, dispatch=each, **route) for each in ("sort", "einsum")]
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            got, want = (outcome(layer, some_x(dtype=dtype)) for layer in layers)
            logits = layers[0].logits(x := some_x(dtype=dtype).flatten(0, 1))
        assert_alike(got, want, tolerance)
        assert got["y"].dtype == low
        assert logits.dtype == (torch.float32 if wide else low)
        assert not wide or torch.equal(logits, x.float() @ layers[0].router.weight.float().T)


@pytest.mark.parametrize("dispatch", ["sort", "einsum"])
def test_all_tokens_to_one_expert_and_none_to_the_others(dispatch):
    layer = build(top_k=1, dispatch=dispatch, aux_weight=0.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 100.0
    dense = FeedForward(replace(layer.config, d_ff=HIDDEN)).double()
    dense.load_state_dict({name: p[2] for name, p in layer.experts.state_dict().items()})
    got = outcome(layer, some_x().abs())
    assert relative_error(got["y"], dense(some_x().abs()).detach()) < ROUNDING
    for name, gradient in got.items():
        if name.startswith("experts"):
            assert gradient[2].any()
            assert not gradient[[0, 1, 3]].any()
    if dispatch == "sort":
        assert layer.load.wanted.tolist() == [[0, 0, 14, 0]]


@pytest.mark.parametrize("dispatch", ["sort", "einsum"])
def test_no_tokens(dispatch):
    routes = ({}, {"capacity_factor": 2.0, "second_policy": "sampling"}, {"top_k": 1, "shared_expert": True})
    for route, dtype in product(routes, (torch.float64, torch.float32)):
        layer = build({}, dtype, dispatch=dispatch, **route)
        got = outcome(layer, some_x(dtype=dtype)[:, :0])
        assert got["y"].shape == (2, 0, 8)
        assert not any(gradient.any() for gradient in got.values())
        assert layer.balance == 0


@pytest.mark.parametrize("dispatch", ["sort", "einsum"])
def test_other_ranks_shares_count_in_training_only(dispatch):
    layer = build(aux_weight=0.3, dispatch=dispatch)
    local, asked = outcome(layer, some_x()), []
    layer.average = lambda share: asked.append(share) or share.flip(0)
    assert not torch.equal(outcome(layer, some_x())["router.weight"], local["router.weight"])
    assert len(asked) == 1
    assert abs(asked[0].sum() - 1) < ROUNDING
    layer.eval()(some_x())
    assert len(asked) == 1


@pytest.mark.parametrize("policy", ["sampling", "random"])
def test_keyed_noise_is_a_rows_own_whatever_its_microbatch(policy):
    layer, x = build(second_policy=policy), some_x(batch=4)
    whole = layer(x, None, dropout_key(5, 6, torch.arange(4)))
    parts = [layer(x[rows], None, dropout_key(5, 6, torch.tensor(rows))) for rows in ([0], [1, 3], [2])]
    assert relative_error(torch.cat((parts[0], parts[1][:1], parts[2], parts[1][1:])), whole) < ROUNDING
    other = layer(x, None, dropout_key(5, 7, torch.arange(4)))
    assert not torch.equal(whole, other)
    layer.layer = 3  # another layer draws other numbers
    assert not torch.equal(layer(x, None, dropout_key(5, 6, torch.arange(4))), whole)
    assert torch.equal(layer.eval()(x), layer(x, None, dropout_key(5, 7, torch.arange(4))))


TOKENS = torch.randint(19, (2, 7), generator=torch.Generator().manual_seed(0))


def model_of(mixture: Mixture, **changes) -> TransformerLM:
    model = TransformerLM(replace(TOY, **changes, mixture=mixture))
    model.init_weights(seed=0)
    return model


def losses_of(model: TransformerLM, key: Tensor | None) -> list[Tensor]:
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
            found.append(losses_of(model_of(mixture, recompute=recompute), key))
    for plain, recomputed in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert not torch.equal(found[0][0], found[1][0])


def test_every_kth_layer_has_experts_which_learn():
    for every, kinds in ((1, "EEEE"), (2, "-E-E"), (3, "--E-")):
        model = model_of(Mixture(shared_expert=True), expert_every=every)
        assert "".join("E" if isinstance(b.feed_forward, MoELayer) else "-" for b in model.blocks) == kinds
    losses_of(model, None)
    layer = model.blocks[2].feed_forward
    assert all(p.grad.any() for p in (layer.router.weight, layer.experts.up.weight, layer.shared.up.weight))
    assert layer.layer == 2


def test_the_padding_mask_reaches_the_experts():
    for masked, tokens in ((False, 14), (True, 11)):
        model = model_of(Mixture(mask_padding=masked))
        model(TOKENS, None, PADDING)
        assert model.blocks[1].feed_forward.load.wanted.sum(1).tolist() == [tokens, tokens]


def test_an_experts_first_weights_depend_on_its_global_number_alone():
    name, device = "blocks.1.feed_forward.experts.down.weight", torch.device("cpu")
    model = TransformerLM(TOY, "meta")
    whole = model.initial_weight(name, torch.Size((4, 8, 24)), 5, device)
    model.blocks[1].feed_forward.experts.first = 2
    part = model.initial_weight(name, torch.Size((2, 8, 24)), 5, device)
    assert torch.equal(part, whole[2:])
    assert not any(torch.equal(whole[i], whole[j]) for i in range(4) for j in range(i))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_experts_survive_compilation():
    # One block of a model; a whole model, a dense one, is compiled in tests/benchmarks/test_e2e.py.
    model = model_of(Mixture(), num_layers=1, expert_every=1)
    want = model(TOKENS)
    model.blocks[0].compile(backend="eager")
    got = model(TOKENS)
    assert relative_error(got, want) < bound(torch.float32, stages=20, longest_sum=24)


def test_whatever_computes_a_model_it_asks_for_the_same_work():
    sort, einsum = (replace(TOY, mixture=Mixture(dispatch=way, capacity_factor=1.0)) for way in ("sort", "einsum"))
    assert model_flops(sort, 2, 7) == model_flops(einsum, 2, 7) == sum(forward_flops(sort, 2, 7).values()) * 3
    assert sum(forward_flops(einsum, 2, 7).values()) > sum(forward_flops(sort, 2, 7).values())
