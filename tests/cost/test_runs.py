"""Runs in a file: how keys are read, the defaults of missing ones, what `validate` prints, and families of runs."""

import json
from statistics import mean

import pytest

from cs336_systems.cost.__main__ import main
from cs336_systems.cost.domain import time_range
from cs336_systems.cost.plan_memory import peak_bytes
from cs336_systems.cost.runs import DEFAULTS, PUBLISHED, families, left_out_errors, read_run, read_runs, summed_up
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command

RUN = {"id": "mine", "h": 1024, "a": 16, "L": 24, "s": 1024, "V": 51200, "tp": 2, "pp": 2, "dp": 4, "gbs": 64}


def test_published_runs_have_a_source_each_and_can_all_be_predicted():
    rows, runs = json.loads(PUBLISHED.read_text()), read_runs(PUBLISHED)
    assert len({row["id"] for row in rows}) == len(rows) == len(runs)
    for row, run in zip(rows, runs, strict=True):
        assert row["source"].strip(), run.id
        assert run.seconds == row["t_iter_s"] > 0
        assert run.plan.ranks == row["gpus"]
        assert not run.notes, run.notes
        assert isinstance(row["fitted"], bool)


def test_a_run_is_read_into_model_plan_and_machine():
    row = {**RUN, "vpp": 3, "mbs": 2, "nvs": 4, "recompute": "selective", "sp": True, "cp": 2, "zero": 1, "kv": 4}
    row |= {"ffn": 2816, "gpu": "H100", "network": 1e10, "t_iter_s": 1.5, "experts": 8, "top_k": 1, "ep": 2}
    run = read_run(row)
    config, plan, system = run.config, run.plan, run.system
    assert (config.d_model, config.num_heads, config.num_layers, config.kv_heads) == (1024, 16, 24, 4)
    assert (config.vocab_size, config.d_ff, config.feed_forward, run.seq) == (51200, 2816, "swiglu", 1024)
    assert (config.num_experts, config.mixture.top_k, config.recompute) == (8, 1, "attention")
    assert (plan.tp, plan.pp, plan.dp, plan.ep, plan.cp) == (2, 2, 2, 2, 2)  # experts' ranks are among those of dp
    assert (plan.chunks, plan.micro_batch, plan.global_batch, plan.zero, plan.sequence) == (3, 2, 64, 1, True)
    assert (system.name, system.node, system.between.bandwidth, run.seconds) == ("H100", 4, 1e10, 1.5)


EMPTY = dict.fromkeys(DEFAULTS)
KINDS = {"id": 7, "gpu": "abacus"} | dict.fromkeys(set(DEFAULTS) - {"id", "gpu"}, "much")
NUMBERS = dict.fromkeys(("cp", "kv", "ep", "experts", "vpp", "mbs"), 0) | {"nvs": float("inf"), "ffn": float("nan")}
UNKNOWN = {"colour": "red", "note": {"a": [1]}, "lr": None}


@pytest.mark.parametrize("more", [EMPTY, KINDS, NUMBERS, UNKNOWN], ids=["null", "other kinds", "0 and none", "unknown"])
def test_what_says_nothing_gets_the_default(more):
    plain, found = read_run(RUN), read_run(RUN | more)
    assert (found.config, found.plan, found.system, found.seconds) == (plain.config, plain.plan, plain.system, None)
    spoilt = [key for key, value in more.items() if value == "much" or value in (float("inf"),) or value != value]
    wanted = [f"{key} {more[key]!r} is not understood, so it is taken as absent" for key in DEFAULTS if key in spoilt]
    known = ["gpu 'abacus' is not known: A100-80GB is taken"] if more is KINDS else []
    assert sorted(found.notes) == sorted(wanted + known)


def test_what_strangers_write_is_understood():
    words = {"sp": "True", "recompute": " Selective", "attention": "FLASH", "zero": "2", "mbs": "2", "t_iter_s": "1.42"}
    plain = {"sp": True, "recompute": "selective", "attention": "flash", "zero": 2, "mbs": 2, "t_iter_s": 1.42}
    texts = {key: str(value) for key, value in RUN.items() if key != "id"}
    assert read_run(RUN | texts | words) == read_run(RUN | plain)
    assert read_run(RUN | plain | {"sp": 0}).plan == read_run(RUN | plain | {"sp": False}).plan
    assert not read_run(RUN | plain | {"sp": 0}).plan.sequence


