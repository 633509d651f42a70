"""A run's parameters and optimizer state as pieces in the coordinates of the whole model, and taking them back.

What a rank has of a parameter, whatever the layout:

    pipeline         the parameters of its stage; the tied embedding is written by the first
    tensor parallel  a box along the dimension that is split; experts, a box along the first
    data parallel    all of that, of which each of N ranks writes one N-th
    ZeRO 1, 2        a run of the flattened box, of the optimizer's state
    ZeRO 3           rows of it, of the parameter as well

Nothing is gathered: a rank writes from its own memory, and reads the boxes that it needs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cs336_systems.checkpoint import RANDOM, VALUE, Box, Checkpoint, Piece, Scalars, my_share
from cs336_systems.checkpoint.tensors import DTYPES, NAMES
from cs336_systems.comm import Group, Mesh
from cs336_systems.cost.layout import TIED
from cs336_systems.expert_parallel import ExpertParallel
from cs336_systems.expert_zero import JointModel, JointOptimizer
from cs336_systems.fsdp import FSDP
from cs336_systems.model import TransformerLM
from cs336_systems.pipeline import Stage
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.tensor_parallel import TensorParallel


class Trained(Protocol):
    """A model on its ranks and what trains it, such as a `Trainer`."""

    mesh: Mesh
    stage: Stage
    plan: TensorParallel
    experts: ExpertParallel
    optimizer: torch.optim.Optimizer | JointOptimizer

    @property
    def model(self) -> nn.Module:
        """The wrapped stage."""


class Slot(NamedTuple):
    """What an optimizer of this rank steps, `like`, which its state is shaped like: the elements from `first` on of the
    local tensor of `owner`, a parameter of the model or FSDP's shard of one. `sharded`: other ranks have others."""

    optimizer: torch.optim.Optimizer
    like: Tensor
    owner: nn.Parameter
    first: int
    sharded: bool


