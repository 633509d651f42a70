"""Fully sharded data parallelism: what is freed, when weights are gathered, mixed precision, state."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cs336_systems.comm import record
from cs336_systems.ddp import BucketedDDP
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig
from tests.support import ranks
from tests.support.parallel_cases import batch, loss_of, make, own_rows, rows_of
from tests.support.tolerances import bound

TOY = ModelConfig(vocab_size=19, context_length=7, d_model=24, d_ff=40, num_layers=3, num_heads=4)
LLAMA = {"tied_head": False, "positions": "rotary", "feed_forward": "swiglu"}
FUSED = {**LLAMA, "kernels": "triton", "attention": "flash"}
BERT = {"norm": "layernorm", "bias": True, "causal": False, "token_types": 2, "bert_heads": True}
TOLERANCE = bound(torch.float64, stages=100, longest_sum=TOY.d_ff)


def empty(unit) -> bool:
    return unit.full.untyped_storage().nbytes() == 0


def freed_case(group) -> None:
    model = FSDP(make(seed=group.rank()))
    assert all(map(empty, model.sharded))
    loss = loss_of(model, 0, group.rank(), group.size())
    assert all(map(empty, model.sharded)), "autograd keeps the weights, but not their memory"
    loss.backward()
    assert all(empty(unit) for unit in model.sharded if not unit.name.startswith("unused"))
    assert all(unit.gradients.flat is None or unit.gradients.work for unit in model.sharded)
    model.finish_gradient_synchronization()
    assert all(map(empty, model.sharded))
    assert all(unit.gradients.flat is None for unit in model.sharded)
    with torch.no_grad():
        model.module(torch.zeros(2, 4, dtype=torch.int64))
    assert all(map(empty, model.sharded)), "no backward frees what an evaluation of the bare module has gathered"
    frozen = FSDP(make(seed=0).requires_grad_(False))
    frozen.module(torch.zeros(2, 4, dtype=torch.int64))
    assert all(map(empty, frozen.sharded)), "nor what a frozen module has gathered"
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.dtype == parameter.dtype
    rows = [unit.rows[1] - unit.rows[0] for unit in model.sharded]
    assert [len(unit.shard) for unit in model.sharded] == rows


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_and_gradients_are_freed_after_use(world_size):
    ranks.run(freed_case, world_size)


def ahead_case(group) -> list[int]:
    """The most weights that are whole at once, when each layer of a chain begins its forward and its backward."""
    chain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))).double()
    most = {"forward": 0, "backward": 0}

    def watch(phase: str) -> None:
        most[phase] = max(most[phase], sum(not empty(unit) for unit in model.sharded))

    def watch_backward(layer, args, output) -> None:
        output.register_hook(lambda gradient: watch("backward"))

    model = FSDP(chain)
    for layer in chain:
        layer.register_forward_pre_hook(lambda *_: watch("forward"))
        layer.register_forward_hook(watch_backward)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    model.finish_gradient_synchronization()
    return [most["forward"], most["backward"]]


def test_two_layers_at_most_are_gathered_ahead():
    for forward, backward in ranks.run(ahead_case, 2):
        assert forward == 3
        assert backward <= 4  # one more until the gradient of the layer above is complete


def transformers_case(group, changes: dict) -> None:
    for recompute in ("none", "segments", "nested"):
        check_transformer(group, changes, recompute)


def check_transformer(group, changes: dict, recompute: str) -> None:
    """A step of the real model equals one process, tied head, biases, BERT's heads and recomputation included."""
    config = ModelConfig(**{**TOY.__dict__, **changes, "recompute": recompute})
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(config.vocab_size, (2, 4, 6), generator=generator)

    def build(seed: int) -> TransformerLM:
        torch.manual_seed(seed)
        model = TransformerLM(config).double()
        for p in model.parameters():
            p.data.normal_(std=0.3)
        return model

    reference = build(0)
    lm_loss(reference, tokens, targets).backward()
    model = FSDP(build(group.rank()))
    for _ in range(2):  # the second pass finds nothing left over from the first
        model.zero_grad()
        lm_loss(model, tokens.chunk(group.size())[group.rank()], targets.chunk(group.size())[group.rank()]).backward()
        model.finish_gradient_synchronization()
    units = {unit.shard: unit for unit in model.sharded}
    for (name, want), p in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (want.grad is None) == (p.grad is None), (recompute, name)
        if want.grad is not None:
            expected = want.grad[slice(*units[p].rows) if p in units else slice(None)]
            assert torch.allclose(p.grad, expected, TOLERANCE, TOLERANCE), (recompute, name)


