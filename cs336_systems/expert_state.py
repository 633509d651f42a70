"""A run's parameters and optimizer state without its layout: whole tensors by name, experts by their global number.

    {"blocks.1.feed_forward.experts.up.weight": {"value": (experts out in), "exp_avg": the same, ..., "step": 2}, ...}

What four ranks have written, one, two or eight can take: a rank's experts are a slice of every such tensor, and so is
its part of a matrix or of a sharded optimizer.
"""

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import ExpertParallel
from cs336_systems.expert_zero import JointModel, JointOptimizer
from cs336_systems.fsdp import FSDP
from cs336_systems.pipeline import Stage
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.tensor_parallel import TensorParallel


class Trained(Protocol):
    """A model on its ranks and what trains it, such as a `Trainer`."""

    stage: Stage
    plan: TensorParallel
    experts: ExpertParallel
    model: nn.Module
    optimizer: torch.optim.Optimizer | JointOptimizer


@torch.no_grad()
def whole_state(run: Trained) -> dict[str, dict[str, Any]]:
    """Copies of this stage's parameters ("value") and of each one's optimizer state, whole, on every rank of the stage.

    All of these must call it. A parameter that has had no gradient yet has its value only. Raises UserError for ZeRO
    stage 3.
    """
    _refuse_sharded(run)
    names = _names(run)
    state: dict[str, dict[str, Any]] = {name: {"value": parameter} for parameter, name in names.items()}
    for optimizer in _optimizers(run):
        numbered = optimizer.state_dict()["state"]  # put together from the data-parallel ranks
        for number, owner in enumerate(chain.from_iterable(_owners(optimizer))):
            state[names[owner]] |= numbered.get(number, {})
    return {name: {key: _whole(run, name, state[name], key) for key in state[name]} for name in state}


@torch.no_grad()
def load_state(run: Trained, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Take this rank's part of a state from any layout; it may have more names, those of other stages.

    Learning rates and the like stay what they are. Nothing is changed and UserError is raised, with the name, if a
    parameter is missing or of another shape, and for ZeRO stage 3.
    """
    _refuse_sharded(run)
    names = _names(run)
    for parameter, name in names.items():
        if name not in state:
            raise UserError(f"the state has no {name}: it belongs to another model")
        got, shape = tuple(state[name]["value"].shape), tuple(run.plan.whole_shape(name, parameter.shape))
        if name in run.experts.names:
            shape = (run.stage.model.config.num_experts, *shape[1:])
        if got != shape:
            raise UserError(f"{name} has shape {got} in the state, and {shape} in the model")
    parts = {p: {key: _part(run, name, state[name], key) for key in state[name]} for p, name in names.items()}
    for parameter, part in parts.items():
        parameter.copy_(part.pop("value"))
    for optimizer in _optimizers(run):
        owners = _owners(optimizer)
        numbers = {parameter: number for number, parameter in enumerate(chain.from_iterable(owners))}
        groups = [
            {**group, "params": [numbers[parameter] for parameter in mine]}
            for group, mine in zip(optimizer.param_groups, owners, strict=True)
        ]
        loaded = {number: parts[parameter] for parameter, number in numbers.items() if parts[parameter]}
        optimizer.load_state_dict({"state": loaded, "param_groups": groups})


def _refuse_sharded(run: Trained) -> None:
    wrappers = run.model.wrappers if isinstance(run.model, JointModel) else (run.model,)
    if any(isinstance(wrapper, FSDP) for wrapper in wrappers):
        raise UserError("ZeRO stage 3 has no parameter whole on any rank: move a state with --zero 0, 1 or 2")


def _names(run: Trained) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in run.stage.model.named_parameters()}


def _optimizers(run: Trained) -> tuple[torch.optim.Optimizer, ...]:
    return run.optimizer.optimizers if isinstance(run.optimizer, JointOptimizer) else (run.optimizer,)


def _owners(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """The model's parameters in each group, in the order in which `state_dict` numbers them."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.owners
    return [group["params"] for group in optimizer.param_groups]


def _split(state: Mapping[str, Any], key: str) -> bool:
    """Whether a value is shaped, and so split, as the parameter is; a step count is not."""
    return isinstance(state[key], Tensor) and state[key].shape == state["value"].shape


def _whole(run: Trained, name: str, state: Mapping[str, Any], key: str) -> Any:
    if not _split(state, key):
        return deepcopy(state[key])
    return run.experts.whole(name, run.plan.whole(name, state[key].detach().clone()))


def _part(run: Trained, name: str, state: Mapping[str, Any], key: str) -> Any:
    """A copy, since an optimizer writes to its state, and a view would hold the whole."""
    if not _split(state, key):
        return deepcopy(state[key])
    return run.plan.part(name, run.experts.part(name, state[key])).clone()
