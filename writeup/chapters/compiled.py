"""torch.compile: whole models and attention, each beside the same without it; `layernorm` has the compiled norm."""

from typing import Any

from cs336_systems.host.console import format_seconds
from writeup.book import Book, Citation
from writeup.ceilings import original_seconds
from writeup.cells import NONE, over, prediction, quoted, timing
from writeup.model_pairs import published_pairs
from writeup.model_pairs import table as turns_table
from writeup.tables import Table
from writeup.words import pair_ratios


def content(book: Book) -> dict[str, Any]:
    """The tables of models, measured and published, and of attention."""
    course = {"grid": "course", "dtype": "fp32", "batch": 8, "causal": False, "keeps": True}
    command = "python -m benchmarks.attention --grid course"
    attention = book.cite("attention", course, candidate=("eager", "compiled"), command=command)
    return {
        "turns": turns_table(book, "compile", ("eager", "compiled")),
        "original": original_table(book),
        "attention": attention_table(book, attention),
    }


def original_table(book: Book) -> Table:
    """The original's models, eager and compiled, with what is predicted of the eager one on an H100."""
    rows = [
        {
            "<2024, one GPU": size, "<pass": what, "eager": quoted(book, eager, "ms"),
            "predicted (eager, an H100)": format_seconds(original_seconds(size, what)),
            "compiled": quoted(book, fast, "ms"), "eager / compiled": f"{eager.value / fast.value:.2f}",
        }
        for (size, what), (eager, fast) in published_pairs(book, "compile").items()
    ]  # fmt: skip
    return Table(book, rows)


def attention_table(book: Book, cited: Citation) -> Table:
    """Attention of 2025 and 2026, eager and compiled, by dim and sequence."""
    rows = []
    for record in sorted(cited.only(candidate="eager"), key=lambda r: (r.config["dim"], r.config["seq"])):
        where = {key: record.config[key] for key in ("dim", "seq", "pass")}
        other = cited.one(candidate="compiled", **where)
        both = other is not None and other.status == record.status == "ok"
        rows.append({
            "<batch x seq x dim": f"{record.config['batch']} x {where['seq']} x {where['dim']}", "<pass": where["pass"],
            "eager": timing(book, record), "compiled": timing(book, other),
            "predicted (of compiled)": prediction(other),
            "eager / compiled": over(pair_ratios(record, other)) if other and both else NONE,
        })  # fmt: skip
    return Table(book, rows, cited)
