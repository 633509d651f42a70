"""Context parallelism: a sequence split over ranks by a ring, by gathering keys and values, or by heads."""

from statistics import median
from typing import Any

from cs336_systems.host.console import format_bytes
from writeup.book import Book, Citation, facts, metric
from writeup.cells import prediction, ratio, timing
from writeup.figures import Figure, draw, logarithmic
from writeup.tables import Table

WAYS = ("ring", "gather", "ulysses")


def content(book: Book) -> dict[str, Any]:
    """The table, the picture, and the values that its sentences quote."""
    cited = book.cite("long_context")
    return {
        "table": table(book, cited),
        "picture": picture(cited) if cited.measured else None,
        "f": facts(lambda: spoken(cited)),
    }


def spoken(cited: Citation) -> dict[str, Any]:
    """Memory of a rank over one rank's, and time over one rank's, at the longest context."""
    longest = max(cited.values("context")) if cited else 0
    one = cited.need(way="one rank", context=longest)
    found: dict[str, Any] = {"context": f"{longest:,}"}
    for way in WAYS:
        two = cited.need(way=way, cp=2, context=longest)
        four = cited.need(way=way, cp=4, context=longest)
        found[way] = {
            "time": metric(two, "ratio_median"),
            "memory": metric(four, "memory_bytes") / metric(one, "memory_bytes"),
        }
    short = [metric(cited.need(way=way, cp=4, context=1024), "ratio_median") for way in WAYS]
    return found | {"short": median(short)}


def table(book: Book, cited: Citation) -> Table:
    """Every way by context and ranks."""
    rows = [
        {
            "tokens": f"{record.config['context']:,}", "ranks": str(record.config["cp"]),
            "<way": str(record.config["way"]), "step": timing(book, record),
            "predicted (of measured)": prediction(record), "over one rank, in turn": ratio(record),
            "memory of a rank": format_bytes(metric(record, "memory_bytes")),
            "its tensors, predicted": format_bytes(record.predicted["live_bytes"]),
        }
        for record in sorted(cited, key=lambda each: int(each.config["context"]))
    ]  # fmt: skip
    return Table(book, rows, cited)


def picture(cited: Citation) -> Figure:
    """Memory of a rank by context for every way on four ranks, and on one."""

    def into(axes: Any) -> None:
        for way, ranks in (("one rank", 1), *((way, 4) for way in WAYS)):
            found = sorted(cited.measured.only(way=way, cp=ranks), key=lambda each: int(each.config["context"]))
            places = [int(each.config["context"]) for each in found]
            sizes = [metric(each, "memory_bytes") / 2**20 for each in found]
            axes.plot(places, sizes, "o-", label=f"{way}, {ranks} ranks" if ranks > 1 else way)
        logarithmic(axes, sorted(cited.values("context")), "tokens", "MiB on a rank")
        axes.legend()

    return draw(
        "long-context", "Peak memory of a rank's process over the length of the sequence.",
        "Lines of memory over tokens for one rank and for three ways on four ranks", into,
    )  # fmt: skip
