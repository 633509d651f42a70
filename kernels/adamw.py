"""AdamW for all parameters in one launch, each number read once and written once.

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    p = (1 - lr decay) p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

A pass over memory for every operation and a launch for every parameter would be slow. So the kernel is given
tables of addresses instead of tensors: a program looks up which chunk of which parameter is its own. Parameters and
gradients may be in half precision, the moments m and v are float32: b2 v + (1 - b2) g^2 with b2 = 0.999 changes v by
less than the distance between two bfloat16 numbers, so that v would not change.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as uncompiled  # imports the compiler only when called

from kernels.checks import AdamWBase, check_shape
from kernels.launch import jit, launch, runs_triton, tl

BLOCK = 1024  # elements that a program holds at once: 8 per thread, two loads of 128 bits of each float32 tensor
CHUNK = 8 * BLOCK  # elements of a program: many, so that reading the tables takes little of its time
NUM_WARPS = 4
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of m and v


@jit
def update_block(param_ptr, grad_ptr, mean_ptr, square_ptr, settings, inside):
    """The equations above for one block of addresses; without a mask, all of them lie inside."""
    sign, beta1, rest1, beta2, rest2, shrink, step_size, root_bias, eps = settings
    # All loads come before the first store: the compiler cannot move a load from behind it.
    param = tl.load(param_ptr, mask=inside).to(tl.float32)
    grad = tl.load(grad_ptr, mask=inside).to(tl.float32) * sign
    mean = tl.load(mean_ptr, mask=inside) * beta1 + grad * rest1
    square = tl.load(square_ptr, mask=inside) * beta2 + grad * rest2 * grad  # a large g^2 alone could be infinite
    tl.store(mean_ptr, mean, mask=inside)
    tl.store(square_ptr, square, mask=inside)
    step = step_size * tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root_bias) + eps)
    tl.store(param_ptr, param * shrink - step, mask=inside)


@jit
def adamw_kernel(
    programs_ptr, places_ptr, grads_ptr, settings_ptr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program updates CHUNK elements of one tensor. programs (programs 2): which tensor, which of its chunks.
    places (tensors 5): the addresses of p, m and v, the number of elements, the row of the settings. grads (tensors):
    the addresses of g. settings (rows 9): `settings_row`."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0))
    start = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    place = places_ptr + 5 * tensor
    param_ptr = tl.load(place).to(tl.pointer_type(PARAM)) + start
    grad_ptr = tl.load(grads_ptr + tensor).to(tl.pointer_type(GRAD)) + start
    mean_ptr = tl.load(place + 1).to(tl.pointer_type(tl.float32)) + start
    square_ptr = tl.load(place + 2).to(tl.pointer_type(tl.float32)) + start
    if ALIGNED:  # the compiler cannot know the alignment of an address from a table
        param_ptr, grad_ptr = tl.multiple_of(param_ptr, 16), tl.multiple_of(grad_ptr, 16)
        mean_ptr, square_ptr = tl.multiple_of(mean_ptr, 16), tl.multiple_of(square_ptr, 16)
    size = tl.minimum(tl.load(place + 3) - start, CHUNK).to(tl.int32)
    row = settings_ptr + 9 * tl.load(place + 4)
    settings = (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4),
        tl.load(row + 5), tl.load(row + 6), tl.load(row + 7), tl.load(row + 8),
    )  # fmt: skip
    # Whole blocks have no mask: loads and stores are 128 bits wide only if no element can be left out.
    for block in range(0, size // BLOCK):
        at = block * BLOCK + tl.arange(0, BLOCK)
        update_block(param_ptr + at, grad_ptr + at, mean_ptr + at, square_ptr + at, settings, None)
    if size % BLOCK != 0:
        at = size // BLOCK * BLOCK + tl.arange(0, BLOCK)
        update_block(param_ptr + at, grad_ptr + at, mean_ptr + at, square_ptr + at, settings, at < size)


def settings_row(group: dict[str, Any], step: int) -> tuple[float, ...]:
    """Numbers of the update, in float64: sign of g, b1, 1 - b1, b2, 1 - b2, 1 - lr decay,
    lr / (1 - b1^t), sqrt(1 - b2^t), eps."""
    lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
    sign, shrink = -1.0 if group["maximize"] else 1.0, 1 - lr * group["weight_decay"]
    step_size, root_bias = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    return sign, beta1, 1 - beta1, beta2, 1 - beta2, shrink, step_size, root_bias, eps


def plain_update(param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, settings: tuple[float, ...]) -> None:
    """The same update in plain torch, in place, of tensors of any layout, where the kernel cannot run."""
    sign, beta1, rest1, beta2, rest2, shrink, step_size, root_bias, eps = settings
    wide = grad.to(mean.dtype) * sign
    mean.mul_(beta1).add_(wide, alpha=rest1)
    square.mul_(beta2).addcmul_(wide, wide, value=rest2)
    step = step_size * (mean / (square.sqrt() / root_bias + eps))
    param.copy_(param.to(mean.dtype) * shrink - step)


class Kind(NamedTuple):
    """Properties that the tensors of one launch share."""

    device: torch.device
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    aligned: bool


class Tables:
    """Tables of the launches of one kind, on the device. Each is sent only when changed, as addresses rarely are."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.sent: dict[str, tuple[list[Any], Tensor]] = {}

    def table(self, name: str, numbers: list[Any], make: Callable[[list[Any]], Tensor]) -> Tensor:
        """The table `make(numbers)` on the device, copied from pinned memory without waiting for the GPU."""
        if name not in self.sent or self.sent[name][0] != numbers:
            host, cuda = make(numbers), self.kind.device.type == "cuda"
            self.sent[name] = numbers, host.pin_memory().to(self.kind.device, non_blocking=True) if cuda else host
        return self.sent[name][1]

    def launch(self, rows: Sequence[Sequence[int]], settings: list[tuple[float, ...]]) -> None:
        """Update the tensors of rows (p, m, v, elements, row of the settings, g), given by address."""
        addresses = partial(torch.tensor, dtype=torch.int64, device="cpu")
        programs = self.table("programs", [row[3] for row in rows], program_table)
        places = self.table("places", list(chain.from_iterable(row[:5] for row in rows)), addresses)
        grads = self.table("grads", [row[5] for row in rows], addresses)
        values = self.table("settings", settings, partial(torch.tensor, dtype=torch.float32, device="cpu"))
        if programs.numel():
            param, grad = (getattr(tl, str(dtype).removeprefix("torch.")) for dtype in self.kind[1:3])
            constants = {"PARAM": param, "GRAD": grad, "ALIGNED": self.kind.aligned, "CHUNK": CHUNK, "BLOCK": BLOCK}
            grid = (programs.shape[0], 1, 1)
            launch(adamw_kernel, grid, programs, places, grads, values, num_warps=NUM_WARPS, **constants)


