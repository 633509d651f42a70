"""Text from outside is never read as markup: terminal, HTML, SVG, Markdown, plots, spreadsheets, logs."""

import re
import sys
import warnings
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from rich.table import Table

from benchmarks import tables
from benchmarks.records import RESULTS, appended, read_records
from cs336_systems.errors import UserError
from cs336_systems.host.console import LiteralConsole, progress, run_command
from cs336_systems.host.table import Table as TextTable
from cs336_systems.host.text import markdown_code, markdown_row, markdown_text, plot_text, printable
from cs336_systems.profiling.report import write_report
from cs336_systems.profiling.trace import read_json, write_json
from tests.support.chrome_events import GLOO, event, tag, trace
from tests.support.traces import memory

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></style></script>",
    '=HYPERLINK("http://x","y")',
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "[red]x[/]",
    "a|b",
    "`x` [y](javascript:z) ![i](http://x/i.png)",
    "one\ntwo\r\x0bthree\x85four\u2028five",
    "\u202eright to left\u2066",
    "lone \udc80 half",
    "nul \0",
    "$\\frac{$",
)
EVERYTHING = " ".join(HOSTILE)


def is_plain(text: str) -> bool:
    """True if a terminal shows a text as it is, line by line."""
    return all(line.isprintable() for line in text.split("\n")) and text.encode() is not None


@pytest.mark.parametrize("text", HOSTILE)
def test_a_line_is_one_line_and_shows_what_was_in_it(text):
    shown = printable(text)
    assert shown.isprintable()
    assert "\n" not in shown
    assert printable(shown) == shown
    assert all(part in shown for part in re.findall(r"[\w<>()=\"]+", text) if part.isprintable())


def test_what_is_readable_stays():
    for text in ("", "a b\u00a0c", "Größe ± 5 %", "模型 🙂", 'C:\\x "y"'):
        assert printable(text) == text
    assert printable("a\x1b[2Jb\x9b\nc\td\u202e\udc80") == "a\\x1b[2Jb\\x9b\\nc\\td\\u202e\\udc80"
    assert printable("a\nb\tc\r", keep="\n\t") == "a\nb\tc\\r"
    assert markdown_text("two_nodes and_ _so __on__ _") == r"two_nodes and\_ \_so \_\_on\_\_ \_"


def unescaped(pattern: str, text: str) -> bool:
    """True if the text has a Markdown sign without a backslash before it."""
    return bool(re.search(rf"(?<!\\)(?:\\\\)*{pattern}", text))


@pytest.mark.parametrize("text", [*HOSTILE, "\\", "\\|", "&lt;script>", '$x$ ~y~ ^z^ _w_ __v__ # "u"'])
def test_a_cell_of_markdown(text):
    cell = markdown_text(text)
    assert not unescaped(r"[|`\[\]$~^#\"]", cell)
    assert "<" not in cell
    assert re.sub(r"\\([\\|`*\[\]$~^#\"_])", r"\1", cell.replace("&lt;", "<").replace("&amp;", "&")) == printable(text)
    row = markdown_row(["first", text, "last"])
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 4
    code = markdown_code(text)
    fence = re.match("`+", code)[0]
    assert fence not in code[len(fence) : -len(fence)], "the code ends where it should"
    assert not re.search(r"(?<!\\)\|", code)


def test_a_terminal_gets_no_commands_but_our_own():
    out = StringIO()
    screen = LiteralConsole(file=out, width=4000, force_terminal=False)
    table = Table(EVERYTHING, title=EVERYTHING, caption=EVERYTHING)
    table.add_row(EVERYTHING)
    screen.print(table)
    screen.print(EVERYTHING, soft_wrap=True)
    screen.print(TextTable(EVERYTHING, [EVERYTHING], [[EVERYTHING]], EVERYTHING, names=True).table())
    assert is_plain(out.getvalue())
    assert "\\x1b[2J" in out.getvalue()
    assert "[red]x[/]" in out.getvalue()
    LiteralConsole(file=out, force_terminal=True, color_system="standard").print("x\x1b[2J", style="bold")
    assert "\x1b[1m" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


def test_errors_warnings_and_progress_of_a_command(capsys):
    @click.command()
    @click.argument("what")
    def command(what: str) -> None:
        sys.stderr.write(warnings.formatwarning(EVERYTHING, UserWarning, "x.py", 1))
        raise UserError(f"first line {EVERYTHING}\n  second line")

    assert run_command(command, ["x"]) == 2
    errors = capsys.readouterr().err
    assert is_plain(errors)
    assert errors.count("[red]x[/]") == 2
    assert errors.endswith("\n  second line\n"), "an error may have lines of its own"
    assert run_command(command, ["x", "\x1b[2J"]) == 2
    with progress(EVERYTHING, 1) as advance:
        advance(EVERYTHING)
    assert is_plain(capsys.readouterr().err)


