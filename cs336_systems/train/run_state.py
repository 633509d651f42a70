"""A run's parameters and optimizer state as pieces in the coordinates of the whole model, and taking them back.

A rank's part of a parameter in each kind of layout:

    pipeline         the parameters of its stage; the tied embedding is written by the first
    tensor parallel  a box along the dimension that is split; experts, a box along the first
    data parallel    all of that, of which each of N ranks writes one N-th
    ZeRO 1, 2        a run of the flattened box, of the optimizer's state
    ZeRO 3           rows of it, of the parameter as well

Nothing is gathered: a rank writes from its own memory, and reads the boxes that it needs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs336_systems.checkpoint import RANDOM, VALUE, Box, Checkpoint, Piece, Scalars, my_share
from cs336_systems.checkpoint.manifest import DTYPES
from cs336_systems.checkpoint.tensors import NAMES
from cs336_systems.fsdp import FSDP
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.train.expert_zero import JointModel, JointOptimizer
from cs336_systems.train.trainer import Trainer


class Slot(NamedTuple):
    """A tensor that an optimizer of this rank steps.

    `like` is that tensor, and its state has the same shape. It holds the elements from `first` on of the local tensor
    of `owner`, a parameter of the model or FSDP's shard of one. `sharded`: other ranks hold other elements.
    """

    optimizer: torch.optim.Optimizer
    like: Tensor
    owner: nn.Parameter
    first: int
    sharded: bool


class RunState:
    """This rank's part of a run's state: `pieces` to write, and `restore` from a checkpoint of any layout."""

    def __init__(self, run: Trainer) -> None:
        self.run = run
        self.parameters = dict(run.stage.model.named_parameters())
        self.names = {parameter: name for name, parameter in self.parameters.items()}
        wrappers = run.model.wrappers if isinstance(run.model, JointModel) else (run.model,)
        self.units = {unit.shard: unit for w in wrappers if isinstance(w, FSDP) for unit in w.sharded}
        optimizers = run.optimizer.optimizers if isinstance(run.optimizer, JointOptimizer) else (run.optimizer,)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = optimizers

    def _slot(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slot:
        unit = self.units.get(parameter)
        return Slot(optimizer, parameter, parameter, unit.rows[0] * unit.shape[1] if unit else 0, unit is not None)

    def _slots(self) -> Iterator[Slot]:
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                assert optimizer.inner is not None
                for part in (part for buffer in optimizer.buffers for part in buffer.parts):
                    yield Slot(optimizer.inner, part.tensor, part.owner, part.start, True)
            else:
                yield from (self._slot(optimizer, p) for group in optimizer.param_groups for p in group["params"])

    def _local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part before FSDP shards it; a vocabulary's has padding at the end."""
        parameter = self.parameters[name]
        return tuple(self.units.get(parameter, parameter).shape)

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

    def _pieces(self, kind: str, slot: Slot, tensor: Tensor) -> Iterator[Piece]:
        name = self.names[slot.owner]
        box, replicas = self.box(name), self.run.gradients.replicas(name)
        if replicas is None:
            return
        real = min(max(box.numel - slot.first, 0), tensor.numel())  # what comes after is padding
        first, last = (0, real) if slot.sharded else my_share(real, replicas.rank(), replicas.size())
        if first < last:
            yield Piece(name, kind, box, slot.first + first, tensor.detach().reshape(-1)[first:last])

    def pieces(self) -> tuple[list[Piece], Scalars]:
        """Pieces that this rank writes, as views: all that it alone has, and its share of what replicas have too."""
        found: list[Piece] = []
        scalars: Scalars = {}
        for parameter in self.parameters.values():
            found += self._pieces(VALUE, self._slot(self.optimizers[0], parameter), parameter)
        for slot in self._slots():
            name = self.names[slot.owner]
            for kind, value in slot.optimizer.state.get(slot.like, {}).items():
                if isinstance(value, Tensor):
                    found += self._pieces(kind, slot, value)
                else:  # equal on all ranks that have any of the parameter, which is checked
                    scalars.setdefault(name, {})[kind] = value
        return found, scalars

    def problem(self, source: Checkpoint, cast: bool = False) -> str:
        """The reason why a checkpoint does not fit this run's model, naming the parameter; "" if it does. With `cast`
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
        """The reason why a parameter's optimizer state is not one that its optimizer makes; "" if it is.

        A parameter that has had no gradient has no state.
        """
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
        """State that one step of the optimizer makes for a parameter of one element: the names and dtypes to expect."""
        inner: Any = getattr(self.optimizers[0], "inner", self.optimizers[0])
        one = nn.Parameter(torch.zeros(1, dtype=dtype))
        one.grad = torch.zeros_like(one)
        tried = type(inner)([one], **inner.defaults)
        tried.step()
        return dict(tried.state[one])

    def _read(self, source: Checkpoint, slot: Slot, kind: str) -> Tensor:
        """The elements of a slot, padding zero."""
        name = self.names[slot.owner]
        box, local = self.box(name), self._local_shape(name)
        read = source.read(name, kind, box)
        if box.size != local:
            part, read = read, read.new_zeros(local)
            read[tuple(slice(0, size) for size in box.size)] = part
        return read.reshape(-1)[slot.first : slot.first + slot.like.numel()].view_as(slot.like)

    @torch.no_grad()
    def restore(self, source: Checkpoint) -> None:
        """Take this rank's part of a checkpoint that fits: parameters, and the optimizer's state if there is one.

        Nothing stays of the state before.
        """
        for parameter in self.parameters.values():
            parameter.copy_(self._read(source, self._slot(self.optimizers[0], parameter), VALUE))
        for slot in self._slots():
            name = self.names[slot.owner]
            slot.optimizer.state.pop(slot.like, None)
            # A shard without rows has no state: no gradient would ever count its steps.
            if (kinds := source.tensors[name].keys() - {VALUE}) and slot.like.numel():
                read = {kind: self._read(source, slot, kind).to(slot.like.device, copy=True) for kind in sorted(kinds)}
                slot.optimizer.state[slot.like] = source.scalars.get(name, {}) | read
