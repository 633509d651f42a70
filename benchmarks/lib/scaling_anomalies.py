"""Anomalies of a scaling study: results to doubt, each a sentence with its numbers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.lib.scaling_logs import ScalingRun, top_level, top_level_ms
from benchmarks.lib.sheets import groups

# Copies within one device's memory: the same bytes on every layout with the same tp and pp, and no communication.
COPIES = ("optimizer-copy-to-main-grad", "optimizer-copy-main-to-model-params")
# How many times as long as in other rows is suspect. Clocks that throttle cost a third at most, and rows of the
# published study that are well differ by 5%. Forward contains communication, too: a loss that is averaged over replicas
# after each micro-batch doubled it there.
COPIES_SLOWER, FORWARD_SLOWER, MEETING_SLOWER = 2.0, 3.0, 3.0
# The ranks' first meeting after the gradients are reduced: its own work is a pass over the gradients and one flag.
MEETING = "optimizer-unscale-and-check-inf"
MEETING_SHARE = 0.05  # of the iteration: less would not change what the table says
# Megatron-LM leaves zeroing gradients, the schedule of the learning rate and logging untimed: 3 to 10% in that study.
UNACCOUNTED_SHARE = 0.2
BINDING = (
    "A launcher that binds to cores can do this: Open MPI binds each process to one core if it starts one or two (say, "
    "one for each of two nodes), to a socket if more, and what these start inherits the core. Cure: mpirun "
    "--bind-to none; check: len(os.sched_getaffinity(0)) on every rank."
)


class Anomaly(NamedTuple):
    """A finding, about which runs (indices into the list that was given), in a sentence."""

    kind: Literal["samples", "excess", "unaccounted", "starved", "stragglers", "uneven batch"]
    runs: tuple[int, ...]
    text: str


def anomalies(runs: Sequence[ScalingRun]) -> list[Anomaly]:
    """All findings: of each run by itself, then of runs among those of the same model and layout, then of all."""

    def kind(index: int) -> tuple[object, ...]:
        run = runs[index]
        return run.tp, run.pp, run.num_layers, run.hidden_size, run.seq_length, run.micro_batch_size, run.peak_flops

    found = [each for index, run in enumerate(runs) for find in (_miscounted, _mistimed) for each in find(index, run)]
    alike = groups(range(len(runs)), kind)
    starved = [each for group in alike for each in _starved(runs, group)]
    late = [each for group in alike for each in _stragglers(runs, group)]
    return [*found, *sorted(starved, key=lambda each: each.runs), *late, *_uneven_batches(runs)]


def marks(runs: Sequence[ScalingRun]) -> list[str]:
    """The numbers of the findings about each run, `1, 4`, as they are listed below a table."""
    found = list(enumerate(anomalies(runs), 1))
    return [", ".join(str(number) for number, each in found if index in each.runs) for index in range(len(runs))]


def rounding(value: float) -> float:
    """Half a unit of the last digit that a figure is given with: 0.87 may have been 0.865 or 0.875."""
    return 0.5 * 10.0 ** int(Decimal(repr(value)).as_tuple().exponent)


def _miscounted(index: int, run: ScalingRun) -> Iterator[Anomaly]:
    """Samples that are not iterations x global batch, and which of the two agrees with the time."""
    if run.iterations is None or run.samples is None or run.samples == run.iterations * run.global_batch_size:
        return
    right, said, timed = run.iterations * run.global_batch_size, run.samples, top_level_ms(run)
    text = (
        f"{run.label}: {said:,} samples in {run.iterations:,} iterations, but a global batch of "
        f"{run.global_batch_size:,} makes {right:,}."
    )
    if timed:
        per_right, per_said = run.iteration_ms, run.ms_per_sample * said / run.iterations
        agrees = right if abs(per_right - timed) < abs(per_said - timed) else said
        text += (
            f" {run.ms_per_sample:g} ms a sample are {per_right:.1f} ms an iteration with {right:,} samples and "
            f"{per_said:.1f} ms with {said:,}; the timers add up to {timed:.1f} ms: {agrees:,} fits."
        )
    yield Anomaly("samples", (index,), text)


def _mistimed(index: int, run: ScalingRun) -> Iterator[Anomaly]:
    """Timers that add up to more than the iteration, by more than rounding, or that leave a large part of it out."""
    timed, slack = top_level_ms(run), rounding(run.ms_per_sample) * run.global_batch_size
    slack += sum(map(rounding, top_level(run).values()))
    over, text = timed - run.iteration_ms, f"{run.label}: the timers add up to {timed:.1f}"
    if over > slack:
        text += f" ms, {over:.1f} ms more than the iteration of {run.iteration_ms:.1f} ms (rounding explains"
        why = "they were taken in another window than the time of a sample, which must not be mixed"
        why = "each is the most over the ranks, and no rank has them all" if run.over_ranks else why
        yield Anomaly("excess", (index,), f"{text} {slack:.1f} ms): {why}.")
    elif timed and -over > UNACCOUNTED_SHARE * run.iteration_ms:
        text += f" of {run.iteration_ms:.1f} ms: {-over / run.iteration_ms:.0%} of the iteration is in no timer"
        yield Anomaly("unaccounted", (index,), f"{text} (waiting for data, zeroing gradients, logging, a late host).")


def _starved(runs: Sequence[ScalingRun], alike: Sequence[int]) -> Iterator[Anomaly]:
    """Runs whose copies within a device are slow as well as forward: a starved host, not a network, does that."""

    def once(run: ScalingRun, name: str) -> float:
        return run.timers.get(name, 0.0) / (run.micro_batches if name == "forward-compute" else 1)

    for index in alike:
        run, others = runs[index], [runs[other] for other in alike if other != index]
        slower = []
        for name in (*COPIES, "forward-compute"):
            usual = [once(other, name) for other in others if other.timers.get(name)]
            slower.append(once(run, name) / median(usual) if usual else 0.0)
        if min(slower[:2]) < COPIES_SLOWER or slower[2] < FORWARD_SLOWER:
            continue
        text = (
            f"{run.label}: a sign of starved hosts, not of a slow network. Copying gradients and parameters within a "
            f"device takes {slower[0]:.1f} and {slower[1]:.1f} times the median of the {len(others)} other rows with "
            f"tp {run.tp} and pp {run.pp}, a forward pass {slower[2]:.1f} times; such copies wait only for the "
            f"CPU. {BINDING}"
        )
        yield Anomaly("starved", (index,), text)


def _stragglers(runs: Sequence[ScalingRun], alike: Sequence[int]) -> Iterator[Anomaly]:
    """Rows that wait long for each other in the check for overflow, as against the row that waits least."""
    times = {index: runs[index].timers[MEETING] for index in alike if MEETING in runs[index].timers}
    least, shares = min(times.values(), default=0.0), {i: time / runs[i].iteration_ms for i, time in times.items()}
    late = [i for i in times if times[i] > MEETING_SLOWER * least and shares[i] > MEETING_SHARE]
    if late:
        named = " and ".join(f"{times[i]:.1f} ms ({shares[i]:.0%})" for i in late)
        text = (
            f"{', '.join(runs[i].label for i in late)}: {MEETING} takes {named} of the iteration, {least:.1f} ms "
            f"in the row that needs least for the same work ({', '.join(f'{time:.1f}' for time in times.values())} ms "
            "in all rows). It is the ranks' first collective after the gradients' reduction, so this time is waiting "
            "for the last rank. It is from a single window: take the median of several before reading a trend into it."
        )
        yield Anomaly("stragglers", tuple(late), text)


def _uneven_batches(runs: Sequence[ScalingRun]) -> Iterator[Anomaly]:
    """Rows that have another share of the batch for each rank than most, where the batch grows with the ranks."""
    shares = [run.global_batch_size / run.world for run in runs]
    if len({run.global_batch_size for run in runs}) < 2:
        return  # strong scaling: the batch stays
    usual, count = Counter(shares).most_common(1)[0]
    if 2 * count <= len(runs):
        listed = ", ".join(f"{share:g}" for share in shares)
        text = (
            f"Neither the global batch nor the samples of a rank ({listed}) stay the same over the rows: efficiencies "
            "mix scaling with the size of the batch."
        )
        yield Anomaly("uneven batch", tuple(range(len(runs))), text)
        return
    others = Counter((run.tp, run.pp) for run in runs).most_common(1)[0][0]
    for index, (run, share) in enumerate(zip(runs, shares, strict=True)):
        if share != usual:
            layout = f", and with the cost of tp {others[0]} and pp {others[1]}" if (run.tp, run.pp) != others else ""
            text = (
                f"{run.label}: {share:g} samples a rank and iteration (m = {run.micro_batches}), {usual:g} in most "
                "rows: an efficiency relative to it mixes scaling with what a rank has between two reductions"
            )
            yield Anomaly("uneven batch", (index,), f"{text}{layout}.")
