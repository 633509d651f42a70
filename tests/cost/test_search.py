"""The search over layouts against an independent loop: the same best, and every configuration accounted for; and the
advice of a search that finds nothing: following it finds something."""

import json
import re
import shlex
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from math import inf

import pytest
from click.testing import CliRunner

from cs336_systems.cost.commands import step as step_command
from cs336_systems.cost.commands.search import command
from cs336_systems.cost.commands.settings import ModelOptions
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.plan import ORDER, Plan
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.search import BEST, Search, search
from cs336_systems.cost.search_space import AXES, Degrees, Space, placement
from cs336_systems.cost.step_time import step_time
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.presets import ModelConfig

A100 = system_preset("A100-80GB")
LLAMA, GPT3 = (ModelOptions(size=name).model_config() for name in ("llama-8b", "gpt3-175b"))
GPUS, BATCH, SEQ, NODE = 4, 6, 256, 2
MODEL = ModelConfig(
    vocab_size=1024, context_length=SEQ, d_model=256, d_ff=1024, num_layers=4, num_heads=2, attention="sdpa"
)
# Room for some configurations, not for others.
SMALL = replace(A100, memory=50e6, node=NODE)
EXPERTS = MODEL.override(num_experts=4, expert_every=2)


@cache
def found(config: ModelConfig) -> Search:
    return search(config, SEQ, SMALL, GPUS, BATCH)


@cache
def brute() -> tuple[dict[tuple, tuple[float, float]], dict[tuple, float], int]:
    """(seconds and bytes by choices of what runs, bytes of what does not fit, how many cannot interleave), of every
    combination of every number, without the search's own lists."""
    runs, too_large, refused = {}, {}, 0
    numbers = range(1, GPUS + 1)
    for tp, pp, dp, cp, ep in product(numbers, repeat=5):
        if tp * pp * dp * cp * ep != GPUS or BATCH % (dp * ep):
            continue
        orders = {}
        for order in permutations(ORDER):
            left, held = NODE, {}
            for axis in order:
                size = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep}[axis]
                held[axis] = max(n for n in numbers if size % n == 0 and left % n == 0)
                left //= held[axis]
            orders[tuple(held[axis] for axis in ORDER)] = order
        for mb, v, sequence, recompute, zero in product(
            (1, 2, 4, 8, 16), (1, 2, 4), (False, True), ("none", "attention", "segments"), range(4)
        ):
            if (v > 1 and (pp == 1 or EXPERTS.num_layers % (pp * v))) or (BATCH // (dp * ep)) % mb:
                continue
            if (sequence and tp == 1) or (zero and dp * cp * ep == 1):
                continue
            model = EXPERTS.override(recompute=recompute)
            for held, order in orders.items():
                key = (tp, pp, dp, cp, ep, v, mb, recompute, sequence, zero, held)
                try:
                    plan = Plan(tp, pp, dp, cp, ep, v, sequence, zero, mb, BATCH, order=order)
                    plan.check(model, SEQ)
                except UserError as error:
                    refused += "as interleaved needs" in str(error)
                    continue
                need = sum(peak_bytes(model, plan, SEQ)[1].values())
                if need > usable_memory(SMALL):
                    too_large[key] = need
                else:
                    runs[key] = step_time(model, plan, SEQ, SMALL).total, need
    return runs, too_large, refused


def test_finds_what_a_loop_over_everything_finds():
    (runs, too_large, refused), got = brute(), found(EXPERTS)
    assert refused == sum(count for reason, count in got.indivisible.items() if "as interleaved needs" in reason) > 10
    assert got.running == len(runs) > 100
    assert got.too_large == len(too_large) > 10
    alike = Counter(runs.values())
    assert [(each.step.total, each.memory) for each in got.best] == sorted(alike)[:BEST], "different ones"
    assert [1 + len(each.alike) for each in got.best] == [alike[pair] for pair in sorted(alike)[:BEST]]
    assert max(alike.values()) > 1
    assert not got.left_out


def test_each_loss_is_of_the_fastest_with_that_value():
    (runs, too_large, _), got = brute(), found(EXPERTS)
    fastest: dict[tuple, float] = defaultdict(lambda: inf)
    for key, (seconds, _) in runs.items():
        for axis, value in zip(AXES[:-1], key[:-1], strict=True):
            fastest[axis, value] = min(fastest[axis, value], seconds)
    winner = got.best[0]
    losses = {(each.axis, each.value): each for each in got.losses}
    assert set(fastest) <= set(losses)
    for (axis, value), each in losses.items():
        if axis == "placement":
            continue
        if each.best is None:
            assert fastest[axis, value] == inf
            assert each.more > 0
            continue
        assert each.best.values[axis] == value
        assert each.factor == fastest[axis, value] / winner.step.total
        if each.part:
            parts = [dict(one.step.parts) for one in (each.best, winner)]
            for one in parts:
                one["computing"] = one.pop("forward") + one.pop("backward")
            more = {name: parts[0][name] - parts[1][name] for name in parts[0]}
            assert each.more == more[each.part] == max(more.values()) > 0
            assert each.net == each.best.step.total - winner.step.total
            assert each.net == pytest.approx(sum(more.values()), rel=1e-9)
            assert each.less == max(0.0, -min(more.values())) == (-more[each.gain] if each.gain else 0.0)
            choices = {name: winner.values[name] for name in AXES[:-1]} | {axis: value}
            held = tuple(winner.plan.local(name, node=NODE) for name in ORDER)
            assert each.forced == ((*choices.values(), held) in too_large and axis not in Degrees._fields)
        else:
            assert winner.values[axis] == value or each.factor == 1.0


def test_the_reasons_add_up_to_all_that_was_tried():
    for got in map(found, (MODEL, EXPERTS)):
        assert got.tried == got.running + got.too_large + sum(got.indivisible.values()) == got.space.size()
    reasons = found(MODEL).indivisible
    assert reasons["a batch of 6 does not divide over 4 replicas"] == 1
    assert reasons["2 heads do not divide over tp 4"] == 1


def test_the_nearest_miss():
    got = found(EXPERTS)
    assert got.nearest.memory == sum(peak_bytes(got.nearest.config, got.nearest.plan, SEQ)[1].values())
    assert got.nearest.lacks == got.nearest.memory - usable_memory(SMALL)
    assert got.nearest.memory == min(brute()[1].values())
    fitting = replace(SMALL, memory=SMALL.memory + 1.0001 * got.nearest.lacks / (usable_memory(SMALL) / SMALL.memory))
    assert search(EXPERTS, SEQ, fitting, GPUS, BATCH).running > got.running


def test_held_choices():
    got = search(MODEL, SEQ, SMALL, GPUS, BATCH, fixed={"tp": 2, "recompute": "none", "zero": 1})
    assert {(each.plan.tp, each.step.config.recompute, each.plan.zero) for each in got.best} == {(2, "none", 1)}
    assert got.tried < found(MODEL).tried
    for fixed, message in (
        ({"tp": 3}, "no layout of 4 accelerators has --tp 3"),
        ({"micro_batch": 5}, "nothing divides over 4 accelerators with --micro-batch-size 5: a batch"),
        ({"micro_batch": "2"}, "micro_batch must be an integer, not '2'"),
        ({"ep": 2}, "ep 2 splits experts, and the model has none"),
        ({"color": 3}, "color is none of the choices"),
    ):
        with pytest.raises(UserError, match=message):
            search(MODEL, SEQ, SMALL, GPUS, BATCH, fixed=fixed)
    for fixed in ({"micro_batch": 3}, {"micro_batch": 32}, {"chunks": 17, "pp": 2}):  # of which a search tries none
        axis, value = next(iter(fixed.items()))
        deep = search(MODEL.override(num_layers=34), SEQ, system_preset("H100"), GPUS, 96, fixed=fixed, limit=200)
        assert {getattr(each.plan, axis) for each in deep.best} == {value}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": 0}, "gpus must be at least 1, not 0"),
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"tp": 2}, r"tp is a choice of a search: hold it with fixed=\{'tp': 2\}"),
        ({"fixed": {"recompute": "full"}}, "recompute 'full' does not exist; choose from none, attention, segments"),
        ({"fp8": True}, "A100-80GB has no 8-bit floating-point GEMMs"),
        ({"seq": -1}, "at least 1 token, not -1"),
    ],
)
def test_a_search_that_cannot_be_says_why(changes, says):
    with pytest.raises(UserError, match=says):
        search(MODEL, **{"seq": SEQ, "system": SMALL, "gpus": 2, "global_batch": BATCH} | changes)


