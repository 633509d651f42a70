"""Layers of every kind, whose parameters have any name and number of axes, and programs that replace parameters by
other tensors: the result is right, or every rank raises an error that names the cause, before a step."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations

from cs336_systems.model.moe import MoELayer
from cs336_systems.presets import Mixture, ModelConfig
from tests.support.fault_cases import ALL, FEW, Case, Net, Run, change, check, steps
from tests.support.parallel_cases import batch


class Mixed(nn.Module):
    """An embedding, what a subclass makes of its vectors (batch 4 6), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.build()
        self.double()

    def forward(self, tokens: Tensor, skip: bool = False) -> Tensor:
        return self.head(self.mix(self.embedding(tokens)))


def experts(dispatch: str) -> MoELayer:
    sizes = {"vocab_size": 9, "context_length": 4, "d_model": 6, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    mixture = Mixture(dispatch=dispatch, shared_expert=True, aux_weight=0.0)
    layer = MoELayer(ModelConfig(**sizes, num_experts=3, bias=True, mixture=mixture))
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer


class Layers(Mixed):
    """Attention, which reads the weight of a layer inside it without calling that, with projections in one matrix and
    in three; torch's own transformer; layers that keep a list of their parameters, and cells; weights of three and
    four axes, a norm over two axes; experts, sorted or one by one."""

    def build(self) -> None:
        self.one = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)
        self.three = nn.MultiheadAttention(6, 2, kdim=3, vdim=4, batch_first=True)
        self.inner = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(6, 6, 2, batch_first=True, bidirectional=True, proj_size=3)
        self.gru, self.rnn = nn.GRU(6, 6, batch_first=True), nn.RNN(6, 6, batch_first=True, bias=False)
        self.cell = nn.GRUCell(6, 6)
        self.wide, self.back = nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 1, 3, padding=1, bias=False)
        self.pairs, self.norm = nn.Bilinear(6, 6, 6), nn.LayerNorm((4, 6))
        self.sort, self.einsum = experts("sort"), experts("einsum")

    def mix(self, x: Tensor) -> Tensor:
        x = self.one(x, x, x)[0] + self.three(x, x[..., :3], x[..., :4], need_weights=False)[0]
        x = self.inner(x, x)
        x = x + self.cell(self.rnn(self.gru(self.lstm(x)[0])[0])[0].flatten(0, 1)).view_as(x)
        x = self.pairs(self.back(torch.tanh(self.wide(x[:, None])))[:, 0], torch.tanh(x))
        return self.norm(self.einsum(torch.tanh(self.sort(x))))


class Loose(Mixed):
    """Parameters beside layers, in a list and in a dictionary; one that is read before and after other layers."""

    def build(self) -> None:
        self.token, self.middle = nn.Parameter(torch.randn(1, 4, 6)), nn.Parameter(torch.randn(6, 6))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.listed = nn.ParameterList([torch.randn(6, 6) for _ in range(3)])
        self.named = nn.ParameterDict({"last": torch.randn(6, 6)})

    def mix(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x + self.token) @ self.middle)
        for matrix in self.listed:
            x = torch.tanh(x @ matrix)
        return torch.tanh(self.second(x)) @ self.middle @ self.named["last"]


