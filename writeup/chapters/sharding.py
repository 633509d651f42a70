"""Sharding the optimizer, the gradients and the parameters: ZeRO and FSDP."""

from collections import Counter
from functools import cache
from statistics import median
from typing import Any

from benchmarks.records import Record
from cs336_systems.buffers.gather_order import AHEAD
from cs336_systems.cost import count_parameters
from cs336_systems.cost.closed_forms import zero_memory
from cs336_systems.cost.course import question
from cs336_systems.cost.course.memory import parameters_of
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.host.text import markdown_text
from cs336_systems.layout import Layout, Transfer
from cs336_systems.presets import model_preset
from cs336_systems.traffic import sent
from cs336_systems.train.observation import observe_traffic
from cs336_systems.train.recipe import Recipe
from writeup.book import Book, Citation, facts, metric, sections
from writeup.cells import NOISY, NONE, beside, joined, marks, pair_ratios, prediction, ratio, timing
from writeup.chapters import optimizer_sharding
from writeup.chapters.optimizer_sharding import GIB, PARTS
from writeup.layer_schematics import gather_ahead
from writeup.rank_runs import ZERO, model_of, runs_of
from writeup.schematics import resting
from writeup.tables import Table, missing

STAGES = {"stage 0": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3}
TORCH = "torch FSDP2"
STUDENT, YEAR, SIZE = "enzo-ding", 2026, "xl"
RANKS = 8  # of the observed collectives
SHAPE = ("d_model", "layers", "batch_size", "context", "ranks")  # the memory depends on these, not on the link


def content(book: Book) -> dict[str, Any]:
    """Memory, times and traffic of every stage; the published accounting with its prediction; the optimizer's sharding;
    and what its sentences quote."""
    cited = book.cite("zero", link="", candidate=(*STAGES, TORCH), command=ZERO)
    slow = book.cite("zero", link=bool, candidate=(*STAGES, TORCH), command=ZERO)
    runs = [*runs_of(cited), *runs_of(slow)]
    shapes: dict[tuple[Any, ...], Citation] = {}  # the first run of each
    for run in runs:
        shapes.setdefault(tuple(next(iter(run)).config[key] for key in SHAPE), run)
    return {
        "f": facts(lambda: spoken(book)),
        "resting": resting(),
        "gather_ahead": gather_ahead(),
        "memory": [(model_of(run), memory(book, run)) for run in shapes.values()],
        "steps": [(model_of(run), steps(book, run)) for run in runs],
        "missing": missing([cited]),
        "traffic": traffic(book),
        "ranks": RANKS,
        "ahead": AHEAD,
        "accounting": accounting(book),
        "answer": question("fsdp-memory").result,
        "student_said": student_said(book),
        "command": ZERO,
    } | sections(book, optimizer_sharding)


def spoken(book: Book) -> dict[str, Any]:
    """Bytes at rest of each stage against stage 0 and against the prediction, and times over stage 0 and over FSDP2, of
    the course's `small` over shared memory and over a slow link."""
    run, slow = (book.cite("zero", size="small", **where) for where in ({"link": "", "backend": "shm"}, {"link": bool}))
    stages, apart = ([each.need(candidate=f"stage {stage}") for stage in range(4)] for each in (run, slow))
    rest = [total(each) for each in stages]
    exact = [total(each, True) / total(each) for each in stages]
    ratios, on_link = ([median(pair_ratios(each, ours[0])) for each in ours] for ours in (stages, apart))
    peers = [median(pair_ratios(each.need(candidate="stage 3"), each.need(candidate="torch FSDP2")))
             for each in (run, slow)]  # fmt: skip
    sent = sent_bytes(apart[3]) / sent_bytes(apart[0])
    return {"rest": [each / rest[0] for each in rest], "low": min(exact), "high": max(exact), "ratios": ratios,
            "on_link": on_link, "peers": peers, "sent": sent}  # fmt: skip


def total(record: Record, predicted: bool = False) -> float:
    """Bytes at rest on the fullest rank after the first step."""
    source = record.predicted if predicted else record.metrics
    return float(sum(source[f"{part}_bytes"] for part in PARTS))


def memory(book: Book, run: Citation) -> Table:
    """Bytes at rest on a rank, by part, with predicted over measured in brackets, and bytes kept by a forward pass."""
    rows = []
    for record in run:
        bytes_of = {part: (record.predicted[f"{part}_bytes"], metric(record, f"{part}_bytes")) for part in PARTS}
        cells = {part: predicted_over(*found) for part, found in bytes_of.items()}
        signs = marks(book, record).replace(NOISY, "")  # bytes are counted: only times are noisy
        at_rest = predicted_over(total(record, True), total(record), signs)
        kept = format_bytes(metric(record, "activations_bytes"))
        name = markdown_text(str(record.config["candidate"]))
        rows.append({"<stage": name, **cells, "at rest": at_rest, "kept by forward": kept})
    return Table(book, rows, run)