@pytest.mark.parametrize("changes", [{}, BERT, FUSED], ids=["gpt", "bert", "fused"])
def test_the_transformer_equals_one_process(changes):
    ranks.run(transformers_case, 2, changes=changes)


def precision_case(group, dtype: str) -> None:
    """Layers compute in half precision, everything that is kept or reduced stays float32, and has the bits of one
    process that rounds and adds in the same order."""
    compute = getattr(torch, dtype)
    seen = []
    model = FSDP(make(seed=group.rank(), dtype=torch.float32), compute_dtype=compute)
    model.module.first.register_forward_hook(lambda layer, args, output: seen.append((args[0].dtype, output.dtype)))
    model.module.norm.register_forward_hook(lambda layer, args, output: seen.append((args[0].dtype, output.dtype)))
    with record() as events:
        loss = loss_of(model, 0, group.rank(), group.size())
        loss.backward()
        model.finish_gradient_synchronization()
    assert seen == [(compute, compute), (torch.float32, torch.float32)]
    assert loss.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    kinds = {(event.verb, event.dtype) for event in events}
    assert ("all-gather", compute) in kinds
    assert ("all-gather", torch.float32) not in kinds
    assert ("reduce-scatter", compute) not in kinds
    weights = {unit.name: unit for unit in model.sharded}
    for name, want in rounded_mean(compute, group.size()).items():
        if name in weights:
            mine = weights[name].shard.grad.as_subclass(torch.Tensor)
            assert torch.equal(mine, want[slice(*weights[name].rows)]), name
        elif group.size() == 2:  # more are added in an order that gloo chooses
            assert torch.equal(model.module.get_parameter(name).grad, want), name