def test_a_microbatch_that_is_not_said_is_the_fastest_and_leaves_interleaved_stages_their_rounds():
    every = [read_run(RUN | {"vpp": 1, "mbs": size}) for size in (1, 2, 4, 8, 16)]
    assert read_run(RUN | {"vpp": 1}).plan == min(every, key=lambda run: run.step.total).plan
    deep = RUN | {"L": 24, "pp": 8, "dp": 1, "tp": 2, "gbs": 64}
    chosen = read_run(deep | {"vpp": 3})  # microbatches of 16 would be 4, too few for 8 stages
    assert chosen.plan.microbatches % 8 == 0
    with pytest.raises(UserError, match="microbatches 63 is not a multiple of stages 8"):
        read_run(deep | {"vpp": 3, "gbs": 63})


def test_defaults_are_those_that_are_stated():
    assert read_run(RUN | {"ep": 2}).plan == read_run(RUN).plan  # ranks of experts mean nothing without experts
    without = {key: value for key, value in RUN.items() if key != "dp"}
    assert read_run(without | {"gpus": 16}).plan == read_run(RUN).plan
    with pytest.raises(UserError, match=r"gpus 18 is not a multiple of tp x pp x cp = 4, so dp cannot be derived"):
        read_run(without | {"gpus": 18})
    older, newer = read_run(RUN), read_run(RUN | {"gpu": "H100", "gpus": 99})
    for run, name, recompute, sequence, attention in (
        (older, "A100-80GB", "segments", False, "naive"), (newer, "H100", "none", True, "sdpa"),
    ):  # fmt: skip
        assert (run.system.name, run.config.recompute, run.plan.sequence) == (name, recompute, sequence)
        assert (run.config.attention, run.plan.overlap) == (attention, run.system.overlap)
    assert (older.config.d_ff, older.config.kv_heads, older.config.feed_forward) == (4096, 16, "gelu")
    assert not read_run(RUN | {"gpu": "H100", "s": 1023}).plan.sequence  # as many tokens do not divide
    assert newer.notes == ("gpus 99 is not tp x pp x dp x cp = 16, which is taken",)


def test_a_pipeline_that_takes_long_to_fill_is_interleaved_a_layer_at_a_time():
    assert read_run(RUN | {"pp": 8, "gbs": 256, "mbs": 1}).plan.chunks == 1  # seven stages, 64 microbatches
    assert read_run(RUN | {"pp": 3, "gbs": 36, "mbs": 1}).plan.chunks == 1  # two are less than a quarter of nine
    assert read_run(RUN | {"pp": 8, "gbs": 32, "mbs": 1}).plan.chunks == 3  # seven, eight microbatches
    assert read_run(RUN | {"pp": 8, "gbs": 36, "mbs": 1}).plan.chunks == 1  # nine, which do not go around
    # 60 layers on 16 stages of four would leave four of 64 chunks empty, and only the ends may be.
    assert read_run(RUN | {"pp": 16, "L": 60, "gbs": 64, "mbs": 1}).plan.chunks == 3
    assert read_run(RUN | {"pp": 16, "L": 62, "gbs": 64, "mbs": 1}).plan.chunks == 4


BAD = [
    ({"h": "wide"}, "h (d_model) must be a number, not 'wide'"),
    ({"L": float("inf")}, "L (layers) must be a number, not inf"),
    ({"L": 2.5}, "L must be a whole number"),
    ({"cp": -1}, "cp must be a whole number from 1"),
    ({"L": 10**30}, "L must be a whole number from 1 to 1e+15"),
    ({"a": 12}, "d_model 1024 is not a multiple of num_heads 12"),
    ({"gbs": 63}, "63 sequences is not a multiple of micro-batch 1 x dp 4 = 4: use 60 or 64"),
    ({"ep": 3, "experts": 6}, "dp 4 is not a multiple of ep 3"),
    ({"ep": 3, "experts": 6, "tp": 2}, "whose ranks are among them, and experts are split over tp 2 as well"),
    ({"experts": 4, "top_k": 5}, "a token is sent to 5 experts, and the layer has 4"),
    ({"fp8": True, "gpu": "A100-80GB"}, "A100-80GB has no 8-bit floating-point GEMMs"),
    ({"zero": 2, "shard": 3}, "4 replicas are no multiple of the shard 3"),
]


