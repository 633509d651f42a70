"""Misuse of the sharded optimizer alone: the result is right, or every rank raises an error that names the cause. All
ranks have the same gradients, so that one process with the plain optimizer is the reference."""

import copy
import re
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.buffers.bucket import SHARDED
from cs336_systems.check.targets import foreign
from cs336_systems.ddp import BucketedDDP
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.zero import zero
from tests.support import ranks
from tests.support.fault_cases import KINDS, Case, Net, compare, oracle, start, steps
from tests.support.parallel_cases import loss_of

LAYOUTS = ("flat", "whole")
SGD = partial(torch.optim.SGD, lr=0.1)


def require_refusal(group, words: str, program: Callable[[], object], error: type = UserError) -> None:
    """Every rank raises the error, and the next program begins when all have."""
    with pytest.raises(error, match=re.escape(words)):
        program()
    dist.barrier(group)


def step_alike(model: nn.Module, optimizer, other: nn.Module, reference, number: int = 3, **options) -> None:
    """Both learn the same, to the bit."""
    other.load_state_dict(model.state_dict())
    for step, (each, its) in product(range(number), ((model, optimizer), (other, reference))):
        each.zero_grad()
        loss_of(each, step).backward()
        its.step(**options)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


CUT = "does not treat every element by itself"
REFUSED = {
    ("LBFGS", "flat"): "LBFGS searches along one direction",
    ("LBFGS", "whole"): "LBFGS searches along one direction",
    ("SparseAdam", "flat"): "SparseAdam takes sparse gradients",
    ("SparseAdam", "whole"): "SparseAdam takes sparse gradients",
    ("Muon", "flat"): f"Muon {CUT}, so a parameter cannot be cut for it; use layout=",
    ("Adafactor", "flat"): f"Adafactor {CUT}",
    ("SGD", "round"): "layout 'round' does not exist",
}


def unshardable_case(group) -> None:
    for (name, layout), words in REFUSED.items():
        with pytest.raises(UserError, match=re.escape(words)):
            ShardedOptimizer([nn.Parameter(torch.ones(4, 4))], getattr(torch.optim, name), layout=layout, lr=0.1)
    for stage, name in product((1, 2, 3), ("Muon", "Adafactor", "LBFGS")):
        with pytest.raises(UserError, match=f"{name} ({CUT}|searches along one)"):
            zero(Net(), getattr(torch.optim, name), stage, lr=0.1)
    for layout in LAYOUTS:
        embedding = nn.Embedding(4, 2, sparse=True)
        optimizer = ShardedOptimizer(embedding.parameters(), SGD, layout=layout)
        embedding(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(UserError, match=r"a gradient of shape \(4, 2\) is sparse and cannot be cut"):
            optimizer.step()


def arguments_case(group) -> None:
    for stage in (4, 1.0, "1"):
        with pytest.raises(UserError, match=f"ZeRO has stages 0 to 3, not {stage!r}"):
            zero(Net(), SGD, stage)
    assert isinstance(zero(Net(), SGD, np.int64(3))[0], FSDP)
    with pytest.raises(UserError, match=r"the optimizer's class is needed, such as torch.optim.AdamW, not 'sgd'"):
        zero(Net(), "sgd", 1)
    with pytest.raises(UserError, match=r"`apart` are parameters of the module, which 2 of them are not"):
        zero(Net(), SGD, 1, apart=["weight", nn.Parameter(torch.ones(2))])
    net = Net()
    assert len(zero(net, SGD, 0, apart=iter([next(net.parameters())]))[0].buckets) == 2


class Told(torch.optim.SGD):
    """An optimizer whose step wants an argument, in which it tells how often it was called."""

    def step(self, closure=None, *, told=None):
        super().step(closure)
        told.append(1)


def step_with_arguments_case(group) -> None:
    with pytest.raises(UserError, match=r"Told does not treat .* AttributeError: 'NoneType' .*; use layout="):
        ShardedOptimizer(Net().parameters(), Told, lr=0.1)
    model, other, told = Net(), Net(), []
    optimizer = ShardedOptimizer(model.parameters(), Told, layout="whole", lr=0.1)
    step_alike(model, optimizer, other, Told(other.parameters(), lr=0.1), 1, told=told)
    assert told == [1, 1]


def whole_parameters_case(group) -> None:
    """What cannot be cut is right by whole parameters."""
    for cls in (torch.optim.Muon, torch.optim.Adafactor):
        torch.manual_seed(0)
        model, other = Net(), Net()
        mine, theirs = ([p for p in each.parameters() if p.dim() == 2] for each in (model, other))
        step_alike(model, ShardedOptimizer(mine, cls, layout="whole", lr=0.1), other, cls(theirs, lr=0.1))


def divided_by_other_means_case(group) -> None:
    """Ranks that step other parameters each, and send them, as torch's sharded optimizer does beside a wrapper."""
    torch.manual_seed(0)
    wrapped = BucketedDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), group=group)
    optimizer = foreign("torch:zero")[1](list(wrapped.parameters()), torch.optim.AdamW, lr=0.1)
    for _ in range(3):
        wrapped(torch.ones(3, 4)).sum().backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        wrapped.zero_grad()


def not_made_on_one_rank_case(group) -> None:
    """One rank's first attempt fails before it meets the others; equal numbers of optimizers are made all the same."""
    if group.rank() == 1:
        with pytest.raises(ValueError, match="empty parameter list"):
            ShardedOptimizer([], SGD, group)
    weight = nn.Parameter(torch.ones(4))
    optimizer = ShardedOptimizer([weight], SGD, group)
    weight.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((4,), 0.9))


