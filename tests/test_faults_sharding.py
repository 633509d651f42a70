"""Layers of every kind, whose parameters have any name and number of axes, and programs that replace parameters by
other tensors: the result is right, or every rank raises an error that names the cause, before a step."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations

from tests.support.fault_cases import ALL, FEW, Case, Net, Run, check
from tests.support.parallel_cases import batch, rows_of
from tests.test_faults_ddp import steps


class Mixed(nn.Module):
    """An embedding, what a subclass makes of its vectors (batch 4 6), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.build()
        self.double()

    def forward(self, tokens: Tensor, skip: bool = False) -> Tensor:
        return self.head(self.mix(self.embedding(tokens)))


class Attention(Mixed):
    """Which reads the weight of a layer inside it without calling that; with projections in one matrix and in three."""

    def build(self) -> None:
        self.one = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)
        self.three = nn.MultiheadAttention(6, 2, kdim=3, vdim=4, batch_first=True)

    def mix(self, x: Tensor) -> Tensor:
        x = x + self.one(x, x, x)[0]
        return x + self.three(x, x[..., :3], x[..., :4], need_weights=False)[0]


class Torchs(Mixed):
    """torch's own transformer."""

    def build(self) -> None:
        self.inner = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def mix(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class Recurrent(Mixed):
    """Layers that keep a list of their parameters, and cells."""

    def build(self) -> None:
        self.lstm = nn.LSTM(6, 6, 2, batch_first=True, bidirectional=True, proj_size=3)
        self.gru, self.rnn = nn.GRU(6, 6, batch_first=True), nn.RNN(6, 6, batch_first=True, bias=False)
        self.cell = nn.GRUCell(6, 6)

    def mix(self, x: Tensor) -> Tensor:
        return self.cell(self.rnn(self.gru(self.lstm(x)[0])[0])[0].flatten(0, 1)).view_as(x)


class Images(Mixed):
    """Weights of three and four axes, and a norm over two axes."""

    def build(self) -> None:
        self.wide, self.back = nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 1, 3, padding=1, bias=False)
        self.pairs, self.norm = nn.Bilinear(6, 6, 6), nn.LayerNorm((4, 6))

    def mix(self, x: Tensor) -> Tensor:
        y = self.back(torch.tanh(self.wide(x[:, None])))[:, 0]
        return self.norm(self.pairs(y, torch.tanh(x)))


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


