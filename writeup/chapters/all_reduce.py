"""Time of an all-reduce over its size, the number of ranks, and a link between two nodes."""

from math import exp, log
from typing import Any

from benchmarks.lib.collective import bandwidths, size_name
from benchmarks.records import Record
from cs336_systems.cost.machines import system_preset
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import markdown_text, plot_text
from cs336_systems.traffic import sent
from writeup.book import Book, Citation, facts, metric
from writeup.cells import NONE, Beside, beside, joined, median_ms, predicted_ms, prediction, timing
from writeup.figures import COLOURS, Figure, draw
from writeup.publications import ORIGINAL
from writeup.rank_runs import PLACES, Group, group_of, line_of, link_title
from writeup.schematics import all_reduces
from writeup.tables import Table

ONE, TWO = "all-reduce", "all-reduce, two nodes"
STUDENTS = ("brandon-snider", "damek", "sidsoc12", "enzo-ding", "students")
SIMULATED = "python -m benchmarks.two_nodes --nproc 1 -- benchmarks/allreduce.py --sizes '1MB 10MB 50MB'"
BACKENDS = (("shm", "cpu"), ("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda"))
MARKERS = ("o-", "s-", "^-")  # by number of ranks


def content(book: Book) -> dict[str, Any]:
    """Ours on one node and on two, the fits, the original's, and the values of the commentary."""
    one, two = book.cite("allreduce", nodes=1, link=""), book.cite("allreduce", nodes=2, command=SIMULATED)
    theirs = beside(book, ORIGINAL, ONE, "ms")
    return {
        "one": measured(book, one, theirs),
        "two": measured(book, two, beside(book, ORIGINAL, TWO, "ms")),
        "simulated": joined({markdown_text(link_title(r)): None for r in two}) if has_link(two) else "",
        "fits": fits(book, [one, two]),
        "picture": picture(one, two) if one.measured or two.measured else None,
        "published": published(book, theirs),
        "published_picture": published_picture(theirs),
        "students": students(book, one),
        "f": facts(lambda: spoken(one)),
        "rings": all_reduces(),
        "original": original(theirs),
    }


def spoken(cited: Citation) -> dict[str, Any]:
    """Times of 16 KB and rates of 1 GB on two ranks, and how far predictions are off on any number of them."""
    small = {name: median_ms(cited.need(ranks=2, backend=name, bytes=16_000)) for name in ("gloo", "shm")}
    large = [median_ms(cited.need(ranks=2, backend=name, bytes=1_000_000_000)) for name in ("gloo", "shm")]
    third = cited.only(ranks=2, backend="mpi").measured
    mpi = [median_ms(third.need(bytes=size)) for size in (16_000, 1_000_000_000)] if third else None
    return {
        "small_gloo": small["gloo"], "small_shm": small["shm"], "large": large[0] / large[1], "mpi": mpi,
        "mpi_large": mpi[1] / large[1] if mpi else 0.0,
        "factor": {name: factor(cited.only(backend=name)) for name in ("shm", "gloo", *["mpi"] * bool(mpi))},
    }  # fmt: skip


def factor(cited: Citation) -> float:
    """The largest factor by which a prediction is too high or too low."""
    return max(exp(abs(log((predicted_ms(each) or 1.0) / median_ms(each)))) for each in cited.measured)


def has_link(cited: Citation) -> bool:
    """True if any record names its link, which is then not a network of the machine's own."""
    return any(record.config["link"] for record in cited)


def bus(record: Record, kind: str = "bus") -> float:
    """Bytes/s of the median time, out of each rank; with `kind` "algorithm" of the tensor."""
    found = bandwidths(int(record.config["bytes"]), int(record.config["ranks"]), median_ms(record))
    return found[f"{kind}_bytes_per_s"]


def rate(bytes_per_s: float) -> str:
    """`1.16 GB/s`, in thousands as links are sold."""
    return f"{size_name(bytes_per_s)}/s"


