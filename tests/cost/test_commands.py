"""`python -m cs336_systems.cost`: what table, step and explain print, and one line for each refusal."""

import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from cs336_systems import cost
from cs336_systems.cost import __main__ as cli
from cs336_systems.cost.commands import step
from cs336_systems.cost.commands.explain import AXES, PASSES, Derivation, explain_step
from cs336_systems.cost.commands.request import Request, take_request
from cs336_systems.cost.commands.step import hfu
from cs336_systems.cost.course import ANSWERS, question
from cs336_systems.cost.flops import forward_flops, least_forward_flops
from cs336_systems.cost.machines import CONSTANTS, system_preset
from cs336_systems.cost.notebook.tables import TABLES
from cs336_systems.cost.operator_time import collective_seconds
from cs336_systems.cost.plan_memory import peak_bytes
from cs336_systems.cost.step_time import step_time
from cs336_systems.host.console import format_bytes, format_seconds

PAGE = Path(__file__).resolve().parents[2] / "docs/cost.md"
GPT = ["--tp", "8", "--sequence-parallel", "--dropout", "0.1"]
PIPELINE = [*GPT, "--pp", "8", "--chunks", "3", "--recompute", "selective", "--batch-size", "64"]
EXPERTS = ["--size", "fairseq-moe-15b", "--tp", "2", "--ep", "8", "--dp", "2", "--recompute", "full", "--zero", "1"]
LLAMA = ["--size", "llama-8b", "--attention", "flash", "--cp", "2", "--dp", "8", "--zero", "3", "--system", "h100"]
LLAMA += ["--recompute", "selective"]
REQUESTS = {"gpt": PIPELINE, "experts": EXPERTS, "llama": LLAMA, "overlap": [*GPT, "--overlap", "all"]}
REQUESTS["modules"] = [*EXPERTS[:-4], "--recompute-modules", "layernorm,moe,mlp", "--top-k", "4"]
REQUESTS["modules"] += ["--expert-d-ff", "1024"]
REQUESTS["fp8"] = [*LLAMA[:-4], "--system", "B200", "--shard", "4", "--precision", "fp8", "--head-dim", "64"]
REQUESTS["nth"] = [*LLAMA[:-2], "--recompute", "full", "--recompute-nth", "3", "--power", "500", "--stack", "megatron"]


def asked(*arguments: str) -> Request:
    """The request that these options make."""
    given = step.command.make_context("step", list(arguments)).params
    given.pop("as_json")
    return take_request(given)


