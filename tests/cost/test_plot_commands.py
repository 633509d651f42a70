"""The pictures of the cost model: the numbers behind each, what its command refuses and says, and stable bytes."""

from dataclasses import replace

import pytest

from cs336_systems.cost.__main__ import main
from cs336_systems.cost.commands import plot
from cs336_systems.cost.machines import Constants, system_preset
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plan_memory import fits
from cs336_systems.cost.plots import breakdown, roofline, scaling, style
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import Case, step_time
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.presets import model_preset

with_matplotlib = pytest.mark.skipif(not style.can_plot(), reason="matplotlib is in the extra `writeup`")

SMALLER = {
    "roofline": "--size fairseq-moe-15b --system H100",
    "breakdown": "--size xl --tp 5",
    "scaling": "--size medium --context 512 --batch-size 16 --per-gpu 1 --most 16 --system B200",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing command."),
        ("roofline --out a.gif", "--out a.gif should end in .svg, .png, .pdf"),
        ("roofline --out nowhere/a.png", "cannot write nowhere/a.png: there is no folder nowhere"),
        ("roofline --out a.svg --tp 5", "96 heads do not divide over tp 5: choose a tp that divides 96"),
        ("scaling --out a.svg --least 64 --most 8", "--least 64 is more than --most 8"),
        ("all --out nowhere", "Invalid value for '--out': Directory 'nowhere' does not exist."),
    ],
)
def test_bad_input_gets_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(style, "can_plot", lambda: True)
    assert run_command(main, ["plot", *plot.shlex.split(arguments)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: {message}")


def test_without_matplotlib_one_line_says_what_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(style, "can_plot", lambda: False)
    for name in plot.EXAMPLES:
        assert run_command(main, ["plot", name, "--out", "a.svg"]) == 2
        assert capsys.readouterr().err == f"error: {style.HOW_TO_PLOT}\n"
    assert run_command(main, ["plot", "all", "--out", str(tmp_path)]) == 2
    assert style.HOW_TO_PLOT in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@with_matplotlib
def test_all_pictures_are_drawn_and_the_same_again(monkeypatch, capsys, tmp_path):
    assert set(plot.EXAMPLES) == set(SMALLER) == set(plot.command.commands) - {"all"}
    monkeypatch.setattr(plot, "EXAMPLES", SMALLER)
    assert run_command(main, ["plot", "all", "--out", str(tmp_path)]) == 0
    text = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(text) == [f"cost-{name}.svg" for name in sorted(SMALLER)]
    assert all("<svg" in picture and "dc:date" not in picture for picture in text.values())
    assert "logits, " in text["cost-roofline.svg"]
    assert ">as asked<" in text["cost-breakdown.svg"]
    assert "B200: figures of data sheets" in text["cost-scaling.svg"]
    captured = capsys.readouterr()
    assert f"plot in {tmp_path / 'cost-breakdown.svg'}" in captured.out
    path = tmp_path / "cost-breakdown.svg"
    assert run_command(main, ["plot", "breakdown", *plot.shlex.split(SMALLER["breakdown"]), "--out", str(path)]) == 0
    assert path.read_text() == text[path.name]


@with_matplotlib
def test_a_file_that_cannot_be_written_gets_one_line(tmp_path):
    class Locked:
        def savefig(self, path, **_):
            raise PermissionError(13, "Permission denied")

    with pytest.raises(UserError, match=r"^cannot write .*a\.png: Permission denied; name another file with --out$"):
        style.save(Locked(), tmp_path / "a.png")


A100 = system_preset("A100-80GB")
GPT3 = model_preset("gpt3-175b")


def test_scaling_is_that_of_the_stack_that_was_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(plot, "check_path", lambda path: None)
    monkeypatch.setattr(plot, "_write", lambda figure, out: None)
    monkeypatch.setattr(plot.scaling, "draw", lambda study, *rest: seen.append(study.system.constants))
    options = {"megatron": "", "other": "--kernels torch", "fsdp": "--zero 3", "nanotron": "--stack nanotron"}
    for words in options.values():
        assert run_command(main, ["plot", "scaling", "--size", "small", "--out", "a.svg", *words.split()]) == 0
    assert seen == [STACKS[name].own() for name in options]


def test_a_point_of_the_roofline_is_flops_over_bytes_and_over_time():
    found = roofline.points(GPT3, Plan(tp=8), 2048, A100)
    ahead, back = (point for point in found if point.operator == "up")
    rows, inner, columns = 2048, 12_288, 49_152 // 8
    flops, numbers = 2 * rows * inner * columns, rows * inner + inner * columns + rows * columns
    assert (ahead.way, back.way) == ("forward", "backward")
    # Backward has two products, each of the same three matrices.
    assert ahead.intensity == back.intensity == flops / (2 * numbers)
    assert (ahead.rate * ahead.seconds, back.rate * back.seconds) == pytest.approx((flops, 2 * flops), rel=1e-12)
    swept = next(point for point in found if point.operator == "GELU")
    assert (swept.intensity, swept.counted, ahead.counted) == (1 / 2, False, True)


def test_points_take_as_long_as_a_block_does_and_lie_under_the_attainable_roof():
    plan, system = Plan(tp=4, micro_batch=2, global_batch=2), replace(A100, constants=Constants(host=0.0))
    found = roofline.points(GPT3, plan, 2048, system)
    one, two = (step_time(GPT3.override(num_layers=layers), plan, 2048, system).parts for layers in (1, 2))
    block = sum(point.seconds for point in found if point.operator not in ("last norm", "logits", "loss"))
    assert block == pytest.approx(sum(two[way] - one[way] for way in ("forward", "backward")), rel=1e-9)
    peak, attainable = roofline.roofs(plan, system)
    assert peak == (A100.bandwidth, A100.matmul_flops)
    assert all(point.rate <= attainable.at(point.intensity) < peak.at(point.intensity) for point in found)
    wide = roofline.roofs(replace(plan, width=4), A100)[0]
    assert wide.flops == A100.wide_flops


def test_multiples_add_up_to_the_inverse_of_mfu():
    step = step_time(GPT3, Plan(tp=8, pp=8, global_batch=32), 2048, A100)
    found = breakdown.multiples(step)
    assert sum(found.values()) == pytest.approx(1 / step.mfu, rel=1e-12)
    assert "context-parallel" not in found
    assert set(step.parts) <= set(breakdown.COLOURS)


def test_the_published_runs_have_their_published_utilisation():
    bars = breakdown.published()
    assert [bar.id for bar in bars[2:4]] == ["175B-full", "175B-sel+sp"]
    assert [bar.config.recompute for bar in bars[:8]] == ["segments", "attention"] * 4
    mfu = [bar.step.mfu * bar.step.total / bar.seconds for bar in bars[1:8:2]]
    # Half a unit of the last printed digit: of the percentage, and of 1.10 seconds.
    assert mfu == pytest.approx([0.415, 0.514, 0.560, 0.563], abs=0.0005, rel=0.005 / 1.10)
    assert [bar.plan.ranks for bar in bars[:8:2]] == [8, 64, 280, 512]


SMALL = Case(model_preset("2.7B"), Plan(zero=1), 1024, A100)


def test_plans_use_all_accelerators_the_whole_batch_and_fit():
    found = list(scaling.plans(SMALL, 16, 32, [(1, 1), (2, 2), (3, 1), (4, 8)]))
    assert {(plan.tp, plan.pp, plan.dp) for _, plan in found} == {(1, 1, 16), (2, 2, 4)}
    assert {plan.ranks for _, plan in found} == {16}
    assert {(plan.global_batch, plan.zero, plan.sequence) for _, plan in found} == {(32, 1, False), (32, 1, True)}
    assert {plan.micro_batch for _, plan in found if plan.pp == 2} == {1, 2, 4, 8}
    assert {plan.micro_batch for _, plan in found if plan.pp == 1} == {1, 2}
    assert {config.recompute for config, _ in found} == {"none", "attention", "segments"}
    assert all(fits(config, plan, 1024, A100) for config, plan in found)
    assert not list(scaling.plans(replace(SMALL, config=GPT3), 8, 8, [(1, 1), (8, 1)]))


def test_the_best_plan_is_the_fastest_and_lines_without_a_point_are_left_out():
    with pytest.raises(UserError, match=r"on 8 to 16 x A100-80GB no plan .* of 8 to 16 sequences: start from more"):
        scaling.curves(replace(SMALL, config=GPT3), [8, 16], [8, 16], [(1, 1)])
    lines = scaling.curves(SMALL, [8, 16], [16, 16], [(1, 1), (8, 1), (3, 1), (8, 2)])
    assert list(lines) == ["best", "tp 1, pp 1", "tp 8, pp 1", "tp 8, pp 2"]
    assert list(lines["tp 8, pp 2"]) == [16]
    for name, line in lines.items():
        assert all(step.total >= lines["best"][gpus].total for gpus, step in line.items()), name
    assert lines["tp 1, pp 1"][8].total < lines["tp 8, pp 1"][8].total
    all_plans = [step_time(config, plan, 1024, A100).total for config, plan in scaling.plans(SMALL, 8, 16, [(8, 1)])]
    assert lines["tp 8, pp 1"][8].total == min(all_plans) < max(all_plans)
