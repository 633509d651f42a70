"""Conversion of Markdown to one HTML file and one PDF, by pandoc and Typst. Both work without a network."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten

import pypandoc
import typst

from cs336_systems.errors import UserError
from writeup.compose import Manuscript
from writeup.play.page import data, with_play

HERE = Path(__file__).parent
TITLE = "Training systems, measured and predicted: CPU edition"
# A pipe table whose lines are longer than this gets columns of fixed shares of the page: none shall.
COMMON = [
    "--columns=100000",
    f"--lua-filter={HERE / 'classes.lua'}",
    "--wrap=none",
    "--section-divs",
    "--fail-if-warnings",
]
# Foreign text may be in the Markdown: no part of it is HTML, Typst or LaTeX as it stands, but for formulas.
READER = "markdown+pipe_tables" + "".join(
    f"-{name}" for name in ("auto_identifiers", "citations", "raw_html", "raw_attribute", "raw_tex", "native_divs",
                            "native_spans", "latex_macros", "yaml_metadata_block", "pandoc_title_block")
)  # fmt: skip


def write_figures(manuscript: Manuscript, folder: Path) -> None:
    """Write the pictures as files, which replace those of an earlier build."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for path in figures.glob("*.svg"):
        if path.stem not in manuscript.figures:
            path.unlink()
    for name, svg in manuscript.figures.items():
        (figures / f"{name}.svg").write_text(svg, encoding="utf-8")


def write_html(manuscript: Manuscript, path: Path, numbers: Callable[[], str] = data) -> None:
    """Write one HTML file that contains pictures, style, MathML and the `numbers` of its interactive parts."""
    options = [
        *COMMON, "--standalone", "--embed-resources", "--mathml", "--toc", "--toc-depth=2",
        f"--template={HERE / 'page.html'}", f"--css={HERE / 'style.css'}",
        f"--metadata=title:{TITLE}", "--metadata=lang:en",
    ]  # fmt: skip
    page = with_play(_converted(manuscript, "html5", options, path.parent), numbers)
    path.write_text(page, encoding="utf-8")


def write_pdf(manuscript: Manuscript, path: Path) -> None:
    """Write a PDF with A4 pages, Typst's own fonts, and no date inside."""
    source = typst_of(manuscript, path.parent)
    with TemporaryDirectory(dir=path.parent, prefix=".typst-") as folder:
        (Path(folder) / "paper.typ").write_text(source, encoding="utf-8")
        os.symlink(path.parent / "figures", Path(folder) / "figures")
        try:
            typst.compile(Path(folder) / "paper.typ", output=path, root=path.parent, ignore_system_fonts=True)
        except typst.TypstError as error:
            raise UserError(f"Typst cannot set the pages: {_line(error)}; please report it with writeup.md") from None


def typst_of(manuscript: Manuscript, folder: Path) -> str:
    """Convert the text to Typst's language, for a folder with figures/. Raises UserError."""
    options = [
        *COMMON, "--standalone", "--toc", "--toc-depth=2", f"--template={HERE / 'paper.typ'}",
        f"--metadata=title:{TITLE}",
    ]  # fmt: skip
    return _converted(manuscript, "typst", options, folder)


def _converted(manuscript: Manuscript, to: str, options: list[str], folder: Path) -> str:
    # Pictures are found from the folder: a path of resources is split at colons, which a folder's name may have.
    try:
        command = [pypandoc.get_pandoc_path(), f"--from={READER}", f"--to={to}", *options]
        return subprocess.run(
            command, cwd=folder, input=manuscript.text, capture_output=True, encoding="utf-8", check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        raise UserError(f"pandoc cannot write {to}: {_line(said)}; please report it with writeup.md") from None


def _line(error: object) -> str:
    return shorten(str(error), 300)