# Bytes that the operators of a block of each kind and of both ends move forward, move backward, and keep; their kernels
# forward; weights, and FLOPs backward, of all layers. Who changes a number here changes predictions.
COUNTS = {
    "gpt": (1_731_530_752, 2_632_347_648, 174_252_032, 24, 21_850_386_432, 181_845_727_641_600),
    "experts": (1_976_303_616, 2_039_480_320, 312_049_664, 39, 956_339_712, 740_881_858_560),
    "llama": (17_930_649_600, 16_791_896_064, 2_739_404_800, 36, 8_030_261_248, 144_946_556_305_408),
    "overlap": (1_731_530_752, 2_632_347_648, 174_252_032, 24, 21_850_386_432, 181_845_727_641_600),
    "modules": (1_741_422_592, 1_578_106_880, 295_272_448, 39, 352_359_936, 586_263_035_904),
    "fp8": (17_691_574_272, 16_317_939_712, 2_596_798_464, 40, 7_359_172_608, 122_956_323_749_888),
    "nth": (18_635_292_672, 18_201_182_208, 3_310_354_432, 34, 8_030_261_248, 144_946_556_305_408),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_table_adds_up_to_the_step_and_counts_what_the_model_has(printed, name):
    """On one stage; a pipeline's stages are asked for one by one."""
    options = [*REQUESTS[name], *(["--pp", "1", "--chunks", "1"] if name == "gpt" else [])]
    request, table = asked(*options), json.loads(printed("table", *options, "--json"))
    plan, config, parts, total = request.plan, request.config, request.step.parts, table["total"]
    sends = sum(parts[each] for each in ("tensor-parallel", "context-parallel", "expert-parallel"))
    computing = parts["forward"] + parts["backward"] + parts["recompute"] + sends
    listed = sum(total[f"{each}_seconds"] for each in ("forward", "backward", "recompute"))
    assert plan.microbatches * listed == pytest.approx(computing, rel=1e-12)
    assert plan.microbatches * total["host_seconds"] == pytest.approx(parts["host"], rel=1e-12)
    operators, start = [one for group in table["groups"] for one in group["operators"]], request.system.constants.start
    for each in (one[way] for one in operators for way in ("forward", "backward")):
        causes = {word: each[f"{word}_seconds"] for word in ("compute", "memory", "launch", "network")}
        assert each["bound"] == max(causes, key=causes.__getitem__)
        assert each["seconds"] == pytest.approx(sum(causes.values()), rel=1e-12)
    nbytes = [sum(one[way]["bytes"] for one in operators) for way in ("forward", "backward")]
    launches = sum(one["forward"]["launch_seconds"] for one in operators) / start
    counts = *nbytes, sum(one["kept_bytes"] for one in operators), round(launches)
    assert (*counts, total["weights"], total["flops_backward"]) == COUNTS[name]

    tokens = plan.micro_batch * request.seq
    whole = least_forward_flops(config, plan.micro_batch, request.seq)
    padded = -config.vocab_size % plan.tp * 2 * tokens * config.d_model
    routers = config.expert_layers * (plan.tp - 1) * 2 * tokens * config.d_model * config.num_experts  # not split
    assert total["flops_forward"] * plan.tp * plan.cp == whole + padded + routers


def test_the_notebook(printed):
    out = printed("table", "--preset", "seed")
    assert "0.618475" in out  # fc2's TFLOP
    assert "What the notebook gets wrong" in out
    found = json.loads(printed("table", "--preset", "seed", "--json"))
    for name, each in TABLES.items():
        total = {"kind": "total", **each.totals(), "communication": each.communication}
        rows = [*({"kind": "operator", **row} for row in each.rows), total]
        assert [row for row in found["rows"] if row["table"] == name] == [{"table": name, **row} for row in rows]
    assert found["differences"]
    layer = {each["name"]: each for each in found["layer"]}
    # Counted with a multiply and an add for each: the notebook has one addition less.
    assert layer["forward computes"]["corrected"] == pytest.approx(layer["forward computes"]["notebook"], rel=1e-3)
    assert layer["weights"]["corrected"] == pytest.approx(layer["weights"]["notebook"], rel=1e-3)
    assert layer["forward time"]["corrected"] > layer["forward time"]["notebook"]


@pytest.mark.parametrize("name", REQUESTS)
def test_step_prints_what_it_predicts(printed, name):
    request = asked(*REQUESTS[name])
    predicted = step_time(request.config, request.plan, request.seq, request.system)
    found = json.loads(printed("step", *REQUESTS[name], "--json"))
    assert found["seconds"] == predicted.total
    assert found["parts"] == predicted.parts
    assert found["mfu"] == predicted.mfu
    assert found["hfu"] == hfu(predicted)
    assert found["tokens_per_second"] == request.plan.global_batch * request.seq / predicted.total
    assert found["tokens_per_second_per_accelerator"] == found["tokens_per_second"] / request.plan.ranks
    assert found["memory_bytes"] == peak_bytes(request.config, request.plan, request.seq)[1]
    out = printed("step", *REQUESTS[name])
    assert max(map(len, out.splitlines())) <= 140
    for seconds in [each for each in predicted.parts.values() if each] + [predicted.total]:
        assert f" {format_seconds(seconds)} " in out
    assert f"{predicted.mfu:.1%}" in out
    assert f"{format_bytes(sum(found['memory_bytes'].values()))}" in out
    assert [line for line in found["warnings"] if line[:40] not in out] == []
    least = predicted.model_flops / (predicted.plan.ranks * predicted.system.peak(predicted.plan.number))
    assert [found["losses"]["at_peak"], sum(found["losses"].values())] == pytest.approx([least, predicted.total])
    assert f"= {format_seconds(least)} at the peak + " in out


def test_the_example_in_python_predicts_what_the_command_does(printed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cost, "search", partial(cost.search, limit=100))
    example = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "example.py").write_text(example)
    step = runpy.run_path(str(tmp_path / "example.py"))["step"]
    assert "GiB" in capsys.readouterr().out
    said = "--size", "llama-8b", "--system", "H100", "--dp", "64", "--zero", "3", "--batch-size", "512"
    assert json.loads(printed("step", *said, "--json"))["seconds"] == step.total


@pytest.mark.parametrize("more", [["--shard", "2"], ["--kernels", "torch"]])
def test_memory_shows_each_zero_stage_as_step_predicts_it(printed, more):
    options = ["--size", "small", "--dp", "4", "--zero", "1", *more]
    for each in json.loads(printed("memory", *options, "--json"))["choices"]:
        same = ["--zero", str(each["zero"]), "--recompute", each["recompute"]]
        found = json.loads(printed("step", *options, *same, "--json"))
        assert (each["peak_bytes"], each["stack"]) == (sum(found["memory_bytes"].values()), found["plan"]["stack"])


def test_a_training(printed):
    found = json.loads(printed("step", *GPT, "--tokens", "3e11", "--json"))
    whole = found["training"]
    assert whole == {
        "tokens": 3e11,
        "seconds": 3e11 / found["tokens_per_second"],
        "accelerator_hours": pytest.approx(8 * 3e11 / found["tokens_per_second"] / 3600, rel=1e-12),
    }
    assert f"{whole['seconds'] / 86400 / 365.25:.1f} years  for 300 G tokens" in printed(
        "step", *GPT, "--tokens", "3e11"
    )
    assert "training" not in json.loads(printed("step", *GPT, "--json"))


