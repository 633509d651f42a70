"""All-reduce over a ring, in two ways, and what latency changes."""

# The letters are those of the formulas.
# ruff: noqa: N803

from math import log2

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, given, quantity, require
from cs336_systems.cost.large.systems import system_preset

_EGRESS = system_preset("H100").inside.bandwidth


def ring_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Reduce-scatter and all-gather around a ring: 2 (N - 1) messages of S / N bytes."""
    return 2 * (N - 1) * (a + S / (N * W))


def alternate_ring_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Every whole tensor once around the ring: N - 1 messages of S bytes."""
    return (N - 1) * (a + S / W)


def tree_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Up and down two trees, each for half of the tensor and in many small pieces (Sanders, Speck and Träff, Parallel
    Computing 35, 2009): what NCCL calls tree."""
    return 2 * (a * log2(N) + S / W)


_RINGS = Question(
    "rings",
    "All-reduce over a ring, and an alternative",
    (2024, 2025, 2026),
    ("alternate_ring_all_reduce", "distributed_communication_single_node"),
    "Each of N devices holds a tensor of S bytes and all want the sum. How long does a ring take by reduce-scatter "
    "and all-gather, and how long if each whole tensor is passed around instead and added up on the way?",
    assumed=(
        "Links are full duplex and do not share wires; additions are free.",
        "Latency is left out until the last steps.",
    ),
    departures=(
        "Latency: small messages take 2 (N - 1) a however few their bytes, which is why buckets exist.",
        "The alternative keeps every sum in one order per device, so devices may differ in the last bit; the ring "
        "adds each piece once and copies it, so they agree.",
        "Switches that add (NVLink SHARP) take half of the bytes off each device; across nodes W is the network's.",
    ),
)


def rings(N: int = 8, S: float = 1e9, W: float = _EGRESS, a: float = 3e-6) -> Answer:
    """All-reduce of S bytes over N devices with W bytes/s out of each and a seconds a message."""
    require(N >= 2, "rings: N must be at least 2, since one device has nothing to send")
    require(N <= S, f"rings: S = {given(S)} bytes cannot be cut into N = {given(N)} pieces; S must be at least N")
    half, other = ring_seconds(N, S, W) / 2, alternate_ring_seconds(N, S, W)
    return Answer(
        _RINGS,
        (
            Symbol("N", "devices", N),
            Symbol("S", "bytes of each device's tensor", S, "B"),
            Symbol("W", "bytes/s out of a device (default: NVLink of an H100, one direction)", W, "B/s"),
            Symbol("a", "seconds that a message takes whatever its size", a, "s"),
        ),
        (
            Step("Reduce-scatter cuts the tensor into N pieces. In each of N - 1 steps a device sends the sum of "
                 "one piece so far", "S/N", "piece", S / N, "B"),
            Step("so it takes", "(N - 1) S/(N W)", "reduce_scatter", half, "s"),
            Step("All-gather passes N - 1 finished pieces on, and takes as long", "(N - 1)/N · S/W", "all_gather",
                 half, "s"),
            Step("Together", "2 (N - 1)/N · S/W", "ring", 2 * half, "s"),
            Step("The alternative sends a whole tensor in each of N - 1 steps", "(N - 1) S/W", "alternate",
                 other, "s"),
            Step("Its time over the ring's", "N/2", "ratio", N / 2),
            Step("No algorithm sends less than the ring out of each device (Patarasu and Yuan, 2009)",
                 "2 (N - 1)/N · S", "least_bytes", 2 * (N - 1) / N * S, "B"),
            Step("so benchmarks report, as bus bandwidth, these bytes over the seconds: here W, whatever N is. The "
                 "plain quotient S/t is", "W N/(2 (N - 1))", "algorithm_bandwidth", S / (2 * half),
                 "B/s"),
            Step("Two rings in opposite directions, each with half of the tensor, halve the time if W is what one "
                 "direction carries", "(N - 1)/N · S/W", "both_directions", half, "s"),
            Step("With latency the ring takes", "2 (N - 1) (a + S/(N W))", "ring_latency", ring_seconds(N, S, W, a),
                 "s"),
            *_crossings(N, W, a),
        ),
        f"The ring takes 2 (N - 1)/N · S/W = {quantity(2 * half, 's')}, the alternative (N - 1) S/W = "
        f"{quantity(other, 's')}, {'the same for two devices' if N == 2 else f'{quantity(N / 2)} times as long'}; with "
        f"latency {_fastest(N, S, W, a)}.",
    )  # fmt: skip


def _fastest(N: int, S: float, W: float, a: float) -> str:
    """Which of three ways takes the least time with latency, and how long."""
    seconds = {
        "ring": ring_seconds(N, S, W, a),
        "alternative": alternate_ring_seconds(N, S, W, a),
        "pair of trees": tree_seconds(N, S, W, a),
    }
    best = min(seconds, key=lambda way: seconds[way])
    return f"the {best} is fastest, {quantity(seconds[best], 's')}"


def _crossings(N: int, W: float, a: float) -> tuple[Step, ...]:
    """Sizes below which another way beats the ring: none for two devices."""
    if N == 2:
        return ()
    return (
        Step("Messages cost a each. The alternate ring has half as many, so it beats the ring below",
             "S = a W N/(N - 2)", "alternate_wins_below", a * W * N / (N - 2), "B"),
        Step("A pair of trees takes about 2 a log₂ N + 2 S/W and beats the ring below",
             "S = a W N (N - 1 - log₂ N)", "tree_wins_below", a * W * N * (N - 1 - log2(N)), "B"),
    )  # fmt: skip
