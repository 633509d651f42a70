"""A tensor of which this rank has some rows: a shard, its gradient, and what is computed from them element by element.

    element-wise operations        on the rows; the result is a shard, too
    norm, sum, mean, any, all      over the rows of all ranks, differentiable: the result of one process
    the same over columns          on the rows, which are whole
    anything else                  UserError: its result would be of this rank's rows alone

Every rank must call operations over all ranks. The library itself works on plain rows, under `raw()`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from cs336_systems.comm import Group, all_reduce, fault
from cs336_systems.comm.pairs import gather_sequence
from cs336_systems.errors import UserError

raw = torch._C.DisableTorchFunctionSubclass

# Names of torch's functions without underscores at their ends and without `foreach_`.
ABOUT_IT = (
    "as_subclass allclose data_ptr delete dim element_size equal format get_device has_compatible_shallow_copy_type "
    "hash is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_pinned is_same_size is_set_to "
    "is_shared is_signed is_view len ndimension nelement new_empty new_full new_ones new_tensor new_zeros numel "
    "register_hook register_post_accumulate_grad_hook repr requires_grad result_type retain_grad set size storage "
    "storage_offset stride typed_storage untyped_storage record_stream"
)
BY_ELEMENT = (
    "abs add addcdiv addcmul and bfloat16 ceil clamp clamp_max clamp_min clip clone constant contiguous copy copysign "
    "cos cpu cuda detach div divide double empty_like eq erf exp expm1 fill float floor fmod full_like fused_adagrad "
    "fused_adam fused_adamw fused_sgd ge gt half hypot iadd idiv imul invert ipow isclose isfinite isinf isnan isub "
    "itruediv le lerp log log1p logical_and logical_not logical_or lt masked_fill maximum minimum mul multiply "
    "nan_to_num ne neg negative ones_like or pin_memory positive pow radd rdiv reciprocal relu remainder rmul round "
    "rpow rsqrt rsub rtruediv sgn sigmoid sign sin sqrt square sub subtract tanh to true_divide truediv trunc type "
    "where zero zeros_like"
)
ABOUT, ELEMENTWISE = set(ABOUT_IT.split()), set(BY_ELEMENT.split())
NORMS, SUMS = ("norm", "linalg_norm", "linalg_vector_norm"), ("sum", "mean", "any", "all")


class Rows(NamedTuple):
    """The rows [first, last) of a weight that has `total`."""

    name: str
    span: tuple[int, int]
    total: int
    group: Group


class ShardTensor(Tensor):
    """Rows of a tensor, with their position in the whole."""

    rows: Rows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__.strip("_").removeprefix("foreach_")
        with raw():
            if name in ABOUT:
                return func(*args, **kwargs)
            if name == "get":
                return read_property(func, args[0])
            shards = shards_in((*args, *kwargs.values()))
            if name in ELEMENTWISE or (name == "setitem" and getattr(args[1], "dtype", None) == torch.bool):
                refuse_other_rows(name, (*args, *kwargs.values()))
                return keep_kind(func(*args, **kwargs), args, shards[0], name)
            if name in NORMS or name in SUMS:
                return reduce_all(func, name, args, kwargs, shards[0])
            if name == "amp_foreach_non_finite_check_and_unscale":
                func(*args)
                for group in {each.rows.group: None for each in shards}:
                    all_reduce(args[1], group, "overflow", "max").wait()
                return None
            raise refusal(name, shards[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with raw():
                copy = memo[id(self)] = as_shard(self.detach().clone(), self.rows).requires_grad_(self.requires_grad)
                copy.__dict__.update(self.__dict__)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with raw():
            plain: Any = self.as_subclass(Tensor)  # a file has the rows as a plain tensor, with a note which they are
            plain.saved_rows = self.rows.span
            return plain.__reduce_ex__(protocol)


for foreach_types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    foreach_types.append(ShardTensor)


def as_shard(tensor: Tensor, rows: Rows) -> ShardTensor:
    """View a tensor's memory as a shard."""
    shard = tensor.as_subclass(ShardTensor)
    shard.rows = rows
    return shard


def shards_in(args: Sequence[Any]) -> list[ShardTensor]:
    """The shards among arguments and in lists of them."""
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else (arg,))]
    return [each for each in flat if isinstance(each, ShardTensor)]


