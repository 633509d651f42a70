"""An expert layer whose experts are on several ranks, against one process that has them all: tokens spread
unevenly, none, or all on one expert; messages and their order; and refusals."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.comm import Mesh, Work, all_reduce, pairs, record
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.model.moe import MoELayer
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import Mixture, ModelConfig
from tests.support import ranks
from tests.support.layout_cases import wide
from tests.support.parallel_models import part_of_experts
from tests.support.tolerances import bound

D, SEQ, EXPERTS = 8, 2, 4
CONFIG = ModelConfig(16, SEQ, D, 12, 1, 2, num_experts=EXPERTS, expert_every=1, bias=True, norm="layernorm")
MIXTURES = {
    "dropless": Mixture(aux_weight=0.5),
    "capped": Mixture(aux_weight=0.5, capacity_factor=1.0, prioritized=True),
    "top1": Mixture(aux_weight=0.5, top_k=1, capacity_factor=1.0),
    "shared": Mixture(aux_weight=0.5, shared_expert=True, aux_scope="global"),
}
ROWS = {2: [[3, 3], [5, 2], [4, 0], [0, 0]], 4: [[2, 2, 2, 2], [3, 0, 5, 1]]}  # of each rank's batch
# The router's product, softmax, weights (5), two products and activation, weighted rows, sum, balance: 3 times, since
# backward has two for each. The longest sum is over the tokens or the hidden width.
ALLOWED = bound(torch.float64, stages=3 * 14, longest_sum=2 * SEQ * 12)


def whole_layer(config: ModelConfig) -> TransformerLM:
    model = TransformerLM(config, "cpu")
    model.init_weights(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(50.0 if "router" in name else 5.0)
    return model


def layer_of(model: TransformerLM) -> MoELayer:
    return model.blocks[0].feed_forward


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def require_close(got: Tensor, want: Tensor, what: object) -> None:
    assert got.shape == want.shape, what
    assert (got - want).norm() <= ALLOWED * want.norm(), what


def one_process(config: ModelConfig, rows: list[int], skew: bool) -> tuple[MoELayer, list[Tensor], list[Tensor]]:
    """The layer of all ranks by einsum, and their x and y, after backward. Shares of a global balancing loss are those
    of all ranks, counted beforehand."""
    layer = layer_of(whole_layer(replace(config, mixture=replace(config.mixture, dispatch="einsum"))))
    xs = [inputs(rank, number, skew) for rank, number in enumerate(rows)]
    if skew:
        steer(layer)
    if config.mixture.aux_scope == "global":
        shares = []
        layer.average = lambda share: shares.append(share) or share
        for x in xs:
            layer(x)
        mean = torch.stack(shares).mean(0)
        layer.average = lambda share: mean
    ys = [layer(x) if x.numel() else x.detach() for x in xs]
    for rank, y in enumerate(ys):
        if y.numel():
            y.backward(drawn(100 + rank, *y.shape))
    return layer, xs, ys


def inputs(rank: int, rows: int, skew: bool) -> Tensor:
    x = drawn(rank, rows, SEQ, D)
    if skew:
        x[..., 0] = 10.0
    return x.requires_grad_()


def steer(layer: MoELayer) -> None:
    """Every token's first choice is the last expert."""
    with torch.no_grad():
        layer.router.weight[:, 0] = 0.0
        layer.router.weight[-1, 0] = 100.0


def layer_case(group) -> None:
    wide()
    for name, mixture in MIXTURES.items():
        for rows in ROWS[group.size()]:
            for dispatch in ("sort", "einsum"):
                if dispatch == "sort" or rows == [rows[0] or None] * len(rows):  # slots are as many on all ranks
                    check_layer(group, replace(CONFIG, mixture=replace(mixture, dispatch=dispatch)), rows, False, name)
    check_layer(group, replace(CONFIG, mixture=MIXTURES["top1"]), ROWS[group.size()][0], True, "all to one expert")
    full = replace(MIXTURES["top1"], capacity_factor=0.0)
    check_layer(group, replace(CONFIG, mixture=full), ROWS[group.size()][1], True, "all to one expert, dropless")
    swiglu = replace(CONFIG, feed_forward="swiglu", mixture=replace(MIXTURES["dropless"], expert_gradient="sqrt"))
    check_layer(group, swiglu, ROWS[group.size()][1], False, "sqrt")
    check_dry(group)
    check_copy(group)


def check_layer(group, config: ModelConfig, rows: list[int], skew: bool, what: str) -> None:
    size, me = group.size(), group.rank()
    if config.mixture.aux_scope == "global" and not all(rows):
        return  # a rank without tokens has no share of theirs
    what = (what, rows, config.mixture.dispatch)
    want, xs, ys = one_process(config, rows, skew)
    model = whole_layer(config)
    if skew:
        steer(layer_of(model))
    plan, layer = expert_parallel(model, group), layer_of(model)
    x = inputs(me, rows[me], skew)
    with record() as events:
        y = layer(x)
        y.backward(drawn(100 + me, *y.shape))
    require_close(y.detach(), ys[me].detach(), what)
    require_close(x.grad, torch.zeros_like(x) if xs[me].grad is None else xs[me].grad, what)
    factor = size**0.5 if config.mixture.expert_gradient == "sqrt" else 1.0
    named = dict(want.named_parameters())
    assert plan.names == {f"blocks.0.feed_forward.{name}" for name in named if name.startswith("experts.")}
    for name, parameter in layer.named_parameters():
        all_of_it = named[name].grad
        all_of_it = torch.zeros_like(named[name]) if all_of_it is None else all_of_it
        got = parameter.grad.clone()
        if name.startswith("experts."):  # the sum over all ranks over their number
            wanted = part_of_experts(plan, f"blocks.0.feed_forward.{name}", all_of_it) * factor / size
            assert (got - wanted).norm() <= ALLOWED * all_of_it.norm(), (name, what)
        else:  # this rank's part of the sum
            all_reduce(got.view(-1), group, name, "sum").wait()
            require_close(got, all_of_it, (name, what))
    if what[2] == "sort":
        check_events(group, layer, config, events, what)