class Tags(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))


def hostile_report(folder: Path) -> str:
    """What is printed for the report of two ranks, every name in whose traces is hostile."""
    names = [f"{text} {number}" for number, text in enumerate(HOSTILE)]
    events = [tag("step 0", 0, 3000), tag("forward", 0, 2000), tag("backward", 2000, 500)]
    for i, name in enumerate(names):
        events += [tag(f"{name} ({name})", 100 * i, 99), event(name, 100 * i + 10, 50), memory(100 * i + 20, 2**20)]
    events.append(tag(f"gloo:{EVERYTHING}", 2000, 100, GLOO))
    said = {"size": EVERYTHING, "wrapper": EVERYTHING, "device": EVERYTHING, "world_size": 2, "steps": 1}
    out = StringIO()
    write_report(folder, [trace(*events, rank=rank, **said) for rank in range(2)], LiteralConsole(file=out, width=200))
    return out.getvalue()


def test_the_report_of_a_profile(tmp_path):
    assert is_plain(hostile_report(tmp_path))
    page = (tmp_path / "index.html").read_text()
    assert is_plain(page)
    elements = Tags(page).found
    known = {"html", "meta", "title", "style", "h1", "h2", "p", "a", "img", "pre", "span", "code"}
    assert {name for name, _ in elements} <= known
    assert not [key for _, attributes in elements for key in attributes if key.startswith("on")]
    links = {attributes.get("src") or attributes.get("href") for _, attributes in elements} - {None}
    assert links == {link for link in links if (tmp_path / link).is_file()}, "nothing from elsewhere"
    (policy,) = [each["content"] for _, each in elements if each.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert page.index("Content-Security-Policy") < page.index("<title>"), "a policy holds for what comes after it"
    pictures = [ElementTree.fromstring(path.read_bytes()) for path in tmp_path.glob("*.svg")]
    assert len(pictures) == 3
    for each in (each for picture in pictures for each in picture.iter()):
        assert each.tag.rpartition("}")[2] not in {"script", "image", "a", "foreignObject", "animate", "set"}
        assert not [key for key in each.attrib if key.startswith("on")]
        assert not [key for key, value in each.attrib.items() if "href" in key and value[:1] != "#"]
    for path in tmp_path.glob("*.md"):
        check_tables(path.read_text())
    assert read_json(tmp_path / "merged.trace.json.gz")


def check_tables(text: str) -> None:
    """Tables of Markdown whose rows have as many columns as their heads, and no HTML."""
    assert is_plain(text)
    columns = None
    for line in text.split("\n"):
        code = re.sub(r"(`+).*?\1(?!`)", "code", line)
        assert "<script" not in code
        assert "<img" not in code
        bars = len(re.findall(r"(?<!\\)(?:\\\\)*\|", code)) if line.startswith("|") else None
        assert bars == columns or columns is None or bars is None, line
        columns = bars


def test_a_trace_with_numbers_that_json_has_not_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for number in ("NaN", "-Infinity"):
        path.write_text(f'{{"traceEvents": [{{"ph": "X", "name": "a", "ts": {number}}}]}}')
        with pytest.raises(UserError, match=f"a number in it is {number}"):
            read_json(path)
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json({"traceEvents": [float(number)]}, path)


def test_the_pages_that_records_become():
    records = read_records(RESULTS / "amd-epyc/e2e.jsonl")[:2]
    for record in records:
        record.environment["device"] = EVERYTHING
        record.flags.append(EVERYTHING)
        record.config["batch_size"] = EVERYTHING
    text = tables.passes(records)[0].markdown(level=0)
    assert is_plain(text)
    assert "<" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows} == {9}
    assert is_plain(appended(2, Path(EVERYTHING)))


def test_labels_of_plots_are_no_formulas():
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
    from matplotlib.figure import Figure

    figure = Figure()
    figure.suptitle(plot_text(EVERYTHING + "$\\frac{$"))
    text = StringIO()
    figure.savefig(text, format="svg")
    picture = ElementTree.fromstring(text.getvalue())
    assert not [each for each in picture.iter() if each.tag.endswith(("script", "image"))]