def program_table(sizes: list[int]) -> Tensor:
    """(programs 2): the tensor and the chunk of every program, from the tensors' sizes."""
    chunks = [-(-size // CHUNK) for size in sizes]
    tensor = torch.tensor(range(len(chunks)), dtype=torch.int32, device="cpu")
    chunk = [torch.arange(n, dtype=torch.int32, device="cpu") for n in chunks]
    return torch.stack((tensor.repeat_interleave(torch.tensor(chunks, device="cpu")), torch.cat(chunk)), dim=1)


def advance(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The parameter's state after one more step is counted, with moments that the kernel can read."""
    wide = torch.promote_types(param.dtype, torch.float32)
    wanted = (wide, param.device, param.shape, param.is_contiguous())
    for name in MOMENTS:
        moment = state.get(name)
        if moment is None:
            state[name] = torch.zeros_like(param, dtype=wide)
        elif (moment.dtype, moment.device, moment.shape, moment.is_contiguous()) != wanted:
            check_shape(name, moment, tuple(param.shape), "its parameter")
            state[name] = torch.empty_like(param, dtype=wide).copy_(moment)
    state["step"] = int(state.get("step", 0)) + 1  # torch keeps a tensor; a number needs no waiting for a GPU
    return state


class FusedAdamW(AdamWBase):
    """`torch.optim.AdamW` in one launch for each dtype, device and alignment to 16 bytes; moments are float32 at least.
    State dicts load both ways. float64, tensors that are not contiguous, subclasses such as DTensor and CPUs without
    Triton's interpreter take plain torch. Raises TypeError for a sparse gradient."""

    can, moments_dtype = ("maximize",), torch.float32

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
        *, maximize: bool = False,
    ) -> None:  # fmt: skip
        self._tables: dict[Kind, Tables] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables = {}
        for group in self.param_groups:
            group.update(self.defaults | group)
            group["lr"] = float(group["lr"])

    @uncompiled
    def update_all(self, used: list[tuple[Any, dict[str, Any]]]) -> None:
        settings, rows = list[tuple[float, ...]](), dict[Kind, list[tuple[int, ...]]]()
        fused, alive = [], []  # alive: gradients, of which the kernel has addresses only
        row_of: dict[tuple[int, int], int] = {}  # by group and step, since parameters may have been left out of some
        for param, group in used:
            state, grad = advance(param, self.state[param]), param.grad
            check_shape("a gradient", grad, tuple(param.shape), "its parameter")
            step, mean, square = (state[name] for name in ("step", *MOMENTS))
            row = row_of.setdefault((id(group), step), len(settings))
            if row == len(settings):
                settings.append(settings_row(group, step))
            ordinary = type(param).__torch_dispatch__ is Tensor.__torch_dispatch__ and param.is_contiguous()
            if not (ordinary and runs_triton(param)):
                plain_update(param, grad, mean, square, settings[row])
                continue
            grad = grad.contiguous().resolve_neg()
            fused.append(param)
            alive.append(grad)
            p, m, v, g = (each.data_ptr() for each in (param, mean, square, grad))
            kind = Kind(param.device, param.dtype, grad.dtype, (p | m | v | g) % 16 == 0)
            rows.setdefault(kind, []).append((p, m, v, param.numel(), row, g))
        for kind, some in rows.items():
            self._tables.setdefault(kind, Tables(kind)).launch(some, settings)
        torch.autograd.graph.increment_version(fused)  # for graphs from before the step
