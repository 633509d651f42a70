"""The page with its interactive parts: style, numbers as JSON, and the script that looks them up."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from cs336_systems.errors import UserError
from writeup.play.grid import grid
from writeup.play.steps import steps

HERE = Path(__file__).parent


def with_play(page: str, numbers: Callable[[], str]) -> str:
    """An HTML page with what makes its `::: {.play #play-layout}` and the like playable; one without any as it is."""
    if 'class="play"' not in page:
        return page
    head, found, rest = page.partition("</head>")
    body, end, last = rest.rpartition("</body>")
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("play.css", "play.js"))
    # Jinja2 and pandoc have run before: the text that is added here is this project's own.
    return (
        f"{head}<style>\n{style}</style>\n{found}{body}"
        f'<script type="application/json" id="playdata">{numbers()}</script>\n<script>\n{script}</script>\n{end}{last}'
    )


def data(layouts: dict[str, Any] | None = None) -> str:
    """All numbers in one line of JSON, which ends no script; `layouts` is `grid()` where that is known."""
    found = {**(layouts or grid()), "steps": steps()}
    return json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@contextmanager
def numbers_ahead() -> Iterator[Callable[[], str]]:
    """`data` for the end of the block, in which another core computes the grid. Raises UserError if that failed."""
    command = [sys.executable, "-m", "writeup.play.grid"]
    # In a session of its own, it does not get Ctrl-C, after which it would print a traceback: it is killed.
    with Popen(command, cwd=HERE.parents[1], stdout=PIPE, text=True, start_new_session=True) as process:

        def collected() -> str:
            said, _ = process.communicate()
            if process.returncode:
                raise UserError(f"the page's layouts: {' '.join(command)} ended with code {process.returncode}")
            return data(json.loads(said))

        try:
            yield collected
        finally:
            process.kill()  # if nobody asked, or the build failed
