"""The operator that launched each kernel, in all formats of GPU traces since torch 1.13."""

import pytest

from cs336_systems.errors import UserError
from cs336_systems.host.console import console
from cs336_systems.profiling.breakdown import share_rows
from cs336_systems.profiling.operators import kernel_rows, op_rows
from cs336_systems.profiling.overlap import overlap
from cs336_systems.profiling.report import write_report
from cs336_systems.profiling.trace import EARLIER
from tests.support.chrome_events import MAIN, STREAM, event, tag, trace

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def launched(start: float, correlation: int, name: str = "cudaLaunchKernel", **args) -> dict:
    return event(name, start, 2, cat="cuda_runtime", **{"cbid": 211, "correlation": correlation} | args)


def kernel(name: str, start: float, length: float, correlation: int, lane=STREAM, **args) -> dict:
    about = {"device": lane[0], "stream": lane[1], "correlation": correlation}
    return event(name, start, length, lane, "kernel", **about | args)


# Two operators, of which the second launches from inside of one that it calls. The ids of operators are 1, 2, 3.
OPERATORS = [
    event("aten::mm", 10, 20, **{"External id": 1}),
    event("aten::softmax", 40, 30, **{"External id": 2}),
    event("aten::_softmax", 45, 20, **{"External id": 3}),
]
FORMS = {
    # The kernels' "External id" is their correlation: 3 and 1 are also the ids of operators, of others. So is HIP's.
    "2021 to 2023": [
        *OPERATORS,
        launched(15, 3, **{"External id": 3}),
        launched(50, 1, "hipLaunchKernel", **{"External id": 1}),
        kernel("gemm", 100, 40, 3, **{"External id": 3}),
        kernel("softmax", 140, 10, 1, **{"External id": 1}),
    ],
    "2024": [
        *OPERATORS,
        launched(15, 901, **{"External id": 1}),
        launched(50, 902, **{"External id": 3}),
        kernel("gemm", 100, 40, 901, **{"External id": 1, "graph node id": 0, "graph id": 0}),
        kernel("softmax", 140, 10, 902, **{"External id": 3}),
    ],
    "calls not recorded": [
        *OPERATORS,
        kernel("gemm", 100, 40, 901, **{"External id": 1}),
        kernel("softmax", 140, 10, 902, **{"External id": 3}),
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_kernels_belong_to_the_operator_around_their_launch(form):
    found = trace(*FORMS[form])
    rows = {row.name: (row.device_self, row.device_total) for row in op_rows(found)}
    assert rows["aten::mm"] == (40_000, 40_000)
    assert rows["aten::softmax"] == (0, 10_000)
    assert rows["aten::_softmax"] == (10_000, 10_000)
    assert sum(own for own, _ in rows.values()) == 50_000
    assert share_rows(found)[0].share == 0.8


@pytest.mark.parametrize("call", ["cudaGraphLaunch", "hipGraphLaunch", "cudaLaunchKernel"])
def test_kernels_of_graphs_have_rows_and_count(call):
    """They bear the correlation of the graph's launch, and in some traces the number of their node."""
    node = {"graph node id": 5} if call == "cudaLaunchKernel" else {}
    found = trace(
        tag("forward", 0, 90),
        OPERATORS[0],
        launched(15, 901),
        kernel("gemm", 100, 10, 901),
        launched(60, 902, call),
        kernel("gemm", 110, 60, 902, **node),
        kernel("norm", 170, 20, 902, **node),
        kernel(NCCL, 190, 10, 902, (0, 9), **node),
    )
    rows = {row.name: row for row in op_rows(found, sort="device", by="self")}
    assert [*rows][:2] == ["CUDA graph: gemm", "CUDA graph: norm"]
    assert [round(rows[name].device_self_share, 9) for name in ("CUDA graph: gemm", "aten::mm")] == [0.6, 0.1]
    assert (rows["CUDA graph: gemm"].calls, rows["CUDA graph: gemm"].cpu_total) == (1, 0)
    assert {row.name: round(row.share, 9) for row in share_rows(found)}["matrix products"] == 0.1
    assert {row.name: round(row.share, 9) for row in share_rows(found)}["collectives"] == 0.1
    assert sum(row.device_self for row in rows.values()) == sum(row.total for row in kernel_rows(found)) == 100_000


def test_what_was_launched_before_the_profile_is_in_no_table():
    """Two kernels still run: one began before the first operator, one later, but with a number from before."""
    found = trace(
        *OPERATORS,
        launched(15, 901),
        launched(50, 902),
        kernel("before", 0, 60, 899),
        kernel("before", 60, 40, 900),
        kernel(NCCL, 0, 100, 898, (0, 9)),
        kernel("gemm", 100, 40, 901),
        kernel("no call recorded", 140, 5, 903),
        kernel(NCCL, 130, 20, 902, (0, 9)),
    )
    assert sum(span.category == EARLIER for span in found.spans) == 3
    assert {row.name: row.total for row in kernel_rows(found)} == {
        "gemm": 40_000,
        NCCL: 20_000,
        "no call recorded": 5000,
    }
    mine = overlap(found)
    assert (mine.communication, mine.overlapped) == (20_000, 15_000)


def test_memory_of_a_gpu_by_operator():
    def memory(time: float, nbytes: int, **args) -> dict:
        about = {"Device Type": 1, "Device Id": 0, "Bytes": nbytes, "Total Allocated": 0} | args
        return {"ph": "i", "name": "[memory]", "pid": MAIN[0], "tid": MAIN[1], "ts": time, "args": about}

    found = trace(
        event("aten::conv2d", 0, 30),
        event("aten::convolution", 2, 26),
        event("aten::cudnn_convolution", 4, 20),
        memory(5, 4096, Addr=16),
        memory(26, -1024, Addr=8),
        memory(27, 512),  # as torch before 1.13 has it
    )
    rows = {row.name: (row.memory_self, row.memory_total) for row in op_rows(found)}
    assert rows["aten::cudnn_convolution"] == (4096, 4096)
    assert rows["aten::convolution"] == (-1024, 3072)
    assert rows["aten::conv2d"] == (0, 3072)


def test_spans_of_something_else_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"neither operators nor kernels of torch\.profiler, only 'blink'"):
        write_report(tmp_path, [trace(event("paint", 0, 1, cat="blink"))], console(quiet=True))
