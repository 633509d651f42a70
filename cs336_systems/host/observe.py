"""Counts of a program as it runs: FLOPs, operators, traffic, memory kept for backward, new and peak memory.

An `Observer` sees each operator that torch's dispatcher starts below autograd, on real tensors, on the meta device or,
for models that no memory here holds, on fake ones (`fake_model`), which have shapes and a device but no numbers:

    with FakeTensorMode():
        model = fake_model(TransformerLM(config, "meta"), "cpu")
        with Observer(parameters=model.parameters()) as seen:
            seen.begin("forward")
            lm_loss(model, tokens, tokens)
    seen.phases["forward"].flops

Fake tensors take the path of their device, through autocast and torch's fused attention; plain meta tensors know
neither. Fake experts get rows as from a balanced router. Memory inside a fused kernel is not seen, such as the logits
of one chunk of tokens in the fused cross entropy. Collectives are not counted: see `comm.record`.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cs336_systems.host import meta

Module = TypeVar("Module", bound=nn.Module)
aten = torch.ops.aten
# Operators that touch no number, besides views.
FREE = {aten._unsafe_view, aten.detach, aten.promote_types, aten.empty_like, aten.empty, aten.new_empty}
FREE |= {aten.empty_strided, aten.new_empty_strided, aten.lift_fresh, aten._local_scalar_dense}
# Operators that read as much of their first input as they write, not all of it.
GATHERS = {aten.embedding, aten.index_select, aten.gather, aten.index}


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Scores and weighted values, of q (... queries dim), k (... keys dim) and v (... keys width)."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward_flops(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """The scores again, the gradients of queries and keys, and of weights and values."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


# Formulas of FLOPs that torch's counter does not have, by name; the causal mask saves nothing there, nor here.
FORMULAS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
    "cs336_kernels.flash_attention": _attention_flops,
    "cs336_kernels.flash_attention_backward": _attention_backward_flops,
    # Each expert with its rows, a (rows in) b (experts in out), or the weights' gradient, a (in rows) b (rows out).
    "aten._grouped_mm": lambda a, b, *_, **__: 2 * math.prod(a.shape[-2:]) * b.shape[-1],
    # The logits and, in forward already, the gradients of hidden and weight where they are needed.
    "cs336_kernels.linear_cross_entropy": lambda hidden, weight, targets, ignored, *needed, **_: (
        2 * (1 + sum(needed)) * hidden.numel() * len(weight)
    ),
}


def _without_numbers(packet: Any, args: tuple[Any, ...], rows: int | None) -> Tensor | None:
    """The result of an operator that torch cannot run on a fake tensor, or None."""
    x = args[0]
    if packet is aten.nonzero:  # how many depends on numbers
        found = x.numel() if rows is None else min(rows, x.numel())
        return torch.empty((found, x.dim()), dtype=torch.int64, device=x.fake_device)
    if packet is aten._grouped_mm and x.dtype != torch.bfloat16:
        _, b, offsets, *_ = args
        lead = (len(offsets),) if x.dim() == b.dim() == 2 else ()
        return torch.empty((*lead, x.shape[-2], b.shape[-1]), dtype=x.dtype, device=x.fake_device)
    return None


@dataclass
class Counts:
    """Counts of one phase."""

    # How many operators were started with so many (FLOPs, bytes read and written).
    work: Counter[tuple[int, int]] = field(default_factory=Counter)
    made: Counter[int] = field(default_factory=Counter)  # how many new storages of so many bytes
    peak: dict[str, int] = field(default_factory=dict)  # bytes of live storages by kind at the fullest moment

    @property
    def flops(self) -> int:
        """FLOPs of matrix products and fused attention, a multiply and an add counted as two."""
        return sum(flops * count for (flops, _), count in self.work.items())

    @property
    def operators(self) -> int:
        """Operators started that touch numbers."""
        return self.work.total()

    def new_bytes(self, least: int = 1) -> int:
        """Bytes of new storages of `least` bytes or more each."""
        return sum(size * count for size, count in self.made.items() if size >= least)


