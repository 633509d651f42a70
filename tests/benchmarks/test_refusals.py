"""Refusals of a benchmark: one line, exit code 2, nothing is begun; and `--smoke`, which is quick and keeps nothing."""

import shlex
from importlib import import_module
from itertools import product

import pytest
import torch

from benchmarks.lib import kernel_run, launcher, parallel_run, scaling_study, workload
from cs336_systems.host.console import run_command
from kernels.launch import INTERPRETED
from tests.support.machine import made_up

TEXT = "--data text --context 16"
REFUSED = {
    "e2e": {
        "--size huge": "no size 'huge' in 2024; choose from tiny, small",
        "--year 2023": "no 2023 edition",
        "--precision tf32": "tf32 is a format of NVIDIA GPUs",
        "--steps 0": "Invalid value for '--steps': 0 is not in the range x>=1.",
        "--recompute-every 2": "--recompute-every needs --recompute segments, not none; add it, or drop both",
        "--all-sizes --size small": "--all-sizes and --size cannot be combined: --all-sizes measures all",
    },
    "memory": {
        "--compile": "what a compiled model needs is not known beforehand",
        "--residuals --segments": "--residuals and --segments cannot be combined: --residuals counts every way",
        "--residuals --recompute none": "--residuals and --recompute cannot be combined",
        "--residuals --recompute-every 1": "--residuals and --recompute-every cannot be combined",
        "--segments --recompute nested": "--segments and --recompute cannot be combined",
        "--all-sizes --size small": "--all-sizes and --size cannot be combined: --all-sizes measures all",
    },
    "fused": {
        "--kernel adamw --dtype bf16": "nothing to measure: adamw is not measured in bf16",
        "--candidate ours": "nothing to measure: ours is not timed on a CPU, where Triton has an inter",
        "--smoke --candidate compiled": "nothing to measure: compiled is left out of smoke runs",
        "--kernel swiglu --candidate torch-fused": "nothing to measure: torch-fused is no candidate for swiglu",
    },
    "leaderboard": {
        "--layers 0": "Invalid value for '--layers': 0 is not in the range x>=1.",
        "--task step-2026 --layers 90000": "step-2026: --layers 90000 at batch 1 needs",
    },
    "ddp": {
        "--bucket-sizes 0": "--bucket-sizes '0': write sizes in MB, such as 5 25 100",
        "--bucket-sizes x": "--bucket-sizes 'x': write sizes in MB",
        "--d-model 100": "--d-model 100 is no multiple of 64, the size of a head",
        "--size huge": "no size 'huge'",
        "--backend nccl --device cpu": "--backend nccl moves tensors between GPUs",
        "--nproc 0": "Invalid value for '--nproc'",
    },
    "allreduce": {
        "--sizes 1XB": "'1XB' is no size; write bytes, or 512KB, 10MB, 1GB (thousands), 64MiB (1024s)",
        "--sizes 1MB 10": "10 is 10 bytes, which no number of float32 elements (4 bytes each) fills",
        "--sizes 0": "0 is 0 bytes, which no number of float32 elements",
        "--device cpu --backend nccl": "--backend nccl moves tensors between GPUs, and there is none here",
        "--nproc 0": "Invalid value for '--nproc': 0 is not in the range x>=1.",
    },
    "moe_layer": {
        "--nproc 3": "512 experts do not divide over 3 ranks: choose ranks that divide 512",
        "--eval-fraction 0": "Invalid value for '--eval-fraction': 0.0 is not in the range 0<x<=1.",
        "--experts 1": "a token is sent to 2 experts, and the layer has 1: use more, or top_k 1",
    },
    "moe_sweep": {
        "--nproc 3": "8 experts do not divide over 3 ranks: choose ranks that divide 8",
        "--capacity 2y": "--capacity '2y' is none: write 2x, or a share of the tokens such as 0.05, or",
        "--capacity 0": "--capacity '0' is none",
        "--capacity 1.5": "--capacity '1.5' is none",
        "--capacity -1x": "--capacity '-1x' is none",
    },
    "moe_eval": {
        f"{TEXT} --nproc 3": "512 experts do not divide over ep 3: choose an ep that divides 512",
        f"{TEXT} --nproc 4 --tp 3": "4 heads do not divide over tp 3: choose a tp that divides 4",
        f"{TEXT} --nproc 4 --ep 8": "tp 1 x pp 1 x ep 8 = 8 does not divide the 4 ranks",
        "--size tiny": "tiny has no experts to evaluate: set --num-experts",
        "--size bert-345m": "bert-345m is no language model: it sees the words that it would be asked for",
        f"{TEXT} --context 900": " has 100 tokens; a context of 900 needs 901: use a longer text or --context 99",
        f"{TEXT} --out text/profile": "cannot write text/profile/einsum: Not a directory; name another",
    },
    "profiling_run": {
        "--wrapper none --nproc 2": "--wrapper none joins no ranks, and there are 2",
        "--smoke --size huge": "no size 'huge'",
        "--compile --wrapper flat": "cannot be combined with --wrapper flat",
        "--nvtx": "--nvtx makes ranges for nsys, which follows a GPU",
    },
    "norms": {
        "--rows 0": "Invalid value for '--rows': 0 is not in the range x>=1.",
        "--columns 2": "Invalid value for '--columns': 2 is not in the range x>=3.",
    },
    "attention": {
        "--dim 0": "Invalid value for '--dim': 0 is not in the range x>=1.",
        "--candidate tiled": "nothing to measure: tiled is no candidate for the grid course",
        "--smoke --grid leaderboard --candidate compiled": "nothing to measure: compiled is no candidate for the grid",
        "--smoke --grid leaderboard --candidate tiled --candidate ours": "nothing to measure: ours is not timed on a",
    },
    "scaling": {
        "--grid 1x1x1,2x2": "--grid has '2x2', which is no layout: write tp x pp x dp, such as 2x1x1,2x2x2",
        "--grid 1x0x1": "--grid has '1x0x1', which is no layout: write tp x pp x dp, such as 2x1x1,2x2x2",
        "--micro-batch-size 64": "layout 1x1x1: a global batch of 16 sequences is not a multiple of",
        "--context 100000000": "are usable; choose a smaller --size or fewer ranks in --grid, which share this",
        "--grid 1x1x100000": "are usable; choose a smaller --size or fewer ranks in --grid, which share this",
        "--grid ' ,'": "--grid names no layout: write some, such as 1x1x1,2x1x1,2x2x2",
        "--grid 1x1x1,3x1x1": "layout 3x1x1: 4 heads do not divide over tp 3: choose a tp that divides 4",
        "--grid 1x1x1,1x3x1": "layout 1x3x1: num_layers 4 is not a multiple of stages 3 x chunks 1 = 3: change one",
        "--global-batch-size 12": "layout 1x1x2: a global batch of 12 sequences is not a multiple of",
        "--global-batch-size 8 --global-batch-per-dp 4": "--global-batch-size 8 keeps the batch,",
        "--size huge": "no size 'huge' in 2024; choose from tiny, small, medium, large, xl, 2.7B, bert-345m,",
        "--backend nccl": "--backend nccl moves tensors between GPUs, and there is none here; use --backend gloo",
        "--grid 1x1x1,3x1x1 --smoke": "layout 3x1x1: 4 heads do not divide over tp 3: choose a tp",
        "--rounds 0": "Invalid value for '--rounds': 0 is not in the range x>=1.",
    },
    "compare": {
        "": "name two or more different variants",
        "norm=rmsnorm": "name two or more different variants",
        "norm=rmsnorm norm=rmsnorm": "name two or more different variants",
        "norm=rmsnorm norm=batchnorm": "Invalid value for '--norm': 'batchnorm' is not one of",
        "norm=rmsnorm norm=layernorm,norm=rmsnorm": "'norm=layernorm,norm=rmsnorm' chooses norm twice; drop one",
        "norm=rmsnorm recompute=nested,recompute-every=2": "--recompute-every needs --recompute segments, not nested",
        "norm=rmsnorm size=xl": "'size=xl' is no variant",
        "--all-sizes norm=rmsnorm norm=layernorm": "drop --all-sizes, and name it with --size",
        "norm=rmsnorm compile=yes": "'compile=yes' is no variant",
    },
    "checkpoints": {
        "--steps 2": "No such option",  # a turn saves once
        "--nproc 100000": "are usable; choose a smaller --size, or fewer --layers or ranks",
    },
    "long_context": {
        "--contexts 66": "66 tokens do not divide into 2 x cp 2 = 4 parts: use --contexts 64, or a lower --cp",
        "--contexts 10000000": "are usable; lower --contexts",
    },
}
NO_DEVICE = ("moe_layer", "moe_sweep")  # which run on CPUs alone
RANKS = ("allreduce", "checkpoints", "ddp", "e2e", "long_context", "moe_eval", "profiling_run", "scaling", "zero")
NO_GPU = "error: --device cuda, but torch finds no CUDA device here; use --device cpu"
FILES = ("e2e", "memory", "fused", "leaderboard", "allreduce", *NO_DEVICE, "norms", "mixed_precision")
EVERY = [
    *((name, words, line) for name, rows in REFUSED.items() for words, line in rows.items()),
    *((name, "--results file", f"cannot write file/{name}.jsonl") for name in FILES),
    *((name, "--device cuda", NO_GPU) for name in RANKS),
]
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        pytest.param(
            *row, id=" ".join(row[:2]), marks=[NEEDS_NO_GPU] * ("there is none here" in row[2] or row[2] == NO_GPU)
        )
        for row in EVERY
    ],
)
def test_bad_input_is_one_line_and_nothing_is_begun(name, words, line, in_tmp, monkeypatch, capsys):
    module = import_module(f"benchmarks.{name}")
    for place, start in product(
        (module, launcher, parallel_run, scaling_study), ("run_ranks", "start_ranks", "on_ranks")
    ):
        monkeypatch.setattr(place, start, lambda *_: pytest.fail("started in vain"), raising=False)
    for place in (module, kernel_run):
        monkeypatch.setattr(place, "measure_once", made_up, raising=False)
    monkeypatch.setattr(workload, "probe", lambda *_: pytest.fail("measured in vain"))
    (in_tmp / "file").write_text("")
    (in_tmp / "text").write_text("a" * 1000)
    device = [] if name in NO_DEVICE or "--device cuda" in words else ["--device", "cpu"]
    assert run_command(module.main, [*shlex.split(words), *device]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert line in error
    assert not any(path.stat().st_size for path in in_tmp.rglob("*.jsonl"))


WHAT_RAN = f"step-2026: {'fused kernels in' if INTERPRETED else 'plain torch in place'}"
SHOWN = {
    "attention": ("ours: not timed on a CPU", "eager"),
    "e2e": ("tiny",),
    "fused": ("ours: not timed on a CPU", "eager"),
    "leaderboard": ("attention-2025: not run on a CPU", "step-2026: gate: one block equals", WHAT_RAN),
    "memory": (),
    "memory --residuals": (),
    "norms": ("ours: not timed on a CPU", "eager"),
}


@pytest.mark.parametrize("words", SHOWN)
def test_a_smoke_run_is_quick_and_writes_nothing(words, in_tmp, monkeypatch, capsys, quick_probe):
    name, *options = words.split()
    module = import_module(f"benchmarks.{name}")
    for place in (module, kernel_run):
        monkeypatch.setattr(place, "measure_once", made_up, raising=False)
    monkeypatch.setattr("benchmarks.lib.options.open_records", lambda *_: pytest.fail("a smoke run wrote a record"))
    assert run_command(module.main, ["--smoke", "--device", "cpu", *options]) == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in SHOWN[words])
    assert not list(in_tmp.iterdir())
