"""torch.compile: norms forward, with backward, whole models, and attention, each beside the same without it."""

from itertools import pairwise
from typing import Any

from benchmarks.records import Record
from writeup.book import Book, Citation
from writeup.cells import NONE, median_ms, predicted_ms, prediction, quoted, ratio, timing
from writeup.chapters.layernorm import MODEL, NORMS, PUBLISHED, ROD, by_columns, twin, unfused
from writeup.figures import Figure, draw, logarithmic
from writeup.tables import Table
from writeup.words import apart, faster, from_which, joined, span, times

FORWARD, BOTH = "forward", "forward-backward"
ORIGINAL = {FORWARD: "compiled norms, forward", BOTH: "compiled norms, forward-backward"}
SHOWN = ("layernorm", "eager", "compiled", "ours")
COLUMNS = (1024, 2048, 4096, 8192)


def content(book: Book) -> dict[str, Any]:
    """The tables of (a), (b), (c) and of attention, the picture, and the commentary's clauses."""
    cited = {what: book.cite("norms", candidate=SHOWN, dtype="fp32", **{"pass": what}) for what in (FORWARD, BOTH)}
    models = {
        compiled: unfused(
            book.cite(
                "e2e",
                MODEL | {"compile": compiled, "norm": "rmsnorm"},
                command=f"python -m benchmarks.e2e --size small{' --compile' * compiled}",
            )
        )
        for compiled in (False, True)
    }
    course = {"grid": "course", "dtype": "fp32", "batch": 8, "causal": False, "keeps": True}
    command = "python -m benchmarks.attention --grid course"
    attention = book.cite("attention", course, candidate=("eager", "compiled"), command=command)
    return {
        "forward": norms(book, cited[FORWARD]),
        "both": norms(book, cited[BOTH]),
        "picture": picture(book, cited),
        "said": {what: gain(each) for what, each in cited.items()},
        "rod": {what: original_gain(book, what) for what in cited},
        "shrinking": shrinking(book),
        "model": whole_models(book, models),
        "model_said": model_said(models),
        "rod_model": original_models(book),
        "attention": attention_table(book, attention),
        "attention_said": attention_said(attention),
    }


def norms(book: Book, cited: Citation) -> Table:
    """The norms of one pass by columns, and the original's beside."""
    rows = []
    for record in sorted(cited, key=lambda each: int(each.config["columns"])):
        name, what, columns = record.config["candidate"], record.config["pass"], record.config["columns"]
        theirs = book.published.value(ROD, ORIGINAL[what], candidate=PUBLISHED[name], columns=columns)
        shape = f"{record.config['rows']} x {columns}"
        cells = [timing(book, record), prediction(record), ratio(record, "copy_fraction")]
        rows.append([shape, NORMS[name], *cells, quoted(book, theirs, "ms")])
    heads = ("<rows x columns", "<norm", "median (quartiles)", "predicted (of measured)", "a copy's time over it")
    return Table(book, (*heads, "Rød, one GPU"), rows, cited)


def gain(cited: Citation) -> str:
    """Whether compiling RMSNorm makes it faster, and how it stands to LayerNorm."""
    compiled, eager, fused = (by_columns(cited, name) for name in ("compiled", "eager", "layernorm"))
    if not compiled or not eager:
        return ""
    found = [median_ms(eager[size]) / median_ms(compiled[size]) for size in compiled.keys() & eager.keys()]
    said = from_which("compiled RMSNorm", compiled, "eager RMSNorm", eager, "{:,g} columns")
    said = f"{said} ({span(found)} times as fast)"
    return f"{said}; {from_which('compiled RMSNorm', compiled, 'LayerNorm', fused, '{:,g} columns')}" if fused else said


def original_gains(book: Book, what: str) -> dict[int, float]:
    """Eager over compiled time of the original, by columns."""
    gains = {}
    for columns in COLUMNS:
        eager, compiled = (
            book.published.value(ROD, ORIGINAL[what], candidate=name, columns=columns)
            for name in ("rmsnorm", "rmsnorm compiled")
        )
        if eager and compiled:
            gains[columns] = eager.value / compiled.value
    return gains


def original_gain(book: Book, what: str) -> str:
    """Where the original's compiled norm is faster than its eager one."""
    gains = original_gains(book, what)
    wins = [f"{columns:,}" for columns, factor in gains.items() if factor > 1]
    factor = f"{span(gains.values())} times as fast as the eager one"
    where = "at every width" if len(wins) == len(gains) else f"at {joined(wins)} columns" if wins else "nowhere"
    return f"the compiled norm is faster {where} ({factor})"


def shrinking(book: Book) -> str:
    """Where twice the columns took the original's compiled norm less time, as a sentence."""
    for small, large in pairwise(COLUMNS):
        less, more = (
            book.published.value(ROD, ORIGINAL[FORWARD], candidate="rmsnorm compiled", columns=each)
            for each in (small, large)
        )
        if less and more and more.value < less.value:
            return (
                f"Its forward pass takes {less.shown('ms')} ms at {small:,} columns and {more.shown('ms')} ms at "
                f"{large:,}: where more work takes less time, the GPU is not what is timed, but the host, which checks "
                "before each call of compiled code that its assumptions still hold."
            )
    return ""


