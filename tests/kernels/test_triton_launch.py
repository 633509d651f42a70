"""Launches find compiled kernels by all that these depend on, and versions of Triton are checked, without a GPU."""

import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from kernels import launch
from kernels.reference import rmsnorm
from kernels.rmsnorm import TritonRMSNormFunction
from tests.support import codegen_run
from tests.support.codegen_run import OTHER_TRITON, VERSIONS


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


def test_only_versions_that_were_tried(monkeypatch):
    for version in ("3.6.0", "3.7.1", "3.8.0+git1234"):
        launch.require_version(version)
    for version in ("3.5.1", "3.9.0", "4.0"):
        monkeypatch.setattr(launch, "triton", SimpleNamespace(__version__=version))
        with pytest.raises(RuntimeError, match=rf"Triton {version} was never tried .* \(3.6 to 3.8 were\)"):
            launch.runs_triton(torch.zeros(1))


def test_other_devices_and_float64_take_the_reference():
    for device in ("meta", "xpu"):
        assert not launch.runs_triton(SimpleNamespace(device=SimpleNamespace(type=device), dtype=torch.float32))
    assert not launch.runs_triton(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def warned_reasons() -> list[str]:
    """What is warned of while an RMSNorm is computed twice, as the reference does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            x, w = torch.randn(3, 50, requires_grad=True), torch.randn(50)
            y = TritonRMSNormFunction.apply(x, w)
            y.sum().backward()
            assert torch.equal(y, rmsnorm(x, w))
    return [str(each.message) for each in caught]


def test_the_reference_runs_without_an_interpreter_and_warns_once(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    launch._say_once.cache_clear()
    (said,) = warned_reasons()
    assert "tensors are on the CPU" in said
    assert "kernels.reference computes instead" in said


def test_the_reference_runs_without_triton_and_warns_once():
    """In a process of its own, which has imported no kernels yet."""
    program = "import sys; sys.modules['triton'] = None; from tests.kernels import test_triton_launch as here; "
    words = [sys.executable, "-c", f"{program}print(here.warned_reasons())"]
    done = subprocess.run(words, cwd=codegen_run.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Triton is not installed: kernels.reference computes instead") == 1
    assert done.stdout.count("computes instead") == 1


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
