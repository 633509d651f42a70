"""The published profile of fairseq's evaluation: its times, the shares that they make, and its calls beside ours."""

from dataclasses import replace

from benchmarks.lib.expert_calls import OF_WORDS, PUBLISHED, expected, spread
from benchmarks.records import Record
from cs336_systems.host.text import markdown_code
from cs336_systems.presets import model_preset
from writeup.book import Book, Citation, metric
from writeup.cells import NONE
from writeup.tables import Table
from writeup.words import times

PROFILE, TIMES = "fairseq-moe-profile", "times"
COMPARE = "python -m benchmarks.moe_eval --nproc 4 --moe both --profile --words slow"


def published_times(book: Book) -> Table:
    """The times of the published profile, with their share of the whole."""
    table = book.published.table(PROFILE, TIMES)
    whole = table.rows[0].values
    rows = []
    for each in table.rows:
        cells = [markdown_code(str(each.keys["name"]))]
        for column in table.values:
            value = each.values.get(column)
            cells += [f"{value.text} ({value.value / whole[column].value:.0%})" if value else NONE]
        rows.append(cells)
    return Table(book, ("<of", "CPU, with what it calls (of all)", "GPU (of all)"), rows, always=True)


def published_shares(book: Book) -> dict[str, str]:
    """Shares that the published times make."""

    def seconds(name: str, column: str) -> float:
        value = book.published.value(PROFILE, TIMES, column, name=name)
        return value.value if value else 0.0

    wall, busy, sent = seconds("everything", "cpu"), seconds("everything", "cuda"), seconds("all-to-all", "cuda")
    layer = {name: seconds(f"TransformerDecoderLayer {name} MoE", "cuda") for name in ("with", "without")}
    return {
        "busy": f"{busy / wall:.0%}",
        "working": f"{(busy - sent) / wall:.1%}",
        "sent": f"{sent / busy:.0%}",
        "outside": f"{1 - seconds('TransformerDecoder', 'cpu') / wall:.0%}",
        "first": f"{seconds('aten::eq', 'cpu') + seconds('cudaFree', 'cpu'):.1f} s",
        "layers": times(layer["with"] / layer["without"]),
        "launch": f"{seconds('cudaLaunchKernel', 'cpu') / wall:.0%}",
    }


def calls_table(book: Book, cited: Citation, record: Record | None) -> Table:
    """The operators of the one-hot formulation, ours beside the published, and what they follow from."""
    rows = []
    if record is not None:
        config = replace(model_preset(record.config["size"]), attention="naive")
        due = expected(config, record.config["ep"], record.config["batches"])
        for name, theirs in (PUBLISHED | OF_WORDS).items():
            mine = spread(metric(record, "calls")[name])
            why = due[name][1] if name in due else "reads of words, mostly"
            rows.append([markdown_code(name), mine, f"{theirs:,}", why])
    one = Citation(cited.benchmark, COMPARE, (record,) if record else (), cited.keys)
    return Table(book, ("<calls", "ours, each rank", "published", "<which is"), rows, one)


def same_calls(record: Record | None) -> str:
    """Number of operators whose calls equal the published number."""
    if record is None:
        return ""
    calls = metric(record, "calls")
    same = [name for name, theirs in PUBLISHED.items() if set(calls[name]) == {theirs}]
    return f"{len(same)} of {len(PUBLISHED)} published call counts equal ours"
