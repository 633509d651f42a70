"""The benchmark of one expert layer and the sweep over many: what they count, what their gates refuse, the plot."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarks import moe_layer, moe_sweep
from benchmarks.harness import WrongResultError
from benchmarks.lib import expert_layer, launcher
from benchmarks.lib.expert_layer import Bench, Candidate, Way, build_layer
from benchmarks.moe_sweep import MoESweepSettings, chosen_capacity, draw, factor, lines
from benchmarks.records import Record
from cs336_systems.comm import Place
from cs336_systems.cost import Hardware
from cs336_systems.cost.plots.style import HOW_TO_PLOT, can_plot, save
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.host.observe import Observer
from cs336_systems.model.moe import MoELayer
from cs336_systems.presets import Mixture
from tests.support import ranks

TINY = {"experts": 8, "tokens": 16, "d_model": 8, "d_ff": 16, "eval_fraction": 1.0, "rounds": 2, "steps": 1}
IDEAL = Hardware("ideal", 1e9, 1e9, "made by hand")


@dataclass(frozen=True)
class Ranks:
    """A group that is not there: of one rank, unless told otherwise."""

    count: int = 1
    number: int = 0

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.number


def ways(**settings) -> list[Way]:
    """The three that take turns."""
    sort = moe_layer.MoELayerSettings(**settings).sort()
    return [sort.changed("einsum", dispatch="einsum"), sort, sort.changed("sort, dropless", eval_fraction=0.0)]


def measured_case(rank: int, world: int, folder: str) -> list[dict]:
    expert_layer.probe = lambda *_: IDEAL  # probing takes longer than all the rest
    settings = moe_layer.MoELayerSettings(**TINY)
    place = Place(rank, world, rank, world, f"{folder}/store")
    return expert_layer.work(place, settings)["records"]


def test_bytes_are_those_predicted_and_records_hold_every_candidate():
    first, second = ranks.run_alone(measured_case, 2)
    assert second == []
    records = [Record(**each) for each in first]
    assert [record.config["candidate"] for record in records] == ["einsum", "sort", "sort, dropless"]
    for record in records:
        config, metrics = record.config, record.metrics
        rows = 8 * 16 if config["candidate"] == "einsum" else 2 * 16
        assert config["slots"] == (None if "dropless" in config["candidate"] else 16)
        assert metrics["rows"] == record.predicted["rows"] == rows
        assert metrics["all_to_all_bytes"] == record.predicted["all_to_all_bytes"] == rows * 8 * 4
        counts = 0 if config["candidate"] == "einsum" else 8 * 8  # an int64 for each expert
        assert metrics["layer_bytes"] == 2 * rows * 8 * 4 + counts
        assert metrics["dropped_share"] == 0
        assert len(record.samples_ms) == 2
        assert (config["ranks"], record.environment["world_size"]) == (2, 2)
    einsum = records[0].metrics
    assert einsum["bytes_ratio"] == 2 * 128 * 32 / (2 * 32 * 32 + 64)
    assert records[1].metrics["ratio_median"] == records[1].metrics["bytes_ratio"] == 1


def sees(settings: moe_layer.MoELayerSettings, group, wrong: str) -> str | None:
    """The gate's findings on a layer whose sort is wrong in one way."""
    right = MoELayer.by_sort

    def by_sort(self, x, logits, mixture, capacity, *rest):
        if wrong == "capacity ignored":
            capacity = None
        if wrong == "one slot less":
            capacity = capacity and max(capacity - 1, 1)
        y, balance = right(self, x, logits, mixture, capacity, *rest)
        return (y * (torch.arange(len(y)) > 0)[:, None] if wrong == "a token lost" else y), balance

    MoELayer.by_sort = by_sort if group.rank() == 0 else right
    try:
        settings.enter(group, {})
    except WrongResultError as refused:
        return str(refused)
    finally:
        MoELayer.by_sort = right
    return None


