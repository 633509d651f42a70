"""Tables over the ranks, and as text."""

from io import StringIO

import pytest
from rich.console import Console

from cs336_systems.host.table import cut
from cs336_systems.profiling import report
from cs336_systems.profiling.tables import Spread, pivot, render_markdown
from tests.profiling.test_breakdown import STEPS
from tests.profiling.test_operators import GPU
from tests.support.chrome_events import GLOO, STREAM, event, tag, trace


def test_rows_over_the_ranks():
    rows = pivot({0: [("mm", 4), ("mm", 6), ("wait", 8)], 2: [("mm", 30)], 1: [("mm", 20), ("wait", 1)]})
    assert rows == [Spread("mm", 10, 20.0, 30, 2, 1.5), Spread("wait", 0, 3.0, 8, 0, pytest.approx(8 / 3))]
    assert pivot({1: [("a", 5), ("b", 0)], 0: [("a", 5)]}) == [
        Spread("a", 5, 5.0, 5, 0, 1.0),
        Spread("b", 0, 0.0, 0, 0, 1.0),
    ]
    assert len(pivot({0: [("a", 1), ("b", 2)]}, limit=1)) == 1
    assert pivot({}) == []


def two_ranks():
    """Rank 1 does rank 0's steps and something more, and waits for a shorter time."""
    gloo = [tag("gloo:all_reduce", 3000, 9, GLOO)]
    more = [event("aten::sort", 3000, 50), tag("gloo:all_reduce", 3000, 5, GLOO)]
    return [trace(*STEPS, *gloo, rank=0, world_size=2, steps=2), trace(*STEPS, *more, rank=1, world_size=2, steps=2)]


def table(text: str, title: str) -> dict[str, list[str]]:
    """The rows of one Markdown table by their first cell."""
    lines = text.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_markdown():
    text = render_markdown(two_ranks())
    assert "sums over 2 steps, on rank 0 of 2" in text
    assert table(text, "Shares of the step")["RMSNorm"] == ["0.020", "0.040", "", "0.060", "15.00%", "10.00%"]
    assert table(text, "Parts of the step")["attention"] == ["0.100", "0.044", "", "0.144", "36.00%"]
    products = table(text, "Operators, whole step, by self CPU")["aten::mm"]
    assert products == ["4.00%", "0.016", "4.00%", "0.016", "0.008", "2", "576", "36 M"]
    assert table(text, "Operators, forward pass only, by CPU total")["aten::bmm"][:1] == ["12.00%"]
    assert "aten::addcdiv_" not in table(text, "Operators, forward pass only, by CPU total")
    assert table(text, "Operators over the ranks, self CPU")["aten::sort"] == ["0.000", "0.025", "0.050", "1", "2.00"]
    assert table(text, "Operators over the ranks, self CPU")["aten::cross_entropy_loss"][0] == "0.012"
    assert table(text, "Collectives over the ranks")["gloo:all_reduce"] == ["0.005", "0.007", "0.009", "0", "1.29"]
    assert table(text, "Phases over the ranks, host time")["backward"][:3] == ["0.140"] * 3
    assert table(text, "Collectives, by thread")["gloo:all_reduce"] == ["communication thread 0", "0.009", "0.009", "1"]
    assert "device total" not in text


def test_markdown_of_one_rank_on_a_gpu():
    text = render_markdown([trace(*GPU)])
    products = table(text, "Operators, whole step, by device total")["aten::mm"]
    assert (products[5:9], products[10]) == (["80.00%", "0.040", "0.040", "0.040"], "65.5 k")
    assert table(text, "Kernels")["sm90_gemm"] == ["80.00%", "0.040", "0.020", "2"]
    assert "over the ranks" not in text
    foreign = trace(event("aten::mm", 0, 5), event("void f<int, a|b>(float)", 0, 5, STREAM, "kernel"))
    assert "`void f<int, a\\|b>(float)`" in render_markdown([foreign])
    assert render_markdown([trace()]).startswith("# Where the time goes")


def test_a_report_without_matplotlib_has_everything_but_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    console = Console(width=200, file=StringIO())
    report.write_report(tmp_path, two_ranks(), console)
    assert [line for line in console.file.getvalue().splitlines() if "matplotlib" in line] == [report.NO_PICTURES]
    for words in ("Operators of rank 0 by self CPU", "Phases over the ranks", "softmax of attention"):
        assert words in console.file.getvalue()
    others = {"tables.md", "overlap.md", "memory.md"}
    assert {path.name for path in tmp_path.iterdir()} == {*others, "index.html", "merged.trace.json.gz"}
    assert "<img" not in (tmp_path / "index.html").read_text()
    report.write_report(tmp_path, [trace(*GPU, event("aten::a_long_name_" * 9, 1e5, 1e7))], console)
    lines = (tmp_path / "index.html").read_text().splitlines()
    assert any("self CPU %" in line and "FLOP/s" in line for line in lines), "heads of a GPU's operators in one line"


def test_ranks_without_a_common_step_have_a_report_without_timeline(tmp_path):
    console = Console(width=200, file=StringIO())
    report.write_report(tmp_path, [trace(tag(f"step {r}", 0, 9), rank=r, world_size=2) for r in range(2)], console)
    assert report.NO_TIMELINE in console.file.getvalue()
    assert "flame.svg" in (tmp_path / "index.html").read_text()
    assert not (tmp_path / "timeline.svg").exists()


def test_long_names_keep_both_ends():
    assert [cut("abcdefghij", 10), cut("abcdefghijk", 10)] == ["abcdefghij", "abcdef…ijk"]
