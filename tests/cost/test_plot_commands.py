"""The commands that draw the pictures of the cost model: what they refuse and say, and byte-stable files."""

import pytest

from cs336_systems.cost.__main__ import main
from cs336_systems.cost.commands import plot
from cs336_systems.cost.plots import breakdown, style
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command

with_matplotlib = pytest.mark.skipif(not style.can_plot(), reason="matplotlib is in the extra `writeup`")

SMALLER = {
    "roofline": "--size fairseq-moe-15b --system H100",
    "breakdown": "--size xl --tp 5 --compare '--dp 2'",
    "scaling": "--size medium --context 512 --batch-size 16 --per-gpu 1 --most 16 --fixed 1x1 --system B200",
    "degrees": "--size small --context 512 --most 8 --system A100-40GB --system V100-32GB-DGX2",
}


def test_every_picture_has_an_example():
    assert set(plot.EXAMPLES) == set(SMALLER) == set(plot.command.commands) - {"all"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("roofline --out a.gif", "--out a.gif should end in .svg, .png, .pdf"),
        ("roofline --out nowhere/a.png", "--out nowhere/a.png: there is no folder nowhere"),
        ("roofline --out a.svg --tp 5", "96 heads do not divide over tp 5: choose a tp that divides 96"),
        ("scaling --out a.svg --fixed 8", "--fixed '8' should be tp x pp, such as 8x1"),
        ("scaling --out a.svg --fixed 8x0", "--fixed '8x0' should be tp x pp, such as 8x1"),
        ("scaling --out a.svg --least 64 --most 8", "--least 64 is more than --most 8"),
        ("degrees --out a.svg --most 6", "--most 6 is not a power of two: take 4"),
        ("breakdown --out a.svg --tp 2 --compare --tq", "--compare '--tq': No such option"),
        ("breakdown --out a.svg --compare '--tp 5'", "--compare '--tp 5': 96 heads do not divide over tp 5"),
        (
            "breakdown --out a.svg --published abc",
            "no published run begins with 'abc': they begin with kort22, mlm2020",
        ),
        ("breakdown --out a.svg --published kort --tp 2", "--published draws runs as they were: leave out the options"),
        ('breakdown --out a.svg --compare "\'"', '--compare "\'": No closing quotation'),
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


def test_a_breakdown_compares_plans_in_the_words_of_the_command_line(monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(style, "can_plot", lambda: True)
    monkeypatch.setattr(breakdown, "draw", lambda bars: drawn.append(bars))
    monkeypatch.setattr(plot, "save", lambda figure, out: out)
    plan = ["--tp", "8", "--pp", "8", "--sequence-parallel", "--batch-size", "64", "--recompute", "selective"]
    compare = ["--compare", "--tp 4 --pp 16", "--compare", "--recompute full --system B200"]
    compare += ["--compare", "--system B200"]
    assert run_command(main, ["plot", "breakdown", "--out", "a.svg", *plan, *compare]) == 0
    assert run_command(main, ["plot", "breakdown", "--out", "a.svg"]) == 0
    own, published = drawn
    assert [bar.name for bar in own] == ["as asked", "tp 4 pp 16", "recompute full system B200", "system B200"]
    plans = [bar.step.plan for bar in own]
    assert [(each.tp, each.pp, each.sequence, each.global_batch) for each in plans] == [
        (8, 8, True, 64),
        (4, 16, True, 64),
        (8, 8, True, 64),
        (8, 8, True, 64),
    ]
    assert [bar.step.config.recompute for bar in own] == ["attention", "attention", "segments", "attention"]
    assert [bar.step.system.name for bar in own] == ["A100-80GB", "A100-80GB", "B200", "B200"]
    assert [bar.measured is None for bar in (own[0], published[0])] == [True, False]
    captured = capsys.readouterr()
    assert captured.out == "plot in a.svg\n" * 2
    assert captured.err.count("note: no run on B200 was fitted") == 1


@with_matplotlib
def test_all_pictures_are_drawn_and_the_same_again(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plot, "EXAMPLES", SMALLER)
    assert run_command(main, ["plot", "all", "--out", str(tmp_path)]) == 0
    text = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(text) == [f"cost-{name}.svg" for name in sorted(SMALLER)]
    assert all("<svg" in picture and "dc:date" not in picture for picture in text.values())
    assert "logits, " in text["cost-roofline.svg"]
    assert ">dp 2<" in text["cost-breakdown.svg"]
    assert "B200: figures of data sheets" in text["cost-scaling.svg"]
    assert "a node: 16" in text["cost-degrees.svg"]
    captured = capsys.readouterr()
    assert f"plot in {tmp_path / 'cost-breakdown.svg'}" in captured.out
    notes = captured.err.splitlines()
    assert len(set(notes[-3:])) == 3, "each note once, though two bars have it"
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
