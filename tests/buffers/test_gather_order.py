"""Parameters that FSDP shards, of any name and number of axes, and the times when it gathers and frees each."""

from collections import Counter

import torch
from torch import Tensor, nn

from cs336_systems.comm import record
from cs336_systems.fsdp import FSDP
from tests.support import ranks
from tests.support.tolerances import bound


def whole(model: FSDP) -> list[str]:
    """The names of the parameters that are whole on this rank now."""
    return [each.name for each in model.sharded if each.full.untyped_storage().nbytes()]


class Everything(nn.Module):
    """Parameters of every kind; `token` is the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 6))
        self.layers = nn.ModuleList(nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(3))
        self.lstm, self.conv, self.norm = nn.LSTM(6, 6, batch_first=True), nn.Conv1d(4, 4, 1), nn.LayerNorm((4, 6))
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2, 0))
        self.turn = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
        self.watch = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
            self.watch()
        return self.norm(self.conv(self.lstm(x)[0])) * self.scale


def sharded_case(group) -> list:
    model = FSDP(Everything())
    most: list[list[str]] = []
    model.module.watch = lambda: most.append(whole(model))
    with record() as events:
        model(torch.randn(2, 4, 6)).square().sum().backward()
        model.finish_gradient_synchronization()
    assert not whole(model)
    model.module.watch = lambda: None
    assert model.module.lstm._flat_weights[0] is model.module.lstm.weight_ih_l0, "the whole weight is still held"
    gathers = Counter(event.label for event in events if event.verb == "all-gather")
    return [[each.name for each in model.sharded], most, gathers]


def test_which_parameters_are_sharded_and_when_they_are_whole():
    """All of two or more axes but norms', complex and empty ones; each is gathered twice, and the root's own matrix is
    whole during the whole forward, an attention's output matrix only while the attention is computed, or is ahead."""
    attention = [f"layers.{n}.{name}" for n in range(3) for name in ("in_proj_weight", "out_proj.weight")]
    names = ["token", *attention, "lstm.weight_ih_l0", "lstm.weight_hh_l0", "conv.weight"]
    for found, most, gathers in ranks.run(sharded_case, 2):
        assert found == names
        assert gathers == dict.fromkeys(names, 2)
        assert most == [["token", *names[3 + 2 * n : 5 + 2 * n]] for n in range(3)]


def kept_case(group) -> list:
    """What is whole after forward and in backward, with weights that stay whole between, and a step's gathers."""
    chain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
    model, x = FSDP(chain, reshard_after_forward=False), torch.ones(2, 6, dtype=torch.float64)
    chain[0].register_full_backward_hook(lambda *_: kept.append(whole(model)))
    with record() as events:
        output = model(x)
        kept = [whole(model)]
        output.sum().backward()
        model.finish_gradient_synchronization()
    assert not whole(model)
    with torch.no_grad():
        model(x)
    assert not whole(model), "nothing is kept where no backward follows"
    return [kept, Counter(event.label for event in events if event.verb == "all-gather")]


def test_weights_that_are_kept_after_forward_are_gathered_once_and_freed_by_their_backward():
    names = ["0.weight", "1.weight", "2.weight"]
    for kept, gathers in ranks.run(kept_case, 2):
        assert kept == [names, names[:1]]
        assert gathers == dict.fromkeys(names, 1)


def reduced_case(group) -> list:
    """Gradients that travel in bfloat16 are added up and kept in float32."""
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 4, bias=False), torch.randn(3, 2, 5, 6)
    model, wanted = FSDP(layer, reduce_dtype=torch.bfloat16), torch.zeros(4, 6)
    with record() as events:
        for each in x:
            model(each[group.rank()]).square().sum().backward()
        model.finish_gradient_synchronization()
    weight = model.gather_full_params()["weight"].requires_grad_()
    for each in x.unbind(0):
        for rows in each:
            wanted += torch.autograd.grad(nn.functional.linear(rows, weight).square().sum(), weight)[0].bfloat16() / 2
    gradient = model.module.weight.grad.as_subclass(Tensor)
    wanted = wanted[slice(*model.sharded[0].rows)]
    # Each of three means is rounded to bfloat16 once more.
    torch.testing.assert_close(gradient, wanted, rtol=bound(torch.bfloat16, stages=3), atol=0.05)
    return [str(event.dtype) for event in events if event.verb == "reduce-scatter"] + [str(gradient.dtype)]


def test_gradients_travel_in_the_dtype_of_the_reduction():
    for found in ranks.run(reduced_case, 2):
        assert found == ["torch.bfloat16"] * 3 + ["torch.float32"]