def test_placements_differ_in_what_a_node_holds():
    degrees = Degrees(tp=2, pp=2, dp=2)
    orders = Space(MODEL, SEQ, 8, Plan(global_batch=12), 4).placements(degrees)
    plans = [Plan(**degrees._asdict(), global_batch=12, order=order) for order in orders]
    assert [placement(plan, 4) for plan in plans] == ["tp 2 x dp 2", "tp 2 x pp 2", "dp 2 x pp 2"]
    assert orders[0] == ORDER


def test_a_large_space_is_cut_and_says_so():
    whole, notes = found(MODEL), []
    got = search(MODEL, SEQ, SMALL, GPUS, BATCH, limit=whole.tried // 2, advance=notes.append)
    assert got.left_out[0] == "placements other than Megatron's order"
    assert got.tried < whole.tried
    assert got.tried > whole.space.within(whole.tried // 2)[0].size()
    assert got.best[0].step.total == whole.best[0].step.total, "around the best everything is tried"
    assert len(notes) == len(whole.space.layouts())
    tiny = search(MODEL, SEQ, SMALL, GPUS, BATCH, limit=20)
    assert "layouts" in tiny.left_out[-1]
    for axis, value in (("zero", 2), ("micro_batch", 8), ("chunks", 6)):  # what is held is not cut
        space, left_out = Space(GPT3, 2048, 64, Plan(global_batch=512), 8, {axis: value}).within(1)
        layouts = [each for each in space.layouts() if not space.refusal(each)]
        assert {getattr(choice, axis) for each in layouts for choice in space.choices(each)} == {value}
        assert left_out


def test_a_model_that_fits_nowhere():
    less = replace(SMALL, memory=6e6)
    with pytest.raises(
        UserError, match=r"nothing fits 4 x A100-80GB: .* MiB on a rank at least, .* it would fit on"
    ) as e:
        search(MODEL, SEQ, less, GPUS, 64)
    enough = int(str(e.value).split()[-1])
    assert enough > GPUS
    assert search(MODEL, SEQ, less, enough, 64).best
    with pytest.raises(UserError, match=f"it would fit on {enough}"):
        search(MODEL, SEQ, less, enough // 2, 64)
    none = replace(SMALL, memory=1e3)
    assert Space(MODEL, SEQ, 2**18, Plan(global_batch=64), NODE).gpus_needed(none) == 0
    with pytest.raises(UserError, match="nothing divides over 7 accelerators"):
        search(MODEL.override(num_layers=4), 250, SMALL, 7, 12)


def test_the_overlap_is_the_machine_s():
    newer = replace(SMALL, overlap="all")
    for machine, asked, expected in ((SMALL, None, "data"), (newer, None, "all"), (newer, "none", "none")):
        got = search(MODEL, SEQ, machine, 2, 2, overlap=asked, fixed={"tp": 2})
        assert {each.plan.overlap for each in got.best} == {expected}


@pytest.mark.parametrize(
    "options",
    [
        ["--size", "gpt3-175b", "--num-layers", "8", "--d-model", "1024", "--num-heads", "8", "--sequence-parallel"],
        ["--size", "tiny", "--system", "H100", "--precision", "fp32", "--recompute", "full", "--tp", "2", "--pp", "2"],
        ["--size", "tiny", "--overlap", "none", "--attention", "naive", "--no-sequence-parallel"],
    ],
)
def test_the_printed_command_predicts_the_same(options):
    asked = ["--gpus", "8", "--batch-size", "16", "--limit", "300", *options]
    record = json.loads(CliRunner().invoke(command, [*asked, "--json"], catch_exceptions=False).stdout)
    assert {each["plan"]["sequence"] for each in record["best"]} >= {"--sequence-parallel" in options}
    for each in [*record["best"], *(loss["best"] for loss in record["losses"] if loss["best"])]:
        words = shlex.split(each["command"])
        assert words[:4] == ["python", "-m", "cs336_systems.cost", "step"]
        again = json.loads(CliRunner().invoke(step_command.command, [*words[4:], "--json"]).stdout)
        assert again["seconds"] == each["seconds"]
        assert again["plan"] == each["plan"]
        assert sum(again["memory_bytes"].values()) == each["memory_bytes"]
    shown = CliRunner().invoke(command, asked, catch_exceptions=False).output
    assert record["best"][0]["command"] in shown.splitlines()
    assert "configurations tried" in shown
    assert "tiny" not in options or re.search(r"^  \d+ plans?: ", shown, re.MULTILINE)


def refusal(capsys, arguments: str) -> str:
    """The line of a search that finds nothing."""
    assert run_command(command, arguments.split()) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_limit_that_left_out_what_fits_is_named(capsys):
    asked = "--size llama-8b --gpus 16 --batch-size 16 --zero 0"
    line = refusal(capsys, f"{asked} --limit 3")
    assert "some does that --limit 3 left out" in line
    assert re.search(r"\d+ of 35 layouts", line)
    advised = int(re.search(r"--limit (\d+) tries every layout", line)[1])
    got = search(LLAMA, LLAMA.context_length, A100, 16, 16, fixed={"zero": 0}, limit=advised)
    assert got.running
    assert not any("layouts" in each for each in got.left_out)
    line = refusal(capsys, "--size gpt3-175b --gpus 36 --batch-size 511 --limit 1")
    assert line.startswith("error: nothing fits 36 x A100-80GB: none of the 1 tried divides, and a plan may fill")
    assert "limit" not in line


def test_what_would_fit_keeps_what_is_held(capsys):
    line = refusal(capsys, "--size llama-8b --gpus 2 --tp 1 --pp 1 --zero 0")
    assert line.endswith("no number up to 1048576 would do with --tp 1 --pp 1 --zero 0: release one of these, or raise "
                         "the batch")  # fmt: skip
    assert refusal(capsys, "--size llama-8b --gpus 2 --tp 1 --pp 1").endswith("it would fit on 4")
    line = refusal(capsys, "--size gpt3-175b --gpus 32 --tp 2 --zero 0 --recompute none")
    enough = int(line.split("it would fit on ")[1])
    fixed = {"tp": 2, "zero": 0, "recompute": "none"}
    assert search(GPT3, 2048, A100, enough, 512, fixed=fixed, limit=500).running
    assert enough > Space(GPT3, 2048, 32, Plan(global_batch=512), 8).gpus_needed(A100)
    none, shallow = replace(A100, memory=1e3), GPT3.override(num_layers=2, num_heads=2)
    with pytest.raises(UserError, match="would do: raise the batch"):
        search(shallow, 64, none, 2, 2)