class Observer(TorchDispatchMode):
    """Counts what runs inside `with`, phase by phase. `held` names storages that exist before, by kind: parameters,
    optimizer state. All others are "activations" until `label` gives them another kind, as gradients after backward."""

    def __init__(self, **held: Iterable[Tensor]) -> None:
        super().__init__()
        self.phases: dict[str, Counts] = {}
        self.counts = Counts()
        self.rows: int | None = None  # of fake numbers, how many at most are not zero
        self._numbers: dict[int, int] = {}  # of live storages, by address: addresses are used again, numbers are not
        self._count = 0
        self._sizes: dict[int, int] = {}  # bytes of live storages, by number
        self._before: dict[int, int] = {}  # the same when the phase began
        self._changes: list[tuple[int, int]] = []  # (number, bytes more) since then
        self._kinds: dict[int, str] = {}
        self._saved = Counter[int]()  # nodes of autograd's graph that keep a storage, by its number
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved())
        for kind, tensors in held.items():
            self.label(kind, tensors)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # as FSDP frees a weight and keeps its tensor
            result = resize(storage, size)
            if (number := self._numbers.get(storage._cdata)) is not None:
                self._set_size(number, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._hooks.__exit__(*error)
        self.counts.peak = self.peak()

    @property
    def live(self) -> int:
        """Bytes of live storages."""
        return sum(self._sizes.values())

    def begin(self, name: str) -> Counts:
        """End the phase before and begin a new one, `phases[name]`."""
        self.counts.peak = self.peak()
        self._before, self._changes = dict(self._sizes), []
        self.counts = self.phases[name] = Counts()
        return self.counts

    def peak(self) -> dict[str, int]:
        """Bytes of live storages by kind at this phase's fullest moment so far."""
        totals = list(accumulate((more for _, more in self._changes), initial=0))
        alive, found = Counter(self._before), Counter[str]()
        for number, more in self._changes[: totals.index(max(totals))]:
            alive[number] += more
        for number, size in alive.items():
            if size:
                found[self._kinds.get(number, "activations")] += size
        return dict(found)

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Give the storages of tensors a kind, in this phase's peak and all that follow."""
        for tensor in tensors:
            self._kinds[self._number(tensor)] = kind

    def saved_bytes(self, kind: str = "activations") -> int:
        """Bytes of the storages of a kind that autograd keeps for backward now."""
        kept = [number for number, nodes in self._saved.items() if nodes]
        return sum(self._sizes[number] for number in kept if self._kinds.get(number, "activations") == kind)

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage, which is watched from now on."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            self._count += 1
            number = self._numbers[address] = self._count
            self._set_size(number, storage.nbytes())
            weakref.finalize(storage, self._freed, address, number)
        return self._numbers[address]

    def _set_size(self, number: int, size: int) -> None:
        self._changes.append((number, size - self._sizes.get(number, 0)))
        self._sizes[number] = size

    def _freed(self, address: int, number: int) -> None:
        self._set_size(number, 0)
        del self._numbers[address], self._sizes[number]

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        # A function of its own tells when autograd lets go; the storage may live on, in a transfer of another thread.
        def saved() -> Tensor:
            return tensor

        number = self._number(tensor)
        self._saved[number] += 1
        weakref.finalize(saved, self._saved.subtract, [number])
        return saved

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        packet, kwargs, is_fake = function.overloadpacket, kwargs or {}, bool(args) and isinstance(args[0], FakeTensor)
        if is_fake and function is torch.ops.prim.device.default:
            return args[0].fake_device
        result = _without_numbers(packet, args, self.rows) if is_fake else None
        if result is None:
            result = meta.run(function, args, kwargs)
        if function.namespace in ("prim", "c10d", "_c10d_functional"):
            return result
        given, results = ([x for x in tree_leaves(of) if isinstance(x, Tensor)] for of in ((args, kwargs), result))
        if not function.is_view and packet not in FREE:
            formula: Callable[..., int] | None = FORMULAS.get(str(packet)) or flop_registry.get(packet)
            flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
            written = sum(each.nbytes for each in results)
            # Of an expanded tensor, what is stored.
            read = sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in given)
            self.counts.work[flops, 2 * written if packet in GATHERS else read + written] += 1
        for tensor in results:
            address = tensor.untyped_storage()._cdata
            if address not in self._numbers:
                number = self._number(tensor)
                if all(address != each.untyped_storage()._cdata for each in given):
                    self.counts.made[self._sizes[number]] += 1
                # Autocast's copies of weights.
                if packet is aten._to_copy and self._kinds.get(self._number(given[0])) == "parameters":
                    self._kinds[number] = "casts"
        return result


def fake_model(model: Module, device: torch.device | str) -> Module:
    """The same module, made on the meta device, with fake parameters; call it inside a FakeTensorMode."""
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            fake = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
            setattr(module, name, nn.Parameter(fake, each.requires_grad))
    return model
