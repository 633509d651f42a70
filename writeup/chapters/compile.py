"""torch.compile: norms forward, with backward, whole models, and attention, each beside the same without it."""

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.records import Record
from cs336_systems.cost.machines import system_preset
from cs336_systems.host.console import format_seconds
from writeup.book import Book, Citation
from writeup.ceilings import COURSE_ROWS, floored, norm_floor, original_seconds
from writeup.cells import NONE, over, predicted_ms, prediction, quoted, timing
from writeup.chapters.layernorm import MODEL, ROD, by_columns, least
from writeup.figures import Figure, draw, logarithmic
from writeup.model_pairs import as_preset, cite, in_turn, said, setup, size_and_pass, twins
from writeup.model_pairs import table as turns_table
from writeup.tables import Table
from writeup.words import from_which, joined, pair_ratios, span, times

FORWARD, BOTH = "forward", "forward-backward"
ORIGINAL = {FORWARD: "compiled norms, forward", BOTH: "compiled norms, forward-backward"}
SHOWN = ("layernorm", "eager", "compiled", "copy")
THEIRS = {"eager": "rmsnorm", "compiled": "rmsnorm compiled", "Triton": "rmsnorm triton"}
GPU = "H100"  # by the kernels in its profile
COLUMNS = (1024, 2048, 4096, 8192)


