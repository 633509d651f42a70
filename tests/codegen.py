"""Compile kernels for an H100 or H200 (sm_90) without one, and count what the machine code holds.

Run as a program (without TRITON_INTERPRET): `python -m tests.codegen`. The project's own launchers are called with
small tensors on the CPU; in place of a launch, the kernel is compiled with the very arguments, constants and number of
warps that a GPU would have been given, and the machine code is read with the disassembler that Triton carries.
"""

import json
import re
import subprocess
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

from kernels import column_sum, rmsnorm, rmsnorm_wide

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
def disassembler() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def report(compiled) -> dict[str, int]:
    """What matters of the machine code: registers, spills, width of loads, matrix instructions, shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        run = [disassembler(), "-sass", "-res-usage", file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text))

    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),
        "stack": int(re.search(r"STACK:(\d+)", text)[1]),
        "spills": count(r"\b(?:LDL|STL)\b"),
        "loads": count(r"\bLDG\b|\bLDGSTS\b"),
        "loads_128": count(r"\bLDG\.\S*128|\bLDGSTS\.\S*128"),
        "async_loads": count(r"\bLDGSTS\b"),
        "bulk_loads": count(r"\bUTMALDG\b"),
        "stores_128": count(r"\bSTG\.\S*128"),
        "stores": count(r"\bSTG\b"),
        "wgmma": count(r"\bHGMMA\b"),
        "mma": count(r"\bHMMA\b"),
        "double": count(r"\bD(?:ADD|MUL|FMA|SETP)\b|\bMUFU\.\w*64"),
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
        setattr(module, name, launch if name == "launch" else lambda x: True)
    try:
        yield reports
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def rmsnorm_case(columns: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w = torch.zeros(1, columns, dtype=x_dtype).requires_grad_(), torch.ones(columns, dtype=w_dtype).requires_grad_()
    y = rmsnorm.TritonRMSNormFunction.apply(x, w)
    y.backward(torch.zeros_like(y))


FP32, BF16 = torch.float32, torch.bfloat16
COLUMNS = (64, 1000, 1024, 4096, 8192, 16_384, 32_768, 262_144)
CASES: dict[str, Callable[[], None]] = {
    f"rmsnorm {columns} {str(x)[6:]} {str(w)[6:]}": partial(rmsnorm_case, columns, x, w)
    for columns, (x, w) in [*product(COLUMNS, [(FP32, FP32), (BF16, FP32)]), *product((4096, 16_384), [(BF16, BF16)])]
}


def main() -> None:
    """Print, as one line of JSON, {case: [[kernel, report], ...]}."""
    reports = {}
    for name, case in CASES.items():
        with compiling(rmsnorm, rmsnorm_wide, column_sum) as found:
            case()
        reports[name] = found
    print(json.dumps({"triton": triton.__version__, "reports": reports}))


if __name__ == "__main__":
    main()