def refuse_other_rows(name: str, args: Sequence[Any]) -> None:
    """Raises UserError for an element-wise operation of a shard and a plain tensor of another number of rows."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    for together in zip(*lists, strict=False) if lists else (args,):
        for shard in shards_in(together)[:1]:
            others = [each for each in together if isinstance(each, Tensor) and each.dim() >= shard.dim()]
            if any(each.shape[-shard.dim()] not in (1, len(shard)) for each in others):
                raise refusal(name, shard)


def saved_rows(tensor: Tensor) -> tuple[int, int] | None:
    """[first, last) of the rows that a tensor is known to have, which may come from a file; None of another one."""
    rows = tensor.rows.span if isinstance(tensor, ShardTensor) else getattr(tensor, "saved_rows", None)
    return rows and tuple(rows)  # files of earlier versions have a list


def know_loaded(state: dict[str, Any], shard: ShardTensor) -> None:
    """Mark tensors of a loaded optimizer state as rows. Raises UserError for rows of another rank, and for all rows."""
    with raw():
        name, mine, total, _ = shard.rows
        for key, value in ((key, v) for key, v in state.items() if type(v) is Tensor):
            rows = saved_rows(value) or ((0, total) if value.shape == (total, *shard.shape[1:]) else mine)
            if rows != mine:
                here = f"this rank has rows {mine[0]} to {mine[1]}: load what this rank saved"
                raise fault(f"the {key} of {name} that was loaded is of rows {rows[0]} to {rows[1]}, and {here}")
            state[key] = as_shard(value, shard.rows) if value.shape == shard.shape else value


def refusal(name: str, shard: ShardTensor) -> UserError:
    """Error of a function that would mix the rows of a shard."""
    weight, (first, last), total, _ = shard.rows
    if name in ("grad", "backward"):
        return fault(
            f"{name}() with respect to {weight} alone: it is sharded, and gradients come to whole weights; call "
            "backward() without inputs=, and read .grad after finish_gradient_synchronization()"
        )
    return fault(
        f"{name}() of {weight} would see rows {first} to {last} of {total}, which this rank has: take whole weights "
        "from gather_full_params(), or change them before wrapping; as_subclass(torch.Tensor) gives these rows"
    )


def read_property(func: Callable[..., Any], shard: ShardTensor) -> Any:
    """A property; tensors (the gradient, the data) are shards of the same rows."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name in ("T", "mT", "H", "mH"):
        raise refusal(name, shard)
    value = func(shard)
    if type(value) is Tensor:
        value = as_shard(value, shard.rows)
        if name == "grad":  # from autograd; later reads return this same object
            shard.grad = value
    return value


def keep_kind(result: Any, args: Sequence[Any], shard: ShardTensor, name: str) -> Any:
    """Mark the result of an element-wise operation as a shard, unless it is a tensor that was written to."""
    if isinstance(result, list | tuple):
        lists = [arg for arg in args if isinstance(arg, list | tuple)]
        if not lists or any(len(each) != len(result) for each in lists):
            raise refusal(name, shard)
        shards = [next(iter(shards_in(each)), None) for each in zip(*lists, strict=True)]
        return [r if s is None else keep_kind(r, (), s, name) for r, s in zip(result, shards, strict=True)]
    if type(result) is not Tensor or (args and result is args[0]):
        return result
    if result.dim() > shard.dim() or result.shape[:1] != shard.shape[:1]:
        raise refusal(name, shard)
    return as_shard(result, shard.rows)


def reduce_all(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], shard: ShardTensor
) -> Any:
    """A norm or sum of a shard over all ranks, or of each tensor in a list, some of which may be no shards."""
    if not args:  # given by name
        raise refusal(name, shard)
    many, before = isinstance(args[0], list | tuple), 2 if name in NORMS else 1  # arguments before the dimensions
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None)) if name in NORMS else 1
    dims = kwargs.get("dim", args[before] if len(args) > before and not many else None)
    if dims is not None:
        if all(d % shard.dim() for d in (dims if isinstance(dims, list | tuple) else (dims,))):
            return keep_kind(func(*args, **kwargs), args, shard, name)
        raise refusal(name, shard)
    if order not in (None, "fro") and (isinstance(order, str) or order <= 0 or name == "linalg_norm"):
        raise refusal(f"{name} of order {order}", shard)
    tensors = args[0] if many else args[:1]
    # A rank without rows takes part with a zero, in all() with a one.
    filled = [t if t.numel() else (t.sum() == 0 if name == "all" else t.sum()).reshape(1) for t in tensors]
    values = [*func(filled, *args[1:], **kwargs)] if many else [func(filled[0], *args[1:], **kwargs)]
    for group in {each.rows.group: None for each in shards_in(args)}:
        places = [i for i, t in enumerate(tensors) if isinstance(t, ShardTensor) and t.rows.group == group]
        power = 2 if isinstance(order, str | None) else order
        total = over_group(name, power, [values[i] for i in places], shard, group)
        for place, value in zip(places, total.unbind(), strict=True):
            values[place] = value
    return values if many else values[0]


def over_group(name: str, order: float, values: list[Tensor], shard: ShardTensor, group: Group) -> Tensor:
    """Combine the ranks' norms or sums, one for each of several shards."""
    mine = torch.stack(values)
    if name == "mean":
        mine = mine * (shard.numel() / (shard.rows.total * math.prod(shard.shape[1:])))
    flags = mine.dtype == torch.bool
    if mine.requires_grad:  # its gradients are added over the ranks, and a wrapper's are means
        mine.register_hook(lambda gradient: gradient / group.size())
    stacked = gather_sequence((mine.byte() if flags else mine)[None], 0, group, f"{name} of {shard.rows.name}")
    if name in NORMS:
        return torch.linalg.vector_norm(stacked, order, dim=0)
    return stacked.amin(0).bool() if name == "all" else stacked.amax(0).bool() if flags else stacked.sum(0)
