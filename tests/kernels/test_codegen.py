"""The code generated from every kernel for an H100 or H200, read without one: no spills, wide loads, tensor cores.

With two versions of Triton: the one installed, and 3.6.0, which `make test` puts beside the environment because the GPU
machines have it. Compilation needs a process whose Triton does not interpret.
"""

import fcntl
import hashlib
import json
from importlib.metadata import version

import pytest
import torch

from tests.support.codegen_run import OTHER_TRITON, ROOT, VERSIONS, start

pytest.importorskip("triton", reason="Triton is not installed")
REGISTERS, SHARED_BYTES = 65_536, 232_448  # of a multiprocessor, and the most of it that one program may have


@pytest.fixture(scope="session")
def compiled(request):
    """The report of the cases with each Triton: compiled by one worker for all, and again only after a change to
    kernels/, to the cases or to a version."""
    folder = request.config.cache.mkdir("codegen")
    sources = [*(ROOT / "kernels").glob("*.py"), *(ROOT / "tests/support").glob("codegen*.py")]
    key = hashlib.sha256(f"{torch.__version__} {version('triton')} {OTHER_TRITON.exists()}".encode())
    for path in sorted(sources):
        key.update(path.read_bytes())
    file = folder / f"{key.hexdigest()}.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            found = compile_all()
            if any(code for code, _, _ in found.values()):
                return found
            file.write_text(json.dumps(found))
    return json.loads(file.read_text())


def compile_all() -> dict[str, tuple[int, str, str]]:
    """(exit code, output, errors) by version: of every case with the Triton of the GPU machines, if it is there."""
    few = {"installed": ["few"]} if OTHER_TRITON.exists() else {}
    started = {version: start(["tests.support.codegen", *few.get(version, [])], version) for version in VERSIONS}
    running = {version: process for version, process in started.items() if process}
    try:
        said = {version: process.communicate(timeout=300) for version, process in running.items()}
        return {version: (running[version].returncode, *texts) for version, texts in said.items()}
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


@pytest.fixture(scope="module", params=VERSIONS)
def reports(request, compiled):
    """(case, kernel, report) of every kernel compiled with one Triton."""
    if request.param not in compiled:
        pytest.skip(f"there is no {OTHER_TRITON}: make test-all installs it")
    code, out, errors = compiled[request.param]
    assert code == 0, errors
    found = json.loads(out)
    assert found["triton"].startswith("3.6.0") == (request.param == "3.6.0")
    return [(case, kernel, report) for case, kernels in found["reports"].items() for kernel, report in kernels]


def failures(reports, wrong):
    return [f"{case}: {kernel} {report}" for case, kernel, report in reports if wrong(report)]


def test_nothing_spills_everything_fits_and_nothing_is_in_double_precision(reports):
    assert not failures(reports, lambda r: r["stack"])
    assert not failures(reports, lambda r: r["registers"] * r["num_warps"] * 32 > REGISTERS)
    assert not failures(reports, lambda r: r["shared_bytes"] > SHARED_BYTES)
    # A Python float that reaches a kernel as float64 costs half the speed (Liger-Kernel issue 1350).
    assert not failures(reports, lambda r: r["double"])


def test_data_moves_in_16_bytes_a_thread(reports):
    # What is narrow are single numbers: 1 / rms of a row, its target, some of them loaded ahead for the next rows.
    in_rows = [each for each in reports if not each[0].startswith(("adamw", "attention"))]
    assert in_rows
    assert not failures(in_rows, lambda r: r["loads"] - r["loads_128"] > 5 or not r["loads_128"])
    one_number = ("row_mean_kernel", "column_sum_kernel", "forward_kernel")
    writing = [each for each in in_rows if not (each[1] in one_number or each[0].endswith("False"))]
    assert not failures(writing, lambda r: not r["stores_128"] or r["stores"] - r["stores_128"] > 2)


def test_adamw_has_a_wide_path_where_addresses_allow(reports):
    found = {case: report["loads_128"] for case, kernel, report in reports if kernel == "adamw_kernel"}
    wide = {"adamw float32 aligned": 8, "adamw bfloat16 aligned": 6, "adamw float32 odd": 0}
    assert found.items() >= wide.items()


def test_loops_load_ahead(reports):
    looping = ("backward_kernel", "cross_entropy_kernel")
    found = [each for each in reports if each[1] in looping and not each[0].startswith("weighted_sum")]
    assert {kernel for _, kernel, _ in found} == set(looping)
    assert not failures(found, lambda r: not r["async_loads"])


def test_attention_runs_on_the_tensor_cores(reports):
    passes = ("forward_kernel", "keys_kernel", "queries_kernel")
    halves = [each for each in reports if each[0].startswith("attention") and "float32" not in each[0]]
    found = [each for each in halves if each[1] in passes]
    assert {kernel for _, kernel, _ in found} == set(passes)
    assert not failures(found, lambda r: not r["wgmma"] or not r["async_loads"])
    # Two programs to a multiprocessor hide each other's waiting.
    of_64 = [each for each in found if " 64 " in each[0] and each[1] == "queries_kernel"]
    assert not failures(of_64, lambda r: 2 * r["registers"] * r["num_warps"] * 32 > REGISTERS)


def test_the_older_triton_interprets_alike():
    tests = ["interpreter.py", "rmsnorm.py::test_any_leading_shape", "swiglu.py::test_any_dtype"]
    tests += ["cross_entropy.py::test_many_chunks", "flash_attention.py::test_any_dim"]
    tests += ["fused_adamw.py::test_each_step_is_rounded_once"]
    run = ["pytest", "-q", "-p", "no:cacheprovider", *(f"tests/kernels/test_{name}" for name in tests)]
    process = start(run, "3.6.0", TRITON_INTERPRET="1")
    if process is None:
        pytest.skip(f"there is no {OTHER_TRITON}: make test-all installs it")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
