"""Compile kernels for an H100 or H200 (sm_90) without one, and count what the generated code holds.

Run as a program (without TRITON_INTERPRET): `python -m tests.support.codegen`. The project's own launchers are called
with small tensors on the CPU; in place of a launch, the kernel is compiled with the very arguments, constants and
number of warps that a GPU would have been given.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import (
    adamw,
    cross_entropy,
    flash_attention,
    flash_attention_backward,
    launch,
    rmsnorm,
    rmsnorm_wide,
    swiglu,
    weighted_sum,
)

TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32",
}  # fmt: skip
_reports: dict[tuple, dict[str, int]] = {}
SM_90 = GPUTarget("cuda", 90, 32)


def type_of(argument) -> str:
    if argument is None:
        return "constexpr"
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def compile_kernel(kernel, args, constants, num_warps, num_stages):
    """The kernel as `launch` would have it compiled: tensors aligned to 16 bytes, numbers not specialised."""
    names, values = kernel.arg_names, (*args, *constants.values())
    assert names[len(args) :] == list(constants), "constants in another order than the kernel's"
    signature = {
        name: type_of(value) if name not in constants else "constexpr"
        for name, value in zip(names, values, strict=True)
    }
    fixed = {
        (i,): value for i, (name, value) in enumerate(zip(names, values, strict=True)) if signature[name] == "constexpr"
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, value in enumerate(args) if isinstance(value, torch.Tensor)}
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=SM_90, options={"num_warps": num_warps, "num_stages": num_stages})


@cache
def reader() -> str:
    """Triton's own tool that reads machine code. Disassembling it as well would take a hundred times as long."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def report(compiled) -> dict[str, int]:
    """Registers and stack of the machine code, and from the PTX that it was assembled from: the width of loads and
    stores, asynchronous ones, tensor-core instructions, double precision."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        run = [reader(), "-res-usage", file.name]
        usage = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    ptx = compiled.asm["ptx"]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, ptx))

    copies, wide_copies = count(r"cp\.async\.c[ag]\."), count(r"cp\.async\.c[ag]\.[^;]*, 0x10,")
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),  # where a spilled register goes
        "loads": count(r"\bld\.global") + copies,
        "loads_128": count(r"\bld\.global\S*\.v4\.b32|\bld\.global\S*\.v2\.b64") + wide_copies,
        "async_loads": copies,
        "stores": count(r"\bst\.global"),
        "stores_128": count(r"\bst\.global\S*\.v4\.b32|\bst\.global\S*\.v2\.b64"),
        "wgmma": count(r"\bwgmma\.mma_async"),
        "double": count(r"\.f64\b"),
        "shared_bytes": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
    }


@contextmanager
def compiling(*modules):
    """Within, the modules' `launch` compiles and reports; yields the reports by kernel name, in order."""
    reports: list[tuple[str, dict[str, int]]] = []

    def launch(kernel, grid, *args, num_warps, num_stages=1, **constants):
        key = (kernel.fn, num_warps, num_stages, *map(type_of, args), *constants.items())
        if key not in _reports:
            _reports[key] = report(compile_kernel(kernel, args, constants, num_warps, num_stages))
        reports.append((kernel.fn.__name__, _reports[key]))

    saved = [
        (module, name, getattr(module, name))
        for module in modules
        for name in ("launch", "runs_triton")
        if hasattr(module, name)
    ]
    for module, name, _ in saved:
        setattr(module, name, launch if name == "launch" else lambda *_: True)
    try:
        yield reports
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def rmsnorm_case(columns: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w = torch.zeros(1, columns, dtype=x_dtype).requires_grad_(), torch.ones(columns, dtype=w_dtype).requires_grad_()
    y = rmsnorm.TritonRMSNormFunction.apply(x, w)
    y.backward(torch.zeros_like(y))


def add_rmsnorm_case(columns: int) -> None:
    x, w = torch.zeros(1, columns, dtype=BF16).requires_grad_(), torch.ones(columns).requires_grad_()
    y, total = rmsnorm.TritonAddRMSNormFunction.apply(x, x.detach(), w)
    torch.autograd.backward((y, total), (torch.zeros_like(y), torch.zeros_like(total)))


def weighted_sum_case(columns: int, dtype: torch.dtype) -> None:
    x, w = (torch.zeros(shape, dtype=dtype).requires_grad_() for shape in ((1, columns), (columns,)))
    weighted_sum.f_weightedsum(x, w).backward(torch.ones(1, dtype=dtype))


def swiglu_case(dtype: torch.dtype) -> None:
    gate, up = (torch.zeros(64, 64, dtype=dtype).requires_grad_() for _ in range(2))
    y = swiglu.SwiGLUFunction.apply(gate, up)
    y.backward(torch.zeros_like(y))


def cross_entropy_case(vocab: int, dtype: torch.dtype, need_grad: bool) -> None:
    logits = torch.zeros(2, -(-vocab // 64) * 64, dtype=dtype)[:, :vocab]
    cross_entropy.rows_in_place(logits, torch.zeros(2, dtype=torch.int64), torch.empty(2), -100, need_grad)
    if need_grad:
        cross_entropy._scaled_op(torch.empty(64, 64), torch.ones(()), dtype)


def attention_case(dim: int, dtype: torch.dtype, is_causal: bool) -> None:
    q, k, v = (torch.zeros(1, 1, dim, dtype=dtype).requires_grad_() for _ in range(3))
    flash_attention.FlashAttention2.apply(q, k, v, is_causal).backward(torch.zeros(1, 1, dim, dtype=dtype))


def adamw_case(dtype: torch.dtype, aligned: bool) -> None:
    p = torch.nn.Parameter(torch.zeros(64 + (not aligned), dtype=dtype)[0 if aligned else 1 :])
    p.grad = torch.zeros(64, dtype=dtype)
    adamw.FusedAdamW([p]).step()


def name_of(*what: object) -> str:
    return " ".join(str(each).removeprefix("torch.") for each in what)


COLUMNS = (64, 1000, 4096, 8192, 16_384, 262_144)
NORMS = [*product(COLUMNS, [(BF16, FP32)]), *product((64, 1000, 8192, 16_384, 262_144), [(FP32, FP32)])]
NORMS += product((4096, 16_384), [(BF16, BF16)])
# At 64 full and causal have equal tiles, and causal has all that full has, and a masked loop.
ATTENTION = ((64, BF16, True), (128, BF16, False), (128, BF16, True), (40, FP16, True), (128, FP32, True))
CASES: dict[str, Callable[[], None]] = {
    **{name_of("rmsnorm", n, x, w): partial(rmsnorm_case, n, x, w) for n, (x, w) in NORMS},
    **{name_of("add_rmsnorm", n): partial(add_rmsnorm_case, n) for n in (4096, 16_384, 32_768)},
    **{name_of("weighted_sum", n, t): partial(weighted_sum_case, n, t) for n, t in ((1000, FP32), (4096, BF16))},
    **{name_of("swiglu", t): partial(swiglu_case, t) for t in (FP32, BF16)},
    **{
        name_of("cross_entropy", n, t, grad): partial(cross_entropy_case, n, t, grad)
        for n, t, grad in ((128_256, BF16, True), (128_256, BF16, False), (50_257, FP32, True), (10_000, FP16, True))
    },
    **{
        name_of("attention", dim, t, "causal" if is_causal else "full"): partial(attention_case, dim, t, is_causal)
        for dim, t, is_causal in ATTENTION
    },
    **{
        name_of("adamw", t, "aligned" if aligned else "odd"): partial(adamw_case, t, aligned)
        for t, aligned in ((FP32, True), (BF16, True), (FP32, False))
    },
}
# Each kernel and type of a Triton that no GPU machine has: a quarter of the time.
FEW = (
    *("rmsnorm 1000 float32 float32", "rmsnorm 4096 bfloat16 float32", "rmsnorm 16384 bfloat16 bfloat16"),
    *("rmsnorm 262144 float32 float32", "add_rmsnorm 4096", "weighted_sum 4096 bfloat16", "swiglu bfloat16"),
    *("cross_entropy 128256 bfloat16 True", "cross_entropy 50257 float32 True", "attention 64 bfloat16 causal"),
    *("adamw float32 aligned", "adamw bfloat16 aligned", "adamw float32 odd"),
)
MODULES = (
    rmsnorm, rmsnorm_wide, weighted_sum, swiglu, cross_entropy, adamw, flash_attention,
    flash_attention_backward, launch,
)  # fmt: skip


def main() -> None:
    """Print, as one line of JSON, {case: [[kernel, report], ...]}; of FEW alone if told so."""
    reports = {}
    for name in FEW if sys.argv[1:] == ["few"] else CASES:
        with compiling(*MODULES) as found:
            CASES[name]()
        reports[name] = found
    print(json.dumps({"triton": triton.__version__, "reports": reports}))


if __name__ == "__main__":
    main()