def gate_case(group) -> dict:
    """What the gate says of each wrong layer, of which only rank 0's is."""
    plenty = moe_layer.MoELayerSettings(**TINY)
    narrow = replace(plenty, eval_fraction=0.25)
    found = {name: sees(narrow, group, name) for name in ("right", "a token lost", "one slot less")}
    # Where what is timed drops nothing, only the gate's layer with a single slot can tell.
    return found | {"capacity ignored": sees(plenty, group, "capacity ignored")}


def test_the_gate_sees_wrong_layers_on_all_ranks():
    first, second = ranks.run(gate_case, 2)
    assert first == second
    assert first.pop("right") is None
    for name, said in first.items():
        assert "is off its reference by" in (said or ""), name


def test_experts_have_the_same_weights_on_any_number_of_ranks():
    config = moe_layer.MoELayerSettings(**TINY).sort().config
    whole = build_layer(config, Ranks()).state_dict()
    assert whole["experts.up.bias"].abs().min() > 0
    part = build_layer(config, Ranks(4, 1))
    for name, value in part.state_dict().items():
        assert torch.equal(value, whole[name][2:4] if "experts" in name else whole[name]), name
    assert (part.dispatcher.local, part.experts.first) == (2, 2)


def test_the_published_layer_is_padded_twelve_times():
    einsum, sort, dropless = ways()
    padded, kept, free = (way.predict(2048, 2, IDEAL) for way in (einsum, sort, dropless))
    assert padded["all_to_all_bytes"] == 512 * 103 * 64 * 4
    assert kept["all_to_all_bytes"] == free["all_to_all_bytes"] == 4096 * 64 * 4
    # Two products with the one-hot tensor, its two outer products, and all slots through the experts.
    router = 2 * 2048 * 64 * 512
    assert kept["flops"] == router + 4096 * 4 * 64 * 256
    assert padded["flops"] == router + 52_736 * (4 * 64 * 256 + 4 * 2048 * 64 + 4 * 2048)
    assert einsum.predict(2048, 1, IDEAL)["all_to_all_bytes"] == 0


def test_ratios_are_of_pairs_in_one_round(monkeypatch):
    monkeypatch.setattr(expert_layer, "room", lambda group, device: 2**30)
    every = ways(**TINY)
    bench = Bench(every[1].config, 0.0, Ranks())
    sort = Candidate(bench, every[1], {}, sent={"layer_bytes": 100.0})
    einsum = Candidate(bench, every[0], {"link": "a string"}, sort, {"layer_bytes": 1200.0})
    einsum.laps = [[40.0, 30.0, 0.0], [90.0, 30.0, 0.0], [60.0, 0.0, 0.0]]
    sort.laps = [[10.0, 5.0, 0.0], [10.0, 0.0, 0.0], [20.0, 0.0, 0.0]]
    record = einsum.record("moe_layer", 1, {}, {})
    assert record.samples_ms == [40.0, 90.0, 60.0]
    ratios = [record.metrics[name] for name in ("ratio_median", "user_ratio_median", "bytes_ratio")]
    assert ratios == [4.0, 3.0, 12.0]
    assert record.config["link"] == "a string"
    assert record.flags == ["noisy: standard deviation 40% of the mean"]


def test_what_does_not_fit_is_refused_with_its_numbers(monkeypatch):
    einsum, have = ways()[0], 2**30
    monkeypatch.setattr(expert_layer, "room", lambda group, device: have)
    said = "2048 tokens x 512 experts x 103 slots need 1.6 GiB on each of 1 ranks, where 1.0 GiB are usable"
    assert einsum.too_large(2048, Ranks()) == f"one-hot tensors of {said}"
    have = 2**31
    assert einsum.too_large(2048, Ranks()) == ""
    have = 2**40
    assert "8192 tokens x 512 experts x 410 slots need 25.6 GiB on each of 1 ranks, where 3.7 GiB" in einsum.too_large(
        8192, Ranks()
    )
    have = 2**31
    with pytest.raises(UserError, match=r"^100000000 tokens and 512 experts need .* where 2\.0 GiB are usable"):
        Bench(ways(tokens=100_000_000)[1].config, 0.0, Ranks())


