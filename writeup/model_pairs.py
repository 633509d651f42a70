"""Comparison of variants of one model that took turns with the plain one, A B A B.

Records that were measured hours apart differ by the machine's state as much as by the model. The benchmark `compare`
measures variants in turn, so that ratios are those of pairs. See `benchmarks/compare.py`. At the end, the time that the
cost model predicts for a pass of a published model.
"""

from dataclasses import replace
from statistics import median

from benchmarks.records import Record
from cs336_systems.cost.machines import System, system_preset
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.step_time import step_time
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import ModelConfig, Norm, model_preset
from writeup.book import Book, Citation
from writeup.cells import NONE, over, pair_ratios, predicted_ms, timing
from writeup.publications import ORIGINAL, Key, Published
from writeup.tables import Table

BASE = "norm=rmsnorm"
COMMAND = "python -m benchmarks.compare --size small norm=rmsnorm norm=layernorm compile precision=bf16"

WARM = "benchmarking, 1 warm-up step"
# The original's tables of the plain model and of each variant, with the keys that choose their rows.
PUBLISHED: dict[str, tuple[tuple[str, dict[str, Key]], tuple[str, dict[str, Key]]]] = {
    "norm=layernorm": ((WARM, {}), ("model with layernorm", {})),
    "precision=bf16": ((WARM, {}), ("mixed precision", {})),
    "compile": (("compiled models", {"compile": False}), ("compiled models", {"compile": True})),
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


def published_pairs(book: Book, variant: str) -> dict[tuple[str, str], tuple[Published, Published]]:
    """The original's times of the plain model and of a variant, by size and pass."""
    found = {}
    (plain, plain_keys), (other, keys) = PUBLISHED[variant]
    for row in book.published.table(ORIGINAL, other).rows:
        base = book.published.value(ORIGINAL, plain, "", **(row.keys | plain_keys))
        if base and keys.items() <= row.keys.items():
            found[str(row.keys["size"]), str(row.keys["pass"])] = base, row.values["mean"]
    return found


def table(book: Book, variant: str, names: tuple[str, str]) -> Table:
    """Both times, the ratio pair by pair, the predicted one, and the original's, by size and pass."""
    cited, theirs, rows, used = cite(book, variant), published_pairs(book, variant), [], list[list[float]]()
    for (size, mode), (base, record) in in_turn(cited, variant).items():
        expected, found = predicted_ratio(base, record), theirs.get((size, mode))
        used += [base.samples_ms, record.samples_ms]
        rows.append({
            "<size": markdown_text(size), "<pass": markdown_text(mode),
            names[0]: timing(book, base), names[1]: timing(book, record),
            f"{' / '.join(names)}, in turn (quartiles)": over(pair_ratios(base, record)),
            "predicted": NONE if expected is None else f"{expected:.2f}",
            "2024, one GPU": f"{found[0].value / found[1].value:.2f}" if found else NONE,
        })  # fmt: skip
    return Table(book, rows, replace(cited, records=tuple(r for r in cited if r.samples_ms in used)))


def predicted_ratio(base: Record, record: Record) -> float | None:
    """The predicted time of one record over that of another, where both have a prediction."""
    first, second = predicted_ms(base), predicted_ms(record)
    return first / second if first and second else None


def pass_seconds(config: ModelConfig, batch: int, seq: int, precision: str, what: str, system: System) -> float:
    """Seconds of one pass over (batch seq) tokens that the model of large systems predicts for a single GPU.

    float32 is taken to be TF32, which the kernels of the original's profile are. Waiting for the host is predicted for
    forward and backward together, so that a single pass has half of it. Raises UserError for sizes that do not divide.
    """
    plan = Plan(micro_batch=batch, global_batch=batch, width=4 if precision == "fp32" else 2)
    parts = step_time(config, plan, seq, system).parts
    passes = {name: parts[name] + parts["host"] / 2 for name in ("forward", "backward")}
    both = sum(passes.values())
    return (passes | {"forward-backward": both, "step": both + parts["optimizer"]})[what]


def original_seconds(size: str, what: str, precision: str = "fp32", norm: Norm = "rmsnorm") -> float:
    """Predicted seconds of a cell of the original: batch 16 and context 128 on the GPU that its kernels point to."""
    config = model_preset(size, 2024).override(norm=norm)
    return pass_seconds(config, 16, 128, precision, what, system_preset("H100"))