class Table(nn.Module):
    """A layer that returns its weight, or a view of it."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.table, self.turned = nn.Parameter(torch.randn(6, 6)), turned

    def forward(self) -> Tensor:
        return self.table.T if self.turned else self.table


class Returned(Mixed):
    def build(self) -> None:
        self.plain, self.turned, self.between = Table(False), Table(True), nn.Linear(6, 6)

    def mix(self, x: Tensor) -> Tensor:
        plain, turned, early = self.plain(), self.turned(), self.embedding.weight
        x = torch.tanh(self.between(x) @ plain)
        return x @ turned + self.embedding(torch.zeros(1, dtype=torch.int64)) + early.mean(0)


class Tied(Mixed):
    """Parameters of other names than `weight` that are tied, within a layer and over layers."""

    def build(self) -> None:
        self.gru, self.attention = nn.GRU(6, 6, 2, batch_first=True), nn.MultiheadAttention(6, 2, batch_first=True)
        self.gru.weight_hh_l1, self.linear = self.gru.weight_hh_l0, nn.Linear(6, 6)
        self.linear.weight = self.attention.out_proj.weight

    def mix(self, x: Tensor) -> Tensor:
        return self.linear(self.attention(*[self.gru(x)[0]] * 3)[0])


class Normed(Mixed):
    """Weights that are computed from others: by hooks of old, whose result is an attribute, and by parametrizations."""

    def build(self) -> None:
        make = (nn.utils.weight_norm, nn.utils.spectral_norm, parametrizations.weight_norm)
        self.layers = nn.Sequential(*(each(nn.Linear(6, 6)) for each in (*make, parametrizations.orthogonal)))

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x))


class Ungiving(torch.autograd.Function):
    """A product whose backward gives the matrix no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(matrix)
        return x @ matrix

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[0].T, None


class Ungiven(Mixed):
    def build(self) -> None:
        self.first, self.scale, self.last = nn.Linear(6, 6), nn.Parameter(torch.ones(1, 1)), nn.Linear(6, 6)

    def mix(self, x: Tensor) -> Tensor:
        return self.last(Ungiving.apply(Ungiving.apply(self.first(x)[..., None], self.scale)[..., 0], self.last.weight))


def numbers() -> nn.Module:
    """A model of numbers, with respect to which there is a gradient."""
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 44), nn.Unflatten(-1, (4, 11))
    return nn.Sequential(*layers).double()


def read_before_forward(run: Run):
    """The loss is scaled by a weight that weight_norm computed before, on each rank from other numbers than rank 0."""
    scale = sum(layer.weight.detach().abs().sum() for layer in run.module.layers[:2])
    (scale * run.loss(0)).backward()
    yield
    run.step()
    yield from steps()(run)


def call_with(run: Run, step: int, others: dict[str, Tensor]) -> None:
    """The module computes with other tensors, which are made from its parameters."""
    tokens, targets = run.rows(step)
    run.criterion(torch.func.functional_call(run.module, others, (tokens,)), targets).backward()


def halved(run: Run, step: int) -> None:
    call_with(run, step, {name: p * 0.5 for name, p in run.module.named_parameters()})


def maml(run: Run, step: int) -> None:
    """A gradient through a step of gradient descent (arXiv:1703.03400)."""
    own = dict(run.module.named_parameters())
    gradients = torch.autograd.grad(run.loss(0), list(own.values()), create_graph=True)
    call_with(run, 1, {name: p - 0.1 * g for (name, p), g in zip(own.items(), gradients, strict=True)})


def some_inputs(run: Run, step: int) -> None:
    run.loss(step).backward(inputs=[run.module.norm.weight, run.module.last.weight])


def numbers_of(run: Run, step: int) -> tuple[Tensor, Tensor]:
    tokens, targets = run.rows(step)
    return tokens.double() / 11, targets


def smooth(run: Run, step: int, penalty: bool = False, create_graph: bool = False) -> None:
    """The loss of numbers may have a penalty of its gradient, and backward a graph of its own."""
    x, targets = numbers_of(run, step)
    output = run.model(x.requires_grad_())
    loss = run.criterion(output, targets)
    if penalty:
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        loss = loss + slope.square().mean()
    loss.backward(create_graph=create_graph)


def forward_mode(run: Run, step: int) -> None:
    x, targets = numbers_of(run, step)
    with forward_ad.dual_level():
        output, slope = forward_ad.unpack_dual(run.model(forward_ad.make_dual(x, torch.ones_like(x))))
        (run.criterion(output, targets) + slope.square().mean()).backward()


def row_by_row(run: Run, step: int) -> None:
    x, targets = numbers_of(run, step)
    run.criterion(torch.func.vmap(lambda row: run.model(row[None])[0])(x), targets).backward()


