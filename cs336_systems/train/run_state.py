"""Save a run's state (parameters, optimizer, generators) as pieces with their position in the whole model; restore it.

A rank's part of a parameter in each kind of layout:

    pipeline         the parameters of its stage; the first stage writes the tied embedding
    tensor parallel  a box: a range along the dimension that is split; for experts, along the first
    data parallel    the same box on N ranks, of which each writes one N-th
    ZeRO 1, 2        a range of the flattened box, for the optimizer's state
    ZeRO 3           rows of the box, also for the parameter

Nothing is gathered: a rank writes from its own memory, and reads the boxes that it needs. Training itself uses no
random number generator; code that does, such as an augmentation, resumes bit for bit at the same number of ranks."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cs336_systems.buffers.shard_tensor import raw
from cs336_systems.checkpoint.disk import RefusedError, require
from cs336_systems.checkpoint.tensors import DTYPES, NAMES, RANDOM, VALUE, Box, Checkpoint, Piece, Scalars, my_share
from cs336_systems.fsdp import FSDP
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.train.trainer import Trainer


class Slot(NamedTuple):
    """A tensor that an optimizer of this rank updates, or a parameter whose shards it updates.

    `like` holds elements of this rank's part of the parameter `name`, from number `first` on; if `sharded`, other ranks
    hold the others. `state[key]` is the optimizer's state for `like`: tensors of its shape, and scalars, by kind."""

    name: str
    like: Tensor
    first: int
    sharded: bool
    state: dict[Tensor, dict[str, Any]]
    key: Tensor


class RunState:
    """This rank's part of a run's state: `pieces` to write, and `restore` from a checkpoint of any layout."""

    def __init__(self, run: Trainer) -> None:
        self.part = run.part
        self.parameters = dict(run.stage.model.named_parameters())
        self.names = {parameter: name for name, parameter in self.parameters.items()}
        self.sharded = {each.shard: each for w in self.part.wrappers if isinstance(w, FSDP) for each in w.sharded}
        # Shapes of this rank's parts before FSDP shards them; a vocabulary's has padding at the end.
        self.shapes = {name: tuple(self.sharded.get(p, p).shape) for name, p in self.parameters.items()}

    def slots(self) -> Iterator[Slot]:
        """This rank's parameters, then their shards in ZeRO 1 and 2."""
        optimizers = self.part.inner_optimizers
        states = {p: each.state for each in optimizers for group in each.param_groups for p in group["params"]}
        for name, parameter in self.parameters.items():
            weight = self.sharded.get(parameter)
            first = weight.rows[0] * weight.shape[1] if weight else 0
            yield Slot(name, parameter, first, weight is not None, states.get(parameter, {}), parameter)
        for optimizer in (each for each in self.part.optimizers if isinstance(each, ShardedOptimizer)):
            for owner, part in optimizer.parts.items():
                yield Slot(self.names[owner], part.tensor, part.piece.start, True, optimizer.state, owner)

    def box(self, name: str) -> Box:
        """Box of the part of a parameter that this rank and its data-parallel replicas have, without padding."""
        plan, experts, local = self.part.plan, self.part.experts, self.shapes[name]
        shape = list(plan.whole_shape(name, torch.Size(local)))
        start, size = [0] * len(shape), list(shape)
        if (dim := plan.cut.get(name)) is not None:
            start[dim] = min(plan.group.rank() * local[dim], shape[dim])
            size[dim] = min(local[dim], shape[dim] - start[dim])
        if name in experts.names:
            shape[0], start[0], size[0] = experts.model.config.num_experts, experts.first, experts.local
        return Box(tuple(shape), tuple(start), tuple(size))

    def pieces(self) -> tuple[list[Piece], Scalars]:
        """Pieces that this rank writes, as views: those that only it has, and its share of those that replicas have."""
        found, scalars = list[Piece](), Scalars()
        for name, like, begin, sharded, state, key in self.slots():
            box, replicas, kinds = self.box(name), self.part.replicas(name), state.get(key, {})
            first, last = 0, min(max(box.numel - begin, 0), like.numel())  # the rest is padding
            if not sharded and replicas is not None:
                first, last = my_share(last, replicas.rank(), replicas.size())
            for kind, value in (kinds if like not in self.names else {VALUE: like} | kinds).items():
                if not isinstance(value, Tensor):  # must be equal on all ranks with parts of the parameter; is checked
                    scalars.setdefault(name, {})[kind] = value
                elif first < last and replicas is not None:
                    with raw():
                        found.append(Piece(name, kind, box, begin + first, value.detach().reshape(-1)[first:last]))
        return found, scalars

    def check(self, source: Checkpoint, cast: bool = False) -> None:
        """Raises RefusedError, naming the parameter, for a checkpoint that does not fit this run's model. With `cast`
        parameters without an optimizer's state may be of another precision."""
        whole = {name for name, _ in TransformerLM(self.part.stage.model.config, "meta").named_parameters()}
        found = source.parameters.keys()
        if absent := sorted(whole - found):
            raise RefusedError(f"it has no {absent[0]}, and lacks {len(absent)} of the model's {len(whole)} parameters")
        if unknown := sorted(found - whole):
            others = f"{len(unknown)} of the {len(found)} parameters there in all"
            raise RefusedError(f"the model has no {unknown[0]}, nor {others}")
        for name, parameter in self.parameters.items():
            kinds, scalars, shape = source.tensors[name], source.scalars.get(name, {}), self.box(name).shape
            require(VALUE in kinds, f"it has no value of {name}")
            for kind, each in kinds.items():
                shapes = f"has shape {list(each.shape)} there, and {list(shape)} in the model"
                require(each.shape == shape, f"{name} ({kind}) {shapes}")
            dtype = DTYPES[kinds[VALUE].dtype]
            fits = dtype == parameter.dtype or (cast and dtype.is_floating_point and len(kinds) == 1)
            require(fits, f"{name} is {kinds[VALUE].dtype} there, and {NAMES[parameter.dtype]} in the model")
            if len(kinds) == 1 and not scalars:  # a parameter without any gradient so far has no state
                continue
            made = self._state_of(parameter.dtype)
            tensors = {kind for kind, each in made.items() if isinstance(each, Tensor)}
            same = kinds.keys() == tensors | {VALUE} and scalars.keys() == made.keys() - tensors
            saved = sorted({*kinds, *scalars} - {VALUE})
            require(same, f"the optimizer's state of {name} is {saved} there, and {sorted(made)} here")
            for kind in tensors:
                there, here = kinds[kind].dtype, NAMES[made[kind].dtype]
                require(there == here, f"{name} ({kind}) is {there} there, and {here} in the optimizer")
            for kind, count in scalars.items():
                possible = type(count) is type(made[kind]) and 1 <= count <= source.step
                require(possible, f"{name} has the {kind} {count!r:.40} there, after step {source.step}")

    def _state_of(self, dtype: torch.dtype) -> dict[str, Any]:
        """State that one step of the optimizer makes for a parameter of one element, by kind."""
        inner: Any = self.part.inner_optimizers[0]
        one = nn.Parameter(torch.zeros(1, dtype=dtype))
        one.grad = torch.zeros_like(one)
        tried = type(inner)([one], **inner.defaults)
        tried.step()
        return tried.state[one]

    def _read(self, source: Checkpoint, slot: Slot, kind: str) -> Tensor:
        """Read the elements of a slot; padding is zero."""
        box, local = self.box(slot.name), self.shapes[slot.name]
        read = source.read(slot.name, kind, box)
        if box.size != local:
            part, read = read, read.new_zeros(local)
            read[tuple(slice(0, size) for size in box.size)] = part
        return read.reshape(-1)[slot.first : slot.first + slot.like.numel()].view(slot.like.shape)

    @torch.no_grad()
    def restore(self, source: Checkpoint) -> None:
        """Take this rank's part of a checkpoint that fits. Nothing stays of the state before."""
        for slot in self.slots():
            if slot.like in self.names:
                slot.like.copy_(self._read(source, slot, VALUE))
            slot.state.pop(slot.key, None)
            if kinds := source.tensors[slot.name].keys() - {VALUE}:
                read = {kind: self._read(source, slot, kind).to(slot.like.device, copy=True) for kind in sorted(kinds)}
                slot.state[slot.key] = source.scalars.get(slot.name, {}) | read


