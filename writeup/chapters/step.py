"""A transformer's step: its passes, its operators, its first pass, and 16-bit numbers."""

from statistics import median
from typing import Any

from benchmarks.records import Record
from writeup import profiles
from writeup.book import Book, facts, sections
from writeup.cells import median_ms, predicted_ms
from writeup.chapters import benchmarking, flame_graph, function_calls, mixed_precision
from writeup.errors import Unmeasured
from writeup.model_pairs import COMMAND, as_preset, in_turn
from writeup.words import pair_ratios


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the four sections, and the values that its sentences quote."""
    found = sections(book, function_calls, flame_graph, mixed_precision, benchmarking)
    return found | {"f": facts(lambda: spoken(book))}


def share(record: Record) -> float:
    """Predicted over measured time."""
    return (predicted_ms(record) or 0.0) / median_ms(record)


def spoken(book: Book) -> dict[str, Any]:
    """Numbers of `small` that the chapter's sentences name."""
    e2e = book.cite("e2e", benchmarking.PLAIN, size="small")
    step, forward, backward = (e2e.need(mode=mode, warmup=2) for mode in ("step", "forward", "backward"))
    warm = as_preset(book.cite("e2e", benchmarking.PLAIN, warmup=2, mode=benchmarking.MODES)).measured
    sizes = {size: book.cite("e2e", benchmarking.PLAIN, size=size, warmup=0) for size in ("tiny", "small")}
    cold = {size: cited.need(mode="forward-backward").samples_ms for size, cited in sizes.items()}
    profile = profiles.largest(book.cite("profiling", size="small", wrapper="none", attention="naive").measured)
    if profile is None:
        raise Unmeasured(profiles.COMMAND)
    pairs = in_turn(book.cite("compare"), mixed_precision.BF16)
    ratios = {size: pair_ratios(*pair) for (size, _), pair in pairs.items()}
    for size in sorted(sizes.keys() - ratios.keys()):
        raise Unmeasured(COMMAND.replace("small", size))
    return {
        "seconds": median_ms(step) / 1e3,
        "predicted": share(step),
        "products": step.predicted["ms_by_kind"]["matrix products"] / median_ms(step),
        "shares": {size: [share(each) for each in warm.only(size=size)] for size in warm.values("size")},
        "backward": median_ms(backward) / median_ms(forward),
        "first": {size: samples[0] / median(samples[1:]) for size, samples in cold.items()},
        "matmuls": profile.metrics["share_matrix_products"],
        "half": median(ratios["small"]),
        "tiny": median(ratios["tiny"]),
        "turns": all(each > 1 for size in sizes for each in ratios[size]),
    }
