"""A scaling study without ranks, on numbers made by hand: the gate, bubbles, efficiencies, records, turns."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from benchmarks.lib import options, scaling_study
from benchmarks.lib.gate import compare_steps, tolerance
from benchmarks.lib.scaling_measure import measure_peak
from benchmarks.lib.scaling_record import crowded, peak_flops, pipeline_bubble, predict, study_run
from benchmarks.lib.scaling_study import Layout, Study
from benchmarks.lib.scaling_tables import sheets, summary
from benchmarks.lib.sheets import remarks, show
from benchmarks.records import Record
from benchmarks.scaling import ScalingSettings, efficiencies, flag_anomalies, layout_record
from cs336_systems.comm import Place
from cs336_systems.cost import count_parameters
from cs336_systems.errors import UserError
from cs336_systems.schedule import schedule, simulate
from cs336_systems.schedule.lists import bubble_fraction

PEAK = {
    "rank": {"name": "device", "matmul_flops": 4e9, "bandwidth": 1e9, "source": "made by hand"},
    "machine_flops": 6e9,
    "gpus": 0,
    "environment": {"device": "CPU", "device_type": "cpu", "cores": 2},
}


def turn(milliseconds: list[float], world: int = 1, **timers) -> dict:
    timers = {name.replace("_", "-"): values for name, values in timers.items()} or {"forward-compute": [1.0] * world}
    return {
        "samples_ms": milliseconds, "timers_ms": timers, "skipped": 0, "gpu_utilisation": [None] * world,
        "memory_bytes": [2.0**20 * (1 + rank) for rank in range(world)],
    }  # fmt: skip


def layouts(**options) -> list[Layout]:
    found = ScalingSettings(device="cpu", **options).layouts(1)
    for layout in found:
        layout.gate = {"losses": [7.0, 6.0], "norms": [2.0, 1.0], "link": {"latency": 1e-5, "bandwidth": 1e9}}
    return found


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (3, 9)])
def test_the_bubble_of_simulated_timers_is_the_closed_form(name, chunks, stages, microbatches):
    """With 2 ranks a stage, the second twice as slow, which changes the share of nothing."""
    played = simulate(schedule(name, stages, microbatches, chunks))
    timers = {name: [] for name in ("forward-compute", "backward-compute", "forward-recv", "backward-recv")}
    for row in played.timeline:
        for slow in (1, 2):
            spent = dict.fromkeys(timers, 0.0)
            for each in row:
                spent[f"{each.action.kind}-compute"] += slow * (each.end - each.start)
            spent["forward-recv"] = slow * row[0].start
            spent["backward-recv"] = slow * sum(after.start - before.end for before, after in pairwise(row))
            for timer, value in spent.items():
                timers[timer].append(value)
    timers["backward-embedding-all-reduce"] = timers["optimizer"] = [1e3] * (2 * stages)  # no part of the pipeline's
    expected = bubble_fraction(name, stages, microbatches, chunks)
    assert pipeline_bubble(timers, stages) == pytest.approx(expected)


def test_the_bubble_of_stages_that_differ():
    timers = {
        "forward-compute": [2.0, 4.0], "forward-send-backward-recv": [3.0, None], "backward-compute": [3.0, 5.0],
        "backward-recv": [2.0, None], "forward-recv": [None, 0.5], "backward-send": [None, 0.25],
    }  # fmt: skip
    # The first stage takes 10 in all and computes 5 of them, the second 9.
    assert pipeline_bubble(timers, 2) == pytest.approx((0.5 + 0.1) / 2)
    timers["backward-send"] = [None, 3.0]  # makes 12.5 of the second
    assert pipeline_bubble(timers, 2) == pytest.approx((1 - 5 / 12.5 + 1 - 9 / 12.5) / 2)
    assert pipeline_bubble(timers, 1) == 0
    assert pipeline_bubble({"forward-recv": [1.0, 2.0]}, 2) is None


def test_the_gate_holds_losses_and_norm_to_their_bounds():
    layout = layouts(grid="1x1x1")[0]
    config, recipe = layout.config, layout.recipe
    t = tolerance(config, "fp32")
    assert t == pytest.approx(4 * 32 * 2.0**-24 * (1 + 512**0.5))
    assert 100 * t < tolerance(config, "fp16") < tolerance(config, "bf16")
    want = {"losses": [7.0, 6.0], "norms": [2.0, 1.0]}
    step = t * (6.0 + 2 * recipe.optimizer.lr * sum(count_parameters(config).values()) ** 0.5 * 2.0)

    def found(first=0.0, second=0.0, norm=0.0, later=0.0):
        got = {"losses": [7.0 + first, 6.0 + second], "norms": [2.0 - norm, 1.0 + later]}
        return compare_steps(got, want, config, recipe)

    assert found() == found(first=0.99 * 7 * t) == found(norm=0.99 * 2 * t) == found(second=0.99 * step) == ""
    assert found(later=0.5) == ""  # after the update no bound is known for it
    assert found(first=1.01 * 7 * t).startswith("the first loss is 7.00")
    assert found(second=-1.01 * step).startswith("the second loss is ")
    assert found(norm=1.01 * 2 * t).startswith("the gradient norm is 1.999")
    assert compare_steps({"losses": [7.0, None], "norms": [2.0, 1.0]}, want, config, recipe) == (
        "the second loss is not finite (fp32)"
    )


def test_peaks_add_up_to_what_the_machine_has(monkeypatch):
    assert [peak_flops(PEAK, n) for n in (1, 2, 8)] == [4e9, 6e9, 6e9]
    gpus = PEAK | {"gpus": 4, "machine_flops": None}
    assert [peak_flops(gpus, n) for n in (1, 4, 8)] == [4e9, 16e9, 16e9]
    monkeypatch.setattr("benchmarks.lib.scaling_record.allowed_cores", lambda: 4)
    side_by_side = PEAK | {"machine_flops": None}
    assert [peak_flops(side_by_side, n) for n in (1, 4, 8)] == [4e9, 16e9, 16e9]


class FakeLauncher:
    """Answers for the ranks: the same losses, a millisecond a step and rank."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.runs = fails, []

    def run(self, here, device, count: int, work, recipe, steps: int, warmup: int, *rest) -> dict:
        name = f"{recipe.parallel.tp}x{recipe.parallel.pp}x{recipe.parallel.dp}"
        if name == self.fails:
            raise UserError("no luck")
        if work is measure_peak:
            return PEAK
        self.runs.append((name, recipe.data.batch_size, warmup, steps, recipe.model.precision))
        return turn([float(count)] * steps, count) | {"losses": [7.0, 6.0], "norms": [2.0, 1.0], "link": None}


