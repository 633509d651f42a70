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
from cs336_systems.check.foreign import foreign
from cs336_systems.ddp import BucketedDDP
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.zero import zero
from tests.support import ranks
from tests.support.fault_cases import TOLERANCE, Net
from tests.support.parallel_cases import loss_of, spread

LAYOUTS = ("flat", "whole")


def model_and_optimizer(cls=torch.optim.AdamW, layout: str = "flat", **options) -> tuple[Net, ShardedOptimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, ShardedOptimizer(model.parameters(), cls, layout=layout, **options)


def require_refusal(group, words: str, program: Callable[[], object], error: type = UserError) -> None:
    """Every rank raises the error, and the next program begins when all have."""
    with pytest.raises(error, match=re.escape(words)):
        program()
    dist.barrier(group)


REFUSED = {
    ("LBFGS", "flat"): "LBFGS searches along one direction",
    ("LBFGS", "whole"): "LBFGS searches along one direction",
    ("SparseAdam", "flat"): "SparseAdam takes sparse gradients",
    ("SparseAdam", "whole"): "SparseAdam takes sparse gradients",
    (
        "Muon",
        "flat",
    ): "Muon does not treat every element by itself, so a parameter cannot be cut for it; use layout=",
    ("Adafactor", "flat"): "Adafactor does not treat every element by itself",
    ("SGD", "round"): "layout 'round' does not exist",
}


def refusal_case(group) -> None:
    for (name, layout), words in REFUSED.items():
        with pytest.raises(UserError) as error:
            ShardedOptimizer([nn.Parameter(torch.ones(4, 4))], getattr(torch.optim, name), layout=layout, lr=0.1)
        assert words in str(error.value)
    for stage in (4, 1.0, "1"):
        with pytest.raises(UserError, match=f"ZeRO has stages 0 to 3, not {stage!r}"):
            zero(Net(), torch.optim.SGD, stage, lr=0.1)
    assert isinstance(zero(Net(), torch.optim.SGD, np.int64(3), lr=0.1)[0], FSDP)
    with pytest.raises(UserError, match=r"the optimizer's class is needed, such as torch.optim.AdamW, not 'sgd'"):
        zero(Net(), "sgd", 1)
    with pytest.raises(UserError, match=r"`apart` are parameters of the module, which 2 of them are not"):
        zero(Net(), torch.optim.SGD, 1, apart=["weight", nn.Parameter(torch.ones(2))])
    net = Net()
    assert len(zero(net, torch.optim.SGD, 0, apart=iter([next(net.parameters())]), lr=0.1)[0].buckets) == 2
    for layout in LAYOUTS:
        embedding = nn.Embedding(4, 2, sparse=True)
        optimizer = ShardedOptimizer(embedding.parameters(), torch.optim.SGD, layout=layout, lr=0.1)
        embedding(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(UserError, match=r"a gradient of shape \(4, 2\) is sparse and cannot be cut"):
            optimizer.step()
    for stage in (1, 2, 3):
        for name in ("Muon", "Adafactor", "LBFGS"):
            with pytest.raises(UserError, match=f"{name} (does not treat every element|searches along one)"):
                zero(Net(), getattr(torch.optim, name), stage, lr=0.1)


def test_unshardable_optimizers_are_refused_by_name():
    ranks.run(refusal_case, 2)


class Told(torch.optim.SGD):
    """An optimizer whose step wants an argument, in which it tells how often it was called."""

    def step(self, closure=None, *, told=None):
        super().step(closure)
        told.append(1)


def told_case(group) -> None:
    with pytest.raises(UserError, match=r"Told does not treat .* AttributeError: 'NoneType' .*; use layout="):
        model_and_optimizer(Told, lr=0.1)
    model, optimizer = model_and_optimizer(Told, "whole", lr=0.1)
    alone, plain = Net(), []
    alone.load_state_dict(model.state_dict())
    reference, told = Told(alone.parameters(), lr=0.1), []
    for each, stepped, calls in ((model, optimizer, told), (alone, reference, plain)):
        loss_of(each, 0).backward()
        stepped.step(told=calls)
    assert told == plain == [1]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def test_a_step_with_arguments():
    ranks.run(told_case, 2)


def whole_case(group) -> None:
    for cls in (torch.optim.Muon, torch.optim.Adafactor):
        require_equal_whole(cls)


def require_equal_whole(cls: type) -> None:
    torch.manual_seed(0)
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    weights = lambda model: [p for p in model.parameters() if p.dim() == 2]  # noqa: E731
    optimizers = (
        (model, ShardedOptimizer(weights(model), cls, layout="whole", lr=0.1)),
        (reference, cls(weights(reference), lr=0.1)),
    )
    for step in range(3):
        for each, optimizer in optimizers:
            each.zero_grad()
            loss_of(each, step).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_whole_parameters_are_right_for_what_cannot_be_cut():
    ranks.run(whole_case, 2)


def divided_case(group) -> None:
    """Ranks that step other parameters each, and send them, as torch's sharded optimizer does beside a wrapper."""
    torch.manual_seed(0)
    wrapped = BucketedDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), group=group)
    optimizer = foreign("torch:zero")[1](list(wrapped.parameters()), torch.optim.AdamW, lr=0.1)
    for _ in range(3):
        wrapped(torch.ones(3, 4)).sum().backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        wrapped.zero_grad()


