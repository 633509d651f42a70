"""Residuals: tensors that autograd keeps of a forward pass for backward, by storage and by module.

An `Observer` sees every tensor as it is kept; module spans tell which module is running. None of it needs numbers, so a
model of any size can be asked on fake tensors, which have shapes and storages but no memory.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_iter

from cs336_systems.cost.observed import expert_rows
from cs336_systems.host.observe import Observer, Storage
from cs336_systems.model.precision import autocast
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig, Precision
from cs336_systems.profiling.labels import tag_modules
from cs336_systems.profiling.names import ROOT, parse_tag

BLOCK = re.compile(r"(?:\w+\.)*?\d+(?=\.|$)")


class Residual(NamedTuple):
    """A storage that a module keeps, as a tensor."""

    module: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    made_by: str = ""  # the operator that made the storage; empty if it was there before

    @property
    def block(self) -> str:
        """`blocks.0` of `blocks.0.attention`; what lies in no numbered block is named by its outermost module."""
        found = BLOCK.match(self.module)
        return found[0] if found else self.module.split(".")[0]


@dataclass(frozen=True)
class Residuals:
    """The storages that a forward pass keeps, each once, in order; without parameters, as they are there anyway."""

    kept: tuple[Residual, ...]
    weight_casts: int = 0  # bytes of autocast's copies of parameters, which are apart

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.kept)

    def by_block(self) -> dict[str, int]:
        """Bytes of each block, and of each outermost module that is none, in order."""
        return sums((each.block, each.nbytes) for each in self.kept)

    def by_module(self, block: str) -> dict[str, int]:
        """Bytes of a block by the direct child that keeps them; the block's own come under its name."""
        depth = block.count(".") + 2
        inside = (each for each in self.kept if each.block == block)
        return sums((".".join(each.module.split(".")[:depth]), each.nbytes) for each in inside)

    def largest(self, count: int = 5, block: str | None = None) -> list[Residual]:
        """The largest storages, of one block or of all; of equal ones the first."""
        inside = [each for each in self.kept if block in (None, each.block)]
        return sorted(inside, key=lambda each: -each.nbytes)[:count]


def sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sum of each name's numbers, in order."""
    found = Counter[str]()
    for name, nbytes in pairs:
        found[name] += nbytes
    return dict(found)


class _Keeper(Observer):
    """Notes which module keeps a storage first, and which operator made it. `path` are the modules that are running."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters=parameters)
        self.path = [ROOT]
        self.made: dict[Storage, str] = {}
        self.kept: dict[Storage, Residual] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), "")  # made before
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self._note(result, function.overloadpacket.__name__.strip("_"))
        return result

    def _note(self, values: Any, maker: str) -> None:
        for each in tree_iter(values):
            if isinstance(each, Tensor):
                self.made.setdefault(self.storage(each), maker)

    @contextmanager
    def running(self, tag: str) -> Iterator[None]:
        """Attribute what is kept inside the block to the module of this span."""
        named = parse_tag(tag)
        self.path.append(named[0] if named else tag)
        try:
            yield
        finally:
            self.path.pop()

    def _pack(self, tensor: Tensor) -> Any:
        storage, dtype = self.storage(tensor), str(tensor.dtype).removeprefix("torch.")
        found = Residual(self.path[-1], tuple(tensor.shape), dtype, storage.nbytes, self.made.get(storage, ""))
        self.kept.setdefault(storage, found)
        return super()._pack(tensor.detach())  # a graph in a reference cycle is not freed

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Attribute a segment's input, which the model keeps to run the segment again, to the segment's first block."""
        for storage in (self.storage(each) for each in args if isinstance(each, Tensor)):
            if storage in self.kept and self.kept[storage].module == ROOT:
                self.kept[storage] = self.kept[storage]._replace(module=self.path[-1])


def residuals(model: nn.Module, forward: Callable[[], object], rows: int | None = None) -> Residuals:
    """Count what `forward`, which runs the model, makes autograd keep. Its result is dropped: no backward can follow.

    A storage that two modules keep counts for the first. What is kept outside of every module is named `model`. On fake
    tensors a layer's experts get `rows` rows at most.
    """
    with _Keeper(model.parameters()) as keeper, tag_modules(keeper.running):
        keeper.rows = rows
        hook = register_module_forward_pre_hook(keeper.enter)
        try:
            forward()
        finally:
            hook.remove()
    kept = tuple(each for storage, each in keeper.kept.items() if storage.kind == "activations")
    return Residuals(kept, sum(each.nbytes for storage, each in keeper.kept.items() if storage.kind == "casts"))


def model_residuals(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> Residuals:
    """Count from shapes alone what autograd keeps of a training step's forward pass on (batch seq) tokens.

    As on a CPU. One thing shapes do not tell: a LayerNorm of half precision, which only BERT's heads have, keeps its
    two numbers per token in four bytes each, not two.
    """
    model = TransformerLM(config, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):  # the parameters, before they are fake
        model.to_empty(device="cpu")
        tokens, targets = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))

        def forward() -> None:
            with autocast(torch.device("cpu"), precision):
                lm_loss(model, tokens, targets)

        return residuals(model, forward, expert_rows(config, batch * seq))