class Viewed(Mixed):
    """A buffer that is a view of a weight, which training changes."""

    def build(self) -> None:
        self.linear = nn.Linear(6, 6).double()
        self.register_buffer("rows", self.linear.weight.data[:2])

    def mix(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.rows.sum()


class Smooth(nn.Module):
    """Of numbers, with respect to which there is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 44)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).view(-1, 11)


def read_before_forward(run: Run):
    """The loss is scaled by a weight that weight_norm computed before, on each rank from other numbers than rank 0."""
    scale = sum(layer.weight.detach().abs().sum() for layer in run.module.layers[:2])
    (scale * run.loss(0)).backward()
    yield
    run.step()
    yield from steps(2)(run)


def called_with(change: Callable[[Tensor], Tensor]) -> Callable:
    """The module computes with other tensors, which are made from its parameters."""

    def program(run: Run):
        run.backward(0)
        yield
        run.step()
        others = {name: change(p) for name, p in run.module.named_parameters()}
        tokens, targets = (rows_of(each, run.rank, run.world) for each in batch(1))
        logits = torch.func.functional_call(run.module, others, (tokens,))
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        yield
        run.step()

    return program


def maml(run: Run):
    """A gradient through a step of gradient descent (arXiv:1703.03400)."""
    own = dict(run.module.named_parameters())
    gradients = torch.autograd.grad(run.loss(0), list(own.values()), create_graph=True)
    others = {name: p - 0.1 * g for (name, p), g in zip(own.items(), gradients, strict=True)}
    tokens, targets = (rows_of(each, run.rank, run.world) for each in batch(1))
    logits = torch.func.functional_call(run.module, others, (tokens,))
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    yield
    run.step()


def some_inputs(run: Run):
    run.loss(0).backward(inputs=[run.module.norm.weight, run.module.last.weight])
    yield
    run.step()


def smooth_loss(run: Run, step: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, targets = (rows_of(each, run.rank, run.world) for each in batch(step))
    x = (tokens.double() / 11).requires_grad_()
    output = run.model(x)
    return x, output, F.cross_entropy(output, targets.flatten())


def gradient_penalty(run: Run):
    for step in range(2):
        x, output, loss = smooth_loss(run, step)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (loss + slope.square().mean()).backward()
        yield
        run.step()


def differentiable_backward(run: Run):
    for step in range(2):
        smooth_loss(run, step)[2].backward(create_graph=True)
        yield
        run.step()


def forward_mode(run: Run):
    tokens, targets = (rows_of(each, run.rank, run.world) for each in batch(0))
    with forward_ad.dual_level():
        x = tokens.double() / 11
        output, slope = forward_ad.unpack_dual(run.model(forward_ad.make_dual(x, torch.ones_like(x))))
        (F.cross_entropy(output, targets.flatten()) + slope.square().mean()).backward()
    yield
    run.step()


def row_by_row(run: Run):
    tokens, targets = (rows_of(each, run.rank, run.world) for each in batch(0))
    output = torch.func.vmap(lambda row: run.model(row[None]))(tokens.double() / 11)
    F.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
    yield
    run.step()


def smooth_steps(run: Run):
    for step in range(2):
        smooth_loss(run, step)[2].backward()
        yield
        run.step()


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


def tie_after_wrapping(run: Run):
    run.module.deep[0].weight = run.module.deep[1].weight
    run.remember()
    yield from steps(2)(run)


def share_memory(module: Net, rank: int) -> None:
    module.deep[0].weight = nn.Parameter(module.deep[1].weight.data)


def limit_rows(module: Net, rank: int) -> None:
    module.embedding.max_norm = 0.7


def assigned_state(run: Run):
    run.backward(0)
    yield
    run.step()
    state = run.module.state_dict(keep_vars=True)
    run.module.load_state_dict({name: value.detach().clone() for name, value in state.items()}, assign=True)
    run.remember()
    yield from steps(2)(run)


def with_average(run: Run):
    """An average of the weights over time takes them one by one, and its values come back into the model."""
    average = copy.deepcopy(run.module.bare)
    for step in range(3):
        run.backward(step)
        yield
        run.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), run.module.parameters(), strict=True):
                mean.mul_(0.5).add_(p, alpha=0.5)
    with torch.no_grad():
        for mean, p in zip(average.parameters(), run.module.parameters(), strict=True):
            p.copy_(mean)


def keep_bare(module: Net, rank: int) -> None:
    torch.manual_seed(0)
    object.__setattr__(module, "bare", Net())


KINDS = {
    "attention, which reads a layer inside that it does not call": Attention,
    "torch's own transformer": Torchs,
    "recurrent layers, with projections and both ways": Recurrent,
    "weights of three and four axes, a norm over two": Images,
    "parameters beside layers, in lists and dictionaries": Loose,
    "a layer that returns its weight, or a view of it": Returned,
    "tied parameters of any name": Tied,
    "a function that gives a parameter no gradient": Ungiven,
}
REPLACED = "is not the parameter that was wrapped"
CASES = {name: Case(steps(2), make=make, modes=FEW) for name, make in KINDS.items()} | {
    # On some processors a product of a matrix and a vector, which spectral_norm has, adds in another order if the
    # matrix does not begin at a multiple of 16 bytes, as in a flat buffer.
    "weight_norm and spectral_norm, old and new": Case(
        read_before_forward, make=Normed, inexact=("stage 1", "stage 2 in small buckets")
    ),
    "a functional_call with other parameters": Case(
        called_with(lambda p: p * 0.5), {"stage 3": f"embedding.weight {REPLACED}"}
    ),
    "a functional_call with other tensors of no gradient, then backward of the loss": Case(
        called_with(lambda p: p.detach().clone().requires_grad_()), {"stage 3": f"embedding.weight {REPLACED}"}
    ),
    "a step of model-agnostic meta-learning": Case(maml, {"stage 3": "grad() with respect to embedding.weight"}),
    "backward(inputs=...) of some parameters": Case(some_inputs, {"stage 3": "backward() with respect to last.weight"}),
    "a buffer that is a view of a weight": Case(
        steps(2), {" | ".join(ALL[4:]): "linear.weight and rows lie in one memory"}, make=Viewed
    ),
    "evaluations of the bare module before and after a step": Case(bare_evaluation),
    "the same, with a fused optimizer": Case(bare_evaluation, cls=partial(torch.optim.AdamW, fused=True), inexact=ALL),
    "a ScriptModule": Case(
        smooth_steps,
        {"stage 3": "layers.0.weight is compiled into a ScriptModule"},
        make=lambda: torch.jit.script(Smooth()),
        inexact=ALL,
    ),
    "forward-mode gradients": Case(forward_mode, {"stage 3": "differentiate with torch.autograd"}, make=Smooth),
    "torch.func.vmap": Case(row_by_row, {"stage 3": "differentiate with torch.autograd"}, make=Smooth, inexact=ALL),
    "a gradient penalty": Case(gradient_penalty, make=Smooth),
    "backward(create_graph=True)": Case(differentiable_backward, make=Smooth),
    "tied after wrapping": Case(tie_after_wrapping, {"stage 3": f"deep.0.weight {REPLACED}"}),
    "two parameters in one memory": Case(
        steps(2), {" | ".join(ALL[4:]): "deep.0.weight and deep.1.weight lie in one memory"}, prepare=share_memory
    ),
    "an embedding with a max_norm": Case(steps(2), "embedding has a max_norm", prepare=limit_rows),
    "load_state_dict(assign=True)": Case(
        assigned_state, {" | ".join(ALL[:-1]): f"scale {REPLACED}", "stage 3": "load without assign=True"}
    ),
    "an average over time, by zip with a plain model's parameters": Case(
        with_average, {"stage 3": "add() of embedding.weight would see rows"}, prepare=keep_bare
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])