def studied(settings: ScalingSettings, launcher: FakeLauncher, monkeypatch, first: int = 0) -> Study:
    monkeypatch.setattr(scaling_study, "on_ranks", launcher.run)
    return Study(settings, settings.layouts(1)[first:], Place())


def test_layouts_take_turns_once_the_gate_is_passed(monkeypatch):
    short = {"rounds": 2, "micro_batch_size": 16}  # one microbatch is observed sooner than four
    settings = ScalingSettings(grid="1x1x1,1x1x2", device="cpu", precision=("fp32", "bf16"), **short)
    launcher = FakeLauncher()
    study = studied(settings, launcher, monkeypatch)
    study.check()
    # In bf16 both are seen in fp32 first, which has been done. Two replicas have a reference of twice the batch.
    gates = [("1x1x1", 16), ("1x1x1", 32), ("1x1x2", 32)]
    assert launcher.runs == [(*each, 2, 0, precision) for precision in ("fp32", "bf16") for each in gates]
    alone = FakeLauncher()
    studied(settings, alone, monkeypatch, first=3).check()  # one layout in bf16 is held to the gate in fp32 as well
    assert [(name, precision) for name, *_, precision in alone.runs] == [
        ("1x1x1", "fp32"), ("1x1x2", "fp32"), ("1x1x1", "bf16"), ("1x1x2", "bf16"),
    ]  # fmt: skip
    study, records = studied(replace(settings, smoke=True), launcher, monkeypatch), []
    launcher.runs.clear()

    def make(*given) -> Record:
        records.append(layout_record(settings, *given))
        return records[-1]

    study.run("scaling", make, lambda records: [], flag_anomalies)
    turns = [("1x1x1", 16), ("1x1x2", 32)]
    each_round = [(*each, 2, 3, precision) for precision in ("fp32", "bf16") for each in turns]
    assert launcher.runs[6:] == 2 * each_round
    found = [(record.config["precision"], record.metrics["efficiency_median"]) for record in records]
    assert found == [("fp32", 1.0), ("fp32", 0.5), ("bf16", 1.0), ("bf16", 0.5)]
    with pytest.raises(UserError, match=r"^layout 1x1x2: no luck$"):
        studied(settings, FakeLauncher(fails="1x1x2"), monkeypatch).check()