def test_operators_of_a_sorted_layer_are_within_a_fifth():
    config = expert_layer.LayerSettings(tokens=64, d_model=32, d_ff=64).sorted(4, Mixture()).config
    layer, x = MoELayer(config), torch.randn(1, 64, 32)
    with torch.no_grad(), Observer() as seen:
        seen.begin("forward")
        layer(x)
    assert seen.phases["forward"].work.total() == pytest.approx(expert_layer.EXPERT_LAUNCHES, rel=0.2)


# The sweep.

needs_matplotlib = pytest.mark.skipif(not can_plot(), reason="matplotlib is in the extra `writeup`")
SWEPT = {"experts": (4, 8), "tokens": 32, "d_model": 8, "d_ff": 16, "rounds": 1, "skew": 1.0}
CAPACITIES = ("1x", "2x", "0.25", "dropless")
LIMIT = 4 * 4 * 32 * 8 * 16  # of four one-hot tensors: 8 experts without a capacity have more


def measured(candidate: str = "sort", experts: int = 8, slots: int | None = 4, ranks: int = 2, **config) -> Record:
    what = {"candidate": candidate, "experts": experts, "slots": slots, "ranks": ranks, "capacity": "0.05"}
    what |= {"tokens": 32, "d_model": 8, "d_ff": 16, "top_k": 2, "skew": 1.0, "backend": "gloo"} | config
    rows = experts * (32 if slots is None else slots) if candidate == "einsum" else 64
    metrics = {"median_ms": 1.5, "ratio_median": 3.0, "bytes_ratio": 2.0, "dropped_share": 0.25}
    stamp = {"device": "abacus", "cores": 2, "threads": 1, "torch": "2", "commit": "c", "dirty": False}
    stamp |= {"date": "today", "backend": "gloo"}
    return Record("moe_sweep", what, stamp, [1.5], metrics | {"all_to_all_bytes": 32 * rows}, {"mean_ms": 2.0})


