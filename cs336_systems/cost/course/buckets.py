"""What bucketed data parallelism costs after backward, and the bucket size that makes it least."""

from math import ceil, floor, sqrt

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, given, quantity, require
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.presets import model_preset

_GRADIENTS = 4 * sum(count_parameters(model_preset("xl", 2025)).values())


def overhead(s: float, w: float, o: float, n: float, compute: float | None = None) -> float:
    """Seconds that the reductions of n equal buckets (s bytes together) end after backward.

    `compute` is how long backward takes; None is the course's assumption that it takes as long as the bytes, s / w.
    A reduction takes s / (n w) + o and waits for its bucket and for the one before.
    """
    backward = s / w if compute is None else compute
    reduction = s / (n * w) + o
    return reduction + (n - 1) * max(0.0, reduction - backward / n)


def best_count(s: float, w: float, o: float, compute: float | None = None) -> int:
    """The whole number of buckets with the least `overhead`.

    Few buckets leave a long last one, many pay o each time. Where backward is longer than the bytes take, it hides the
    calls too as long as n o <= compute - s / w; beyond, the overhead is s / w + n o - compute + compute / n.
    """
    backward = s / w if compute is None else compute
    real = max(sqrt(backward / o), (backward - s / w) / o)
    return min(max(1, floor(real)), ceil(real), key=lambda n: overhead(s, w, o, n, compute))


_BUCKETS = Question(
    "buckets",
    "How large should a bucket be?",
    (2024, 2025),
    ("ddp_bucketed_benchmarking (b)",),
    "Gradients are reduced in buckets while backward goes on. How much longer than backward does a step of data "
    "parallelism take, and which bucket size makes that least?",
    assumed=(
        "Buckets are equal, and ready at equal distances; reductions run one after another.",
        "A bucket's gradients take as long to compute as its bytes to transfer, s/(n w). (Given up in the last steps.)",
    ),
    departures=(
        "On a fast link backward is several times as long as the bytes take, so every size from a few MB to "
        "hundreds hides almost everything: that is why published sweeps on NVLink are flat.",
        "Reductions also take processors and memory bandwidth from backward, which o and w do not say.",
        "Buckets are not equal, and the last (the embedding's) is often the largest; w falls for small messages.",
    ),
)


def buckets(s: float = _GRADIENTS, w: float = 300e9, o: float = 30e-6, n: int = 320, r: float = 3.0) -> Answer:
    """The bucket equation for s bytes of parameters, an all-reduce of w bytes/s, o seconds a call, n buckets."""
    require(n <= s, f"buckets: n = {given(n)} must be at most s = {given(s)}, or a bucket holds less than a byte")
    each, compute, size = s / n, r * s / w, sqrt(s * o * w)
    count, other = best_count(s, w, o), best_count(s, w, o, compute)
    return Answer(
        _BUCKETS,
        (
            Symbol("s", "bytes of all gradients (default: the xl of 2025 in fp32)", s, "B"),
            Symbol("w", "bandwidth of the all-reduce: a rank's bytes over its seconds", w, "B/s"),
            Symbol("o", "overhead of one call", o, "s"),
            Symbol("n", "number of buckets (default: 25 MB each, as in PyTorch)", n, "buckets"),
            Symbol("r", "length of backward over s/w, where the two are not equal", r),
        ),
        (
            Step("A bucket holds", "s/n", "bucket", each, "B"),
            Step("Its bytes take, and so do its gradients", "t = s/(n w)", "transfer", each / w, "s"),
            Step("Its reduction also pays for the call", "t + o", "reduction", each / w + o, "s"),
            Step("Backward ends at", "n t = s/w", "backward", s / w, "s"),
            Step("The first reduction starts at t. None is shorter than t, so the next bucket is always ready and "
                 "the link never rests: the last one ends at", "t + n (t + o)", "end", each / w + n * (each / w + o),
                 "s"),
            Step("The overhead is the difference: the last bucket's bytes, which nothing can hide, and all calls",
                 "T(n) = s/(n w) + n o", "overhead", overhead(s, w, o, n), "s"),
            Step("Its derivative -s/(n² w) + o is zero at", "n* = √(s/(w o))", "best_real", sqrt(s / (w * o))),
            Step("where a bucket has", "s/n* = √(s o w)", "best_bucket", size, "B"),
            Step("and T is, half for the last bucket and half for the calls", "T(n*) = 2 √(s o/w)", "least",
                 2 * sqrt(s * o / w), "s"),
            Step("T has one minimum, so the best whole number is next to n*, at least 1", "", "best", count, "buckets"),
            Step("with an overhead of", "", "best_overhead", overhead(s, w, o, count), "s"),
            Step("Without overlap, one flat bucket costs", "s/w + o", "flat", s / w + o, "s"),
            Step("If backward takes r times as long as the bytes, c = r s/w, a reduction also waits for its "
                 "bucket, and n buckets leave", "s/(n w) + o + (n - 1) max(0, s/(n w) + o - c/n)", "general",
                 overhead(s, w, o, n, compute), "s"),
            Step("If r <= 1 the best is √(c/o); if r > 1, calls are free until n o = c - s/w, so it is",
                 "max(√(c/o), (c - s/w)/o)", "general_best", other, "buckets"),
            Step("and with these buckets there is left", "", "general_least",
                 overhead(s, w, o, other, compute), "s"),
        ),
        "T(n) = s/(n w) + n o: "
        f"{_left(n, overhead(s, w, o, n))} after backward, at best {_left(count, overhead(s, w, o, count))}. "
        f"If backward takes r = {given(r)} times as long as the bytes, {_left(n, overhead(s, w, o, n, compute))}, "
        f"at best {_left(other, overhead(s, w, o, other, compute))}.",
    )  # fmt: skip


def _left(count: int, seconds: float) -> str:
    """What a number of buckets leaves."""
    return f"{quantity(count, 'buckets')} {'leaves' if count == 1 else 'leave'} {quantity(seconds, 's')}"