def test_an_optimizer_divided_by_other_means_is_accepted():
    ranks.run(divided_case, 2)


def refused_once_case(group) -> None:
    """One rank's first attempt fails before it meets the others; equal numbers of optimizers are made all the same."""
    if group.rank() == 1:
        with pytest.raises(ValueError, match="empty parameter list"):
            ShardedOptimizer([], torch.optim.SGD, group, lr=0.1)
    weight = nn.Parameter(torch.ones(4))
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, group, lr=0.1)
    weight.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((4,), 0.9))


def test_an_optimizer_that_one_rank_could_not_make_is_not_counted():
    ranks.run(refused_once_case, 2)


def two_groups_case(group) -> None:
    for layout in LAYOUTS:
        model = Net()
        groups = [{"params": [model.scale]}, {"params": list(model.parameters())}]
        make = partial(ShardedOptimizer, groups, torch.optim.SGD, layout=layout, lr=0.1)
        require_refusal(group, "some parameters appear in more than one parameter group", make, ValueError)


def test_a_parameter_in_two_groups_is_refused():
    ranks.run(two_groups_case, 2)


def move(model: Net) -> None:
    model.scale.data = model.scale.data.clone()


def changed_case(group) -> None:
    for layout in LAYOUTS:
        for change in (Net.float, move):
            model, optimizer = model_and_optimizer(layout=layout)
            before = [p.detach().clone() for p in model.parameters()]
            change(model)
            loss_of(model, 0).backward()
            require_refusal(group, "moved or cast after the sharded optimizer was made", optimizer.step)
            for old, p in zip(before, model.parameters(), strict=True):
                assert torch.equal(p, old.to(p.dtype))


def test_a_parameter_that_left_its_buffer_is_refused():
    ranks.run(changed_case, 2)


def unfrozen_case(group) -> None:
    for layout in LAYOUTS:
        torch.manual_seed(0)
        model = Net()
        model.optional.requires_grad_(False)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, layout=layout, lr=0.1)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.optional.requires_grad_(True)
        loss_of(model, 0).backward()
        require_refusal(group, "frozen when the sharded optimizer was made", optimizer.step)


def test_a_parameter_unfrozen_later_is_refused():
    ranks.run(unfrozen_case, 2)


def few_case(group) -> None:
    for layout, number in product(LAYOUTS, (1, 2)):
        require_equal_few(layout, number)