def test_hfu_counts_blocks_twice_under_full_recomputation():
    request = asked(*GPT, "--recompute", "full")
    parts = forward_flops(request.config, 1, request.seq)
    again = sum(parts.values()) - parts["head"]
    assert hfu(request.step) / request.step.mfu == pytest.approx(1 + again / (3 * sum(parts.values())), rel=1e-12)
    assert hfu(asked(*GPT).step) == asked(*GPT).step.mfu
    once, twice = (asked(*GPT, "--recompute-modules", names).step for names in ("mlp", "mlp,mlp"))
    assert hfu(once) == hfu(twice) > once.mfu


@pytest.mark.parametrize("name", REQUESTS)
def test_every_part_of_a_step_is_derived(printed, name):
    request = asked(*REQUESTS[name])
    found, text = Derivation(request), " ".join(printed("explain", "step", *REQUESTS[name]).split())
    for part, seconds in found.step.parts.items():
        assert seconds == 0 or format_seconds(seconds) in text, part
    assert f"= {found.step.total:.4g} s." in text
    assert f"{found.step.mfu:.1%}" in text
    # Its sums are those of the stage.
    for axis in AXES:
        total = 0.0
        for part in found.parts:
            for sent in found.collectives(part, axis).values():
                for each, count in sent.items():
                    total += part.times * count * collective_seconds(each, request.plan, request.system)
        assert total == pytest.approx(getattr(found.stage, axis), rel=1e-12)
    waits = 0.0
    for way in PASSES:
        total = sum(part.times * getattr(part, way).busy for part in found.parts)
        assert total == pytest.approx(getattr(found.stage, way), rel=1e-12)
        waits += sum(part.times * getattr(part, way).waits(CONSTANTS.host) for part in found.parts)
    assert waits * request.plan.microbatches == pytest.approx(found.step.parts["host"], rel=1e-12)


def test_the_largest_product_is_derived():
    numbers, _ = explain_step(asked(*GPT))
    flops, system = 2 * 2048 * 12288 * 6144, system_preset("a100-80gb")
    waves = 2048 * 6144 / 32768 / 108
    busy, steps = waves / (waves + CONSTANTS.wave), 12288 / (12288 + CONSTANTS.ramp)
    rate = 312e12 * system.attainable * CONSTANTS.product * busy * steps
    expected = {"waves": waves, "full": busy, "long": steps, "rate": rate, "compute": flops / rate}
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_a_stage_without_blocks_is_explained(printed):
    assert '"logits" is' in printed("explain", "step", "--size", "llama-8b", "--num-layers", "2", "--pp", "3")


def test_questions_of_the_course(printed):
    assert printed("explain", "rings", "N=16") == question("rings", N=16).markdown() + "\n"
    assert all(f"  {name} " in printed("explain") for name in ("step", *ANSWERS))
    assert "N=8, S=1e9" in printed("explain", "rings", "--help")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("step", "--tp", "7"), "do not divide over tp 7"),
        (("step", "--tp", "0"), "0 is not in the range"),
        (("table", "--constants", "nowhere.json"), "cannot read nowhere.json"),
        (("explain", "everything"), "nothing is called 'everything'; choose from step, rings"),
        (("explain", "rings", "N=0"), "N must be a number above 0"),
        (("fit", "runs.json", "--vocab-size", "9"), "--vocab-size is for logs: runs in runs.json say it themselves"),
        (("predict",), "No such command 'predict'"),
        (("step", "--size", "small", "--d-ff", "9" * 320), "--d-ff has 320 digits: give 10^15 at most"),
        (("table", "--preset", "seed", "--pp", "2"), "the notebook has sizes of its own: leave out --pp"),
        (("step", "--size", "llama-8b", "--recompute-nth", "2"), "2 needs --recompute selective or full"),
        *((("step", "--tokens", tokens), "Invalid value for '--tokens'") for tokens in ("0", "nan", "inf")),
    ],
)
def test_bad_input_is_one_line(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_help_lists_every_command_without_torch():
    """In a process of its own, where nothing is loaded yet."""
    code = (
        "import sys; from cs336_systems.host.console import run_command; from cs336_systems.cost.__main__ import main; "
        "status = run_command(main, ['--help']); "
        "sys.exit(status or bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    names = re.findall(r"^  ([a-z]+)  ", found.stdout, re.MULTILINE)
    assert Counter(cli.COMMANDS) - Counter(names) == Counter()


@pytest.mark.parametrize("name", ["[best].json", "# best.json", "> best.json"])
def test_a_model_of_any_name(tmp_path, run, monkeypatch, name):
    """The page of a search has a part that is called so, and lines that begin with these signs."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "n_positions": 32}
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(json.dumps(sizes))
    status, out, _ = run("search", "--size", name, "--gpus", "1", "--batch-size", "1")
    assert status == 0
    assert out.startswith(f"{name}: 144 k parameters, on 1 x A100-80GB")


def test_a_default_is_printed_once(run):
    status, out, _ = run("step", "--help")
    assert status == 0
    for text in re.split(r"\n  --", out):
        assert text.count("[default:") <= 1, text