def bare_evaluation(run: Run):
    """Before a step and after it, the next loss is scaled by what the bare module computes."""
    run.backward(0)
    yield
    with torch.no_grad():
        run.module(batch(7)[0])
        run.step()
        scale = run.module(batch(7)[0]).abs().sum()
    (scale * run.loss(1)).backward()
    yield
    run.step()


def tie(run: Run) -> None:
    run.module.deep[0].weight = run.module.deep[1].weight


def share_memory(module: Net, rank: int) -> None:
    module.deep[0].weight = nn.Parameter(module.deep[1].weight.data)


def limit_rows(module: Net, rank: int) -> None:
    module.embedding.max_norm = 0.7


def assign_state(run: Run) -> None:
    state = run.module.state_dict(keep_vars=True)
    run.module.load_state_dict({name: value.detach().clone() for name, value in state.items()}, assign=True)


def share_with_buffer(module: Net, rank: int) -> None:
    module.register_buffer("rows", module.last.weight.data[:2])


REPLACED = "is not the parameter that was wrapped"
CASES = {
    "layers of every kind, torch's transformer, experts": Case(steps(), make=Layers, modes=FEW),
    "parameters beside layers, in lists and dictionaries": Case(steps(), make=Loose, modes=FEW),
    "a layer that returns its weight, or a view of it": Case(steps(), make=Returned, modes=FEW),
    "tied parameters of any name": Case(steps(), make=Tied, modes=FEW),
    "a function that gives a parameter no gradient": Case(steps(), make=Ungiven, modes=FEW),
    # On some processors a product of a matrix and a vector, which spectral_norm has, adds in another order if the
    # matrix does not begin at a multiple of 16 bytes, as in a flat buffer.
    "weight_norm and spectral_norm, old and new": Case(
        read_before_forward, make=Normed, inexact=("stage 1", "stage 2 in small buckets")
    ),
    "a functional_call with other parameters": Case(steps(of=halved), {"stage 3": f"embedding.weight {REPLACED}"}),
    "a step of model-agnostic meta-learning": Case(
        steps(1, maml), {"stage 3": "grad() with respect to embedding.weight"}
    ),
    "backward(inputs=...) of some parameters": Case(
        steps(1, some_inputs), {"stage 3": "backward() with respect to last.weight"}
    ),
    "a buffer that is a view of a weight": Case(
        steps(), {" | ".join(ALL[4:]): "last.weight and rows lie in one memory"}, prepare=share_with_buffer
    ),
    "evaluations of the bare module before and after a step": Case(bare_evaluation),
    "the same, with a fused optimizer": Case(bare_evaluation, cls=partial(torch.optim.AdamW, fused=True), inexact=ALL),
    "a ScriptModule": Case(
        steps(of=smooth),
        {"stage 3": "0.weight is compiled into a ScriptModule"},
        make=lambda: torch.jit.script(numbers()),
        inexact=ALL,
    ),
    "forward-mode gradients": Case(
        steps(1, forward_mode), {"stage 3": "differentiate with torch.autograd"}, make=numbers
    ),
    "torch.func.vmap": Case(
        steps(1, row_by_row), {"stage 3": "differentiate with torch.autograd"}, make=numbers, inexact=ALL
    ),
    "a gradient penalty": Case(steps(of=smooth, penalty=True), make=numbers),
    "backward(create_graph=True)": Case(steps(of=smooth, create_graph=True), make=numbers),
    "tied after wrapping": Case(change(tie), {"stage 3": f"deep.0.weight {REPLACED}"}),
    "two parameters in one memory": Case(
        steps(), {" | ".join(ALL[4:]): "deep.0.weight and deep.1.weight lie in one memory"}, prepare=share_memory
    ),
    "an embedding with a max_norm": Case(steps(), "embedding has a max_norm", prepare=limit_rows),
    "load_state_dict(assign=True)": Case(
        change(assign_state, at=1, number=3),
        {" | ".join(ALL[:-1]): f"scale {REPLACED}", "stage 3": "load without assign=True"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])
