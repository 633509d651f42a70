"""The write-up as its reader gets it: the same bytes for the same records, and a page without faults."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from writeup.exercised import ROOT

for needed in ("jinja2", "matplotlib", "pypandoc", "typst"):
    pytest.importorskip(needed, reason=f"{needed} is in the extra `writeup`")

CHROMIUM = Path("/usr/bin/chromium")
DESKTOP, PHONE = (1280, 900), (390, 844)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
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


def build(out: Path, *, hash_seed: int, results: Path | None = None) -> None:
    options = ["--out", str(out), *(["--results", str(results)] if results else [])]
    done = subprocess.run(
        [sys.executable, "-m", "writeup", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=170,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The committed records' write-up."""
    out = tmp_path_factory.mktemp("writeup")
    build(out, hash_seed=1)
    return out


def test_the_same_records_give_the_same_bytes(written, tmp_path):
    build(tmp_path, hash_seed=2)
    files = sorted(path.relative_to(written) for path in written.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert {"index.html", "writeup.md", "writeup.pdf"} <= {str(path) for path in files}
    assert [str(path) for path in files if (written / path).read_bytes() != (tmp_path / path).read_bytes()] == []


def test_without_any_record_every_chapter_says_what_to_run(tmp_path):
    build(tmp_path / "out", hash_seed=1, results=tmp_path / "none")
    text = (tmp_path / "out/writeup.md").read_text()
    assert text.count("Not measured on this machine. Run: `python -m benchmarks.") > 20
    assert "nothing has been measured on this machine" in text


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_in_a_browser(written, size):
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}")
    pytest.importorskip("playwright", reason="playwright is in the extra `browser`")
    from playwright.sync_api import sync_playwright

    said = []
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser:
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        page.set_default_timeout(60_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
        page.goto((written / "index.html").as_uri())
        assert page.evaluate(FAULTS) == []
        page.click("#contents a >> nth=3")
    assert said == []


def test_the_page_needs_no_other_file(written):
    page = (written / "index.html").read_text()
    assert "<math" in page
    assert 'src="figures/' not in page
    assert "<script" not in page
