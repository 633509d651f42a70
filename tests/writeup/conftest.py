"""The committed records' write-up, built once for all tests of a run."""

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import RESULTS
from writeup.book import Book, Citation, choose_machine

MACHINE = "amd-epyc"  # whose records are committed


@dataclass
class Asked(Book):
    """A book that keeps what it has no record of."""

    empty: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def cite(self, name: str, config: Any = None, /, *, command: str = "", **more: Any) -> Citation:
        found = super().cite(name, config, command=command, **more)
        if not found:
            self.empty.append((self.chapter, name, {**(config or {}), **more}))
        return found


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The write-up's folder; beside it `empty.json`, the citations without a record as (chapter, benchmark, settings).

    The first worker that needs it builds it, the others wait.
    """
    for name in ("matplotlib", "pypandoc", "typst"):
        pytest.importorskip(name, reason=f"{name} is in the extra `writeup`")
    from writeup.build import build

    with shared(tmp_path_factory) as folder:
        if not (folder / "empty.json").exists():
            book = Asked(RESULTS, choose_machine(RESULTS, MACHINE))
            build(book, folder / "writeup")
            (folder / "empty.json").write_text(json.dumps(book.empty, default=repr), encoding="utf-8")
    return folder / "writeup"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The numbers of the page's playable parts, of the built page if there is one."""
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
    from writeup.play import page as playable

    with shared(tmp_path_factory) as folder:
        page, found = folder / "writeup/index.html", folder / "played.json"
        if not found.exists():
            built = (
                page.read_text(encoding="utf-8").partition('id="playdata">')[2] if page.exists() else playable.data()
            )
            found.write_text(built.partition("</script>")[0], encoding="utf-8")
        return json.loads(found.read_text(encoding="utf-8"))


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the drawing of figures, which takes longest and does not change the text."""
    monkeypatch.setattr("writeup.figures._svg", lambda canvas: "")


@contextmanager
def shared(tmp_path_factory):
    """A folder of all workers of a run, for one worker at a time."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (folder / "writeup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(params=[(1280, 900), (390, 844)], ids=["desktop", "phone"])
def opened(request):
    """A function that opens a file in a browser, of a desktop and of a phone: no script may complain, and nothing may
    be asked of a server."""
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip(f"needs {chromium}")
    pytest.importorskip("playwright", reason="playwright is in the extra `browser`")
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=chromium, args=flags) as browser:
        page = browser.new_page(viewport=dict(zip(("width", "height"), request.param, strict=True)))
        page.set_default_timeout(60_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda each: each.is_navigation_request() or each.url.startswith("data:") or said.append(each.url),
        )
        yield lambda path: page.goto(path.as_uri()) and page
    assert said == []