def test_a_prediction_gives_each_rank_its_share_of_the_machine():
    (two,) = layouts(grid="1x1x2")
    shared, apart = (predict(two, PEAK | {"machine_flops": flops})["parts_ms"] for flops in (6e9, 8e9))
    for part in ("forward", "backward", "optimizer"):
        assert shared[part] == pytest.approx(8 / 6 * apart[part])


def test_shared_cores_are_said_and_bound_the_efficiency(monkeypatch):
    monkeypatch.setattr("benchmarks.lib.scaling_record.allowed_cores", lambda: 2)
    monkeypatch.setattr("benchmarks.lib.scaling_record.os.cpu_count", lambda: 2)
    assert crowded(2) == ""
    assert crowded(8).startswith("8 ranks on 2 cores: efficiency is bounded by 2/8; 8 ranks share 2 cores, all ")
    assert "bind" not in crowded(8)
    monkeypatch.setattr("benchmarks.lib.scaling_record.allowed_cores", lambda: 1)
    monkeypatch.setattr("benchmarks.lib.scaling_record.os.cpu_count", lambda: 64)
    assert "8 ranks share 1 core of 64: the process that starts them is bound" in crowded(8)


def test_efficiency_is_taken_round_by_round():
    one, two = layouts(grid="1x1x1,1x1x2")
    one.turns = [turn([10.0, 30.0]) | {"skipped": 1}, turn([40.0]), turn([100.0])]
    two.turns = [turn([20.0], 2), turn([50.0], 2), turn([200.0], 2)]
    # Twice the batch on twice the ranks: 20 / 20, 40 / 50, 100 / 200.
    found = efficiencies(two, one)
    assert found == pytest.approx({"efficiency_median": 0.8, "efficiency_low": 0.65, "efficiency_high": 0.9})
    assert "1 of 4 steps were skipped" in layout_record(ScalingSettings(device="cpu"), one, one, PEAK).flags


@cache
def measured() -> tuple[Record, Record]:
    one, two = layouts(grid="1x1x1,1x2x1")
    one.turns = [turn([16.0], forward_compute=[8.0]), turn([32.0], forward_compute=[9.0]), turn([80.0])]
    spans = {"forward_compute": [2.0, 4.0], "backward_compute": [6.0, 5.0], "backward_recv": [2.0, None]}
    two.turns = [turn([48.0], 2), turn([32.0], 2, **spans), turn([8.0], 2)]
    first, second = (layout_record(ScalingSettings(device="cpu"), each, one, PEAK) for each in (one, two))
    return first, second


