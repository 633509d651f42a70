"""A run's state as pieces in the coordinates of the whole model, and restoring it: parameters, optimizer, generators.

A rank's part of a parameter in each kind of layout:

    pipeline         the parameters of its stage; the tied embedding is written by the first
    tensor parallel  a box along the dimension that is split; experts, a box along the first
    data parallel    all of that, of which each of N ranks writes one N-th
    ZeRO 1, 2        a run of the flattened box, of the optimizer's state
    ZeRO 3           rows of it, of the parameter as well

Nothing is gathered: a rank writes from its own memory, and reads the boxes that it needs. Training draws nothing from
the random number generators, but code that does, an augmentation say, resumes bit for bit at the same number of ranks.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cs336_systems.checkpoint import DTYPES, NAMES, RANDOM, VALUE, Box, Checkpoint, Piece, Scalars, my_share
from cs336_systems.fsdp import FSDP
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.train.trainer import Trainer


class Slot(NamedTuple):
    """A tensor that an optimizer of this rank steps."""

    optimizer: torch.optim.Optimizer
    like: Tensor  # that tensor, of whose shape its state is
    name: str  # of the parameter
    first: int  # element of this rank's part of the parameter with which it begins
    sharded: bool  # other ranks hold other elements


class RunState:
    """This rank's part of a run's state: `pieces` to write, and `restore` from a checkpoint of any layout."""

    def __init__(self, run: Trainer) -> None:
        self.part, self.optimizers = run.part, run.part.optimizers
        self.parameters = dict(run.stage.model.named_parameters())
        self.names = {parameter: name for name, parameter in self.parameters.items()}
        self.units = {unit.shard: unit for w in self.part.wrappers if isinstance(w, FSDP) for unit in w.sharded}

    def _slot(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Slot:
        unit = self.units.get(parameter)
        first = unit.rows[0] * unit.shape[1] if unit else 0
        return Slot(optimizer, parameter, self.names[parameter], first, unit is not None)

    def slots(self) -> Iterator[Slot]:
        """All that this rank's optimizers step."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                assert optimizer.inner is not None
                for part in (part for buffer in optimizer.buffers for part in buffer.parts):
                    yield Slot(optimizer.inner, part.tensor, self.names[part.owner], part.piece.start, True)
            else:
                yield from (self._slot(p, optimizer) for group in optimizer.param_groups for p in group["params"])

    def _local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part before FSDP shards it; a vocabulary's has padding at the end."""
        parameter = self.parameters[name]
        return tuple(self.units.get(parameter, parameter).shape)

    def box(self, name: str) -> Box:
        """The part of a parameter that this rank and its data-parallel replicas have, without padding."""
        plan, experts, local = self.part.plan, self.part.experts, self._local_shape(name)
        shape = list(plan.whole_shape(name, torch.Size(local)))
        start, size = [0] * len(shape), list(shape)
        if (dim := plan.cut.get(name)) is not None:
            start[dim] = min(plan.group.rank() * local[dim], shape[dim])
            size[dim] = min(local[dim], shape[dim] - start[dim])
        if name in experts.names:
            shape[0], start[0], size[0] = experts.model.config.num_experts, experts.first, experts.local
        return Box(tuple(shape), tuple(start), tuple(size))

    def _pieces(self, kind: str, slot: Slot, tensor: Tensor) -> Iterator[Piece]:
        box, replicas = self.box(slot.name), self.part.replicas(slot.name)
        if replicas is None:
            return
        real = min(max(box.numel - slot.first, 0), tensor.numel())  # what comes after is padding
        first, last = (0, real) if slot.sharded else my_share(real, replicas.rank(), replicas.size())
        if first < last:
            yield Piece(slot.name, kind, box, slot.first + first, tensor.detach().reshape(-1)[first:last])

    def pieces(self) -> tuple[list[Piece], Scalars]:
        """Pieces that this rank writes, as views: all that it alone has, and its share of what replicas have too."""
        found: list[Piece] = []
        scalars: Scalars = {}
        for parameter in self.parameters.values():
            found += self._pieces(VALUE, self._slot(parameter, self.optimizers[0]), parameter)
        for slot in self.slots():
            for kind, value in slot.optimizer.state.get(slot.like, {}).items():
                if isinstance(value, Tensor):
                    found += self._pieces(kind, slot, value)
                else:  # equal on all ranks that have any of the parameter, which is checked
                    scalars.setdefault(slot.name, {})[kind] = value
        return found, scalars

    def problem(self, source: Checkpoint, cast: bool = False) -> str:
        """The reason why a checkpoint does not fit this run's model, naming the parameter; "" if it does. With `cast`
        parameters without an optimizer's state may be of another precision."""
        whole = {name for name, _ in TransformerLM(self.part.stage.model.config, "meta").named_parameters()}
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
        """The reason why a parameter's optimizer state is not one that its optimizer makes; "" if it is, or if there is
        none, as of a parameter that has had no gradient."""
        kinds = {kind: each for kind, each in source.tensors[name].items() if kind != VALUE}
        scalars = source.scalars.get(name, {})
        if not kinds and not scalars:
            return ""
        # The names and dtypes of what one step makes for a parameter of one element.
        inner: Any = getattr(self.optimizers[0], "inner", self.optimizers[0])
        one = nn.Parameter(torch.zeros(1, dtype=self.parameters[name].dtype))
        one.grad = torch.zeros_like(one)
        tried = type(inner)([one], **inner.defaults)
        tried.step()
        made = tried.state[one]
        tensors = {kind: each for kind, each in made.items() if isinstance(each, Tensor)}
        if kinds.keys() != tensors.keys() or scalars.keys() != made.keys() - tensors.keys():
            return f"the optimizer's state of {name} is {sorted({*kinds, *scalars})} there, and {sorted(made)} here"
        for kind, each in kinds.items():
            if DTYPES[each.dtype] != (dtype := tensors[kind].dtype):
                return f"{name} ({kind}) is {each.dtype} there, and {NAMES[dtype]} in the optimizer"
        for kind, count in scalars.items():
            if type(count) is not type(made[kind]) or not 1 <= count <= source.step:
                return f"{name} has the {kind} {count!r:.40} there, after {source.step} steps"
        return ""

    def _read(self, source: Checkpoint, slot: Slot, kind: str) -> Tensor:
        """The elements of a slot, padding zero."""
        box, local = self.box(slot.name), self._local_shape(slot.name)
        read = source.read(slot.name, kind, box)
        if box.size != local:
            part, read = read, read.new_zeros(local)
            read[tuple(slice(0, size) for size in box.size)] = part
        return read.reshape(-1)[slot.first : slot.first + slot.like.numel()].view_as(slot.like)

    @torch.no_grad()
    def restore(self, source: Checkpoint) -> None:
        """Take this rank's part of a checkpoint that fits. Nothing stays of the state before."""
        for parameter in self.parameters.values():
            parameter.copy_(self._read(source, self._slot(parameter, self.optimizers[0]), VALUE))
        for slot in self.slots():
            slot.optimizer.state.pop(slot.like, None)
            # A shard without rows has no state: no gradient would ever count its steps.
            if (kinds := source.tensors[slot.name].keys() - {VALUE}) and slot.like.numel():
                read = {kind: self._read(source, slot, kind).to(slot.like.device, copy=True) for kind in sorted(kinds)}
                slot.optimizer.state[slot.like] = source.scalars.get(slot.name, {}) | read


