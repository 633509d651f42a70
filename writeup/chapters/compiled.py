"""torch.compile: norms forward, with backward, whole models, and attention, each beside the same without it."""

from typing import Any

from cs336_systems.host.console import format_seconds
from writeup.book import Book, Citation
from writeup.ceilings import original_seconds
from writeup.cells import NONE, over, prediction, quoted, timing
from writeup.chapters.layernorm import ROD, by_columns, least
from writeup.model_pairs import cite, in_turn
from writeup.model_pairs import table as turns_table
from writeup.tables import Table
from writeup.words import pair_ratios

FORWARD, BOTH = "forward", "forward-backward"
SHOWN = ("layernorm", "eager", "compiled", "copy")


def content(book: Book) -> dict[str, Any]:
    """The tables of (a), (b), (c) and of attention, the picture, and the commentary's clauses."""
    cited = {what: book.cite("norms", candidate=SHOWN, dtype="fp32", **{"pass": what}) for what in (FORWARD, BOTH)}
    compared = cite(book, "compile")
    pairs = in_turn(compared, "compile")
    course = {"grid": "course", "dtype": "fp32", "batch": 8, "causal": False, "keeps": True}
    command = "python -m benchmarks.attention --grid course"
    attention = book.cite("attention", course, candidate=("eager", "compiled"), command=command)
    return {
        "forward": norms(book, cited[FORWARD]),
        "both": norms(book, cited[BOTH]),
        "turns": turns_table(book, compared, pairs, ("eager", "compiled"), original_shares(book)),
        "original": original_table(book),
        "attention": attention_table(book, attention),
    }


def norms(book: Book, cited: Citation) -> Table:
    """The compiled norm of one pass by columns, and how eager RMSNorm and LayerNorm stand to it."""
    compiled, eager, fused, copies = (by_columns(cited, name) for name in ("compiled", "eager", "layernorm", "copy"))
    rows = []
    for columns, record in sorted(compiled.items()):
        ratios = [over(pair_ratios(base[columns], record)) if columns in base else NONE for base in (eager, fused)]
        cells = [timing(book, record), least(record, copies.get(columns)), *ratios]
        rows.append([f"{record.config['rows']} x {columns}", *cells])
    heads = ("<rows x columns", "compiled", "least: a copy in turn (of measured)", "eager / compiled")
    used = cited.only(candidate=lambda name: name != "copy")
    return Table(book, (*heads, "LayerNorm / compiled"), rows, used)


def original_models_gains(book: Book) -> dict[tuple[str, str], float]:
    """Eager over compiled time of the original's models, by size and pass."""
    found, gains = book.published.table(ROD, "compiled models"), {}
    for row in found.rows:
        eager = found.value("", **{**row.keys, "compile": False})
        if row.keys["compile"] and eager:
            gains[str(row.keys["size"]), str(row.keys["pass"])] = eager.value / row.values["mean"].value
    return gains


def original_shares(book: Book) -> dict[tuple[str, str], str]:
    """The original's eager over compiled time as cells."""
    return {where: f"{factor:.2f}" for where, factor in original_models_gains(book).items()}


def original_table(book: Book) -> Table:
    """The original's models, eager and compiled, with what is predicted of the eager one on an H100."""
    table, rows = book.published.table(ROD, "compiled models"), []
    for (size, what), factor in original_models_gains(book).items():
        both = [quoted(book, table.value(size=size, pass_=what, compile=each), "ms") for each in (False, True)]
        rows.append([size, what, both[0], format_seconds(original_seconds(size, what)), both[1], f"{factor:.2f}"])
    heads = ("<2024, one GPU", "<pass", "eager", "predicted (eager, an H100)", "compiled", "eager / compiled")
    return Table(book, heads, rows)


def attention_table(book: Book, cited: Citation) -> Table:
    """Attention of 2025 and 2026, eager and compiled, by dim and sequence."""
    rows = []
    for record in sorted(cited.only(candidate="eager"), key=lambda r: (r.config["dim"], r.config["seq"])):
        where = {key: record.config[key] for key in ("dim", "seq", "pass")}
        other = cited.one(candidate="compiled", **where)
        gained = over(pair_ratios(record, other)) if other and other.status == record.status == "ok" else NONE
        start = [f"{record.config['batch']} x {where['seq']} x {where['dim']}", where["pass"]]
        rows.append([*start, timing(book, record), timing(book, other), prediction(other), gained])
    heads = ("<batch x seq x dim", "<pass", "eager", "compiled", "predicted (of compiled)", "eager / compiled")
    return Table(book, heads, rows, cited)
