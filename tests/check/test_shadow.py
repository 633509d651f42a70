"""Types of gradients that are reduced after backward, in place and in flat buffers: right code is accepted on 64 fake
ranks, and code that lacks a collective is refused."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from cs336_systems.check.candidates import candidate, load
from cs336_systems.check.shadow import check_reduction
from cs336_systems.check.targets import OURS
from cs336_systems.errors import UserError
from tests.check.planted import DDP, FSDP, MISTAKES, OPTIMIZER, PUBLISHED, REDUCING, STEP, TENSOR, make
from tests.check.test_pages import run
from tests.support.gallery import changes
from writeup.gallery import variants


def statuses(report):
    return {each.name: each.status for each in report.verdicts if each.status != "right"}


NO_SYNC = {"accumulation in no_sync": "not offered"}
ACCEPTED = [f"ours:{each}" for each in OURS if each != "zero0"] + ["torch:zero", DDP, OPTIMIZER, STEP, FSDP, REDUCING]


@pytest.mark.parametrize("target", ACCEPTED, ids=lambda text: "student" if "\n" in text else text)
def test_right_wrappers_and_what_students_write_is_accepted(target):
    report = check_reduction(candidate(make(target)) if "\n" in target else load(target)[0][0])
    assert statuses(report) == (NO_SYNC if target == FSDP else {}), report


def test_gradients_of_dtensors_are_followed():
    class Cut:
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            output_tensor.copy_(input_tensor[: len(output_tensor)])

    def build(module, cls, options, group):
        fully_shard(module).set_custom_reduce_scatter(Cut())
        return module, cls(module.parameters(), **options)

    right = load("torch:fsdp2")[0][0]
    assert statuses(check_reduction(right)) == NO_SYNC
    assert re.search(UNREDUCED, check_reduction(replace(right, build=build)).of("training").says)


def test_what_cannot_run_so_is_refused():
    by_messages = make(DDP, "dist.all_reduce(flat, async_op=True)", "dist.irecv(flat, 1)")
    for each, said in ((load("torch:ddp")[0][0], "follow torch:ddp: it reduces in C"),
                       (candidate(by_messages), "follow StudentDDP: it sums by messages"),
                       (candidate(make(TENSOR)), "name a function that returns the split model")):  # fmt: skip
        with pytest.raises(UserError, match=f"--types cannot .*{said}"):
            check_reduction(each)


def test_a_wrapper_that_hangs_or_ends_is_told_so(tmp_path, capsys):
    start = "from torch import nn\nimport os\nclass Mine(nn.Module):\n    def __init__(self, module):\n"
    for does, said in (("while True: pass", "TimeoutError: it did not end in 2 s, ten times --timeout"),
                       ("os._exit(0)", "it ended by itself with exit code 0")):  # fmt: skip
        (tmp_path / "mine.py").write_text(f"{start}        {does}\n")
        assert run(f"{tmp_path}/mine.py", "--types", "--timeout", "0.2") == 2
        assert said in capsys.readouterr().out


def test_the_time_of_imports_does_not_count(tmp_path):
    """In a process of its own, which has imported nothing yet."""
    (tmp_path / "mine.py").write_text("def build():\n    while True: pass\n")
    target, said = f"{tmp_path}/mine.py:build", "TimeoutError: it did not end in 1 s, ten times --timeout"
    words = [sys.executable, "-m", "cs336_systems.check", target, "--types", "--timeout", "0.1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (2, f"error: {target}: {said}\n")


UNREDUCED = r"the gradient that SGD uses is Partial \(P\) on axis dp, .* an all-reduce or a reduce-scatter is missing"
UNSENT = r"it is Varying \(V\) on axis dp, and must be Replicate \(R\): .* are not sent to all ranks"
LACKING = {  # planted mistakes and published bugs that lack a collective, and what is said of them
    "nothing is reduced": UNREDUCED,
    "rank 0's gradients are sent to all": UNREDUCED,
    "data-parallel group of one rank": UNREDUCED,
    "the hook averages the parameter that it is given, not its gradient": UNREDUCED,
    "weights are not sent": UNSENT,
    "most updated parameters are not broadcast": UNSENT,
}


@pytest.mark.parametrize("name", LACKING)
def test_without_a_collective_it_is_refused(name):
    (mistake,) = (each for each in MISTAKES + PUBLISHED if each.name == name)
    report = check_reduction(candidate(make(*mistake[1:4])))
    (first, *_) = [each for each in report.verdicts if each.status != "right"]
    assert first.status == "WRONG", report
    assert re.search(LACKING[name], first.says), report
    assert report.exit_code() == 1


GALLERY = {  # variants of this library that lack a collective: the candidate, and what refuses it
    "skipped-bucket": ("ours:ddp-bucketed", "unused on every rank", UNREDUCED),
    "sticky-no-sync": ("ours:ddp-bucketed", "accumulation in no_sync", UNREDUCED),
    "no-all-gather": ("ours:zero1", "training", UNSENT),
    "wrong-slice": ("ours:zero2", "training", UNREDUCED),
}


@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery_is_refused(name, monkeypatch):
    target, where, said = GALLERY[name]
    for function, code in changes(next(each for each in variants() if each.name == name)):
        monkeypatch.setattr(function, "__code__", code)
    verdict = check_reduction(load(target)[0][0]).of(where)
    assert verdict.status == "WRONG", verdict
    assert re.search(said, verdict.says), verdict
