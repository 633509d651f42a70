"""Residuals: tensors that autograd keeps of a forward pass for backward, by storage and by module; and how long a
segment of recomputed blocks is best.

An `Observer` sees every tensor as it is kept; module spans tell which module is running. None of it needs numbers, so a
model of any size can be asked on fake tensors, which have shapes and storages but no memory.

Short segments keep many inputs, long ones recompute much at once. With L blocks of which each keeps b bytes, and s
bytes of the stream between two, segments of k blocks need about (L / k) s + k b: least at k = sqrt(L s / b). It is
sqrt(L) where s = b, as in Chen et al. (arXiv:1604.06174, section 4), but a transformer's block keeps 20 or 30 times its
input: one block or two are best up to a depth of 50.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import ceil, log2, sqrt
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
from cs336_systems.presets import ModelConfig, Precision, Recompute
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


_residuals = cache(model_residuals)  # of the same few layers for every length of segments


class Kept(NamedTuple):
    """Bytes that autograd keeps for backward, parameters and their casts apart, by the time at which they are freed."""

    shared: int  # token ids, targets and what all blocks share: when backward ends
    blocks: tuple[int, ...]  # of each block
    head: int  # of the last norm, the head and the loss: before the backward of the blocks


@dataclass(frozen=True)
class Strategy:
    """A way of recomputing, and the bytes of activations that it needs."""

    recompute: Recompute
    every: int  # blocks in a segment
    kept: int  # bytes kept from forward to backward
    recomputed: int  # bytes that the blocks hold more at once when backward runs something again
    logits: int  # bytes of the logits, if they are made
    head: int  # bytes of `kept` that the last norm, the head and the loss keep

    @property
    def peak(self) -> int:
        """The most bytes of activations at once: when the loss has been made of the logits (it keeps their softmax,
        too), or when blocks have been run again; the loss, the head and the last norm are over by then."""
        return max(self.kept + self.logits, self.kept - self.head + self.recomputed)

    @property
    def name(self) -> str:
        return f"segments of {self.every}" if self.recompute == "segments" else self.recompute

    def apply(self, config: ModelConfig) -> ModelConfig:
        """The model that recomputes so."""
        return config.override(recompute=self.recompute, recompute_every=self.every)


def strategy(
    config: ModelConfig, batch: int, seq: int, recompute: Recompute, every: int = 1, precision: Precision = "fp32"
) -> Strategy:
    """Bytes that one way of recomputing needs for (batch seq) tokens. Raises UserError for one that does not exist."""
    config = config.override(recompute=recompute, recompute_every=every)
    plain = _kept(replace(config, recompute="none"), batch, seq, precision)
    blocks, stream = plain.blocks, 4 * batch * seq * config.d_model  # between two blocks, in float32
    if recompute == "nested" and len(blocks) == 1:
        recompute = "none"
    match recompute:
        case "attention":
            apart = _kept(config, batch, seq, precision)
            kept, most, plain = sum(apart.blocks), sum(apart.blocks) + blocks[-1] - apart.blocks[-1], apart
        case "segments":
            # A segment's first block keeps the segment's input, which is there already.
            kept = ceil(len(blocks) / every) * stream
            before = [0, *accumulate(blocks)]
            most = max(i // every * stream + before[i + 1] - before[i - i % every] for i in range(len(blocks)))
        case "nested":
            # The input of every second half on the way to the last block; that of the first halves is their parent's.
            kept, most = 2 * stream, ceil(log2(len(blocks))) * stream + max(blocks)
        case _:
            kept = most = sum(blocks)
    fused = config.kernels == "triton" and not config.bert_heads  # the logits are never made whole
    logits = 0 if fused else 4 * batch * seq * config.vocab_size
    return Strategy(config.recompute, every, plain.shared + kept + plain.head, most - kept, logits, plain.head)


def _kept(config: ModelConfig, batch: int, seq: int, precision: Precision) -> Kept:
    """Bytes kept for backward, counted for as few layers as there are kinds of them."""
    kinds = config.expert_every if config.num_experts else 1
    found = _residuals(replace(config, num_layers=2 * kinds, recompute_every=1), batch, seq, precision)
    inside = {name: nbytes for name, nbytes in found.by_block().items() if name.startswith("blocks.")}
    # What all blocks share is counted with the first one, so that the second half tells what a block keeps by itself.
    blocks = list(inside.values())[kinds:]
    outside = (each for each in found.kept if each.block not in (*inside, "embedding"))
    targets = "int64", 8 * batch * seq
    head = sum(each.nbytes for each in outside if (each.dtype, each.nbytes) != targets)
    shared = found.nbytes - 2 * sum(blocks) - head
    return Kept(shared, tuple(blocks[i % kinds] for i in range(config.num_layers)), head)


def sweep(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> list[Strategy]:
    """Segments of every length, 1 block to all of them."""
    lengths = range(1, config.num_layers + 1)
    return [strategy(config, batch, seq, "segments", every, precision) for every in lengths]


def best(strategies: Iterable[Strategy]) -> Strategy:
    """The one that needs the least memory; of equal ones the first."""
    return min(strategies, key=lambda each: each.peak)


def square_root_rule(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> float:
    """The length that the continuous formula gives: sqrt(L s / b). It may lie below one block."""
    blocks = _kept(config, batch, seq, precision).blocks
    return len(blocks) * sqrt(4 * batch * seq * config.d_model / sum(blocks))


def neighbours(config: ModelConfig, batch: int, seq: int, precision: Precision = "fp32") -> list[Strategy]:
    """Candidates worth measuring: nothing recomputed, the best length k with k - 1 and k + 1, and nested halves."""
    lengths = sweep(config, batch, seq, precision)
    k = best(lengths).every
    nothing = strategy(config, batch, seq, "none", 1, precision)
    nested = strategy(config, batch, seq, "nested", 1, precision)
    return [nothing, *lengths[max(0, k - 2) : k + 1], nested]