def seed_generators(seed: int, rank: int) -> None:
    """Seed the generators of torch (on every device), Python and numpy, differently on each rank."""
    words = np.random.SeedSequence((seed, rank)).generate_state(3)
    torch.manual_seed(int(words[0]))
    random.seed(int(words[1]))
    np.random.seed(int(words[2]))


def random_pieces(rank: int, device: torch.device) -> tuple[list[Piece], Scalars]:
    """States of the generators of torch, of the rank's GPU, of Python and of numpy."""
    name, numpy_state = f"{RANDOM}rank {rank}", np.random.get_state(legacy=False)
    _, words, gauss = random.getstate()
    found = {"torch": torch.get_rng_state(), "python": torch.tensor(words)}
    found["numpy"] = torch.tensor([*numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]])
    found |= {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    scalars: dict[str, float | int] = {} if gauss is None else {"python gauss": gauss}
    scalars |= {"numpy gauss": numpy_state["gauss"]} if numpy_state["has_gauss"] else {}
    pieces = [Piece(name, kind, Box.whole(tensor.shape), 0, tensor) for kind, tensor in found.items()]
    return pieces, {name: scalars} if scalars else {}


def restore_random(source: Checkpoint, rank: int, device: torch.device) -> None:
    """Restore the generators of a rank, if any are saved. Raises RefusedError for invalid states."""
    name = f"{RANDOM}rank {rank}"
    if name not in source.tensors:
        return
    try:
        saved = {kind: source.read(name, kind, Box.whole(entry.shape)) for kind, entry in source.tensors[name].items()}
        scalars, (*key, position) = source.scalars.get(name, {}), saved["numpy"].tolist()
        gauss = scalars.get("numpy gauss")
        torch.set_rng_state(saved["torch"])
        random.setstate((3, tuple(saved["python"].tolist()), scalars.get("python gauss")))
        words = np.array(key, dtype=np.uint32)
        np.random.set_state(("MT19937", words, position, int(gauss is not None), gauss or 0.0))
        if device.type == "cuda" and "cuda" in saved:
            torch.cuda.set_rng_state(saved["cuda"], device)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise RefusedError(f"the random number generators of rank {rank} cannot be set: {error!r:.80}") from None