def picture(book: Book, cited: dict[str, Citation]) -> Figure:
    """What compiling brings, by columns."""

    def into(axes: Any) -> None:
        for what, line in ((FORWARD, "-"), (BOTH, "--")):
            compiled, eager = by_columns(cited[what], "compiled"), by_columns(cited[what], "eager")
            here = {size: median_ms(eager[size]) / median_ms(compiled[size]) for size in compiled.keys() & eager.keys()}
            both: dict[str, dict[Any, float]] = {"here": here, "Rød": original_gains(book, what)}
            for place, (who, gains) in enumerate(both.items()):
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


def whole_models(book: Book, models: dict[bool, Citation]) -> Table:
    """The model without and with torch.compile."""
    rows = []
    for record in models[True]:
        size, mode = record.config["size"], record.config["mode"]
        plain = twin(record, models[False])
        cells = [timing(book, plain), timing(book, record), prediction(record), share(record, plain)]
        rows.append([size, mode, *cells, original(book, size, mode)])
    heads = ("<size", "<pass", "vanilla", "compiled", "predicted (of compiled)", "ratio", "Rød: compiled (ratio)")
    used = models[False].only(size=models[True].values("size")) if rows else models[False]
    notes = ["Ratio: compiled over vanilla; below 1, compiling pays."] if rows else []
    return Table(book, heads, rows, [used, models[True]], notes=notes)


def share(record: Record, base: Record | None) -> str:
    """The time of one record over another's."""
    measured = base and base.status == "ok" and record.status == "ok"
    return f"{median_ms(record) / median_ms(base):.2f}" if base and measured else NONE


def original(book: Book, size: str, mode: str) -> str:
    """The original's compiled model, and its share of the vanilla one's time."""
    vanilla, compiled = (
        book.published.value(ROD, "compiled models", size=size, compile=each, **{"pass": mode})
        for each in (False, True)
    )
    return f"{compiled.shown('ms')} ms ({compiled.value / vanilla.value:.2f})" if vanilla and compiled else NONE


def model_said(models: dict[bool, Citation]) -> list[str]:
    """For each size, what compiling does to a forward and backward pass."""
    said = []
    for record in models[True].measured.only(mode=BOTH):
        size = record.config["size"]
        plain = twin(record, models[False].measured)
        if plain:
            clause = faster("the compiled model", record, "the vanilla one", plain)
            said.append(f"{size}: {clause}. {apart(record, plain)}".strip())
    return said


def original_models(book: Book) -> str:
    """How the original's models gain, and where they do not."""
    table = book.published.table(ROD, "compiled models")
    gains = {}
    for row in table.rows:
        if row.keys["compile"]:
            vanilla = table.value("", **{**row.keys, "compile": False})
            if vanilla:
                gains[f"{row.keys['size']} {row.keys['pass']}"] = vanilla.value / row.values["mean"].value
    losses = [where for where, factor in gains.items() if factor < 1]
    most = max(gains, key=lambda where: gains[where])
    said = f"the compiled models are at most {times(gains[most])} as fast ({most})"
    return f"{said}, and slower in {joined(losses)}" if losses else f"{said}, and nowhere slower"


def attention_table(book: Book, cited: Citation) -> Table:
    """Attention of 2025 and 2026, eager and compiled, by dim and sequence."""
    rows = []
    for record in sorted(cited.only(candidate="eager"), key=lambda r: (r.config["dim"], r.config["seq"])):
        where = {key: record.config[key] for key in ("dim", "seq", "pass")}
        other = cited.one(candidate="compiled", **where)
        gained = ""
        if other and other.status == record.status == "ok":
            gained = f"{median_ms(record) / median_ms(other):.2f}"
        start = [f"{record.config['batch']} x {where['seq']} x {where['dim']}", where["pass"]]
        rows.append([*start, timing(book, record), timing(book, other), prediction(other), gained or NONE])
    heads = ("<batch x seq x dim", "<pass", "eager", "compiled", "predicted (of compiled)", "eager / compiled")
    return Table(book, heads, rows, cited)


def attention_said(cited: Citation) -> str:
    """What compiling attention brings, least and most, with where."""
    found = []
    for record in cited.measured.only(candidate="eager", **{"pass": BOTH}):
        where = {key: record.config[key] for key in ("dim", "seq", "pass")}
        other = cited.measured.one(candidate="compiled", **where)
        if other:
            at = f"{where['seq']} tokens of width {where['dim']}"
            found.append((median_ms(record) / median_ms(other), at, (predicted_ms(other) or 0.0) / median_ms(other)))
    if not found:
        return ""
    least, most = min(found), max(found)
    return (
        f"compiled attention, forward and backward, is {least[0]:.2f} times as fast as eager at {least[1]} and "
        f"{most[0]:.2f} times at {most[1]}; its matrix products alone would take {min(f[2] for f in found):.0%} to "
        f"{max(f[2] for f in found):.0%} of its time"
    )
