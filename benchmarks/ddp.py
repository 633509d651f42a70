"""Cost of synchronising gradients, and how much of it backward hides: `python -m benchmarks.ddp`.

The four wrappers, bucketed ones of several sizes, PyTorch's DistributedDataParallel and a model that does not
communicate at all take turns on the same ranks.
"""

import math
import sys
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import ratios
from benchmarks.lib.options import command
from benchmarks.lib.parallel_run import ParallelRun, StepSettings, start, worker_run
from benchmarks.lib.turns import ALONE, TORCH_DDP, Turn, ddp_candidates
from benchmarks.records import Record
from cs336_systems.comm import Place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.cost.closed_forms import exposed_seconds
from cs336_systems.errors import UserError
from cs336_systems.host.console import setting


@dataclass(frozen=True)
class DDPSettings(StepSettings):
    """Options of the command line, one field each."""

    bucket_sizes: str = setting("5 25 100 500", "Sizes of BucketedDDP's buckets in 10^6 bytes.")

    def sizes(self) -> list[float]:
        """The bucket sizes. Raises UserError for what is not a positive number."""
        try:
            sizes = [float(word) for word in self.bucket_sizes.replace(",", " ").split()]
        except ValueError:
            sizes = []
        if not sizes or not all(0 < size < math.inf for size in sizes):
            raise UserError(f"--bucket-sizes {self.bucket_sizes!r}: write sizes in MB, such as 5 25 100")
        return sizes


def predicted_ms(run: ParallelRun, name: str, turns: dict[str, Turn]) -> float:
    """The analytic model's step: computing as `cost.predict` has it, and reductions over the probed link, of which
    backward hides what it can."""
    seconds = run.compute_seconds()
    total = sum(seconds.values())
    if name == ALONE:
        return 1e3 * total
    events = [event for event in turns[name].events if event.verb == "all-reduce" and event.label != "used parameters"]
    buckets = [event.nbytes for event in events] or run.gradient_buckets(25e6)
    times = [run.link.seconds(nbytes, run.ranks) for nbytes in buckets]
    overlap = name not in ("naive", "flat")
    return 1e3 * (total + exposed_seconds(buckets, times, seconds["backward"], overlap))


def make_record(run: ParallelRun, name: str, turns: dict[str, Turn]) -> Record:
    """One candidate's record, with its ratio to PyTorch's and what of its communication shows."""
    turn, metrics = turns[name], ratios(turns[name].steps, turns[TORCH_DDP].steps)
    if name != ALONE:
        metrics["exposed_ms"] = median(a - b for a, b in zip(turn.steps, turns[ALONE].steps, strict=True))
    if turn.reductions:
        events = [event for event in turn.events if event.label != "used parameters"]
        metrics["communication_ms"] = median(turn.reductions)
        metrics["communication_share"] = metrics["communication_ms"] / median(turn.steps)
        metrics["collectives"] = len(events)
        metrics["bytes_sent"] = sum(event.bytes_sent for event in events)
    return run.record("ddp", name, turn, metrics, {"mean_ms": predicted_ms(run, name, turns)})


def work(place: Place, settings: DDPSettings) -> None:
    """One rank's part."""
    worker_run(place, settings, "ddp", ddp_candidates(settings.sizes()), make_record)


@command(DDPSettings)
def main(settings: DDPSettings) -> None:
    """Time training steps of this project's data-parallel wrappers and PyTorch's, in turn, beside predictions."""
    settings.sizes()
    start(work, settings, "ddp")


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
