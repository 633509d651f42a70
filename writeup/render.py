"""From Markdown to one HTML file, and to a PDF: pandoc, then Typst. Both work without a network."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pypandoc
import typst

from writeup.compose import Manuscript

HERE = Path(__file__).parent
TITLE = "cs336_systems: measured, predicted, proven"
# A pipe table whose lines are longer than this gets columns of fixed shares of the page: none shall.
COMMON = ["--columns=100000", f"--lua-filter={HERE / 'classes.lua'}", "--wrap=none", "--section-divs"]
READER = "markdown-auto_identifiers+pipe_tables"


def write_figures(manuscript: Manuscript, folder: Path) -> None:
    """The pictures as files, for whoever wants one alone."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name, svg in manuscript.figures.items():
        (folder / "figures" / f"{name}.svg").write_text(svg)


def write_html(manuscript: Manuscript, path: Path) -> None:
    """One file that needs no other: pictures, style and MathML are inside."""
    options = [
        *COMMON, "--standalone", "--embed-resources", "--mathml", "--toc", "--toc-depth=2",
        f"--template={HERE / 'page.html'}", f"--css={HERE / 'style.css'}", f"--resource-path={path.parent}",
        f"--metadata=title:{TITLE}", "--metadata=lang:en",
    ]  # fmt: skip
    text = pypandoc.convert_text(manuscript.text, "html5", format=READER, extra_args=options)
    path.write_text(text)


def write_pdf(manuscript: Manuscript, path: Path) -> None:
    """The same as A4 pages, with the fonts that Typst brings along, and no date inside."""
    options = [
        *COMMON, "--standalone", "--toc", "--toc-depth=2", f"--template={HERE / 'paper.typ'}",
        f"--metadata=title:{TITLE}",
    ]  # fmt: skip
    source = pypandoc.convert_text(manuscript.text, "typst", format=READER, extra_args=options)
    with TemporaryDirectory(dir=path.parent, prefix=".typst-") as folder:
        (Path(folder) / "paper.typ").write_text(source)
        os.symlink(path.parent / "figures", Path(folder) / "figures")
        typst.compile(Path(folder) / "paper.typ", output=path, root=path.parent, ignore_system_fonts=True)