def content(book: Book) -> dict[str, Any]:
    """The tables of (a), (b), (c) and of attention, the picture, and the commentary's clauses."""
    cited = {what: book.cite("norms", candidate=SHOWN, dtype="fp32", **{"pass": what}) for what in (FORWARD, BOTH)}
    models = {
        compiled: as_preset(
            book.cite(
                "e2e",
                MODEL | {"compile": compiled, "norm": "rmsnorm"},
                command=f"python -m benchmarks.e2e --size small{' --compile' * compiled}",
            )
        )
        for compiled in (False, True)
    }
    compared = cite(book, "compile")
    pairs = in_turn(compared, "compile")
    together = twins(models[False], models[True])
    course = {"grid": "course", "dtype": "fp32", "batch": 8, "causal": False, "keeps": True}
    command = "python -m benchmarks.attention --grid course"
    attention = book.cite("attention", course, candidate=("eager", "compiled"), command=command)
    return {
        "forward": norms(book, cited[FORWARD]),
        "both": norms(book, cited[BOTH]),
        "rod_norms": {what: original_norms(book, what) for what in cited},
        "picture": picture(book, cited),
        "said": {what: gain(each) for what, each in cited.items()},
        "rod": {what: original_gain(book, what) for what in cited},
        "shrinking": shrinking(book),
        "setup": setup(compared),
        "turns": turns_table(book, compared, pairs, ("eager", "compiled"), original_shares(book)),
        "model_setup": setup(models[True]) if together else "",
        "model": whole_models(book, models, together) if together else "",
        "original": original_table(book),
        "model_said": said(pairs, "the compiled model", "the eager model"),
        "rod_model": original_models(book),
        "attention": attention_table(book, attention),
        "attention_said": attention_said(attention),
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
    used = replace(cited, records=tuple(r for r in cited if r.config["candidate"] != "copy"))
    return Table(book, (*heads, "LayerNorm / compiled"), rows, used)


def original_norms(book: Book, what: str) -> Table:
    """The original's compiled norm of one pass beside its own kernel, by columns, and what its bytes take."""
    rows = []
    for columns in COLUMNS:
        floor = norm_floor(columns, what, system_preset(GPU))
        cells = [
            floored(book, book.published.value(ROD, ORIGINAL[what], candidate=THEIRS[name], columns=columns), floor)
            for name in ("compiled", "Triton")
        ]
        ratios = [f"{original_gains(book, what, name)[columns]:.2f}" for name in ("eager", "Triton")]
        rows.append([f"{columns:,}", format_seconds(floor), *cells, *ratios])
    heads = ("<2024, one GPU: columns", f"least on an {GPU}", "compiled", "Triton", "eager / compiled")
    note = f"Of {COURSE_ROWS:,} rows; in brackets the least time over the published one."
    return Table(book, (*heads, "Triton / compiled"), rows, notes=[note])


def original_norm(book: Book, what: str, name: str, columns: int) -> float:
    """The original's seconds of one norm; infinity where it has none."""
    found = book.published.value(ROD, ORIGINAL[what], candidate=THEIRS[name], columns=columns)
    return found.value if found else float("inf")


def gain(cited: Citation) -> str:
    """Speed of compiled RMSNorm relative to eager RMSNorm and to LayerNorm."""
    compiled, eager, fused = (by_columns(cited, name) for name in ("compiled", "eager", "layernorm"))
    if not compiled or not eager:
        return ""
    found = [median(pair_ratios(eager[size], compiled[size])) for size in compiled.keys() & eager.keys()]
    clause = from_which("compiled RMSNorm", compiled, "eager RMSNorm", eager, "{:,g} columns")
    clause = f"{clause} (eager / compiled {span(found, '{:.2f}')})"
    beside = from_which("compiled RMSNorm", compiled, "LayerNorm", fused, "{:,g} columns") if fused else ""
    return f"{clause}; {beside}" if beside else clause


def original_gains(book: Book, what: str, base: str) -> dict[int, float]:
    """The original's time of a norm over that of the compiled one, by columns."""
    found = {name: [original_norm(book, what, name, each) for each in COLUMNS] for name in (base, "compiled")}
    return {each: a / b for each, a, b in zip(COLUMNS, found[base], found["compiled"], strict=True)}


def original_gain(book: Book, what: str) -> str:
    """Where the original's compiled norm is faster than its eager one, and than its Triton kernel."""
    clauses = []
    for name in ("eager", "Triton"):
        gains = original_gains(book, what, name)
        wins = [f"{columns:,}" for columns, factor in gains.items() if factor > 1]
        where = "at every width" if len(wins) == len(gains) else f"at {joined(wins)} columns" if wins else "nowhere"
        clauses.append(f"than the {name} one {where} ({name} / compiled {span(gains.values(), '{:.2f}')})")
    return f"the compiled norm is faster {joined(clauses)}"


def shrinking(book: Book) -> str:
    """Where twice the columns took the original's compiled norm less time, as a sentence."""
    for small, large in pairwise(COLUMNS):
        less, more = (
            book.published.value(ROD, ORIGINAL[FORWARD], candidate="rmsnorm compiled", columns=each)
            for each in (small, large)
        )
        if less and more and more.value < less.value:
            return (
                f"Its forward pass takes {quoted(book, less, 'ms')} at {small:,} columns and "
                f"{quoted(book, more, 'ms')} at {large:,}. Where more work takes less time, something else was timed "
                "as well, perhaps the host, which checks before each call of compiled code that its assumptions still "
                "hold."
            )
    return ""


def picture(book: Book, cited: dict[str, Citation]) -> Figure:
    """Speed-up by compiling, by columns."""

    def into(axes: Any) -> None:
        for what, line in ((FORWARD, "-"), (BOTH, "--")):
            compiled, eager = by_columns(cited[what], "compiled"), by_columns(cited[what], "eager")
            here = {
                int(size): median(pair_ratios(eager[size], compiled[size])) for size in compiled.keys() & eager.keys()
            }
            for place, (who, gains) in enumerate({"here": here, "2024": original_gains(book, what, "eager")}.items()):
                if gains:
                    sizes = sorted(gains)
                    label = f"{who}, {what}"
                    axes.plot(sizes, [gains[size] for size in sizes], f"o{line}", color=f"C{place}", label=label)
        logarithmic(axes, COLUMNS, "columns", "eager / compiled time")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(
        "compile-norms", "What torch.compile brings for RMSNorm: eager over compiled time. Below 1 it is slower.",
        "Lines of eager over compiled time of RMSNorm over columns, here and in the original", into,
    )  # fmt: skip


def whole_models(book: Book, models: dict[bool, Citation], together: list[tuple[Record, Record]]) -> Table:
    """The compiled model by size and pass, where the eager one was measured within half an hour."""
    rows = [[*size_and_pass(record), timing(book, record), prediction(record)] for _, record in together]
    used = replace(models[True], records=tuple(record for _, record in together))
    return Table(book, ("<size", "<pass", "compiled", "predicted (of measured)"), rows, used)


def original_models_gains(book: Book) -> dict[tuple[str, str], float]:
    """Eager over compiled time of the original's models, by size and pass."""
    found, gains = book.published.table(ROD, "compiled models"), {}
    for row in found.rows:
        eager = found.value("", **{**row.keys, "compile": False})
        if row.keys["compile"] and eager:
            gains[str(row.keys["size"]), str(row.keys["pass"])] = eager.value / row.values["mean"].value
    return gains


def original_shares(book: Book) -> dict[tuple[str, str], str]:
    """The same as cells."""
    return {where: f"{factor:.2f}" for where, factor in original_models_gains(book).items()}


def original_table(book: Book) -> Table:
    """The original's models, eager and compiled, with what is predicted of the eager one on an H100."""
    table, rows = book.published.table(ROD, "compiled models"), []
    for (size, what), factor in original_models_gains(book).items():
        both = [quoted(book, table.value(size=size, pass_=what, compile=each), "ms") for each in (False, True)]
        rows.append([size, what, both[0], format_seconds(original_seconds(size, what)), both[1], f"{factor:.2f}"])
    heads = ("<2024, one GPU", "<pass", "eager", "predicted (eager, an H100)", "compiled", "eager / compiled")
    return Table(book, heads, rows)


def original_models(book: Book) -> str:
    """How the original's models gain, and where they do not."""
    gains = {f"`{size}` {what}": factor for (size, what), factor in original_models_gains(book).items()}
    losses = [where for where, factor in gains.items() if factor < 1]
    most = max(gains, key=lambda where: gains[where])
    clause = f"the compiled models are at most {times(gains[most])} as fast ({most})"
    return f"{clause}, and slower in {joined(losses)}" if losses else f"{clause}, and nowhere slower"


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


def attention_said(cited: Citation) -> str:
    """Smallest and largest speed-up of compiled attention, and where."""
    found, shares = [], []
    for record in cited.measured.only(candidate="eager", **{"pass": BOTH}):
        where = {key: record.config[key] for key in ("dim", "seq", "pass")}
        other = cited.measured.one(candidate="compiled", **where)
        if other:
            at = f"{where['seq']:,} tokens of width {where['dim']}"
            found.append((median(pair_ratios(record, other)), at))
            shares += [expected / median(other.samples_ms) for expected in [predicted_ms(other)] if expected]
    if not found:
        return ""
    (low, at_low), (high, at_high) = min(found), max(found)
    clause = f"forward and backward, eager / compiled is {low:.2f} at {at_low}"
    clause += f" and {high:.2f} at {at_high}" * (len(found) > 1)
    if not shares:
        return clause
    return f"{clause}; its matrix products alone would take {span(shares, '{:.0%}')} of the compiled time"
