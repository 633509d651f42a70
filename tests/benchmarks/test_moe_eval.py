"""The command that evaluates a mixture of experts: published counts, formulations side by side, profile, refusals."""

import gc
import math
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import moe_eval
from benchmarks.lib.expert_calls import ALL_TO_ALL, expected
from benchmarks.lib.expert_scores import TAGS
from benchmarks.moe_eval import MoEEvalSettings
from benchmarks.records import Record, read_records
from cs336_systems.host.console import run_command
from cs336_systems.profiling.trace import read_json
from tests.benchmarks.test_moe_eval_scores import SHAPE
from tests.support import ranks
from tests.support.merged_trace import validate
from tests.support.tolerances import bound

ONE = dict.fromkeys(("pp", "dp", "cp", "ep", "tp"), 1)
TINY = ("--device", "cpu", "--d-model", "16", "--vocab-size", "256", "--context", "16")
SMALL = (*TINY, "--num-layers", "3", "--num-experts", "4", "--eval-fraction", "0.25", "--batches", "2")


def command(arguments: list[str], out: Path) -> dict:
    """Run it in this process, which must not have run tensor code, as it forks; ranks write into the file."""
    with out.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = run_command(moe_eval.main, arguments)
    return {"code": code, "out": out.read_text()}


def command_case(rank: int, world: int, folder: str, results: str) -> dict:
    gc.freeze()  # what the ranks need not copy
    text = Path(results, "text")
    text.write_text("of 512 experts a rank has 128. " * 200)
    common = ["--data", str(text), "--results"]
    counts = [*TINY, "--nproc", "4", "--moe", "einsum", "--words", "slow", "--warmup", "0", *common]
    both = [*SMALL, "--nproc", "2", "--profile", "--out", f"{results}/out", *common, f"{results}/both"]
    return {
        "counts": command([*counts, f"{results}/counts"], Path(results, "counts.txt")),
        "both": command(both, Path(results, "both.txt")),
        "one": command([*SMALL, "--moe", "both", "--smoke", "--data", str(text)], Path(results, "one.txt")),
    }


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict:
    """Output of the commands, and the folder of their files."""
    folder = tmp_path_factory.mktemp("moe_eval")
    (answer,) = ranks.run_alone(command_case, 1, results=str(folder))
    for said in answer.values():
        assert said["code"] == 0, said["out"]
    return answer | {"folder": folder}


def records_of(folder: Path) -> dict[str, Record]:
    return {record.config["moe"]: record for record in read_records(folder / "moe_eval.jsonl")}


def test_the_published_counts_come_out_on_every_rank(commands):
    (record,) = records_of(commands["folder"] / "counts").values()
    published = {
        "aten::addmm": 7740, "aten::linear": 8015, "aten::matmul": 275, "aten::mm": 335, "aten::gelu": 3870,
        "aten::bmm": 180, "launch all-to-all": 60, "TransformerDecoder": 5, "MoELayer": 30, "eval_lm": 1,
        "TransformerDecoderLayer with MoE": 30, "TransformerDecoderLayer without MoE": 30, "MultiheadAttention": 60,
    }  # fmt: skip
    counts = record.metrics["calls"]
    assert {name: counts[name] for name in published} == {name: [count] * 4 for name, count in published.items()}
    # Of words, and what one_hot asks on a CPU: eight a layer.
    assert counts["aten::item"][0] >= 5 * (4 * 16 - 1 + 6 * 8)
    assert "│ aten::addmm" in commands["counts"]["out"]


def test_formulations_side_by_side(commands):
    assert "record" not in commands["one"]["out"]  # as it is a smoke run
    records, out = records_of(commands["folder"] / "both"), commands["both"]["out"]
    einsum, sort = records["einsum"], records["sort"]
    # Four slots of four experts, sixteen wide, in float32: 16 rows of 64 bytes; of 32 choices sorting sends 16 at most.
    assert einsum.metrics["bytes_per_all_to_all"] == einsum.predicted["bytes_per_all_to_all"] == 4 * 4 * 16 * 4
    assert 0 < sort.metrics["bytes_per_all_to_all"] <= sort.predicted["bytes_per_all_to_all"] == 16 * 16 * 4
    derived = expected(SHAPE, 2, 2)
    assert {name: einsum.metrics["calls"][name] for name in derived} == {
        name: [count] * 2 for name, (count, _) in derived.items()
    }
    assert sort.metrics["calls"][ALL_TO_ALL] == [6, 6]  # with the counts of rows
    assert einsum.metrics["score"] == pytest.approx(sort.metrics["score"], rel=bound(torch.float32, 48, 256))
    assert all(0 < share < 1 for share in sort.metrics["waiting"])
    assert f"{sort.metrics['loss']:.6f}, perplexity {2 ** sort.metrics['loss']:,.2f}" in out
    assert sort.metrics["loss"] == pytest.approx(-sort.metrics["score"] / 64 / math.log(2))


def test_the_profile_of_all_ranks(commands):
    out = commands["both"]["out"]
    for dispatch in ("einsum", "sort"):
        folder = commands["folder"] / "out" / dispatch
        merged = read_json(folder / "merged.trace.json.gz")
        assert not validate(merged).problems
        names = [each["args"]["name"] for each in merged["traceEvents"] if each["name"] == "process_name"]
        assert {name.split(" (")[0] for name in names} >= {"rank 0", "rank 1"}
        table = (folder / "tables.md").read_text().split("by CPU total")[1]
        for tag in TAGS:
            assert f"| `{tag}` |" in table
        names = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
        assert next(name for name in names if name in TAGS) == "eval_lm"  # the largest of them
        assert f"{folder}: " in out


def test_layouts_that_follow_from_the_ranks():
    config = MoEEvalSettings().config()
    assert MoEEvalSettings().sizes(config, 4) == ONE | {"ep": 4}
    assert MoEEvalSettings(tp=2).sizes(config, 4) == ONE | {"ep": 2, "tp": 2}
    assert MoEEvalSettings().sizes(replace(config, num_experts=2), 8) == ONE | {"dp": 4, "ep": 2}
    assert MoEEvalSettings(profile=True).variants() == ("einsum", "sort")
