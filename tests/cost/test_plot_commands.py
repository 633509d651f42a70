"""The commands that draw the pictures of the cost model: what they refuse and say, and byte-stable files."""

import pytest

from cs336_systems.cost.__main__ import main
from cs336_systems.cost.commands import plot
from cs336_systems.cost.plots import style
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command

with_matplotlib = pytest.mark.skipif(not style.can_plot(), reason="matplotlib is in the extra `writeup`")

SMALLER = {
    "roofline": "--size fairseq-moe-15b --system H100",
    "breakdown": "--size xl --tp 5",
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
    monkeypatch.setattr(plot, "EXAMPLES", SMALLER)
    assert run_command(main, ["plot", "all", "--out", str(tmp_path)]) == 0
    text = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(text) == [f"cost-{name}.svg" for name in sorted(SMALLER)]
    assert all("<svg" in picture and "dc:date" not in picture for picture in text.values())
    assert "logits, " in text["cost-roofline.svg"]
    assert ">as asked<" in text["cost-breakdown.svg"]
    assert "B200: figures of data sheets" in text["cost-scaling.svg"]
    assert "a node: 16" in text["cost-degrees.svg"]
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
