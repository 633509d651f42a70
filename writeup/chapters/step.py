"""A transformer's step: its passes, its operators, its first pass, and 16-bit numbers."""

from statistics import median
from typing import Any

from writeup.book import Book, facts, sections
from writeup.cells import median_ms, predicted_ms
from writeup.chapters import benchmarking, flame_graph, function_calls, mixed_precision
from writeup.errors import Unmeasured
from writeup.model_pairs import COMMAND, in_turn
from writeup.words import pair_ratios


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the four sections, and the values that its sentences quote."""
    found = sections(book, function_calls, flame_graph, mixed_precision, benchmarking)
    return found | {"f": facts(lambda: spoken(book))}


def spoken(book: Book) -> dict[str, Any]:
    """Numbers of `small` that the chapter's sentences name."""
    e2e = book.cite("e2e", benchmarking.PLAIN, size="small")
    step, forward, backward = (e2e.need(mode=mode, warmup=2) for mode in ("step", "forward", "backward"))
    sizes = {size: book.cite("e2e", benchmarking.PLAIN, size=size, warmup=0) for size in ("tiny", "small")}
    cold = {size: cited.need(mode="forward-backward").samples_ms for size, cited in sizes.items()}
    profile = function_calls.largest(book.cite("profiling", size="small", wrapper="none", attention="naive").measured)
    if profile is None:
        raise Unmeasured(function_calls.COMMAND)
    pairs = in_turn(book.cite("compare"), "precision=bf16")
    ratios = {size: pair_ratios(*pair) for (size, _), pair in pairs.items()}
    for size in sorted(sizes.keys() - ratios.keys()):
        raise Unmeasured(COMMAND.replace("small", size))
    return {
        "seconds": median_ms(step) / 1e3,
        "predicted": (predicted_ms(step) or 0.0) / median_ms(step),
        "backward": median_ms(backward) / median_ms(forward),
        "first": {size: samples[0] / median(samples[1:]) for size, samples in cold.items()},
        "matmuls": profile.metrics["share_matrix_products"],
        "half": median(ratios["small"]),
        "tiny": median(ratios["tiny"]),
        "turns": all(each > 1 for size in sizes for each in ratios[size]),
    }
