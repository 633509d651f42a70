"""Anomalies of a scaling study: results to doubt, each a sentence with its numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import median
from typing import Literal

from benchmarks.lib.scaling_run import ScalingRun, top_level, top_level_ms

Kind = Literal["samples", "starved", "excess", "unaccounted", "stragglers", "uneven batch"]

# Copies within one device's memory: the same bytes on every layout with the same tp and pp, and no communication.
COPIES = ("optimizer-copy-to-main-grad", "optimizer-copy-main-to-model-params")
# Clocks that throttle cost a third at most, and rows of the published study that are well differ by 5%.
COPIES_SLOWER = 2.0
# Forward contains communication, too: a loss that is averaged over replicas after each micro-batch doubled it there.
FORWARD_SLOWER = 3.0
# The ranks' first meeting after the gradients are reduced: its own work is a pass over the gradients and one flag.
MEETING = "optimizer-unscale-and-check-inf"
MEETING_SLOWER = 3.0
MEETING_SHARE = 0.05  # of the iteration: less would not change what the table says
# Megatron-LM leaves zeroing gradients, the schedule of the learning rate and logging untimed: 3 to 10% in that study.
UNACCOUNTED_SHARE = 0.2


BINDING = (
    "A launcher that binds to cores can do this: Open MPI binds each process to one core if it starts one or two (say, "
    "one for each of two nodes), to a socket if more, and what these start inherits the core. Cure: mpirun "
    "--bind-to none; check: len(os.sched_getaffinity(0)) on every rank."
)


@dataclass(frozen=True)
class Anomaly:
    """A finding, about which runs (indices into the list that was given), in a sentence."""

    kind: Kind
    runs: tuple[int, ...]
    text: str


def anomalies(runs: Sequence[ScalingRun]) -> list[Anomaly]:
    """All findings: of each run by itself, then of runs among their neighbours."""
    found = []
    for index, run in enumerate(runs):
        singles = {"samples": miscounted(run), "excess": excess(run), "unaccounted": unaccounted(run)}
        found += [Anomaly(kind, (index,), text) for kind, text in singles.items() if text]  # type: ignore[arg-type]
    return found + starved(runs) + stragglers(runs) + uneven_batches(runs)


def label(run: ScalingRun) -> str:
    """`W = 16 (2/2/4)`: ranks, and how they are laid out."""
    return f"W = {run.world} ({run.layout})"


def miscounted(run: ScalingRun) -> str | None:
    """Samples that are not iterations x global batch, and which of the two agrees with the time."""
    if run.iterations is None or run.samples is None or run.samples == run.iterations * run.global_batch_size:
        return None
    right, said = run.iterations * run.global_batch_size, run.samples
    text = (
        f"{label(run)}: {said:,} samples in {run.iterations:,} iterations, but a global batch of "
        f"{run.global_batch_size:,} makes {right:,}"
    )
    timed = top_level_ms(run)
    if not timed:
        return text + "."
    per_right, per_said = run.iteration_ms, run.ms_per_sample * said / run.iterations
    agrees = right if abs(per_right - timed) < abs(per_said - timed) else said
    return (
        f"{text}. {run.ms_per_sample:g} ms a sample are {per_right:.1f} ms an iteration with {right:,} samples and "
        f"{per_said:.1f} ms with {said:,}; the timers add up to {timed:.1f} ms: {agrees:,} fits."
    )


def rounding(value: float) -> float:
    """Half a unit of the last digit that a figure is given with: 0.87 may have been 0.865 or 0.875."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    assert isinstance(exponent, int)  # no infinity or NaN: Run refuses them
    return 0.5 * 10.0**exponent


def excess(run: ScalingRun) -> str | None:
    """Timers that add up to more than the iteration, by more than the rounding of what was printed."""
    timed, slack = top_level_ms(run), rounding(run.ms_per_sample) * run.global_batch_size
    slack += sum(rounding(value) for value in top_level(run).values())
    if timed <= run.iteration_ms + slack:
        return None
    why = (
        "each is the most over the ranks, and no rank has them all"
        if run.over_ranks
        else "they were taken over another window than the time of a sample; do not mix the two"
    )
    return (
        f"{label(run)}: the timers add up to {timed:.1f} ms, {timed - run.iteration_ms:.1f} ms more than the iteration "
        f"of {run.iteration_ms:.1f} ms (rounding explains {slack:.1f} ms): {why}."
    )