def require_equal_few(layout: str, number: int) -> None:
    """Fewer parameters, or elements, than ranks."""
    weights = [nn.Parameter(torch.arange(1.0, 3.0)) for _ in range(number)]
    references = [nn.Parameter(p.detach().clone()) for p in weights]
    optimizers = (
        ShardedOptimizer(weights, torch.optim.Adam, layout=layout, lr=0.1),
        torch.optim.Adam(references, lr=0.1),
    )
    for _ in range(2):
        for parameters, optimizer in zip((weights, references), optimizers, strict=True):
            sum((p**2).sum() for p in parameters).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(weights, references, strict=True))
    optimizers[0].load_state_dict(optimizers[0].state_dict())


def test_fewer_parameters_than_ranks():
    ranks.run(few_case, 3)


def closure_case(group) -> None:
    """A closure that does everything, the synchronisation included, as LBFGS-style loops do."""
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model, optimizer = zero(Net(), torch.optim.SGD, stage, lr=0.5)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0, group.rank(), group.size())
            loss.backward()
            model.finish_gradient_synchronization()
            return loss.detach()

        for _ in range(3):
            optimizer.step(closure)
        torch.manual_seed(0)
        alone = Net()
        plain = torch.optim.SGD(alone.parameters(), lr=0.5)
        for _ in range(3):
            alone.zero_grad()
            loss_of(alone, 0).backward()
            plain.step()
        full = model.gather_full_params() if stage == 3 else dict(model.module.named_parameters())
        for name, p in alone.named_parameters():
            torch.testing.assert_close(full[name], p, rtol=TOLERANCE, atol=TOLERANCE)
        assert spread(group, [full[name].detach() for name, _ in alone.named_parameters()]) == 0


def test_a_closure_that_synchronises_is_right_in_every_stage():
    ranks.run(closure_case, 2)


def order_case(group) -> None:
    """A group's parameters are in another order on rank 1, as those of a set may be."""

    def groups(model: nn.Module) -> list[dict]:
        vectors = [p for p in model.parameters() if p.shape == (5,)]
        vectors = vectors if group.rank() == 0 else vectors[::-1]
        return [{"params": [p for p in model.parameters() if p.shape != (5,)]}, {"params": vectors}]

    words = "the ranks' optimizer parameters differ: rank 0 has first.bias (5,) torch.float64 in group "
    for stage in (1, 2):
        make = partial(zero, Net(), torch.optim.SGD, stage, param_groups=groups, lr=0.1)
        require_refusal(group, words, make)
    model = BucketedDDP(Net())
    optimizer = ShardedOptimizer(groups(model)[0]["params"], torch.optim.SGD, lr=0.1)
    require_refusal(group, words, lambda: optimizer.add_param_group(groups(model)[1]))


def test_parameters_in_another_order_on_one_rank_are_refused():
    ranks.run(order_case, 2)


def crossing_case(group, layout: str) -> None:
    """Two optimizers of equal parameters, which rank 1 steps in another order."""
    weights = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizers = [ShardedOptimizer([each], torch.optim.SGD, layout=layout, lr=1.0) for each in weights]
    for optimizer in optimizers if group.rank() == 0 else optimizers[::-1]:
        optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_two_optimizers_are_not_mixed(layout):
    for error in ranks.run_failing(crossing_case, 2, layout=layout):
        assert "of optimizer 2" in error[1]


def complex_case(group) -> None:
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


def test_a_class_with_options_and_a_complex_parameter():
    ranks.run(complex_case, 2)


def copy_case(group) -> None:
    optimizer = model_and_optimizer(lr=0.1)[1]
    with pytest.raises(UserError, match="a copy would have this rank's state alone"):
        copy.deepcopy(optimizer)


def test_a_copy_is_refused():
    ranks.run(copy_case, 2)


def left_out_case(group) -> None:
    model = BucketedDDP(Net(), gradients=SHARDED)
    make = partial(ShardedOptimizer, [model.module.scale], torch.optim.SGD, lr=0.1, wrapper=model)
    require_refusal(group, "the wrapper synchronises parameters that the optimizer was not given", make)


def test_a_wrapper_with_more_parameters_than_the_optimizer_is_refused():
    ranks.run(left_out_case, 2)
