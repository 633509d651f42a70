"""The write-up as its reader gets it: the same bytes for the same records, and a page without faults."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
pytest.importorskip("pypandoc", reason="pypandoc is in the extra `writeup`")
pytest.importorskip("typst", reason="typst is in the extra `writeup`")
import typst

from cs336_systems.errors import UserError
from cs336_systems.host.text import markdown_text
from tests.support.command_lines import problem_of
from tests.support.ranks import patience
from writeup import build as building
from writeup.book import Book
from writeup.compose import Manuscript, compose
from writeup.profiles import BELOW
from writeup.proofs import ROOT
from writeup.render import typst_of, write_figures, write_html, write_pdf

EXTRA = ("matplotlib", "cycler", "pypandoc", "typst")
# What a reader would see go wrong: links to nowhere, pictures that are not there, what sticks out of the page.
FAULTS = """() => {
    const faults = [];
    for (const a of document.querySelectorAll('a[href]')) {
        const to = a.getAttribute('href');
        if (to.startsWith('#') ? !document.getElementById(decodeURIComponent(to.slice(1))) : !to.startsWith('https://'))
            faults.push(`link to ${to}`);
    }
    const ids = [...document.querySelectorAll('body [id]')].filter(e => !e.closest('svg')).map(e => e.id);
    for (const id of new Set(ids)) if (ids.filter(each => each === id).length > 1) faults.push(`two of ${id}`);
    for (const img of document.images) if (!img.complete || !img.naturalWidth) faults.push(`picture ${img.alt}`);
    for (const svg of document.querySelectorAll('figure svg'))
        if (!svg.getBoundingClientRect().height) faults.push('picture without height');
    if (!document.querySelectorAll('figure').length) faults.push('no picture at all');
    const width = document.documentElement.scrollWidth;
    if (width > innerWidth) faults.push(`page of ${width} pixels`);
    for (const e of document.querySelectorAll('main p, main li, main figure, main h2, main h3, .wide, pre, .missing'))
        if (e.getBoundingClientRect().right > innerWidth + 1 && !e.parentElement.closest('.wide, pre, figure'))
            faults.push(`${e.tagName} sticks out: ${e.textContent.slice(0, 60)}`);
    return faults;
}"""


COMMAND = re.compile(r"(`+)((?:python|torchrun|sbatch|make) [^`]+)\1")
# What has not been measured there, and why; an empty citation that is not listed here has a misspelt value.
NOT_MEASURED = {
    ("introduction", "leaderboard"): "a GPU's",
    ("flash-attention", "attention"): "its grid keeps nothing of our kernels on a CPU",
}


def test_every_printed_command_could_run_and_every_citation_that_is_empty_is_known(written):
    text = re.sub(r"\s+", " ", (written / "writeup.md").read_text(encoding="utf-8"))
    commands = list(dict.fromkeys(found[1] for found in COMMAND.findall(text)))
    assert len(commands) > 40
    problems = {command: wrong for command in commands if (wrong := problem_of(command.replace("FOLDER", ".")))}
    assert problems == {}
    empty = json.loads((written.parent / "empty.json").read_text(encoding="utf-8"))
    unknown = [each for each in empty if tuple(each[:2]) not in NOT_MEASURED]
    assert unknown == [], "no record has these settings: one of them is misspelt, or was not measured"
    found = {(chapter, name) for chapter, name, _ in empty}
    assert found == NOT_MEASURED.keys(), "what is listed here has been measured"


def test_the_same_records_give_the_same_bytes_to_everyone(written, tmp_path):
    # matplotlib takes the settings that it finds where it is started.
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.facecolor: black\nlines.linewidth: 9\n")
    out = tmp_path / "a:b"  # a path of resources is split at colons
    (out / "figures").mkdir(parents=True)
    (out / "figures/of-an-earlier-build.svg").write_text("<svg/>")
    other = {
        "PYTHONHASHSEED": "2",
        "TZ": "Pacific/Kiritimati",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "writeup", "--out", str(out)], cwd=tmp_path, capture_output=True, text=True,
        timeout=patience(170), env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | other,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted(path.relative_to(written) for path in written.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert {"index.html", "writeup.md", "writeup.pdf"} <= {str(path) for path in files}
    assert [str(path) for path in files if (written / path).read_bytes() != (out / path).read_bytes()] == []


def test_without_any_record_every_chapter_says_what_to_run(tmp_path, undrawn):
    text = compose(Book(tmp_path)).text
    assert text.count("Not measured on this machine. Run: `python -m benchmarks.") > 20
    assert "nothing has been measured on this machine" in text


HOSTILE = (
    "x<script>alert(1)</script>", "`#panic()`{=typst}", "`<script>`{=html}", "<img src=x onerror=alert(1)>", "#panic()",
    "[x]{onclick=alert(1)}", "[x](javascript:alert(1))", "![x](/etc/passwd)", "![x](http://x.org/x.png)", "@x",
    "`x`{onclick=alert(1)}", "[x](https://x.org){onclick=alert(1)}", "<javascript:alert(1)>", "\\newpage",
    "<div onclick=alert(1)>", "<span>",
)  # fmt: skip
FORMULAS = "$\\frac{$ and $x$ ~~a~~ b~c~ ^d^ __e__ #f @g"


class Tags(HTMLParser):
    """Names of tags and attributes, and where links lead, of what a page has below its head."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()

    def handle_starttag(self, tag, attrs):
        self.seen |= {tag, *(name for name, _ in attrs)}
        self.seen |= {value.split(":")[0] for name, value in attrs if name in ("href", "src")}


