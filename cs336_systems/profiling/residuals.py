"""Residuals: what autograd keeps of a forward pass for backward, storage by storage, and which module keeps it.

`saved_tensors_hooks` sees every tensor as it is kept, but not whose it is: module spans tell which module is running,
and a dispatch mode which operator made the storage. None of it needs numbers, so a model of any size can be asked on
fake tensors, which have shapes and storages but no memory.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cs336_systems.host.observe import fake_model
from cs336_systems.model.precision import autocast
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig, Precision
from cs336_systems.profiling.labels import tag_modules
from cs336_systems.profiling.names import ROOT, parse_tag

BLOCK = re.compile(r"(?:\w+\.)*?\d+(?=\.|$)")


class Residual(NamedTuple):
    """A storage that is kept: `nbytes` of it, as a tensor of `shape` and `dtype`, by `module`.

    `made_by` is the operator that made the storage, empty if it was there before.
    """

    module: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    made_by: str = ""

    @property
    def block(self) -> str:
        """`blocks.0` of `blocks.0.attention`; what lies in no numbered block is named by its outermost module."""
        found = BLOCK.match(self.module)
        return found[0] if found else self.module.split(".")[0]


@dataclass(frozen=True)
class Residuals:
    """The storages that a forward pass keeps, each once, in the order in which they were first kept.

    Parameters are apart, as they are there anyway; so are autocast's copies of them, of which `weight_casts` are bytes.
    """

    kept: tuple[Residual, ...]
    weight_casts: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(each.nbytes for each in self.kept)

    def by_block(self) -> dict[str, int]:
        """Bytes of each block, and of each outermost module that is none, in order."""
        return _sums((each.block, each.nbytes) for each in self.kept)

    def by_module(self, block: str) -> dict[str, int]:
        """Bytes of a block by the direct child that keeps them; the block's own come under its name."""
        depth = block.count(".") + 2
        inside = (each for each in self.kept if each.block == block)
        return _sums((".".join(each.module.split(".")[:depth]), each.nbytes) for each in inside)

    def largest(self, count: int = 5, block: str | None = None) -> list[Residual]:
        """The largest storages, of one block or of all; of equal ones the first."""
        inside = [each for each in self.kept if block in (None, each.block)]
        return sorted(inside, key=lambda each: -each.nbytes)[:count]


def _sums(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, nbytes in pairs:
        found[name] = found.get(name, 0) + nbytes
    return found


class _Keeper(TorchDispatchMode):
    """Collects what is kept, and notes which operator made which storage, and which storages are casts of parameters.

    `path` are the qualified names of the modules that are running.
    """

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.parameters, self.path = parameters, [ROOT]
        self.made: dict[int, str] = {}
        self.kept: dict[int, Residual] = {}
        self.weight_casts: dict[int, int] = {}
        self.casts: dict[int, Tensor] = {}  # held, so that no other storage takes their place
        self.held: list[Tensor] = []  # for the same reason

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {_storage(each) for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        name = function.overloadpacket.__name__
        for each in tree_iter(out):
            # A view and what is changed in place lie in a storage that was given, and made by another.
            if isinstance(each, Tensor) and (storage := _storage(each)) not in given:
                self.made[storage] = name.strip("_")
                if name in ("_to_copy", "to") and given & self.parameters:
                    self.casts[storage] = each
        return out

    @contextmanager
    def running(self, tag: str) -> Iterator[None]:
        """Attribute what is kept inside the block to the module of this span."""
        named = parse_tag(tag)
        self.path.append(named[0] if named else tag)
        try:
            yield
        finally:
            self.path.pop()

    def keep(self, tensor: Tensor) -> Tensor:
        """autograd's pack hook. It keeps and returns no tensor with a graph: a graph that holds itself never dies."""
        storage, nbytes = _storage(tensor), tensor.untyped_storage().nbytes()
        if storage in self.parameters:
            return tensor.detach()
        if storage in self.casts:
            self.weight_casts[storage] = nbytes
        elif storage not in self.kept:
            dtype, maker = str(tensor.dtype).removeprefix("torch."), self.made.get(storage, "")
            self.kept[storage] = Residual(self.path[-1], tuple(tensor.shape), dtype, nbytes, maker)
            self.held.append(tensor.detach())
        return tensor.detach()

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Attribute what the model kept itself, to run a segment again, to the segment's first block, its input."""
        for each in args:
            if isinstance(each, Tensor) and (found := self.kept.get(_storage(each))) and found.module == ROOT:
                self.kept[_storage(each)] = found._replace(module=self.path[-1])


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def residuals(model: nn.Module, forward: Callable[[], object]) -> Residuals:
    """Count what `forward`, which runs the model, makes autograd keep. Its result is dropped: no backward can follow.

    A storage that two modules keep counts for the first. What is kept outside of every module is named `model`.
    """
    keeper = _Keeper({_storage(parameter) for parameter in model.parameters()})
    with ExitStack() as stack:
        stack.enter_context(tag_modules(keeper.running))
        stack.callback(register_module_forward_pre_hook(keeper.enter).remove)
        stack.enter_context(keeper)
        stack.enter_context(saved_tensors_hooks(keeper.keep, lambda tensor: tensor))
        forward()
    return Residuals(tuple(keeper.kept.values()), sum(keeper.weight_casts.values()))


def model_residuals(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> Residuals:
    """Count from shapes alone what autograd keeps of a training step's forward pass on (batch seq) tokens.

    As on a CPU. One thing shapes do not tell: a LayerNorm of half precision, which only BERT's heads have, keeps its
    two numbers a token in four bytes each, not two.
    """
    with FakeTensorMode():
        model = fake_model(TransformerLM(config, "meta"), "cpu")
        tokens, targets = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))

        def forward() -> None:
            with autocast(torch.device("cpu"), precision):
                lm_loss(model, tokens, targets)

        return residuals(model, forward)