@pytest.mark.parametrize(("changes", "says"), BAD)
def test_a_run_that_cannot_be_names_itself_and_says_why(changes, says):
    with pytest.raises(UserError) as caught:
        read_run(RUN | changes)
    assert str(caught.value).startswith("mine: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def validate(capsys, *arguments: object) -> tuple[int, str, str]:
    status = run_command(main, ["validate", *map(str, arguments)])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_json_is_one_list_and_nothing_else(capsys, tmp_path):
    file = tmp_path / "runs.json"
    rows = [RUN | {"t_iter_s": 2}, RUN | {"id": None, "gpu": "abacus", "gpus": 3}]
    file.write_text(json.dumps(rows))
    status, out, err = validate(capsys, file, "--json")
    assert (status, err.count("note: run 2: "), err.count("\n")) == (0, 2, 2)  # accelerator and their number
    runs, found = read_runs(file), json.loads(out)
    assert [(each["id"], each["t_iter_s"]) for each in found] == [("mine", 2.0), ("run 2", None)]
    assert [each["predicted_s"] for each in found] == [run.step.total for run in runs]
    for each, run in zip(found, runs, strict=True):
        assert (each["low_s"], each["high_s"], each["stack"]) == (*time_range(run.step), "megatron")
        assert each["low_gib"] < each["predicted_gib"] < each["high_gib"]
        assert each["predicted_gib"] == sum(peak_bytes(run.config, run.plan, run.seq)[1].values()) / 2**30


def test_the_table_shows_each_run_the_total_and_notes(capsys, tmp_path):
    file = tmp_path / "run.json"
    seconds = read_run(RUN).step.total
    rows = [RUN | {"t_iter_s": seconds / 1.25}, RUN | {"id": "[other]", "t_iter_s": seconds * 2}, RUN | {"gpus": 3}]
    file.write_text(json.dumps(rows))
    status, out, err = validate(capsys, file)
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[-2] for line in lines[2:5]] == ["+25.0%", "-50.0%", "-"], out
    assert "[other]" in out
    assert "all runs: 2 measured, error 37.5% on average, -50.0% at worst, -12.5% with its sign; 0% in range" in lines
    assert err == "note: mine: gpus 3 is not tp x pp x dp x cp = 16, which is taken\n"
    file.write_text(json.dumps(RUN))  # one run, not in a list, and not measured
    assert "nothing was measured" in validate(capsys, file)[1]
    large = RUN | {"h": 16384, "a": 128, "L": 96, "recompute": "none"}
    file.write_text(json.dumps(large))
    assert "note: mine: it needs " in validate(capsys, file)[2]  # of what ran, that it fits is known
    file.write_text(json.dumps(large | {"t_iter_s": 1}))
    assert validate(capsys, file)[2] == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no list of runs: it is not JSON"),
        ("\xff", "is no list of runs: it is not JSON"),
        ("[]", "holds an empty list, and no run"),
        ("3", "must hold a list of runs"),
        ("[" + json.dumps(RUN) + ", 3]", "entry 2 is '3', not an object with h, a, L"),
        ("[" * 100_000, "is no list of runs: it is not JSON"),
        (json.dumps([RUN, RUN | {"id": "bad", "tp": 3}]), "bad: 16 heads do not divide over tp 3"),
        (json.dumps([RUN, {}]), "run 2: h, a, L, s, V, tp, pp, dp, gbs missing"),
    ],
)
def test_a_file_that_cannot_be_used_gets_one_line(capsys, tmp_path, text, says):
    file = tmp_path / "runs.json"
    file.write_bytes(text.encode("latin-1"))
    status, out, err = validate(capsys, file, "--json")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


RUNS = read_runs(PUBLISHED)


@pytest.mark.parametrize("by_source", [False, True])
def test_each_run_is_in_one_family_and_fitted_ones_come_first(by_source):
    found = families(RUNS, by_source)
    assert sorted(run.id for some in found.values() for run in some) == sorted(run.id for run in RUNS)
    assert [fitted for fitted, *_ in found] == sorted((fitted for fitted, *_ in found), reverse=True)
    assert all(len({run.given["family"] for run in some}) == 1 for some in found.values())
    assert by_source == all(len({run.given["source"] for run in some}) == 1 for some in found.values())


def test_errors_of_a_family():
    some = max(families(RUNS).values(), key=len)
    off = [run.step.total / run.seconds - 1 for run in some]
    assert summed_up([*off, None]) == (mean(map(abs, off)), mean(off), max(off, key=abs))
    assert left_out_errors(some) == [1 / run.given["left_out"] - 1 for run in some]
    inside = [low <= run.seconds <= high for run in some for low, high in [time_range(run.step)]]
    assert [run.in_range for run in some] == inside
