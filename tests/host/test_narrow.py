"""Tables on narrow terminals, and a bar of progress beside what is printed."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.table import Table

from cs336_systems.host import table as tables
from cs336_systems.host.console import LiteralConsole

ROOT = Path(__file__).resolve().parents[2]
PASSES = ("forward", "backward", "forward-backward", "step")
HEADS = ("size", "pass", "mean", "± std", "median", "predicted", "tokens/s", "FLOP/s", "MFU", "peak", "memory")
CELLS = ("54.2 ms", "4.31 ms", "54 ms", "3.69 ms", "2.37 k", "4.51 G", "5%", "4.5 MiB", "3.9 MiB")


def table(*more: str) -> Table:
    found = Table(title="AMD EPYC: 71.9 GFLOP/s", title_justify="left")
    for head in (*HEADS, *more):
        found.add_column(head, justify="left" if head in ("size", "pass", "words") else "right")
    for name in PASSES:
        found.add_row("tiny", name, *CELLS, *("parameters 3.2 MiB, gradients 3.2 MiB" for _ in more))
    return found


def printed(width: int, *more: str, shown: Table | None = None) -> list[str]:
    console = LiteralConsole(width=width)
    with console.capture() as found:
        console.print(shown or table(*more))
    return found.get().splitlines()


def test_nothing_is_cut_at_any_width():
    for width in (140, 118, 117, 80, 63, 62, 40, 34):
        lines = printed(width)
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert "…" not in text
        for word in (*HEADS, *PASSES, *CELLS):
            assert re.search(rf"(^|[│┃ ]) ?{re.escape(word)} ", text, re.MULTILINE), (word, width)
        assert text.count("54.2 ms") == len(PASSES)


def test_a_head_that_may_not_be_wrapped_is_not_cut():
    for width in range(20, 60):
        wide = Table()
        for head in ("some operator", "another operator", "a third"):
            wide.add_column(head, no_wrap=True)
        wide.add_row("two words", "no operator: gemm", "2")
        assert "…" not in "".join(printed(width, shown=wide)), width


def test_words_are_wrapped_between_words_and_a_table_is_turned_before_it_is_written_row_by_row():
    shown = [re.split("[┃│]", line)[-2].strip() for line in printed(135, "words") if line[0] in "┃│"]
    assert shown[1] == "parameters 3.2"
    assert " ".join(shown).count("parameters 3.2 MiB, gradients 3.2 MiB") == len(PASSES)
    heads = [line.split("┃")[1].strip() for line in printed(118) + printed(80) if line.startswith("┃")]
    assert heads == ["size", "size"]
    assert len(printed(118)) < len(printed(80)) < len(printed(40))


def test_a_table_that_fits_with_a_wrapped_head_loses_no_column():
    """rich shrinks the widest columns below what they need, and then cuts the last one."""
    wide = Table()
    for head in ("sizes", "pass", "median", "/ ZeroRedundancyOptimizer", "of a copy", "predicted"):
        wide.add_column(head, justify="right" if wide.columns else "left", no_wrap=not wide.columns)
    wide.add_row("cross-entropy 64 x 32 x 500 bf16", "forward-backward", "15.9 ms ± 12%", "0.9", "61%", "160.8 KiB")
    for width in range(100, 130):
        lines = printed(width, shown=wide)
        assert max(map(len, lines)) <= width
        assert all(cell in "".join(lines) for cell in ("15.9 ms ± 12%", "160.8 KiB"))


def test_columns_of_numbers_are_right_aligned_also_where_some_are_missing():
    rows = [["256 x 512 fp32", "1.5 ms", "forward", "2"], ["8 x 8192 fp32", "does not fit", "2 x 4", ""]]
    assert tables.Table("title", ("shape", "median", "pass", "ranks"), rows).numeric() == [False, True, False, True]


BESIDE = """
from cs336_systems.host.console import console, progress
with progress("training", 3, 9.0) as advance:
    for step in range(3):
        console().print(f"iteration {step}", soft_wrap=True)
        advance()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads from a Linux terminal")
def test_a_line_is_printed_where_the_bar_has_been_erased():
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", BESIDE], stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        written = b""
        with open(leader, "rb", 0) as terminal, suppress(OSError):  # how Linux says that nobody writes any more
            while piece := terminal.read(65536):
                written += piece
        assert process.wait(60) == 0
    before = written.decode().split("iteration ")[:-1]
    assert len(before) == 3
    for text in before:
        since = text[max(text.rfind("training"), 0) :]
        assert "training" not in since or "\x1b[2K" in since, repr(since)
