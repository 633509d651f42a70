"""The machine code of every kernel for an H100 or H200, read without one: no spills, wide loads, tensor cores.

With two versions of Triton: the one installed, and 3.6.0, which `make test` puts beside the environment because the GPU
machines have it. Compilation needs a process whose Triton does not interpret.
"""

import json

import pytest

from tests.codegen_run import OTHER_TRITON, VERSIONS, run_without_interpreter

pytest.importorskip("triton", reason="Triton is not installed")
REGISTERS, SHARED_BYTES = 65_536, 232_448  # of a multiprocessor, and the most of it that one program may have


@pytest.fixture(scope="module")
def running():
    """The compilation of every case with each Triton, side by side."""
    started = {version: run_without_interpreter("tests.codegen", version) for version in VERSIONS}
    found = {version: process for version, process in started.items() if process}
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


@pytest.fixture(scope="module", params=VERSIONS)
def reports(request, running):
    """(case, kernel, report) of every kernel compiled with one Triton."""
    if request.param not in running:
        pytest.skip(f"there is no {OTHER_TRITON}: make test installs it")
    out, errors = running[request.param].communicate(timeout=300)
    assert running[request.param].returncode == 0, errors
    found = json.loads(out)
    assert found["triton"].startswith("3.6.0") == (request.param == "3.6.0")
    return [(case, kernel, report) for case, kernels in found["reports"].items() for kernel, report in kernels]


def failures(reports, wrong):
    return [f"{case}: {kernel} {report}" for case, kernel, report in reports if wrong(case, kernel, report)]


def test_nothing_spills_and_everything_fits(reports):
    assert not failures(reports, lambda case, kernel, r: r["spills"] or r["stack"])
    assert not failures(reports, lambda case, kernel, r: r["registers"] * r["num_warps"] * 32 > REGISTERS)
    assert not failures(reports, lambda case, kernel, r: r["shared_bytes"] > SHARED_BYTES)


def test_no_double_precision(reports):
    # A Python float that reaches a kernel as float64 costs half the speed (Liger-Kernel issue 1350).
    assert not failures(reports, lambda case, kernel, r: r["double"])


def test_rows_move_in_16_bytes_a_thread(reports):
    # What is left are single numbers: 1 / rms of a row, its mean, and pairs of them for the next iteration.
    norms = [each for each in reports if each[0].startswith("rmsnorm")]
    assert not failures(norms, lambda case, kernel, r: r["loads"] - r["loads_128"] > 4)
    assert not failures(norms, lambda case, kernel, r: not r["loads_128"])
    assert not failures(
        norms, lambda case, kernel, r: kernel != "row_mean_kernel" and r["stores"] - r["stores_128"] > 1
    )


def test_backward_loads_ahead(reports):
    looping = [each for each in reports if each[1] in ("backward_kernel", "slice_backward_kernel")]
    assert looping
    assert not failures(looping, lambda case, kernel, r: not r["async_loads"])