def rounded_mean(dtype: torch.dtype, ranks: int) -> dict[str, torch.Tensor]:
    """Gradients of one process: matrices, and what enters them, are rounded to half precision, norms are not. The
    gradients of each rank's rows are widened to float32, added in the order of the ranks, and divided."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        named = {name: p.detach() for name, p in make(dtype=torch.float32).named_parameters() if "unused" not in name}
        w = {name: p.to(dtype) if p.dim() == 2 else p.clone() for name, p in named.items()}
        used = {name: p.requires_grad_() for name, p in w.items() if name != "first.bias"}  # which is frozen
        tokens, targets = (rows_of(each, rank, ranks) for each in batch(0))
        x = torch.tanh(F.linear(w["embedding.weight"][tokens], w["first.weight"], w["first.bias"].to(dtype)))
        y = F.linear(torch.tanh(F.linear(x, w["shared.weight"])), w["shared.weight"])
        x = F.layer_norm((x + y).float(), (5,), w["norm.weight"], w["norm.bias"]) * w["scale"]
        x = F.linear(x.to(dtype), w["last.weight"], w["last.bias"].to(dtype))
        logits = F.linear(x, w["embedding.weight"]).float()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for name, p in used.items():
            total[name] = p.grad.float() if name not in total else total[name] + p.grad.float()
    return {name: gradient / ranks for name, gradient in total.items()}


@pytest.mark.parametrize(("dtype", "world_size"), [("bfloat16", 2), ("float16", 2), ("bfloat16", 3)])
def test_masters_and_gradients_stay_float32(dtype, world_size):
    ranks.run(precision_case, world_size, dtype=dtype)


def state_case(group) -> None:
    """Whole weights go out and in; each rank takes its rows of them, or its own rows that it saved."""
    model = FSDP(make(seed=group.rank()))
    bare = make(seed=7)
    bare.load_state_dict(model.gather_full_params())
    require_equal(bare.state_dict(), make(seed=0).state_dict())
    require_equal(FSDP(bare).gather_full_params(), model.gather_full_params())
    own, want = {name: value.clone() for name, value in own_rows(model).items()}, make(seed=7).state_dict()
    model.module.load_state_dict(want)
    require_equal(model.gather_full_params(), want)
    model.load_state_dict(own)
    require_equal(model.gather_full_params(), make(seed=0).state_dict())


def require_equal(got: dict, want: dict) -> None:
    assert not [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_state_goes_out_and_in(world_size):
    ranks.run(state_case, world_size)


def refused_case(group) -> str:
    """A state of rows, of the wrapper or of a layer inside, as if they were all; a forward inside a forward. The model
    says how much of it is sharded."""
    model, first = FSDP(make(seed=0)), f"rows {6 * group.rank()} to {5 * group.rank() + 6} of 11 of embedding.weight"
    for module in (model, model.module, model.module.embedding):
        with pytest.raises(UserError, match=f"^state_dict.. would have {first}: call gather_full_params.. on every"):
            module.state_dict()
    assert model.module.norm.state_dict().keys() == {"weight", "bias"}  # which are whole
    nested = FSDP(Nested())
    nested.module.wrapper.append(nested)
    with pytest.raises(UserError, match="FSDP is inside `forward`: it cannot begin another pass"):
        nested(torch.ones(1, 2))
    nested.module.wrapper[0] = nn.Identity()
    nested(torch.ones(1, 2)).sum().backward()
    nested.finish_gradient_synchronization()
    model = FSDP(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5)))
    return next(line for line in repr(model).split("\n") if "this rank keeps" in line)


class Nested(nn.Module):
    """A module that calls its own wrapper in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.wrapper = nn.Linear(2, 2), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapper[0](self.layer(x))


def test_states_of_rows_and_nested_forwards_are_refused():
    for said, kept in zip(ranks.run(refused_case, 2), (24, 16), strict=True):
        assert f"shards 256 of 285 parameters: this rank keeps {29 + 108 + kept}" in said


def foreign_case(group, marked: bool, folder: str) -> None:
    """Rank 0's rows on every rank, and rows of which nothing says whose they are."""
    model = FSDP(make(seed=0))
    if group.rank() == 0:
        torch.save(own_rows(model), f"{folder}/saved")
    dist.barrier(group)
    state = torch.load(f"{folder}/saved", weights_only=True)
    model.load_state_dict(state if marked else {name: value.clone() for name, value in state.items()})
    loss_of(model, 0).backward()  # rank 0 learns of the others' error where it meets them


@pytest.mark.parametrize("marked", [True, False])
def test_rows_of_another_rank_are_refused(marked, tmp_path):
    rows = "are rows 0 to 6" if marked else "do not say which they are"
    words = f"6 of 11 rows of embedding.weight are loaded that {rows}, and this rank has rows"
    for error in ranks.run_failing(foreign_case, 2, marked=marked, folder=str(tmp_path)):
        assert words in error[1]


def gan_step(generator, discriminator, optimizers, step: int, rank: int, world: int, finish, frozen: bool) -> None:
    """The discriminator's step, then the generator's, whose loss flows backward through the discriminator."""
    random = torch.Generator().manual_seed(step)
    noise, real = (torch.randn(8, n, generator=random, dtype=torch.float64).chunk(world)[rank] for n in (3, 4))
    discriminator.requires_grad_(True)
    optimizers[1].zero_grad()
    made = generator(noise)
    (F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made.detach())).mean()).backward()
    finish(discriminator)
    optimizers[1].step()
    optimizers[0].zero_grad()
    discriminator.requires_grad_(not frozen)
    F.softplus(-discriminator(made)).mean().backward()
    finish(generator)
    optimizers[0].step()


