"""FSDP's shards: results computed from them equal one process's, or one error names the weight."""

import copy
import io

import pytest
import torch
from torch import nn

from cs336_systems.buffers.shard_tensor import ShardTensor, saved_rows
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.optim.adamw import AdamW
from cs336_systems.optim.master_weights import MasterAdamW
from kernels.adamw import FusedAdamW
from tests.support import ranks
from tests.support.parallel_cases import loss_of, make, own_rows
from tests.support.tolerances import bound

TOLERANCE = bound(torch.float64, stages=3 * 64, longest_sum=77)
OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adamax, {}),
]
FUSED = [(cls, {"fused": True}) for cls in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad)]
EVERY = [(cls, {**rest, "foreach": each}) for cls, rest in OPTIMIZERS for each in (False, True)] + FUSED
EVERY += [(cls, {}) for cls in (AdamW, MasterAdamW, FusedAdamW)]


class LARS(torch.optim.Optimizer):
    """Each parameter moves along its momentum by a fraction of its norm, all of them no more than a global norm
    allows: norms of parameters, gradients and of the optimizer's state."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        used = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = sum(p.grad.pow(2).sum() for p in used).sqrt() + torch.nn.utils.get_total_norm([p.grad for p in used])
        for p in used:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            p.sub_(momentum * p.norm() / momentum.norm() / norm * self.param_groups[0]["lr"])


EVERY += [(LARS, {})]


def penalty(model: nn.Module) -> torch.Tensor:
    """Norms, sums and means of all parameters, and of their rows."""
    parameters = list(model.parameters())
    norms = sum(p.norm() + torch.linalg.vector_norm(p, 3) + torch.norm(p, 1) for p in parameters)
    rows = sum(
        p.norm(dim=1).sum() + (p / p.norm(dim=-1, keepdim=True)).pow(3).mean() for p in parameters if p.dim() > 1
    )
    return norms + rows + sum((2 * p).square().sum() + p.abs().mean() for p in parameters)


def training_case(group, cls: type, options: dict, penalised: bool) -> None:
    """Two steps, with torch's clipping of `parameters()`, equal one process. With penalties, whose gradients go
    straight into the shards, a step has three backwards, with the penalty before the loss and after it."""
    options = {"lr": 0.01, **options}
    bare, model = make(seed=0), FSDP(make(seed=group.rank()))
    plain, optimizer = (cls(each.parameters(), **options) for each in (bare, model))
    for step in range(2):
        share = 0.2 * (group.rank() + 1) / (group.size() + 1)  # 0.1 in the mean
        for part in range(3 if penalised else 1):
            first = share * penalty(model) if penalised and part == 1 else 0
            loss = loss_of(model, step, group.rank(), group.size())
            last = share * penalty(model) if penalised and part != 1 else 0
            (first + loss + last).backward()
            (loss_of(bare, step) + (0.1 * penalty(bare) if penalised else 0)).backward()
        model.finish_gradient_synchronization()
        want, norm = (torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (bare, model))
        torch.testing.assert_close(norm, want, rtol=TOLERANCE, atol=0)
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    full = model.gather_full_params()
    for name, value in bare.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def every_optimizer_case(group) -> None:
    for cls, options in EVERY:
        try:
            training_case(group, cls, options, penalised=False)
        except Exception as error:
            error.add_note(f"{cls.__name__} {options}")
            raise


def test_every_optimizer_and_clipping_equal_one_process():
    ranks.run(every_optimizer_case, 2)


def penalised_case(group) -> None:
    for cls in (torch.optim.AdamW, LARS):
        training_case(group, cls, {}, penalised=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_penalties_that_weigh_differently_by_rank_equal_one_process(world_size):
    ranks.run(penalised_case, world_size)


def resumed_case(group, folder: str) -> None:
    """An optimizer whose state came from this rank's file goes on as one process; another rank's file, and the state of
    all rows, are refused."""
    bare, model = make(seed=0), FSDP(make(seed=0))
    plain, optimizer = (LARS(each.parameters(), 0.1) for each in (bare, model))
    for step in range(3):
        if step == 1:
            torch.save([own_rows(model), optimizer.state_dict()], f"{folder}/{group.rank()}")
            model, mine = FSDP(make(seed=1)), torch.load(f"{folder}/{group.rank()}", weights_only=True)
            optimizer = LARS(model.parameters(), 0.1)
            model.load_state_dict(mine[0])
            optimizer.load_state_dict(mine[1])
        loss_of(bare, step).backward()
        loss_of(model, step, group.rank(), group.size()).backward()
        model.finish_gradient_synchronization()
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    full = model.gather_full_params()
    for name, value in bare.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    other = torch.load(f"{folder}/{1 - group.rank()}", weights_only=True)[1]
    for state in (other, plain.state_dict()):  # of the other rank, and of all rows
        optimizer.load_state_dict(state)
        loss_of(model, 3).backward()
        model.finish_gradient_synchronization()
        with pytest.raises(UserError, match=r"of \w+.weight that was loaded is of rows"):
            optimizer.step()


def test_a_state_from_a_file_knows_which_rows_it_has(tmp_path):
    ranks.run(resumed_case, 2, folder=str(tmp_path))


REFUSED = {
    "mul": lambda w: torch.ones(5, 5, dtype=w.dtype).mul_(w),
    "copy": lambda w: w.data.copy_(torch.ones(5, 5, dtype=w.dtype)),
    "lerp": lambda w: torch._foreach_lerp_([torch.ones(5, 5, dtype=w.dtype)], [w.data], 0.5),
    "matmul": lambda w: w @ torch.ones(5, dtype=w.dtype),
    "T": lambda w: w.T,
    "view": lambda w: w.view(-1),
    "sort": lambda w: w.sort(dim=0),
    "cat": lambda w: torch.cat([torch.ones(2, 5, dtype=w.dtype), w]),
    "sum": lambda w: w.grad.sum(0),
    "mean": lambda w: w.mean(dim=(0, 1)),
    "norm": lambda w: w.norm("nuc"),
    "linalg_norm": lambda w: torch.linalg.norm(w, 2),
    "max": lambda w: w.abs().max(),
    "getitem": lambda w: w[0],
    "item": lambda w: w.item(),
    "tolist": lambda w: w.detach().tolist(),
    "linear": lambda w: nn.functional.linear(torch.ones(5, dtype=w.dtype), w),
    "randn_like": lambda w: w.grad.add_(torch.randn_like(w)),
    "bernoulli": lambda w: w.data.bernoulli_(0.5),
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "flatten": lambda w: nn.utils.parameters_to_vector([w]),
    "deepcopied view": lambda w: copy.deepcopy(w).view(-1),
    "add": lambda w: w.detach() + torch.ones(2, 1, 1, dtype=w.dtype),
    "average over time": lambda w: torch.ones(5, 5, dtype=w.dtype).mul_(0.5).add_(w, alpha=0.5),
    "penalty": lambda w: (w.T @ w - torch.eye(5)).square().sum(),
    "columns": lambda w: w.norm(dim=0),
    "xavier": nn.init.xavier_normal_,
}


def refused_case(group) -> None:
    model = FSDP(make(seed=0))
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    before = model.gather_full_params()
    for name, act in REFUSED.items():
        with pytest.raises(UserError) as error:
            act(model.module.shared.weight)
        assert "of shared.weight would see rows" in str(error.value), name
        assert "\n" not in str(error.value)
    for name, value in model.gather_full_params().items():
        assert torch.equal(value, before[name])


def test_what_would_see_one_ranks_rows_is_refused():
    ranks.run(refused_case, 2)


def handled_case(group) -> None:
    """Shards are parameters like any: copied, saved, printed, cast, compared, filled, and averaged over time."""
    model = FSDP(make(seed=0))
    shard, rows = model.module.first.weight, slice(*model.sharded[1].rows)
    whole = make(seed=0).first.weight.detach()
    assert isinstance(shard, ShardTensor)
    assert isinstance(shard, nn.Parameter)
    assert shard.is_leaf
    assert shard.requires_grad
    assert "ShardTensor" in repr(shard)
    assert torch.equal(shard.as_subclass(torch.Tensor), whole[rows])
    twin = copy.deepcopy(shard)
    assert isinstance(twin, nn.Parameter)
    assert twin.requires_grad
    assert twin.rows == shard.rows
    torch.testing.assert_close(twin.detach().norm(), whole.norm())
    file = io.BytesIO()
    torch.save({"weight": shard.detach(), "parameter": shard}, file)
    file.seek(0)
    for value in torch.load(file, weights_only=True).values():
        assert type(value) is torch.Tensor
        assert torch.equal(value, whole[rows])
    average = shard.detach().clone()
    version = shard._version
    with torch.no_grad():
        shard.copy_(2 * whole[rows])
        average.mul_(0.5).add_(shard, alpha=0.5)
        torch.testing.assert_close(average.norm(), 1.5 * whole.norm())
        assert shard._version > version
        assert bool((shard.float() == (2 * whole[rows]).float()).all())
        assert not shard.isnan().any()
        nn.init.zeros_(shard)
        shard.data.add_(1)
        assert shard.sum() == whole.numel()
        assert shard.grad is None
    assert isinstance(shard.requires_grad_(True).detach(), ShardTensor)


def test_shards_can_be_handled_as_parameters():
    ranks.run(handled_case, 3)


def test_rows_that_earlier_versions_saved_are_a_list():
    rows = torch.zeros(3, 2)
    assert saved_rows(rows) is None
    rows.saved_rows = [0, 3]
    assert saved_rows(rows) == (0, 3)
