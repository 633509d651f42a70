"""The sharded optimizer against the plain one: every elementwise class, both layouts, groups, schedulers, state."""

import pytest
import torch
from torch import nn

from cs336_systems.errors import UserError
from cs336_systems.optim.adamw import AdamW
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.zero import zero
from kernels.adamw import FusedAdamW
from tests.support import ranks
from tests.support.parallel_cases import loss_of, make
from tests.support.tolerances import bound

ELEMENTWISE = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
    "ours": (AdamW, {"lr": 0.05}),
    "ours-largest": (AdamW, {"lr": 0.05, "amsgrad": True, "maximize": True}),
    "ours-fused": (FusedAdamW, {"lr": 0.05}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),
    "radam": (torch.optim.RAdam, {"lr": 0.05}),
    "adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
}
CLASSES = ELEMENTWISE | {"adafactor": (torch.optim.Adafactor, {"lr": 0.05})}


def groups_of(model) -> list[dict]:
    """Two groups with settings of their own."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trainable[:4], "lr": 0.02}, {"params": trainable[4:]}]


def train(model, optimizer, steps: range, scheduler=None) -> None:
    """The same gradients on every rank, so that the optimizer alone is tested."""
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()


def assert_equal(model, reference, tolerance: float = 0.0, what: str = "") -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p - q).abs().max() <= tolerance, f"{what} {name} is off by {(p - q).abs().max()}"


def classes_case(group, names: list[str], layout: str) -> None:
    for name in names:
        cls, options = CLASSES[name]
        model, reference = make(), make()
        train(model, ShardedOptimizer(groups_of(model), cls, layout=layout, **options), range(4))
        train(reference, cls(groups_of(reference), **options), range(4))
        # A fused kernel rounds the elements that fill no vector otherwise, and cuts move them: twelve roundings in each
        # of four steps, of numbers up to 4.
        tolerance = bound(torch.float64, stages=4 * 12) * 4 if name == "adamw-fused" else 0.0
        assert_equal(model, reference, tolerance, name)


@pytest.mark.parametrize(("world_size", "layout"), [(3, "flat"), (3, "whole")])
def test_every_elementwise_class_is_bitwise_the_plain_one(layout, world_size):
    """On whole parameters the other classes as well."""
    ranks.run(classes_case, world_size, names=list(ELEMENTWISE if layout == "flat" else CLASSES), layout=layout)


def later_group_case(group, layout: str) -> None:
    """add_param_group during training, a scheduler, a closure, and a setting changed by hand."""
    model, reference = make(), make()
    pairs = []
    for each, cls in ((model, ShardedOptimizer), (reference, None)):
        trainable = [p for p in each.parameters() if p.requires_grad]
        first, options = [{"params": trainable[:5]}], {"lr": 0.05, "weight_decay": 0.1}
        if cls is ShardedOptimizer:
            optimizer = ShardedOptimizer(first, torch.optim.AdamW, layout=layout, **options)
        else:
            optimizer = torch.optim.AdamW(first, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        train(each, optimizer, range(3), scheduler)
        optimizer.add_param_group({"params": trainable[5:], "lr": 0.01})
        each.zero_grad()

        def closure(each=each):
            each.zero_grad()
            loss = loss_of(each, 9)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        optimizer.zero_grad()
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        train(each, optimizer, range(3, 6))
        pairs.append((loss, [g["lr"] for g in optimizer.param_groups]))
    assert pairs[0] == pairs[1]
    assert_equal(model, reference)


@pytest.mark.parametrize("layout", ["flat", "whole"])
def test_groups_schedulers_and_closures_work_during_training(layout):
    ranks.run(later_group_case, 2, layout=layout)


def save_case(group, folder: str, layout: str, stage: int) -> None:
    model = make()
    if stage == 2:
        model, optimizer = zero(model, torch.optim.AdamW, 2, lr=0.05)
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, layout=layout, lr=0.05)
    for step in range(2):
        loss_of(model, step).backward()
        if stage == 2:
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    bare = model.module if stage == 2 else model
    if group.rank() == 0:
        torch.save([bare.state_dict(), state], f"{folder}/state.pt")


def resume_case(group, folder: str, layout: str, plain: bool) -> None:
    """A run resumed from a saved state equals an uninterrupted one bitwise."""
    weights, state = torch.load(f"{folder}/state.pt", weights_only=True)
    model, reference = make(seed=5), make()
    model.load_state_dict(weights)
    if plain:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.9)
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, layout=layout, lr=0.9)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.05
    train(model, optimizer, range(2, 4))
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.05), range(4))
    assert_equal(model, reference)


@pytest.mark.parametrize(("layout", "stage"), [("flat", 1), ("whole", 1), ("flat", 2)])
def test_state_loads_at_another_world_size_and_into_the_plain_optimizer(tmp_path, layout, stage):
    """What is saved, by any of them, is the plain optimizer's state: how others read it does not depend on by whom."""
    ranks.run(save_case, 2, folder=str(tmp_path), layout=layout, stage=stage)
    others = (("flat", 3, False), ("whole", 4, False), ("flat", 1, False)) if (layout, stage) == ("flat", 1) else ()
    for other, world_size, plain in (*others, ("flat", 1, True)):
        ranks.run(resume_case, world_size, folder=str(tmp_path), layout=other, plain=plain)


