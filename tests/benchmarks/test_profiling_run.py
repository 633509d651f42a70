"""The command that profiles every rank at once, end to end on small models, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import profiling_run
from benchmarks.lib import profiling_record as recording
from benchmarks.profiling_run import ProfilingSettings
from benchmarks.records import Record, read_records
from cs336_systems.comm import Event, Place
from cs336_systems.cost import Hardware, count_parameters
from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.observed import observe_passes
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.profiling.__main__ import main as profiling
from cs336_systems.profiling.report import write_report
from cs336_systems.profiling.trace import parse, read_json
from tests.support import ranks
from tests.support.machine import made_up
from tests.support.merged_trace import validate

SMALL = {"size": "tiny", "batch_size": 1, "context": 16, "warmup": 1, "steps": 1, "device": "cpu"}
PAGES = ("flame.svg", "index.html", "memory.md", "memory.svg", "overlap.md", "tables.md")
FILES = (*PAGES, "timeline.svg", "merged.trace.json.gz")


def run_case(rank: int, world: int, folder: str, out: str, wrapper: str) -> None:
    settings = ProfilingSettings(**SMALL, wrapper=wrapper, out=Path(out), results=Path(out, "results"))
    Path(out, "results").mkdir(exist_ok=True, parents=True)
    profiling_run.probe = made_up  # in the process of this case only
    profiling_run.work(Place(rank, world, rank, world, f"{folder}/store"), settings)


@pytest.fixture(scope="module", params=["bucketed", "zero3"])
def folder(request, tmp_path_factory) -> Path:
    """Folder of a run over two ranks."""
    out = tmp_path_factory.mktemp(request.param)
    ranks.run_alone(run_case, 2, out=str(out), wrapper=request.param)
    return out


def test_everything_is_left_in_one_folder_and_can_be_made_again(folder):
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert found.keys() == {*FILES, "rank0.trace.json.gz", "rank1.trace.json.gz"}
    assert not validate(read_json(folder / "merged.trace.json.gz")).problems
    page = (folder / "index.html").read_text()
    for picture in ("timeline.svg", "flame.svg", "memory.svg"):
        assert f'src="{picture}"' in page
    assert "RMSNorm" in page
    if "bucketed" in folder.name:
        for name in FILES:
            (folder / name).unlink()
        assert CliRunner().invoke(profiling, ["report", str(folder)], catch_exceptions=False).exit_code == 0
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == found


def test_the_record_says_where_time_and_memory_went(folder):
    (record,) = read_records(folder / "results" / "profiling.jsonl")
    metrics, expected, wrapper = record.metrics, record.predicted, record.config["wrapper"]
    assert len(record.samples_ms) == 1
    phases = sum(metrics[f"{phase}_ms"] for phase in ("forward", "backward", "synchronise", "optimizer"))
    assert phases <= metrics["mean_ms"]
    assert len(metrics["overlap"]) == 2
    assert expected["communication_ms"] > 0
    if wrapper == "bucketed":
        parameters = sum(count_parameters(ProfilingSettings(**SMALL).case("tiny", torch.device("cpu")).config).values())
        assert metrics["peak_memory_bytes"] > 16 * parameters  # weights, gradients, two moments
        assert expected["exposed_ms"] <= expected["communication_ms"]
        assert record.config["bucket_size_mb"] == 1.0
        # A new gradient lies beside its buffer until it is copied.
        assert metrics["peak_memory_bytes"] == pytest.approx(expected["peak_memory_bytes"], rel=0.05)
    else:
        assert not {"bucket_size_mb", "nvtx"} & record.config.keys()
        # Layers that are gathered or reduced are much of a model this small.
        assert 0.8 < expected["peak_memory_bytes"] / metrics["peak_memory_bytes"] < 1
        assert not {"mean_ms", "exposed_ms"} & expected.keys()
    assert (record.config["warmup"], record.config["steps"]) == (1, 1)


def test_pictures_and_tables_lie_beside_the_record(folder, tmp_path):
    results = folder / "results"
    (record,) = read_records(results / "profiling.jsonl")
    assert record.metrics["pictures"] == f"profiling/tiny-{record.config['wrapper']}"
    for picture in recording.PICTURES:
        assert recording.picture_beside(results, record, picture).read_bytes() == (folder / picture).read_bytes()
    tables = recording.tables_beside(results, record)
    phases = {"forward", "backward", "synchronise", "optimizer"}
    assert tables["operators"].keys() == {"step", *phases}
    assert tables["phases"].keys() == phases
    products = next(row for row in tables["operators"]["forward"] if row["name"] == "aten::mm")
    assert products["calls"] > 0 < products["flops"]
    assert {row["name"] for row in tables["shares"]} >= {"matrix products", "RMSNorm"}
    assert recording.tables_beside(results, replace(record, samples_ms=[1.0])) is None, (
        "pictures of a later run are another's"
    )
    (tmp_path / record.metrics["pictures"]).mkdir(parents=True)
    (tmp_path / record.metrics["pictures"] / recording.TABLES).write_text("[]")
    with pytest.raises(UserError, match=r"tables.json has no tables of a profile"):
        recording.tables_beside(tmp_path, record)


def test_what_cannot_be_written_is_one_line(tmp_path):
    config, nothing = {"size": "small", "wrapper": "none", "attention": "naive"}, [parse({"traceEvents": []})]
    (tmp_path / "profiling").touch()
    with pytest.raises(UserError, match=r"cannot write to \S+profiling/small-none-naive: .*--results DIR"):
        recording.leave_pictures(Record("profiling", config, {}), nothing, tmp_path, tmp_path)
    (tmp_path / "tables.md").mkdir()
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    with pytest.raises(UserError, match="cannot write to"):
        write_report(tmp_path, [parse({"traceEvents": [event]})], None)
    with pytest.raises(UserError, match="have no events"):
        write_report(tmp_path, nothing, None)


def test_one_rank_needs_no_wrapper(tmp_path, capsys, quick_probe):
    options = ["--batch-size", "1", "--context", "16", "--warmup", "0", "--steps", "1", "--device", "cpu"]
    options += ["--attention", "naive", "--recompute", "segments", "--out", str(tmp_path)]
    assert run_command(profiling_run.main, [*options, "--results", str(tmp_path / "results")]) == 0
    out = capsys.readouterr().out
    assert "softmax" in out
    assert "Overlap of communication" not in out
    (record,) = read_records(tmp_path / "results" / "profiling.jsonl")
    assert record.config["wrapper"] == "none"
    assert "overlap" not in record.metrics
    assert record.metrics["share_softmax_of_attention"] > 0


def test_a_report_of_a_foreign_trace(tmp_path, capsys):
    """A trace of plain torch.profiler has no tags, labels or phases; nothing breaks."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "rank0.trace.json"))
    assert run_command(profiling, ["report", str(tmp_path)]) == 0
    assert (tmp_path / "index.html").exists()


