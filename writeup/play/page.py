"""The page with its interactive parts: style, numbers as JSON, and the script that looks them up."""

import json
from functools import cache
from pathlib import Path

from writeup.play.grid import grid
from writeup.play.steps import steps

HERE = Path(__file__).parent


def with_play(page: str) -> str:
    """An HTML page with what makes its `::: {.play #play-layout}` and the like playable; one without any as it is."""
    if 'class="play"' not in page:
        return page
    head, found, rest = page.partition("</head>")
    body, end, last = rest.rpartition("</body>")
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("play.css", "play.js"))
    # Jinja2 and pandoc have run before: the text that is added here is this project's own.
    return (
        f"{head}<style>\n{style}</style>\n{found}{body}"
        f'<script type="application/json" id="playdata">{data()}</script>\n<script>\n{script}</script>\n{end}{last}'
    )


@cache
def data() -> str:
    """All numbers in one line of JSON, which ends no script."""
    return json.dumps({**grid(), "steps": steps()}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