def consolidated_case(group) -> None:
    """On rank 1 alone, and with hooks, which run where torch runs them."""
    for stage in (1, 2):
        model, optimizer = zero(make(), torch.optim.AdamW, stage, lr=0.05)
        loss_of(model.module, 0).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        whole, ran = optimizer.state_dict(), []
        optimizer.register_state_dict_pre_hook(lambda _, ran=ran: ran.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"epoch": 3})
        some = optimizer.state_dict(to=1)
        assert (some == {}) == (group.rank() == 0)
        if some:
            assert (some["epoch"], some["param_groups"]) == (3, whole["param_groups"])
            torch.testing.assert_close(some["state"], whole["state"], rtol=0, atol=0)
        slower = lambda _, state: {**state, "param_groups": [{**state["param_groups"][0], "lr": 0.5}]}  # noqa: E731
        optimizer.register_load_state_dict_pre_hook(slower)
        optimizer.register_load_state_dict_post_hook(lambda _, ran=ran: ran.append("after loading"))
        optimizer.load_state_dict(whole)
        assert (whole["param_groups"][0]["lr"], optimizer.param_groups[0]["lr"]) == (0.05, 0.5)
        assert ran == ["before saving", "after loading"]


def test_state_comes_together_on_one_rank_and_hooks_run():
    ranks.run(consolidated_case, 2)


def held_case(group) -> list[int]:
    """Numbers of optimizer state that a rank keeps, in each layout; and wide moments, which stay so when loaded."""
    found = []
    for layout in ("flat", "whole"):
        model = make()
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, layout=layout)
        loss_of(model, 0).backward()
        optimizer.step()
        states = [(key, value.numel()) for state in optimizer.state.values() for key, value in state.items()]
        found.append(sum(count for key, count in states if key != "step"))
        check_wide_moments(layout)
    return found


def check_wide_moments(layout: str) -> None:
    def steps(optimizer, tensors, numbers) -> None:
        for number in numbers:
            torch.manual_seed(number)
            for p in tensors:
                p.grad = torch.randn_like(p)
            optimizer.step()

    torch.manual_seed(0)
    sharded = [nn.Parameter(torch.randn(n).bfloat16()) for n in (50, 120)]
    whole = [nn.Parameter(p.detach().clone()) for p in sharded]
    first, plain = ShardedOptimizer(sharded, FusedAdamW, layout=layout, lr=1.0), FusedAdamW(whole, lr=1.0)
    steps(first, sharded, range(3))
    steps(plain, whole, range(6))
    second = ShardedOptimizer(sharded, FusedAdamW, layout=layout, lr=1.0)
    second.load_state_dict(first.state_dict())
    steps(second, sharded, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(sharded, whole, strict=True))


def test_the_state_is_divided_and_moments_wider_than_the_parameters_stay_so():
    model = make()
    used = sum(p.numel() for p in model.parameters() if p.requires_grad)
    used -= sum(p.numel() for p in model.unused.parameters())
    # Two moments of what has a gradient, each on one rank.
    assert [sum(each) for each in zip(*ranks.run(held_case, 2), strict=True)] == [2 * used] * 2


def refused_case(group) -> None:
    """The state of another algorithm, and one parameter twice."""
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    other = torch.optim.Adam([p], maximize=True)
    other.step()
    optimizer = ShardedOptimizer([nn.Parameter(torch.ones(4, 4))], AdamW)
    with pytest.raises(ValueError, match="another algorithm than AdamW: it has coupled weight decay"):
        optimizer.load_state_dict(other.state_dict())
    said = r"^1 of 2 parameters are given twice: give each once$"
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(UserError, match=said):
        ShardedOptimizer([p, p], torch.optim.SGD, lr=0.1)


def test_refusals():
    ranks.run(refused_case, 2)


class Counting(torch.optim.SGD):
    """Notes a number in its groups, one for all parameters, and one of each parameter in every second step."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["seen"] = 0
        self.fails = False

    def step(self, closure=None):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                if self.state["all"]["steps"] % 2:
                    self.state[p]["odd"] = self.state["all"]["steps"]
                else:
                    self.state.pop(p, None)
        if self.fails:
            raise ArithmeticError("a step that fails")
        super().step(closure)


def counting_case(group) -> None:
    model = make()
    optimizer = ShardedOptimizer([p for p in model.parameters() if p.requires_grad], Counting, layout="whole", lr=0.1)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["seen"] == step + 1
        wanted = [] if step % 2 else [{"odd": step + 1}] * len(optimizer.parts)
        assert list(optimizer.state.values()) == wanted
        assert optimizer.inner.state.keys() == {"all"}, "one copy of the state is enough"
    optimizer.inner.fails = True
    loss_of(model, 3).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert not optimizer.state
    assert not any(part.tensor.grad is not None for part in optimizer.parts.values())


def test_what_an_optimizer_keeps_besides_parameters_stays():
    ranks.run(counting_case, 2)