def two_groups_case(group) -> None:
    for layout in LAYOUTS:
        model = Net()
        groups = [{"params": [model.scale]}, {"params": list(model.parameters())}]
        make = partial(ShardedOptimizer, groups, SGD, layout=layout)
        require_refusal(group, "some parameters appear in more than one parameter group", make, ValueError)


def move(model: Net) -> None:
    model.scale.data = model.scale.data.clone()


def changed_later_case(group) -> None:
    """A parameter that left its buffer, or wants a gradient now."""
    for layout in LAYOUTS:
        for act in (Net.float, move):
            model = Net()
            optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, layout=layout)
            before = [p.detach().clone() for p in model.parameters()]
            act(model)
            loss_of(model, 0).backward()
            require_refusal(group, "moved or cast after the sharded optimizer was made", optimizer.step)
            for old, p in zip(before, model.parameters(), strict=True):
                assert torch.equal(p, old.to(p.dtype))
        model = Net()
        model.optional.requires_grad_(False)
        optimizer = ShardedOptimizer(model.parameters(), SGD, layout=layout)
        for wanted in (False, True):
            optimizer.zero_grad()
            model.optional.requires_grad_(wanted)
            loss_of(model, 0).backward()
            if not wanted:
                optimizer.step()
        require_refusal(group, "frozen when the sharded optimizer was made", optimizer.step)


def fewer_parameters_than_ranks_case(group) -> None:
    """Or fewer elements."""
    for layout, number in product(LAYOUTS, (1, 2)):
        weights, references = ([nn.Parameter(torch.arange(1.0, 3.0)) for _ in range(number)] for _ in range(2))
        optimizer = ShardedOptimizer(weights, torch.optim.Adam, layout=layout, lr=0.1)
        for mine, its in ((weights, optimizer), (references, torch.optim.Adam(references, lr=0.1))) * 2:
            sum((p**2).sum() for p in mine).backward()
            its.step()
            its.zero_grad()
        assert all(torch.equal(p, q) for p, q in zip(weights, references, strict=True))
        optimizer.load_state_dict(optimizer.state_dict())


CLOSURE = Case(steps(3, lambda run, step: run.backward(0)), cls=torch.optim.SGD, options={"lr": 0.5})


def closure_case(group) -> None:
    """A closure that does everything, the synchronisation included, as LBFGS-style loops do."""
    want = oracle(CLOSURE, group.size())
    for mode in KINDS:
        run = start(CLOSURE, mode, group)

        def closure(run=run):
            run.optimizer.zero_grad()
            loss = run.loss(0)
            loss.backward()
            run.model.finish_gradient_synchronization()
            return loss.detach()

        for _ in range(3):
            run.optimizer.step(closure)
        compare(group, CLOSURE, run, mode, want)


def another_order_on_one_rank_case(group) -> None:
    """A group's parameters are in another order on rank 1, as those of a set may be."""

    def groups(model: nn.Module) -> list[dict]:
        vectors = [p for p in model.parameters() if p.shape == (5,)]
        vectors = vectors if group.rank() == 0 else vectors[::-1]
        return [{"params": [p for p in model.parameters() if p.shape != (5,)]}, {"params": vectors}]

    words = "the ranks' optimizer parameters differ: rank 0 has first.bias (5,) torch.float64 in group "
    for stage in (1, 2):
        require_refusal(group, words, partial(zero, Net(), SGD, stage, param_groups=groups))
    model = BucketedDDP(Net())
    optimizer = ShardedOptimizer(groups(model)[0]["params"], SGD)
    require_refusal(group, words, lambda: optimizer.add_param_group(groups(model)[1]))


def class_with_options_case(group) -> None:
    """The class comes with options, and a complex number's state is gathered as it is."""
    weights = [nn.Parameter(torch.arange(5.0).to(torch.complex64) * (1 + 2j)) for _ in range(2)]
    cls = partial(torch.optim.Adam, lr=0.1)
    optimizers = ShardedOptimizer(weights[:1], cls), cls(weights[1:])
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = weight.detach() - 1j
        optimizer.step()
    assert torch.equal(*weights)
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def refused_uses_case(group) -> None:
    """A copy, and a wrapper with more parameters than the optimizer."""
    with pytest.raises(UserError, match="a copy would have this rank's state alone"):
        copy.deepcopy(ShardedOptimizer(Net().parameters(), SGD))
    model = BucketedDDP(Net(), gradients=SHARDED)
    make = partial(ShardedOptimizer, [model.module.scale], SGD, wrapper=model)
    require_refusal(group, "the wrapper synchronises parameters that the optimizer was not given", make)


@pytest.mark.parametrize(
    "case", [it for name, it in globals().items() if name.endswith("_case")], ids=lambda it: it.__name__
)
def test_right_or_an_error_that_names_the_cause(case):
    ranks.run(case, 3 if case is fewer_parameters_than_ranks_case else 2)


def crossing(group, layout: str) -> None:
    """Two optimizers of equal parameters, which rank 1 steps in another order."""
    weights = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizers = [ShardedOptimizer([each], torch.optim.SGD, layout=layout, lr=1.0) for each in weights]
    for optimizer in optimizers if group.rank() == 0 else optimizers[::-1]:
        optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_two_optimizers_are_not_mixed(layout):
    for error in ranks.run_failing(crossing, 2, layout=layout):
        assert "of optimizer 2" in error[1]