def unaccounted(run: ScalingRun) -> str | None:
    """An iteration of which no timer knows a large part."""
    timed = top_level_ms(run)
    share = 1 - timed / run.iteration_ms
    if share <= UNACCOUNTED_SHARE or not timed:
        return None
    return (
        f"{label(run)}: the timers add up to {timed:.1f} of {run.iteration_ms:.1f} ms: {share:.0%} of the iteration is "
        "in no timer (waiting for data, zeroing gradients, logging, a host that is late)."
    )


def _peers(runs: Sequence[ScalingRun], index: int) -> list[int]:
    """The other runs of the same model in which a rank has the same weights and micro-batch."""

    def shape(run: ScalingRun) -> tuple[object, ...]:
        return run.tp, run.pp, run.num_layers, run.hidden_size, run.seq_length, run.micro_batch_size, run.peak_flops

    return [i for i, run in enumerate(runs) if i != index and shape(run) == shape(runs[index])]


def starved(runs: Sequence[ScalingRun]) -> list[Anomaly]:
    """Runs whose copies within a device are slow as well as forward: a starved host, not a network, does that."""

    def once(run: ScalingRun, name: str) -> float:
        return run.timers[name] / (run.micro_batches if name == "forward-compute" else 1)

    found = []
    for index, run in enumerate(runs):
        ratios = []
        peers = [runs[i] for i in _peers(runs, index)]
        for name in (*COPIES, "forward-compute"):
            usual = [once(peer, name) for peer in peers if peer.timers.get(name)]
            if usual and name in run.timers:
                ratios.append(once(run, name) / median(usual))
        if len(ratios) < 3 or min(ratios[:2]) < COPIES_SLOWER or ratios[2] < FORWARD_SLOWER:
            continue
        text = (
            f"{label(run)}: a sign of starved hosts, not of a slow network. Copying gradients and parameters within a "
            f"device takes {ratios[0]:.1f} and {ratios[1]:.1f} times the median of the {len(peers)} other rows with "
            f"tp {run.tp} and pp {run.pp}, a forward pass {ratios[2]:.1f} times; such copies wait only for the "
            f"CPU. {BINDING}"
        )
        found.append(Anomaly("starved", (index,), text))
    return found


def stragglers(runs: Sequence[ScalingRun]) -> list[Anomaly]:
    """Rows that wait long for each other in the check for overflow, as against the row that waits least."""
    found = []
    for group in dict.fromkeys(tuple(sorted([index, *_peers(runs, index)])) for index in range(len(runs))):
        times = {i: runs[i].timers[MEETING] for i in group if MEETING in runs[i].timers}
        shares = {i: time / runs[i].iteration_ms for i, time in times.items()}
        least = min(times.values(), default=0.0)
        late = [i for i in times if times[i] > MEETING_SLOWER * least and shares[i] > MEETING_SHARE]
        if late:
            named = " and ".join(f"{times[i]:.1f} ms ({shares[i]:.0%})" for i in late)
            every = ", ".join(f"{time:.1f}" for time in times.values())
            text = (
                f"{', '.join(label(runs[i]) for i in late)}: {MEETING} takes {named} of the iteration, {least:.1f} ms "
                f"in the row that needs least for the same work ({every} ms in all rows). It is the ranks' "
                "first collective after the gradients' reduction, so this time is waiting for the last rank. It is "
                "from a single window: take the median of several before reading a trend into it."
            )
            found.append(Anomaly("stragglers", tuple(late), text))
    return found


def uneven_batches(runs: Sequence[ScalingRun]) -> list[Anomaly]:
    """Rows that have another share of the batch for each rank than most, where the batch grows with the ranks."""
    if len({run.global_batch_size for run in runs}) < 2:
        return []  # strong scaling: the batch stays
    shares = [run.global_batch_size / run.world for run in runs]
    usual, count = Counter(shares).most_common(1)[0]
    if count == len(runs):
        return []
    if 2 * count <= len(runs):
        listed = ", ".join(f"{share:g}" for share in shares)
        text = (
            f"Neither the global batch nor the samples of a rank ({listed}) stay the same over the rows: efficiencies "
            "mix scaling with the size of the batch."
        )
        return [Anomaly("uneven batch", tuple(range(len(runs))), text)]
    found = []
    for index, (run, share) in enumerate(zip(runs, shares, strict=True)):
        if share != usual:
            text = (
                f"{label(run)}: {share:g} samples a rank and iteration (m = {run.micro_batches}), {usual:g} in most "
                "rows: an efficiency relative to it mixes scaling with what a rank has between two reductions"
            )
            others = Counter((other.tp, other.pp) for other in runs).most_common(1)[0][0]
            layout = f", and with the cost of tp {others[0]} and pp {others[1]}" if (run.tp, run.pp) != others else ""
            found.append(Anomaly("uneven batch", (index,), text + layout + "."))
    return found