def test_a_record_has_the_turn_of_median_speed():
    one, two = measured()
    assert one.samples_ms == [16.0, 32.0, 80.0]
    assert one.metrics["ms_per_sample"] == two.metrics["ms_per_sample"] == 2.0
    assert one.metrics["timers_ms"] == {"forward-compute": [9.0]}
    assert two.metrics["bubble"] == pytest.approx((0.2 + 0.1) / 2)
    assert two.predicted["bubble"] == 1 / 5
    assert two.predicted["mean_ms"] == pytest.approx(sum(two.predicted["parts_ms"].values()))
    assert two.metrics["mfu"] == pytest.approx(4 / 6 * one.metrics["mfu"])
    assert one.flags[0].startswith("noisy: ")


def test_the_studys_row_has_the_last_ranks_timers():
    one, two = measured()
    run = study_run(two)
    assert run.timers == {"forward-compute": 4.0, "backward-compute": 5.0}
    assert run.gpu_memory == (1.0, 2.0)
    assert run.peak_flops == 3e9
    assert (run.layout, run.global_batch_size, run.iteration_ms) == ("1/2/1", 16, 32.0)
    assert (run.num_layers, run.recompute) == (4, "none")
    other = replace(two, config=two.config | {"zero": 1, "schedule": "gpipe"})
    assert [row[0] for row in summary([two, other]).rows] == ["1x2x1", "1x2x1, zero 1, schedule gpipe"]
    some = [replace(one, flags=["late"]), replace(two, flags=["late", "small"]), replace(two, flags=["small"])]
    assert remarks(some, lambda each: each.config["layout"]) == ["1x1x1, 1x2x1: late", "1x2x1, 1x2x1: small"]
    # A flag that all have comes last and names nobody.
    assert remarks(some[:2], lambda each: each.config["layout"]) == ["1x2x1: small", "late"]


def test_a_finding_is_a_flag_and_is_shown_below_the_tables(capsys):
    one, two = measured()
    one, two = replace(one, flags=[]), replace(two, flags=["late"])
    flag_anomalies([one, two])
    show(sheets([one, two]))
    out = " ".join(capsys.readouterr().out.split())
    parts = ("tiny bert in fp32, weak scaling", "Timers of the last rank, ms an", "1x1x1: W = 1 (1/1/1)", "1x2x1: late")
    places = [out.index(part) for part in parts]
    assert places == sorted(places)


def test_layouts_with_too_few_gpus_are_recorded_as_unsupported(monkeypatch):
    monkeypatch.setattr(options, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    settings = ScalingSettings(grid="1x1x1,2x1x1", device="cuda")
    monkeypatch.setattr(scaling_study, "usable_memory", lambda device: 2**40)
    one, two = studied(settings, FakeLauncher(), monkeypatch).layouts
    assert not one.wrong
    record = layout_record(settings, two, one, PEAK)
    assert (record.status, record.config["backend"], record.flags) == ("unsupported", "nccl", [two.wrong])
    assert two.wrong.startswith("nccl needs a GPU a rank: 2 ranks, 1 GPU(s)")


def test_a_layout_leaves_out_options_that_it_has_no_use_for():
    settings = ScalingSettings(zero=1, chunks=2, schedule="interleaved", sequence_parallel=True, global_batch_per_dp=8)

    def options(grid):
        (layout,) = replace(settings, grid=grid, size="medium").layouts(1)
        recipe, parallel = layout.recipe, layout.recipe.parallel
        found = (parallel.zero, parallel.chunks, parallel.schedule, parallel.sequence_parallel)
        return *found, recipe.data.batch_size

    assert options("2x1x1") == (0, 1, None, True, 8)
    assert options("1x2x1") == (0, 2, "interleaved", False, 8)
    assert options("1x1x2") == (1, 1, None, False, 16)
    assert options("2x2x2") == (1, 2, "interleaved", True, 16)
    (strong,) = replace(settings, global_batch_per_dp=None, global_batch_size=24, grid="1x1x2").layouts(1)
    assert strong.shape.global_batch == 24