def gan_case(group) -> None:
    for keep, frozen in product((False, True), repeat=2):
        models = []
        for seed in (0, group.rank()):
            torch.manual_seed(seed)
            sizes = ((3, 8), (8, 4)), ((4, 8), (8, 1))
            models.append([nn.Sequential(nn.Linear(*a), nn.Tanh(), nn.Linear(*b)).double() for a, b in sizes])
        wrapped = [FSDP(each, reshard_after_forward=not keep) for each in models[1]]
        ours, plain = ([torch.optim.Adam(each.parameters(), lr=0.01) for each in pair] for pair in (wrapped, models[0]))
        for step in range(3):
            gan_step(*models[0], plain, step, 0, 1, lambda model: None, frozen)
            place = (step, group.rank(), group.size())
            gan_step(*wrapped, ours, *place, lambda model: model.finish_gradient_synchronization(), frozen)
        for model, want in zip(wrapped, models[0], strict=True):
            full = model.gather_full_params()
            for name, value in want.state_dict().items():
                torch.testing.assert_close(full[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_gan_whose_loss_flows_through_another_wrapper_equals_one_process():
    ranks.run(gan_case, 2)


class Skipping(nn.Module):
    """A chain of layers, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.skipped = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(6)), -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == self.skipped else torch.tanh(layer(x))
        return x


def skipping_case(group) -> None:
    torch.manual_seed(0)
    plain, sharded = Skipping(), Skipping()
    sharded.load_state_dict(plain.state_dict())
    model = FSDP(sharded, reshard_after_forward=False)
    x = torch.ones(3, 4, dtype=torch.float64)
    for rank in range(group.size()):
        plain.skipped = 2 if rank == 1 else -1
        (plain(x).sum() / group.size()).backward()
    sharded.skipped = 2 if group.rank() == 1 else -1
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    for weight, want in zip(model.sharded, (layer.weight.grad for layer in plain.layers), strict=True):
        assert torch.equal(weight.shard.grad.as_subclass(torch.Tensor), want[slice(*weight.rows)])


def test_a_rank_may_leave_out_a_layer_whose_weight_is_kept():
    ranks.run(skipping_case, 2)


def test_a_dtype_that_cannot_hold_gradients_is_refused():
    for dtype in (torch.int8, torch.bool, torch.complex64, "float16"):
        for name in ("compute_dtype", "reduce_dtype"):
            with pytest.raises(UserError, match=f"^{name} {dtype} is not a floating-point dtype, such as"):
                FSDP(nn.Linear(2, 2), **{name: dtype})


def compiled_case(group) -> None:
    tokens, gradients = torch.arange(7).view(1, 7) + group.rank(), []
    for compiled in (False, True):
        torch.manual_seed(0)
        # One block, as to trace one takes seconds; two layers of the same code, each with its own weights.
        model, layers = TransformerLM(replace(TOY, num_layers=1)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for block in (*model.blocks, *layers) if compiled else ():
            block.compile(backend="eager")
        layers, wrapper = FSDP(layers, group=group), FSDP(model, group=group)
        loss = lm_loss(wrapper, tokens, tokens) + layers(tokens.new_ones(1, 4, dtype=torch.float32)).sum()
        loss.backward()
        for each in (layers, wrapper):
            each.finish_gradient_synchronization()
        gradients.append([p.grad.as_subclass(torch.Tensor) for p in (*layers.parameters(), *wrapper.parameters())])
    assert all(map(torch.equal, *gradients))
    for whole in (torch.compile(wrapper, backend="eager"), wrapper):
        if whole is wrapper:
            wrapper.compile(backend="eager")
        with pytest.raises(UserError, match="block by block"):
            whole(tokens)
    module = nn.Linear(2, 2)
    replicated = torch.compile(BucketedDDP(module), backend="eager")
    module.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UserError, match="weight is not the parameter that was wrapped"):
        replicated(torch.ones(1, 2))


def test_compiled_blocks_are_exact_and_a_compiled_wrapper_is_refused():
    ranks.run(compiled_case, 2)