def seed_generators(seed: int, rank: int) -> None:
    """Set the generators of torch, on every device, of Python and of numpy: each rank's are its own."""
    words = np.random.SeedSequence((seed, rank)).generate_state(3)
    torch.manual_seed(int(words[0]))
    random.seed(int(words[1]))
    np.random.seed(int(words[2]))


def random_pieces(rank: int, device: torch.device) -> tuple[list[Piece], Scalars]:
    """The states of torch, of the rank's GPU, of Python and of numpy."""
    name, keys = f"{RANDOM}rank {rank}", np.random.get_state(legacy=False)
    _, words, gauss = random.getstate()
    found = {"torch": torch.get_rng_state(), "python": torch.tensor(words)}
    found["numpy"] = torch.tensor([*keys["state"]["key"].tolist(), keys["state"]["pos"]])
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    scalars: dict[str, float | int] = {} if gauss is None else {"python gauss": gauss}
    scalars |= {"numpy gauss": keys["gauss"]} if keys["has_gauss"] else {}
    pieces = [Piece(name, kind, Box.whole(tensor.shape), 0, tensor) for kind, tensor in found.items()]
    return pieces, {name: scalars} if scalars else {}


def restore_random(source: Checkpoint, rank: int, device: torch.device, spare: bool = False) -> bool:
    """Restore the generators of the rank of this number, or try with `spare` ones; returns False, and changes nothing,
    if none are saved."""
    name = f"{RANDOM}rank {rank}"
    if name not in source.tensors:
        return False
    saved = {kind: source.read(name, kind, Box.whole(entry.shape)) for kind, entry in source.tensors[name].items()}
    scalars = source.scalars.get(name, {})
    *key, position = saved["numpy"].tolist()
    gauss = scalars.get("numpy gauss")
    numpy_state = "MT19937", np.array(key, dtype=np.uint32), position, int(gauss is not None), gauss or 0.0
    python_state = 3, tuple(saved["python"].tolist()), scalars.get("python gauss")
    (torch.Generator() if spare else torch.default_generator).set_state(saved["torch"])
    (random.Random() if spare else random).setstate(python_state)
    (np.random.RandomState() if spare else np.random).set_state(numpy_state)
    if device.type == "cuda" and "cuda" in saved:
        set_state = torch.Generator(device).set_state if spare else partial(torch.cuda.set_rng_state, device=device)
        set_state(saved["cuda"])
    return True


def random_problem(source: Checkpoint, rank: int, device: torch.device) -> str:
    """The reason why a rank's saved states cannot be restored, found with spare generators; "" if they can."""
    try:
        restore_random(source, rank, device, spare=True)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        return f"the random number generators of rank {rank} cannot be set: {error!r:.80}"
    return ""