def measured(book: Book, cited: Citation, theirs: Beside) -> Table:
    """Every size and number of ranks."""
    rows = []
    for record in sorted(cited, key=lambda r: (group_of(r), r.config["bytes"])):
        config = {name: record.config[name] for name in ("backend", "device", "bytes", "ranks")}
        known = record.status == "ok"
        rows.append({
            "<ranks": str(group_of(record)), "size": size_name(config["bytes"]), "median": timing(book, record),
            "predicted (of measured)": prediction(record),
            "algorithm": rate(bus(record, "algorithm")) if known else NONE, "bus": rate(bus(record)) if known else NONE,
            "rank spread": format_seconds(metric(record, "rank_spread_ms") / 1e3) if known else NONE,
            "2024, mean": theirs.cell(**config),
        })  # fmt: skip
    return Table(book, rows, cited)


def families(cited: Citation) -> dict[Group, list[Record]]:
    """Records by backend, device and ranks, each sorted by size."""
    found: dict[Group, list[Record]] = {}
    for record in sorted(cited.measured, key=lambda r: (group_of(r), r.config["bytes"])):
        found.setdefault(group_of(record), []).append(record)
    return found


def fits(book: Book, citations: list[Citation]) -> Table:
    """Latency and bandwidth: of the probe, on which the predictions rest, and fitted to what was measured."""
    rows = []
    for name, records in (pair for cited in citations for pair in families(cited).items()):
        line, first = line_of(records), records[0]
        nodes = first.config["nodes"]
        rows.append({
            "<ranks": str(name), "<on": f"{nodes} node{'s' * (nodes > 1)}",
            "latency, probed": format_seconds(metric(first, "latency_ms") / 1e3),
            "fitted": format_seconds(line.overhead) if line else NONE,
            "bus bandwidth, probed": rate(metric(first, "link_bytes_per_s")),
            "fitted ": rate(line.bandwidth) if line else NONE,
            "fit off by": f"{line.residual:.1%}" if line else "no line",
        })  # fmt: skip
    return Table(book, rows, [cited for cited in citations if cited] or citations[0])


def picture(one: Citation, two: Citation) -> Figure:
    """Time over size, log-log: a colour for each backend, a marker for each number of ranks, predictions dashed."""

    def into(both: Any) -> None:
        found = [families(cited) for cited in (one, two)]
        backends = list(dict.fromkeys((name.backend, name.device) for each in found for name in each))
        counts = sorted({name.ranks for each in found for name in each})
        for axes, cited, lines, title in zip(both, (one, two), found, ("one node", "two nodes"), strict=True):
            for name, records in lines.items():
                colour = COLOURS[backends.index((name.backend, name.device)) % len(COLOURS)]
                marker = MARKERS[counts.index(name.ranks) % len(MARKERS)]
                sizes, label = [r.config["bytes"] for r in records], plot_text(f"{name.ranks} ranks, {name.backend}")
                axes.plot(sizes, list(map(median_ms, records)), marker, color=colour, markersize=4, label=label)
                axes.plot(sizes, list(map(predicted_ms, records)), "--", color=colour, linewidth=0.7)
            simulated = " (simulated)" if has_link(cited) else ""
            axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="milliseconds", title=title + simulated)
        handles, labels = both[0].get_legend_handles_labels()
        both[0].figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")

    return draw(
        "all-reduce-time", "Time of an all-reduce over its size: medians, and dashed the prediction from the probe.",
        "Two log-log plots of the time of an all-reduce over its size, on one node and on two", into, columns=2,
        height=4.2,
    )  # fmt: skip


def backends_of(theirs: Beside) -> list[tuple[str, str]]:
    """The backends and devices that a published table has figures of, in our order."""
    found = {(row.keys["backend"], row.keys["device"]) for row in theirs.table.rows}
    return [each for each in BACKENDS if each in found]


