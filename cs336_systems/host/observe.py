"""Counts of a program as it runs: FLOPs, operators, traffic, memory kept for backward, new and peak memory.

An `Observer` sees each operator that torch's dispatcher starts below autograd, on real tensors, on the meta device, or
on fake ones, which have shapes and a device but no numbers (`cost/observed.py`). Fake tensors behave as on their
device, with autocast and torch's fused attention; plain meta tensors have neither. With fake tensors the router is
assumed to be balanced. Memory inside a fused kernel is not seen, such as the logits of one chunk of tokens in the fused
cross entropy. Collectives are not counted: see `comm.record`.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Operators that read and write no elements, besides views.
FREE = {aten._unsafe_view, aten.detach, aten.promote_types, aten.empty_like, aten.empty, aten.new_empty}
FREE |= {aten.empty_strided, aten.new_empty_strided, aten.lift_fresh, aten._local_scalar_dense}
# Operators that read as much of their first input as they write, not all of it.
GATHERS = {aten.embedding, aten.index_select, aten.gather, aten.index}
UNALIKE = {aten.set_, aten.resize_, aten.nonzero}  # they change a tensor's storage or size, or have it from elements
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

# FLOP formulas of operators that torch's counter lacks, by name. Like torch's, they subtract nothing for a causal mask.
FORMULAS: dict[str, Callable[..., int]] = {
    # Each expert with its rows, a (rows in) b (experts in out), or the weights' gradient, a (in rows) b (rows out).
    "aten._grouped_mm": lambda a, b, *_, **__: 2 * a.shape[-2:].numel() * b.shape[-1],
    # The logits and, in forward already, the gradients of hidden and weight where they are needed.
    "cs336_kernels.linear_cross_entropy": lambda hidden, weight, targets, ignored, *needed, **_: (
        2 * (1 + sum(needed)) * hidden.numel() * len(weight)
    ),
}
for _name in ("aten._scaled_dot_product_flash_attention_for_cpu", "cs336_kernels.flash_attention"):
    # q (... queries dim) times k (... keys dim), and the weights times v (... keys dim).
    FORMULAS[_name] = lambda q, k, *_, **__: 2 * 2 * q.numel() * k.shape[-2]
    # The scores again, the gradients of queries and keys, and of weights and values.
    FORMULAS[f"{_name}_backward"] = lambda grad, q, k, *_, **__: 5 * 2 * q.numel() * k.shape[-2]


@dataclass
class Counts:
    """Counts of one phase."""

    # Number of operators by their (FLOPs, bytes read and written); only operators that access elements.
    work: Counter[tuple[int, int]] = field(default_factory=Counter)
    made: Counter[int] = field(default_factory=Counter)  # number of new storages by their size in bytes
    peak: dict[str, int] = field(default_factory=dict)  # bytes of live storages by kind when most are in use

    @property
    def flops(self) -> int:
        """FLOPs of matrix products and fused attention, a multiply and an add counted as two."""
        return sum(flops * count for (flops, _), count in self.work.items())

    def new_bytes(self, least: int = 1) -> int:
        """Bytes of new storages of `least` bytes or more each."""
        return sum(size * count for size, count in self.made.items() if size >= least)


# By operator and kinds of arguments: the kinds of new tensors, or () if the result is the first argument, changed in
# place; and the work. None if torch must compute the result.
_known: dict[Any, tuple[Any, tuple[int, int]] | None] = {None: None}


def run_operator(function: Any, args: Any, kwargs: Any, rows: int | None) -> tuple[Any, tuple[int, int]]:
    """Run an operator. Returns its result and work: FLOPs, bytes read and written. On meta and fake tensors torch runs
    it once for arguments of the same sizes, strides and dtypes, since their results are alike. Looking one up takes a
    fifth of the time of torch's decompositions in Python (0.1 ms and more)."""
    packet, key = function.overloadpacket, None
    if function.namespace == "aten" and packet not in UNALIKE:
        with suppress(TypeError):
            key = function, torch.get_default_dtype(), kind_of(args), kind_of(tuple(kwargs.items()))
    if (known := _known.get(key)) is None:
        result, given = without_numbers(packet, args, rows), tensors(*args, *kwargs.values())
        result = function(*args, **kwargs) if result is None else result
        formula: Callable[..., int] | None = FORMULAS.get(str(packet)) or flop_registry.get(packet)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        written = sum(each.nbytes for each in tensors(result))
        read = sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in given)  # less of an expanded one
        work = flops, 2 * written if packet in GATHERS else read + written
        if key not in _known:
            kinds = result_kinds(result, args, given, key)
            _known[key] = None if kinds is None else (kinds, work)
        return result, work
    kinds, work = known
    if not kinds:
        return args[0], work
    mode = next((each.fake_mode for each in tensors(*args, *kwargs.values()) if isinstance(each, FakeTensor)), None)
    alone = isinstance(kinds[0], torch.Size)
    made: list[Tensor] = []
    with no_dispatch():
        for shape, stride, dtype, device in (kinds,) if alone else kinds:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            made.append(tensor if mode is None or device.type == "meta" else FakeTensor(mode, tensor, device))
    return made[0] if alone else tuple(made), work


def kind_of(value: Any) -> Any:
    """Key of an argument. Raises TypeError for a tensor with numbers, and for a value that is no tensor or constant."""
    kind = type(value)
    if kind is FakeTensor and value.constant is None:
        return value.shape, value.stride(), value.dtype, value.fake_device
    if (kind is Tensor or kind is nn.Parameter) and value.is_meta:
        return value.shape, value.stride(), value.dtype, value.device
    if kind is tuple or kind is list:
        return tuple([kind_of(each) for each in value])
    if kind in CONSTANTS:
        return kind, value
    raise TypeError