def predicted_over(predicted: float, found: float, signs: str = "") -> str:
    """`1.2 GiB (0.99)`: bytes with marks, and in brackets the predicted ones over them."""
    return f"{format_bytes(found)}{signs} ({predicted / found:.2f})"


def sent_bytes(record: Record) -> float:
    """Bytes that a rank sends in a step."""
    return float(metric(record, "reductions_bytes_sent") + metric(record, "gathers_bytes_sent"))


def steps(book: Book, run: Citation) -> Table:
    """A step, its collectives alone, and what it sends in units of the parameters' (N - 1)/N."""
    base = run.one(candidate="stage 0")
    rows = []
    for record in run:
        found, reductions, gathers, whole = record.metrics, NONE, NONE, NONE
        if "reductions_ms" in found:
            reductions = format_seconds(found["reductions_ms"] / 1e3)
            if found["gathers_ms"]:
                gathers = f"{format_seconds(found['gathers_ms'] / 1e3)} ({found['update_share']:.0%})"
            units = f" ({2 * sent_bytes(record) / sent_bytes(base):.2f})" if base else ""  # stage 0 sends two of them
            whole = format_bytes(sent_bytes(record)) + units
        rows.append({
            "<stage": markdown_text(str(record.config["candidate"])), "step": timing(book, record),
            "predicted (of measured)": prediction(record), "over FSDP2": ratio(record, "fsdp_ratio"),
            "reductions alone": reductions, "gathers alone (of step)": gathers, "sent (in 4P(N-1)/N)": whole,
        })  # fmt: skip
    return Table(book, rows, run)


@cache
def observed(stage: int) -> Counter[Transfer]:
    """A step's collectives for the course's `small`, as the library is observed to send them."""
    layout = Layout(dp=RANKS, zero=stage, global_batch=RANKS)
    return observe_traffic(Recipe.of(context=1), model_preset("small", YEAR), layout)


def traffic(book: Book) -> Table:
    """Calls and bytes of the collectives of a rank's step, by stage."""
    nbytes, rows = 4 * sum(count_parameters(model_preset("small", YEAR)).values()), []
    for name, stage in STAGES.items():
        found, verbs = observed(stage), Counter[str]()
        whole = sum(count * sent(each.verb, RANKS) * each.nbytes for each, count in found.items())
        for each, count in found.items():
            verbs[each.verb] += count
        rows.append({
            "<stage": name,
            "<collectives of a step": ", ".join(f"{count} {verb}" for verb, count in verbs.items()),
            "sent by a rank": format_bytes(whole),
            "in units of 4P(N-1)/N": f"{whole / (nbytes * (RANKS - 1) / RANKS):.2f}",
        })  # fmt: skip
    return Table(book, rows)


def accounting(book: Book) -> Table:
    """The published accounting of 2026's xl, with what the formula has at rest and what it saves."""
    theirs, rows = beside(book, STUDENT, "fsdp", "GiB"), []
    time = beside(book, STUDENT, "fsdp", "ms")
    base = theirs.value("peak", candidate="ddp", ranks=2, precision="fp32")
    for row in theirs.table.rows:
        full, ranks, precision = row.keys["candidate"] == "fsdp", int(row.keys["ranks"]), str(row.keys["precision"])
        whole, sharded = at_rest(ranks)
        found = row.values["peak"]
        saved = f"{(base.value - found.value) / GIB:.1f} GiB" if base and full and precision == "fp32" else NONE
        rows.append({
            "<wrapper": str(row.keys["candidate"]), "ranks": str(ranks), "<precision": precision,
            "peak": theirs.cell("peak", **row.keys),
            "at rest, predicted": f"{(sharded if full else whole) / GIB:.1f} GiB", "saved": saved,
            "saved at rest, predicted": f"{(whole - sharded) / GIB:.1f} GiB" if full else NONE,
            "step": time.cell("time", **row.keys),
        })  # fmt: skip
    note = f"::: source\n{theirs.table.source.author}, {theirs.table.hardware}; {theirs.table.note}.\n:::"
    return Table(book, rows, notes=[note, *theirs.notes])


def at_rest(ranks: int) -> list[float]:
    """Bytes of parameters, gradients and state of xl on a rank: whole, and fully sharded."""
    return [sum(zero_memory(parameters_of(SIZE, YEAR), 0, ranks, stage).values()) for stage in (0, 3)]


def student_said(book: Book) -> str:
    """Published saving compared with the formula for memory at rest."""
    theirs, shares = book.published.table(STUDENT, "fsdp"), []
    base = theirs.value("peak", candidate="ddp", ranks=2, precision="fp32")
    for ranks in (2, 4):
        found = theirs.value("peak", candidate="fsdp", ranks=ranks, precision="fp32")
        if base and found:
            whole, sharded = at_rest(ranks)
            shares.append(f"{(base.value - found.value) / (whole - sharded):.0%} ({ranks} ranks)")
    return (
        f"In fp32 sharding lowers the published peak by {joined(shares)} of what the formula saves at rest: a peak "
        "also has activations, gathered weights and a whole gradient before its reduce-scatter."
    )