def published(book: Book, theirs: Beside) -> Table:
    """The original's cells of all three settings, and the least that its hardware's data sheet allows NCCL."""
    rows, backends = [], backends_of(theirs)
    link = system_preset(theirs.table.system).inside.bandwidth
    for nbytes, ranks in sorted({(int(row.keys["bytes"]), int(row.keys["ranks"])) for row in theirs.table.rows}):
        keys: dict[str, dict[str, Any]] = {
            f"{backend}, {PLACES[device]}": {"backend": backend, "device": device, "bytes": nbytes, "ranks": ranks}
            for backend, device in backends
        }
        fastest = theirs.value(**[*keys.values()][-1])
        rows.append({
            "size": size_name(nbytes), "ranks": str(ranks),
            **{head: theirs.cell(**key) for head, key in keys.items()},
            "NCCL's bus": rate(bandwidths(nbytes, ranks, fastest.ms)["bus_bytes_per_s"]) if fastest else NONE,
            "ring, least": f"{1e3 * sent('all-reduce', ranks) * nbytes / link:.3g} ms",
        })  # fmt: skip
    note = (
        f"Means of {theirs.table.source.author} on {theirs.table.hardware}. The last column is a ring's bytes over the "
        f"{rate(link)} that one such GPU has to the others by its data sheet. {theirs.table.note}."
    )
    return Table(book, rows, notes=[f"::: source\n{note}\n:::", *theirs.notes])


def published_picture(theirs: Beside) -> Figure:
    """The original's three settings over size."""

    def into(axes: Any) -> None:
        for colour, (backend, device) in zip(COLOURS, backends_of(theirs), strict=False):
            for ranks, style in ((2, "o-"), (4, "s--"), (6, "^:")):
                rows = [
                    (row.keys["bytes"], 1e3 * row.values["mean"].value)
                    for row in theirs.table.rows
                    if (row.keys["backend"], row.keys["device"], row.keys["ranks"]) == (backend, device, ranks)
                ]
                label = f"{ranks} ({backend}, {PLACES[device]})"
                axes.plot(*zip(*sorted(rows), strict=True), style, color=colour, markersize=4, label=label)
        link = system_preset(theirs.table.system).inside.bandwidth
        sizes = sorted({int(row.keys["bytes"]) for row in theirs.table.rows})
        axes.plot(sizes, [1e3 * size / link for size in sizes], color="black", label="2 ranks' bytes over NVLink")
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="milliseconds")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    return draw(
        "all-reduce-published", "The original's figures. True times lie above the black line, a link at full speed.",
        "Log-log plot of the original's all-reduce times for gloo on CPU and GPU and NCCL, with the link's limit", into,
    )  # fmt: skip


def students(book: Book, one: Citation) -> Table:
    """Other published all-reduces of 1 GB, with their bus bandwidth; then ours of the same tensor on two ranks."""
    rows = []

    def add(who: str, on: str, nbytes: int, ranks: int, mean: str, bytes_per_s: float) -> None:
        rows.append({"<source": who, "<on": on, "size": size_name(nbytes), "ranks": str(ranks), "mean": mean,
                     "bus bandwidth": rate(bytes_per_s)})  # fmt: skip

    for source in STUDENTS:
        table = beside(book, source, ONE, "ms")
        for row in table.table.rows:
            ranks, nbytes = int(row.keys["ranks"]), int(row.keys["bytes"])
            who = f"{source}, the {row.keys['extreme']}" if "extreme" in row.keys else source
            found = bandwidths(nbytes, ranks, row.values["mean"].ms)["bus_bytes_per_s"]
            on = f"{row.keys['backend']}, {table.table.hardware}"
            add(who, on, nbytes, ranks, table.cell(**row.keys), found)
    ours = one.only(bytes=10**9, ranks=2)
    for record in ours.measured:
        on = markdown_text(f"{record.config['backend']}, {record.environment['device']}")
        add("this write-up, median", on, 10**9, 2, timing(book, record), bus(record))
    return Table(book, rows, ours if ours else ())


def original(theirs: Beside) -> dict[str, Any]:
    """Number of the original's figures over NCCL, how many of them are suspect, and the fastest bus that they would
    imply, in bytes/s and over the link's."""
    rows = [row for row in theirs.table.rows if row.keys["backend"] == "nccl"]
    rates = [
        bandwidths(int(row.keys["bytes"]), int(row.keys["ranks"]), row.values["mean"].ms)["bus_bytes_per_s"]
        for row in rows
    ]
    marked = sum(bool(theirs.book.doubts(row.values["mean"])) for row in rows)
    link = system_preset(theirs.table.system).inside.bandwidth
    return {"count": len(rows), "marked": marked, "fastest": rate(max(rates)), "times": max(rates) / link}