def result_kinds(result: Any, args: Any, given: list[Tensor], key: Any) -> tuple[Any, ...] | None:
    """Entry of a result in `_known`; the key has the kinds that the arguments had before."""
    used = {each.untyped_storage()._cdata for each in given}
    if not used or any(map(overlaps, given)):  # their storages may have any size
        return None
    if args and result is args[0]:
        return () if kind_of(result) == key[2][0] else None
    for each in result if isinstance(result, tuple) else (result,):
        is_plain = type(each) is FakeTensor or (type(each) is Tensor and each.is_meta)
        if not is_plain or each.untyped_storage()._cdata in used:
            return None
    return kind_of(result)


def overlaps(x: Tensor) -> bool:
    """True of a tensor that has more elements than places in memory, such as an expanded one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) < x.numel()


def tensors(*values: Any) -> list[Tensor]:
    """List the tensors in arguments or results, also those in lists; faster than torch's pytrees."""
    found = [each for each in values if isinstance(each, Tensor)]
    lists = (each for each in values if isinstance(each, (tuple, list)))
    return found + [tensor for each in lists for tensor in tensors(*each)]


def without_numbers(packet: Any, args: tuple[Any, ...], rows: int | None) -> Tensor | None:
    """Result of an operator that torch cannot run on a fake tensor; None for other operators."""
    if not args or not isinstance(x := args[0], FakeTensor):
        return None
    if packet is aten.nonzero:  # its number of rows depends on the elements
        found = x.numel() if rows is None else min(rows, x.numel())
        return torch.empty((found, x.dim()), dtype=torch.int64, device=x.fake_device)
    if packet is aten._grouped_mm and x.dtype != torch.bfloat16:
        _, b, offsets, *_ = args
        lead = (len(offsets),) if x.dim() == b.dim() == 2 else ()
        return torch.empty((*lead, x.shape[-2], b.shape[-1]), dtype=x.dtype, device=x.fake_device)
    return None


@dataclass(eq=False, slots=True)
class Storage:
    """Size and kind of a storage that is live, or was."""

    nbytes: int = 0
    kind: str = "activations"


class Observer(TorchDispatchMode):
    """Counts operators and memory inside `with`, phase by phase. `held` gives the kinds of tensors that exist before:
    parameters, optimizer state. Others are "activations" until `label` changes it, for instance for gradients."""

    def __init__(self, **held: Iterable[Tensor]) -> None:
        super().__init__()
        self.phases: dict[str, Counts] = {}
        self.counts = Counts()
        self.rows: int | None = None  # largest number of non-zero elements to assume in a fake tensor
        self._live: dict[int, Storage] = {}  # by address
        self._changes: list[tuple[Storage, int]] = []  # bytes of each when the phase began, and more since then
        # Keys are functions that autograd's graph keeps for backward and then drops; the storage may live longer, in a
        # transfer of another thread.
        self._saved: WeakKeyDictionary[Callable[[], Tensor], Storage] = WeakKeyDictionary()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved())
        for kind, tensors in held.items():
            self.label(kind, tensors)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # as FSDP frees a weight and keeps its tensor
            result = resize(storage, size)
            if (found := self._live.get(storage._cdata)) is not None:
                self._set_size(found, storage.nbytes())
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
        return sum(each.nbytes for each in self._live.values())

    def begin(self, name: str) -> None:
        """End the phase before and begin a new one, `phases[name]`."""
        self.counts.peak = self.peak()
        self._changes = [(each, each.nbytes) for each in self._live.values()]
        self.counts = self.phases[name] = Counts()

    def peak(self) -> dict[str, int]:
        """Bytes of live storages by kind, at the moment of this phase when most were in use."""
        totals, found = list(accumulate((more for _, more in self._changes), initial=0)), Counter[str]()
        for storage, more in self._changes[: totals.index(max(totals))]:
            found[storage.kind] += more
        return dict(+found)

    def label(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Give the storages of tensors a kind, in this phase's peak and all that follow; returns their bytes."""
        for storage in (found := set(map(self.storage, tensors))):
            storage.kind = kind
        return sum(each.nbytes for each in found)

    def saved_bytes(self, kind: str = "activations") -> int:
        """Bytes of the storages of a kind that autograd keeps for backward now."""
        return sum(each.nbytes for each in set(self._saved.values()) if each.kind == kind)

    def storage(self, tensor: Tensor) -> Storage:
        """Find the record of a tensor's storage, or begin to track the storage."""
        address = (storage := tensor.untyped_storage())._cdata
        if (found := self._live.get(address)) is None:
            found = self._live[address] = Storage()
            self._set_size(found, storage.nbytes())
            finalize(storage, lambda: self._set_size(self._live.pop(address), 0))
        return found

    def _set_size(self, storage: Storage, nbytes: int) -> None:
        self._changes.append((storage, nbytes - storage.nbytes))
        storage.nbytes = nbytes

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        def saved() -> Tensor:
            return tensor

        self._saved[saved] = self.storage(tensor)
        return saved

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = function.overloadpacket, kwargs or {}
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        free = function.is_view or function.namespace in ("prim", "c10d", "_c10d_functional")
        result, work = (function(*args, **kwargs), None) if free else run_operator(function, args, kwargs, self.rows)
        if work and packet not in FREE:
            self.counts.work[work] += 1
        for tensor in tensors(result) if work or function.is_view else ():
            address = tensor.untyped_storage()._cdata
            if address not in self._live:
                found, given = self.storage(tensor), tensors(*args, *kwargs.values())
                if all(address != each.untyped_storage()._cdata for each in given):
                    self.counts.made[found.nbytes] += 1
                if packet is aten._to_copy and self.storage(given[0]).kind == "parameters":
                    found.kind = "casts"  # autocast's copies of weights
        return result