def check_events(group, layer: MoELayer, config: ModelConfig, events: list, what: object) -> None:
    """A record lists the counts, then the rows that were kept, there and back, forward and backward."""
    kept, row = int(layer.load.kept.sum()), D * 8
    listed = [(event.label, event.nbytes) for event in events if event.verb == "all-to-all"]
    here = listed[2][1] // row  # rows that came
    mine = [("dispatch", kept), ("combine", here), ("combine, gradient", kept), ("dispatch, gradient", here)]
    assert listed == [("expert counts", EXPERTS * 8), *((label, rows * row) for label, rows in mine)], what
    total = torch.tensor([kept - here])
    all_reduce(total, group, "rows", "sum").wait()
    assert not total.item(), "every row that leaves comes"
    if not config.mixture.capacity_factor:
        tokens = int(layer.load.wanted[0].sum())
        assert kept == config.mixture.top_k * tokens


def check_dry(group) -> None:
    """In evaluation a rank without any rows takes part, and changes nothing for the others."""
    config = replace(CONFIG, mixture=replace(MIXTURES["capped"], eval_fraction=0.5))
    tokens = torch.arange(6).view(3, SEQ)
    want = whole_layer(config).eval()(tokens)
    model = whole_layer(config)
    expert_parallel(model, group)
    mine = tokens if group.rank() == 0 else tokens[:0]
    with torch.no_grad():
        logits = model.eval()(mine)
    require_close(logits, want.detach()[: len(mine)], "dry")


def check_copy(group) -> None:
    """A deep copy shares the group and nothing else."""
    config = replace(CONFIG, mixture=MIXTURES["shared"])
    model = whole_layer(config)
    expert_parallel(model, group)
    twin, x = copy.deepcopy(model), inputs(group.rank(), 2, False)
    assert torch.equal(layer_of(twin)(x), layer_of(model)(x))
    assert layer_of(twin).dispatcher is not layer_of(model).dispatcher
    assert layer_of(twin).dispatcher.group is layer_of(twin).average.keywords["group"] is group


@pytest.mark.parametrize("size", ROWS)
def test_a_layer_over_ranks_is_one_processs_layer(size):
    ranks.run(layer_case, size)


class Told(Work):
    """A collective that says when it is waited for."""

    def __init__(self, work: Work, said: list[str]) -> None:
        self.work, self.said = work, said

    def wait(self) -> None:
        self.said.append(f"wait {self.work.event.label}")
        self.work.wait()


def order_case(group) -> list[str]:
    said: list[str] = []
    begin = pairs.all_to_all

    def told(*arguments: object) -> Told:
        said.append(f"begin {arguments[-1]}")
        return Told(begin(*arguments), said)

    pairs.all_to_all = told
    model = whole_layer(replace(CONFIG, mixture=MIXTURES["shared"]))
    expert_parallel(model, group)
    layer = layer_of(model)
    for name in ("shared", "experts"):
        module = getattr(layer, name)
        module.register_forward_hook(lambda module, args, y, name=name: said.append(name))
        # The first and the last product that backward comes to.
        for part, when in ((module.down, "begins"), (module.up, "ends")):
            parameter = part.weight
            parameter.register_hook(lambda gradient, name=name, when=when: said.append(f"{name} backward {when}"))
    x = inputs(group.rank(), 3, False)
    layer(x).sum().backward()
    return said


def test_a_shared_expert_computes_while_rows_travel_forward_and_backward():
    for said in ranks.run(order_case, 2):
        assert said == [
            *("begin dispatch", "shared", "wait dispatch", "experts", "begin combine", "wait combine"),
            *("begin combine, gradient", "wait combine, gradient", "experts backward begins", "experts backward ends"),
            *("begin dispatch, gradient", "shared backward begins", "shared backward ends", "wait dispatch, gradient"),
        ]


def refused_case(group) -> None:
    with pytest.raises(UserError, match="5 experts do not divide over ep 2"):
        expert_parallel(whole_layer(replace(CONFIG, num_experts=5)), group)
    dense = TransformerLM(replace(CONFIG, num_experts=0))
    with pytest.raises(UserError, match="ep 2 splits experts, and the model has none"):
        expert_parallel(dense, group)
    assert not expert_parallel(dense, Mesh().ep).names
    sparse = whole_layer(CONFIG)
    expert_parallel(sparse, group)
    with pytest.raises(UserError, match="experts are split over ranks already"):
        expert_parallel(sparse)


def test_a_model_that_does_not_divide_is_refused_on_every_rank():
    ranks.run(refused_case, 2)