def test_a_step_that_does_not_fit_is_one_line_before_ranks_start(in_tmp, capsys, monkeypatch):
    monkeypatch.setattr(profiling_run, "start_ranks", lambda *args: pytest.fail("a rank was started"))
    config = ProfilingSettings(**SMALL).case("tiny", torch.device("cpu")).config
    need = sum(observe_passes(config, 1, 16).memory("step").values())
    monkeypatch.setattr(profiling_run, "usable_memory", lambda device: 2 * need - 1)  # which two ranks share
    options = ["--size", "tiny", "--batch-size", "1", "--context", "16", "--device", "cpu", "--nproc", "2"]
    assert run_command(profiling_run.main, options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: tiny with batch 1 x 16 needs" in line
    assert not list(in_tmp.iterdir())


def test_traces_of_more_ranks_are_named_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiling_run, "start_ranks", lambda *args: pytest.fail("a rank was started"))
    for rank in range(2):
        (tmp_path / f"rank{rank}.trace.json.gz").touch()
    options = ["--device", "cpu", "--out", str(tmp_path), "--results", str(tmp_path / "r")]
    assert run_command(profiling_run.main, [*options, "--nproc", "1"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "holds rank1.trace.json.gz, which a profile of 1 rank leaves as it is" in error
    monkeypatch.setattr(profiling_run, "start_ranks", lambda *args: None)
    assert run_command(profiling_run.main, [*options, "--nproc", "2"]) == 0


def test_predictions_follow_the_wrapper():
    """With 1 ms a reduction and no latency: naive and flat hide nothing, overlapping ones all but what outlasts."""
    case = ProfilingSettings(**SMALL).case("tiny", torch.device("cpu"))
    hardware, link = Hardware("x", 1e12, 1e12, "made up"), Link(0.0, 1e6)
    events = [Event("all-reduce", f"bucket {i}", 250, torch.float32, 2, "all-reduce") for i in range(3)]
    events.append(Event("all-reduce", "used parameters", 10**6, torch.float32, 2, "all-reduce"))
    naive = recording.predicted(case, hardware, "naive", link, events, 2)
    hidden = recording.predicted(case, hardware, "bucketed", link, events, 2)
    assert naive["communication_ms"] == hidden["communication_ms"] == pytest.approx(3.0)
    assert naive["exposed_ms"] == pytest.approx(3.0)
    assert hidden["exposed_ms"] == pytest.approx(3.0 - hidden["backward_ms"] * 2 / 3, rel=1e-6)
    assert hidden["mean_ms"] - naive["mean_ms"] == pytest.approx(hidden["exposed_ms"] - naive["exposed_ms"])
    alone = recording.predicted(case, hardware, "none", None, [], 1)
    assert "exposed_ms" not in alone
    assert alone["mean_ms"] == pytest.approx(naive["mean_ms"] - 3.0)
    sharded = recording.predicted(case, hardware, "zero1", link, events, 2)
    assert sharded["optimizer_ms"] == alone["optimizer_ms"] / 2
    saved = alone["optimizer_ms"] / 2 + hidden["exposed_ms"] - sharded["exposed_ms"]
    assert sharded["mean_ms"] == pytest.approx(hidden["mean_ms"] - saved)
    assert not {"mean_ms", "exposed_ms"} & recording.predicted(case, hardware, "zero3", link, events, 2).keys()
    left_out = {"mean_ms", "exposed_ms", "communication_ms", "peak_memory_bytes"}
    assert not left_out & recording.predicted(case, hardware, "torch-ddp", link, [], 2).keys()


def test_what_was_predicted_stands_beside_what_was_measured():
    said = {"mean_ms": 2.0, "peak_memory_bytes": 2048, "share_matrix_products": 0.5, "exposed_ms": 3.0, "other_ms": 1.0}
    found = {"mean_ms": 4.0, "peak_memory_bytes": 4096, "share_matrix_products": 0.25, "exposed_ms": [1.0, 5.0]}
    table = recording.beside_measured(Record("profiling", {}, {}, metrics=found, predicted=said))
    cells = [list(column) for column in zip(*table.rows, strict=True)]
    assert cells[1] == ["4 ms", "4.0 KiB", "25.0%", "5 ms", "-"]  # of ranks, the slowest
    assert cells[2] == ["2 ms", "2.0 KiB", "50.0%", "3 ms", "1 ms"]


def test_the_predicted_peak_follows_the_wrapper():
    """By hand, with P bytes of weights: what keeps buckets has P more while the loss is made; ZeRO shards."""
    case = ProfilingSettings(**SMALL | {"batch_size": 8, "context": 128}).case("tiny", torch.device("cpu"))
    parts = observe_passes(case.config, 8, 128).memory("step")
    weights, loss = parts["parameters"], parts["activations"]
    assert parts["gradients"] == 0  # the fullest moment is in the loss
    norms = 4 * count_parameters(case.config)["norms"]
    shard = (weights - norms) / 4 + norms
    expected = dict.fromkeys(("none", "naive", "overlapped"), 3 * weights + loss)
    expected |= dict.fromkeys(("flat", "bucketed"), 4 * weights + loss)
    expected |= {"zero1": 2.5 * weights + loss, "zero2": 1.5 * weights + loss, "zero3": 3 * shard + loss}
    assert {name: recording.predicted_peak(case, name, 4) for name in expected} == expected
    # With few tokens gradients are the most: of stage 2 this rank's and those of a bucket that is not yet reduced.
    few = ProfilingSettings(**SMALL).case("tiny", torch.device("cpu"))
    weights = observe_passes(few.config, 1, 16).memory("step")["parameters"]
    assert recording.predicted_peak(few, "zero2", 4) == (1 + 2 / 4 + 1 / 4 + 1) * weights


def test_a_record_names_what_was_unusual():
    case, options = ProfilingSettings(**SMALL).case("tiny", torch.device("cpu")), vars(ProfilingSettings())
    assert {name: options[name] for name in recording.USUAL} == recording.USUAL
    step = {"ph": "X", "name": "step 0", "ts": 0, "dur": 1000, "tid": 1, "pid": 1}
    above = step | {"cat": "gpu_user_annotation", "tid": 7}  # as torch.profiler draws it over a GPU's kernels
    empty = parse({"traceEvents": [step | {"cat": "user_annotation"}, above]})
    assert recording.step_times(empty) == [1.0], "each step counts once"

    def config(wrapper: str, **changes: object) -> dict[str, object]:
        return recording.make_record(options | changes, wrapper, case, [empty], {}, {}).config

    plain = config("flat")
    assert not {*recording.USUAL, "bucket_size_mb"} & plain.keys()
    assert config("bucketed")["bucket_size_mb"] == 1.0
    for name, value in {"warmup": 0, "steps": 5, "nvtx": True}.items():
        assert config("flat", **{name: value}) == plain | {name: value}