def grid() -> list[Record]:
    return [
        measured(candidate, experts, slots, ranks, capacity=capacity)
        for ranks in (1, 2)
        for experts in (8, 32)
        for capacity, slots in (("1x", 32 // experts), ("2x", 64 // experts), ("0.05", 2), ("dropless", None))
        for candidate in ("einsum", "sort")
    ]


def sweep_case(rank: int, world: int, folder: str) -> list[dict]:
    expert_layer.probe = lambda *_: IDEAL
    expert_layer.ONE_HOT_LIMIT = LIMIT
    settings = MoESweepSettings(**SWEPT, capacity=CAPACITIES)
    return expert_layer.work(Place(rank, world, rank, world, f"{folder}/store"), settings)["records"]


def broken_and_right_case(rank: int, world: int, folder: str) -> dict:
    """What is said of layers that ignore their capacity, and the records of those that do not."""
    right = MoELayer.by_sort
    MoELayer.by_sort = lambda self, x, logits, mixture, _, *rest: right(self, x, logits, mixture, None, *rest)
    Path(folder, "broken").mkdir(exist_ok=True)
    with pytest.raises(WrongResultError) as refused:
        sweep_case(rank, world, f"{folder}/broken")
    MoELayer.by_sort = right
    return {"refused": str(refused.value), "records": sweep_case(rank, world, folder)}


def test_a_sweep_records_every_cell_and_what_it_drops_and_of_wrong_layers_nothing():
    first, second = ranks.run_alone(broken_and_right_case, 2)
    for said in (first, second):
        assert said["refused"].startswith("sort's output is off its reference by")
    records = [Record(**each) for each in first["records"]]
    found = {(r.config["experts"], r.config["capacity"], r.config["candidate"]): r for r in records}
    every = {(e, c, name) for e in (4, 8) for c in CAPACITIES for name in ("einsum", "sort")}
    assert set(found) == every - {(8, "dropless", "einsum")}
    assert [found[8, c, "sort"].config["slots"] for c in CAPACITIES] == [4, 8, 8, None]
    for (experts, _, name), record in found.items():
        config, metrics, whole = record.config, record.metrics, 2 * 32 * 8 * 4
        if name == "sort":
            assert metrics["all_to_all_bytes"] == pytest.approx((1 - metrics["dropped_share"]) * whole)
            assert metrics["all_to_all_bytes"] <= record.predicted["all_to_all_bytes"]
        else:
            slots = 32 if config["slots"] is None else config["slots"]
            assert metrics["all_to_all_bytes"] == record.predicted["all_to_all_bytes"] == experts * slots * 8 * 4
            assert metrics["dropped_share"] == found[experts, config["capacity"], "sort"].metrics["dropped_share"]
    for experts in (4, 8):
        dropped = [found[experts, c, "sort"].metrics["dropped_share"] for c in ("1x", "2x", "dropless")]
        assert dropped[0] > dropped[1] > dropped[2] == 0
        assert dropped[0] >= 0.5  # of all choices: at 1x there are half as many slots


def test_ranks_that_were_started_are_those_measured(in_tmp, monkeypatch, capsys):
    here, run = Place(rank=1, world_size=4, local_rank=1, local_world_size=4, meeting="host:1"), Mock()
    run.return_value = {"records": []}
    monkeypatch.setattr(launcher, "on_ranks", run)
    for arguments in ([], ["--nproc", "2", "--smoke"]):
        assert run_command(moe_sweep.main, ["--results", "out", *arguments]) == 0
    assert [call.args[2] for call in run.call_args_list] == [1, 2, 4, 2]
    monkeypatch.setattr(launcher, "find_place", lambda: here)
    assert run_command(moe_sweep.main, ["--results", "other"]) == 0
    assert len(run.call_args_list) == 5
    assert [path.name for path in in_tmp.iterdir()] == ["out"]  # rank 1 opens no file of records
    assert run_command(moe_sweep.main, ["--nproc", "2"]) == 2
    assert "--nproc 2 would start ranks, but 4 were started already" in capsys.readouterr().err


@pytest.mark.parametrize("there", [pytest.param(True, marks=needs_matplotlib), False])
def test_what_was_measured_is_drawn_beside_the_records(there, in_tmp, monkeypatch, capsys):
    """Without matplotlib the table and the records are all there is."""

    def run(here, device, count, *_):
        return {"records": [asdict(each) for each in grid() if each.config["ranks"] == count]}

    monkeypatch.setattr(launcher, "on_ranks", run)
    monkeypatch.setattr(moe_sweep, "can_plot", lambda: there)
    assert run_command(moe_sweep.main, ["--results", "out", "--nproc", "1", "--nproc", "2"]) == 0
    shown = capsys.readouterr().out
    assert "32 records appended to out/moe_sweep.jsonl" in shown
    assert "Sweep: layers of 8 x 16, 32 tokens a rank, router skewed by 1" in shown
    assert "gloo ranks of 1 thread(s) on abacus, 2 cores, torch 2, commit c, today." in shown
    assert ("plot in out/moe_sweep.svg" if there else HOW_TO_PLOT) in shown
    assert (picture := in_tmp / "out/moe_sweep.svg").exists() == there
    if there:
        assert picture.read_bytes() == save(draw(grid()), in_tmp / "again.svg").read_bytes()
        assert picture.stat().st_size < 60_000


def test_lines_of_the_plot():
    records = grid()
    assert chosen_capacity(records) == "0.05"
    assert chosen_capacity([measured(capacity="2x"), measured(capacity="dropless")]) == "2x"
    limited = [record for record in records if record.config["slots"] is not None]
    found = lines(limited, factor, "experts", "candidate", "ranks")
    assert len(found) == 8
    assert [factor(r) for r in found[8, "sort", 1]] == [0.5, 1.0, 2.0]
    assert [factor(r) for r in found[32, "sort", 1]] == [1.0, 2.0, 2.0]