def test_text_of_others_stays_text(tmp_path):
    rows = "".join(f"| {text} |\n" for text in HOSTILE)
    division = '<div class="x">\n\ndivided\n\n</div>\n'
    listing = "::: sources\n```python\nlisted = 1\n```\n:::\n"
    table = f"| a |\n|:--|\n{rows}\n: Caption\n\n"
    text = f"## One {{#one}}\n\n{table}{markdown_text(FORMULAS)}\n\n{listing}\n{division}\n$$x^2$$\n"
    write_figures(Manuscript(text), tmp_path)
    write_html(Manuscript(text), tmp_path / "index.html")
    write_pdf(Manuscript(text), tmp_path / "writeup.pdf")
    page = (tmp_path / "index.html").read_text()
    tags = Tags()
    tags.feed(page[page.index("<main>") :])
    assert not tags.seen & {"script", "img", "onclick", "onerror", "javascript", "file", "http"}
    assert {"table", "math", "https"} <= tags.seen
    assert f"<p>{FORMULAS}</p>" in page
    assert all(each in page for each in ("<td", "\\newpage", "&lt;div class=", "listed"))
    source = typst_of(Manuscript(text), tmp_path)
    assert "listed" not in source
    assert "\\#panic()" in source
    (tmp_path / "paper.typ").write_text(source)
    assert json.loads(typst.query(tmp_path / "paper.typ", "figure", field="numbering")) == [None]


def test_tables_are_numbered_as_they_stand_on_paper(tmp_path):
    """Also on the page, where what is folded away, and stands in the appendix on paper, comes earlier."""

    def table(name: str) -> str:
        return f"| a |\n|:--|\n| 1 |\n: []{{#{name}}}{name}\n\n"

    folded = f'::: {{.details title="More"}}\n{table("folded")}:::\n\n'
    text = f"## One {{#one}}\n\n{folded}{table('open')}"
    write_html(Manuscript(text), tmp_path / "index.html")
    for shown in ((tmp_path / "index.html").read_text(), typst_of(Manuscript(text), tmp_path)):
        found = re.findall(r"Table (\d)\.\W*(open|folded)", re.sub(r"<[^>]*>", "", shown))
        assert sorted(found) == [("1", "open"), ("2", "folded")]


def test_pictures_lie_below_the_records():
    names = ("profiling/tiny-none-naive", "profiling/2.7B-none", "../x", "/etc", "a/../../b", "a\nb", "")
    assert [name for name in names if BELOW.fullmatch(name)] == [*names[:2]]


@pytest.mark.parametrize(
    ("text", "write", "said"),
    [
        ("[x](#nowhere)", write_pdf, "Typst cannot set the pages: label `<nowhere>` does not exist"),
        ("![x](figures/none.svg)", write_html, "pandoc cannot write html5: .*Could not fetch resource"),
        ("![x](figures/none.svg)", write_pdf, "Typst cannot set the pages: file not found"),
    ],
)
def test_what_cannot_be_rendered_is_one_line(text, write, said, tmp_path):
    (tmp_path / "figures").mkdir()
    with pytest.raises(UserError, match=said) as error:
        write(Manuscript(f"## One {{#one}}\n\n{text}\n"), tmp_path / "out")
    assert "\n" not in str(error.value)


def test_what_cannot_be_read_is_not_said_to_be_unwritable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(building, "compose", lambda *_, **__: (tmp_path / "none.svg").read_text())
    with pytest.raises(FileNotFoundError):
        building.build(Book(tmp_path), tmp_path / "out")
    with pytest.raises(UserError, match=r"cannot write into .*: Not a directory; name another folder with --out"):
        building.build(Book(tmp_path), tmp_path / "file/out")


def test_tests_are_collected_without_the_extra():
    hide = f"import sys, pytest; sys.modules.update(dict.fromkeys({EXTRA}))"
    collect = (
        "sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', 'tests/writeup', *sys.argv[1:]]))"
    )
    files = map(str, sorted((ROOT / "tests").glob("*.py")))
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}; {collect}", *files], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_page_in_a_browser(written, opened):
    page = opened(written / "index.html")
    assert page.evaluate(FAULTS) == []
    figure = page.locator("#step .measured").first
    figure.click()
    shown = figure.evaluate("each => getComputedStyle(each, '::after').content")
    assert shown == f'"{figure.get_attribute("data-record")}"'
    page.click("#contents a >> nth=3")


def test_the_page_needs_no_other_file(written):
    page = (written / "index.html").read_text(encoding="utf-8")
    assert "<math" in page
    assert 'src="figures/' not in page
    assert "<script src" not in page
