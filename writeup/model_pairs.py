"""Comparison of variants of one model that took turns with the plain one, A B A B.

Records that were measured hours apart differ by the machine's state as much as by the model. The benchmark `compare`
measures variants in turn, so that ratios are those of pairs. See `benchmarks/compare.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from benchmarks.records import Record
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import model_preset
from writeup.book import Book, Citation
from writeup.cells import NONE, over, predicted_ms, timing
from writeup.tables import Table
from writeup.words import joined, pair_ratios

BASE = "norm=rmsnorm"
COMMAND = "python -m benchmarks.compare --size small norm=rmsnorm norm=layernorm compile precision=bf16"
ATTENTION = {
    "naive": "operator by operator",
    "sdpa": "by torch's `scaled_dot_product_attention`",
    "flash": "by our kernel",
}

Pairs = dict[tuple[str, str], tuple[Record, Record]]  # by size and pass: the plain model, and the variant


def cite(book: Book, variant: str) -> Citation:
    """The plain model and a variant of it, which took turns."""
    return book.cite("compare", command=COMMAND, year=2024, baseline=BASE, variant=(BASE, variant))


def as_preset(cited: Citation) -> Citation:
    """Select records with the attention and the kernels of the size's preset, as without an option."""

    def usual(record: Record) -> bool:
        model = model_preset(record.config["size"], record.config["year"])
        here = record.config["attention"], record.config.get("kernels", model.kernels)
        return here == (model.attention, model.kernels)

    return replace(cited, records=tuple(filter(usual, cited)))


def in_turn(cited: Citation, variant: str) -> Pairs:
    """Pairs of plain model and variant from one run, by size and pass.

    A run stamps each variant with a date of its own, so the base takes over the variant's, once its samples give the
    ratio that the variant's record has; otherwise it is the base of another run, and left out.
    """
    found: Pairs = {}
    for record in cited.measured.only(variant=variant):
        where = {key: record.config[key] for key in ("size", "mode")}
        base = cited.measured.one(where, variant=BASE)
        if base and len(base.samples_ms) == len(record.samples_ms) > 1:
            same = replace(base, environment={**base.environment, "date": record.environment["date"]})
            if abs(median(pair_ratios(record, same)) - record.metrics["ratio_median"]) < 1e-6:
                found[where["size"], where["mode"]] = same, record
    return found


def table(
    book: Book, cited: Citation, pairs: Pairs, names: tuple[str, str], theirs: Mapping[tuple[str, str], str]
) -> Table:
    """Both times, the ratio pair by pair, the predicted one, and the original's, by size and pass."""
    rows = []
    for where, (base, record) in pairs.items():
        expected = predicted_ratio(base, record)
        cells = [timing(book, base), timing(book, record), over(pair_ratios(base, record))]
        cells += [NONE if expected is None else f"{expected:.2f}", theirs.get(where, NONE)]
        rows.append([*map(markdown_text, where), *cells])
    ratio = " / ".join(names)
    heads = ("<size", "<pass", *names, f"{ratio}, in turn (quartiles)", "predicted", "2024, one GPU")
    used = [r for pair in pairs.values() for r in pair]
    kept = tuple(r for r in cited if any(r.samples_ms == each.samples_ms for each in used))
    return Table(book, heads, rows, replace(cited, records=kept))


def predicted_ratio(base: Record, record: Record) -> float | None:
    """The predicted time of one record over that of another, where both have a prediction."""
    first, second = predicted_ms(base), predicted_ms(record)
    return first / second if first and second else None


def setup(cited: Citation, vary: tuple[str, ...] = ()) -> str:
    """Settings that the records share, as a line above their table; the table shows those in `vary`."""
    if not cited.records:
        return ""

    def all_of(key: str) -> str:
        return joined(dict.fromkeys(markdown_text(str(each.config[key])) for each in cited), last="or")

    size = f"batch {all_of('batch_size')}, context {all_of('context')}"
    parts = [f"models of the {all_of('year')} edition", size]
    parts += [all_of("precision")] * ("precision" not in vary)
    warm = all_of("warmup")
    parts.append("no pass before those that count" if warm == "0" else f"{warm} passes before those that count")
    kinds: dict[str, list[str]] = {}
    for record in cited:
        sizes = kinds.setdefault(str(record.config["attention"]), [])
        sizes += [f"`{record.config['size']}`"] * (f"`{record.config['size']}`" not in sizes)
    attention = [ATTENTION.get(kind, kind) + f" ({joined(sizes)})" * (len(kinds) > 1) for kind, sizes in kinds.items()]
    return f"*Set-up: {', '.join(parts)}; attention {joined(attention)}.*"
