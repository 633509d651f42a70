"""Launches find compiled kernels by all that these depend on, and versions of Triton are checked, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import launch
from tests.support import codegen_run
from tests.support.codegen_run import OTHER_TRITON, VERSIONS

ROOT = Path(__file__).resolve().parents[1]


class FakeKernel:
    """Behaves as a JIT function whose compiled versions note what they are launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.fn, self.arg_names = test_a_second_launch_is_direct, ["x_ptr", "n", "A", "B"]
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def compile_and_run(*args, num_warps, num_stages, **constants):
            self.compiled.append((args, constants, num_warps))
            return self

        return compile_and_run

    def run(self, *args):
        self.launched.append(args)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: "stream"))
    monkeypatch.setattr(launch, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # what the tests' CPU tensors are on
    return FakeKernel()


def start(kernel, x, n=3, grid=(7, 1, 1), num_warps=4, **constants):
    launch.launch(kernel, grid, x, n, num_warps=num_warps, **({"A": 1, "B": 2} | constants))


def test_a_second_launch_is_direct(kernel):
    x = torch.zeros(8)
    start(kernel, x)
    start(kernel, x, n=5)  # numbers are no part of a compiled kernel
    assert len(kernel.compiled) == 1
    assert kernel.launched == [(7, 1, 1, "stream", "function", "metadata", None, None, None, x, 5, 1, 2)]


def test_changes_that_compile_a_kernel_anew(kernel):
    x = torch.zeros(8)
    for change in ({}, {"n": 2**31}, {"A": 2}, {"num_warps": 8}):
        start(kernel, x, **change)
    for other in (x.half(), x[1:]):
        start(kernel, other)
    assert len(kernel.compiled) == 6


def test_constants_in_another_order_are_refused(kernel):
    with pytest.raises(TypeError, match=r"takes the constants \['A', 'B'\], in this order, not \['B', 'A'\]"):
        launch.launch(kernel, (1, 1, 1), torch.zeros(1), 3, num_warps=4, B=1, A=2)


def test_only_versions_that_were_tried():
    for version in ("3.6.0", "3.7.1", "3.8.0+git1234"):
        launch.require_version(version)
    for version in ("3.5.1", "3.9.0", "4.0"):
        with pytest.raises(RuntimeError, match=rf"Triton {version} was never tried .* \(3.6 to 3.8 were\)"):
            launch.require_version(version)


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_other_devices_take_the_reference(device):
    assert not launch.runs_triton(SimpleNamespace(device=SimpleNamespace(type=device), dtype=torch.float32))


def test_any_tensor_of_float64_takes_the_reference():
    assert not launch.runs_triton(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def test_a_new_version_stops_a_kernel(monkeypatch):
    monkeypatch.setattr(launch, "triton", SimpleNamespace(__version__="3.9.0"))
    with pytest.raises(RuntimeError, match=r"Triton 3.9.0"):
        launch.runs_triton(torch.zeros(1))


PROGRAM = """
import sys, warnings
{first}
import torch
from kernels.rmsnorm import TritonAddRMSNormFunction, TritonRMSNormFunction
from kernels.reference import rmsnorm
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        x, w = torch.randn(3, 50, requires_grad=True), torch.randn(50)
        y = TritonRMSNormFunction.apply(x, w)
        y.sum().backward()
        assert torch.equal(y, rmsnorm(x, w))
print([str(each.message) for each in caught])
"""
# What was promised to torch.compile holds for the reference, too, whatever the layout.
PROMISES = """
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ops, tall = torch.ops.cs336_kernels, torch.randn(50, 3).T
    torch.library.opcheck(ops.rmsnorm.default, (tall, w, 1e-5))
    torch.library.opcheck(ops.add_rmsnorm.default, (tall, tall, w, 1e-5))
    torch.library.opcheck(ops.rmsnorm_backward.default, (tall, tall, w, torch.rand(3), tall, 1e-5, True, True))
"""


@pytest.mark.parametrize(
    ("first", "then", "reason"),
    [("sys.modules['triton'] = None", PROMISES, "Triton is not installed"), ("", "", "tensors are on the CPU")],
    ids=["no Triton", "no interpreter"],
)
def test_the_reference_runs_without_triton_and_warns_once(first, then, reason, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    program = [sys.executable, "-c", PROGRAM.format(first=first) + then]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kernels.reference computes instead") == 1
    assert reason in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_the_driver_is_given_what_triton_would_give_it(version):
    done = codegen_run.start(["tests.support.fake_driver"], version)
    if done is None:
        pytest.skip(f"there is no {OTHER_TRITON}: make test-all installs it")
    out, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors
    found = json.loads(out)
    by_triton, again, first, direct = found["given"]
    assert by_triton == again == first == direct
    assert found["compiled"] == [1, 3]  # another dtype and another alignment are other kernels