class RunState:
    """What this rank has of a run: `pieces` to write, and `restore` from a checkpoint of any layout."""

    def __init__(self, run: Trained) -> None:
        self.run = run
        self.parameters = dict(run.stage.model.named_parameters())
        self.names = {parameter: name for name, parameter in self.parameters.items()}
        wrappers = run.model.wrappers if isinstance(run.model, JointModel) else (run.model,)
        self.units = {unit.shard: unit for w in wrappers if isinstance(w, FSDP) for unit in w.units}
        optimizers = run.optimizer.optimizers if isinstance(run.optimizer, JointOptimizer) else (run.optimizer,)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = optimizers

    def _parameter_slot(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slot:
        unit = self.units.get(parameter)
        return Slot(optimizer, parameter, parameter, unit.rows[0] * unit.shape[1] if unit else 0, unit is not None)

    def _slots(self) -> Iterator[Slot]:
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                assert optimizer.inner is not None
                for part in (part for store in optimizer.stores for part in store.parts):
                    yield Slot(optimizer.inner, part.tensor, part.owner, part.start, True)
            else:
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    yield self._parameter_slot(optimizer, parameter)

    def _local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part before FSDP shards it; a vocabulary's has padding at the end."""
        unit = self.units.get(self.parameters[name])
        return tuple(unit.shape if unit else self.parameters[name].shape)

    def box(self, name: str) -> Box:
        """The part of a parameter that this rank and its data-parallel replicas have, without padding."""
        run, local = self.run, self._local_shape(name)
        shape = list(run.plan.whole_shape(name, torch.Size(local)))
        start, size = [0] * len(shape), list(shape)
        if (dim := run.plan.cut.get(name)) is not None:
            start[dim] = min(run.plan.group.rank() * local[dim], shape[dim])
            size[dim] = min(local[dim], shape[dim] - start[dim])
        if name in run.experts.names:
            shape[0], start[0], size[0] = run.stage.model.config.num_experts, run.experts.first, run.experts.local
        return Box(tuple(shape), tuple(start), tuple(size))

    def _replicas(self, name: str) -> Group | None:
        """The ranks, of which this is one, that share the writing of a box; None if others write it."""
        run = self.run
        if name not in run.plan.cut and run.mesh.tp.rank() > 0:
            return None
        if name == TIED and not run.stage.has_first:
            return None
        return run.mesh.dp if name in run.experts.names else run.mesh.data

    def _pieces(self, kind: str, slot: Slot, tensor: Tensor) -> Iterator[Piece]:
        name = self.names[slot.owner]
        box, replicas = self.box(name), self._replicas(name)
        if replicas is None:
            return
        real = min(max(box.numel - slot.first, 0), tensor.numel())  # what comes after is padding
        first, last = (0, real) if slot.sharded else my_share(real, replicas.rank(), replicas.size())
        if first < last:
            yield Piece(name, kind, box, slot.first + first, tensor.detach().reshape(-1)[first:last])

    def pieces(self) -> tuple[list[Piece], Scalars]:
        """What this rank is to write, as views: its share of what several ranks have, and all that it alone has."""
        found: list[Piece] = []
        scalars: Scalars = {}
        for parameter in self.parameters.values():
            found += self._pieces(VALUE, self._parameter_slot(self.optimizers[0], parameter), parameter)
        for slot in self._slots():
            name = self.names[slot.owner]
            for kind, value in slot.optimizer.state.get(slot.like, {}).items():
                if isinstance(value, Tensor):
                    found += self._pieces(kind, slot, value)
                else:  # equal on all ranks that have any of the parameter, which is checked
                    scalars.setdefault(name, {})[kind] = value
        return found, scalars

    def problem(self, source: Checkpoint, cast: bool = False) -> str:
        """Why a checkpoint does not fit this run's model, naming the parameter; nothing if it does. With `cast`
        parameters without an optimizer's state may be of another precision."""
        whole = {name for name, _ in TransformerLM(self.run.stage.model.config, "meta").named_parameters()}
        found = {name for name in source.tensors if not name.startswith(RANDOM)}
        if missing := sorted(whole - found):
            return f"it has no {missing[0]}, and lacks {len(missing)} of the model's {len(whole)} parameters"
        if unknown := sorted(found - whole):
            return f"the model has no {unknown[0]}, nor {len(unknown)} of the {len(found)} parameters there in all"
        for name, parameter in self.parameters.items():
            kinds = source.tensors[name]
            if VALUE not in kinds:
                return f"it has no value of {name}"
            for kind, each in kinds.items():
                if each.shape != (shape := self.box(name).shape):
                    return f"{name} ({kind}) has shape {list(each.shape)} there, and {list(shape)} in the model"
            dtype = DTYPES[kinds[VALUE].dtype]
            if dtype != parameter.dtype and not (cast and dtype.is_floating_point and len(kinds) == 1):
                return f"{name} is {kinds[VALUE].dtype} there, and {NAMES[parameter.dtype]} in the model"
            if problem := self._state_problem(source, name):
                return problem
        return ""

    def _state_problem(self, source: Checkpoint, name: str) -> str:
        """Why the optimizer's state of a parameter is none that its optimizer makes. There may be none at all, of a
        parameter that has had no gradient."""
        kinds = {kind: each for kind, each in source.tensors[name].items() if kind != VALUE}
        scalars = source.scalars.get(name, {})
        if not kinds and not scalars:
            return ""
        made = self._made(self.parameters[name].dtype)
        tensors = {kind: each for kind, each in made.items() if isinstance(each, Tensor)}
        if kinds.keys() != tensors.keys() or scalars.keys() != made.keys() - tensors.keys():
            return f"the optimizer's state of {name} is {sorted({*kinds, *scalars})} there, and {sorted(made)} here"
        for kind, each in kinds.items():
            if DTYPES[each.dtype] != (dtype := tensors[kind].dtype):
                return f"{name} ({kind}) is {each.dtype} there, and {NAMES[dtype]} in the optimizer"
        for kind, count in scalars.items():
            if type(count) is not type(made[kind]) or not 1 <= count <= source.manifest.step:
                return f"{name} has the {kind} {count!r:.40} there, after {source.manifest.step} steps"
        return ""

    def _made(self, dtype: torch.dtype) -> dict[str, Any]:
        """What a step of the optimizer makes of a parameter of one element, which says what its states are made of."""
        optimizer = self.optimizers[0]
        inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        assert inner is not None
        one = nn.Parameter(torch.zeros(1, dtype=dtype))
        one.grad = torch.zeros_like(one)
        tried = type(inner)([one], **inner.defaults)
        tried.step()
        return dict(tried.state[one])

    def _read(self, source: Checkpoint, name: str, kind: str) -> Tensor:
        """A parameter's local part (flat), padding zero."""
        box, local = self.box(name), self._local_shape(name)
        read = source.read(name, kind, box)
        if box.size == local:
            return read.reshape(-1)
        padded = read.new_zeros(local)
        padded[tuple(slice(0, size) for size in box.size)] = read
        return padded.reshape(-1)

    @torch.no_grad()
    def restore(self, source: Checkpoint) -> None:
        """Take this rank's part of a checkpoint that fits: parameters, and the optimizer's state if there is one.

        Nothing stays of the state before.
        """
        for name, parameter in self.parameters.items():
            first = self._parameter_slot(self.optimizers[0], parameter).first
            flat = self._read(source, name, VALUE)[first : first + parameter.numel()]
            parameter.copy_(flat.view_as(parameter))
        for slot in self._slots():
            slot.optimizer.state.pop(slot.like, None)
            if state := self._state(source, slot):
                slot.optimizer.state[slot.like] = state

    def _state(self, source: Checkpoint, slot: Slot) -> dict[str, Any]:
        """The optimizer's state of a slot. A shard without rows has none: no gradient would ever count its steps."""
        name, like = self.names[slot.owner], slot.like
        kinds = [kind for kind in source.tensors[name] if kind != VALUE]
        if not kinds or not like.numel():
            return {}
        state: dict[str, Any] = dict(source.scalars.get(name, {}))
        for kind in kinds:
            flat = self._read(source, name, kind)[slot.first : slot.first + like.numel()]
            state[kind] = flat.view_as(like).to(like.device, copy=True)
        return state
