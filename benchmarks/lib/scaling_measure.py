"""One turn of a layout: its ranks start, take real training steps, and return the time of every part on every rank."""

import json
import math
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.collective import probe as probe_link
from benchmarks.rank_times import gather_times, time_ranks
from cs336_systems.comm import CommError, Group, Place, backend_of, distributed
from cs336_systems.comm.launch import run_ranks
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.host.machine import PeakMemory, allowed_cores, choose_device, device_name, environment, out_of_memory
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.trainer import Trainer

Answer = dict[str, Any]  # values that JSON can hold


@dataclass(frozen=True)
class ScalingTask:
    """Work of every rank in a turn: `warmup` steps that are not timed, whose losses are kept, then `steps` that are.

    `threads` is how many a CPU rank computes with; `budget` the seconds of each probe of the machine, in which ranks
    that torchrun started take part `side_by_side`.
    """

    recipe: Recipe
    steps: int = 0
    warmup: int = 2
    threads: int = 1
    budget: float = 0.3
    commit: str | None = None
    side_by_side: bool = False


Work = Callable[[Place, ScalingTask], Answer]


def take_turn(place: Place, task: ScalingTask) -> Answer:
    """One rank's part of a turn; every rank returns the same.

    `losses` and `norms` are of the warm-up's steps, NaN and infinity as None. `samples_ms` are the timed steps, of the
    rank that took longest; a small all-reduce before each lets all start together. `timers_ms` are a step's mean by
    name and rank, None where a rank has not used the timer. `memory_bytes` is each rank's peak, weights and optimizer
    included. Raises UserError for a run that cannot be made.
    """
    device = use(task)
    with distributed(device, task.recipe.launch.backend, task.recipe.launch.timeout, place) as group:
        try:
            memory = PeakMemory(device)
            trainer = Trainer(task.recipe)
            answer = _first_steps(trainer, task.warmup)
            if task.steps:
                answer |= _timed_steps(trainer, task, group)
            answer["memory_bytes"] = _of_ranks(memory.read(), group, device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError("out of memory; choose a smaller --size or --micro-batch-size") from error
        answer |= {"vocab_size": trainer.config.vocab_size, "link": None}
        if not task.steps and group.size() > 1:
            answer["link"] = asdict(probe_link(group, device, "nccl" if backend_of(group) == "nccl" else "gloo"))
    return answer


def use(task: ScalingTask) -> torch.device:
    """The task's device, a CPU with the task's threads."""
    device = choose_device(task.recipe.launch.device)
    if device.type == "cpu":
        torch.set_num_threads(task.threads)
    return device


def _first_steps(trainer: Trainer, count: int) -> Answer:
    """Losses (in all, nats) and gradient norms of the first steps."""
    losses, norms = [], []
    for number in range(count):
        step = trainer.step(number)
        losses.append(_number(sum(trainer.mean_losses([step]))))
        norms.append(_number(step.norm.item()))
    return {"losses": losses, "norms": norms}


def _timed_steps(trainer: Trainer, task: ScalingTask, group: Group) -> Answer:
    skipped, device = [], trainer.device
    trainer.timers.reset()
    steps = iter(range(task.warmup, task.warmup + task.steps))
    times = time_ranks(lambda: skipped.append(trainer.step(next(steps)).skipped), group, device, 0, task.steps)
    busy = gpu_utilisation(device)  # at once: it looks back for less than a second
    timers = trainer.timers.by_rank()
    return {
        "samples_ms": times.amax(dim=0).tolist(),
        "timers_ms": {name: [each and each / task.steps for each in values] for name, values in timers.items()},
        "gpu_utilisation": _of_ranks(busy, group, device),
        "skipped": sum(skipped),
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _of_ranks(value: float | None, group: Group, device: torch.device) -> list[float | None]:
    """Every rank's number, in order."""
    every = gather_times([math.nan if value is None else float(value)], group, device)
    return [_number(each) for each in every[:, 0].tolist()]


def gpu_utilisation(device: torch.device) -> float | None:
    """nvidia-smi's percentage of the last moment in which some kernel ran, be it one that waits in a collective; None
    without such a GPU."""
    if device.type != "cuda":
        return None
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", name]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def measure_peak(place: Place, task: ScalingTask) -> Answer:
    """Peak rates of this machine: `rank` is the ceiling of a rank by itself, with its threads; `machine_flops` that of
    all cores at once, None where ranks are measured side by side or have a GPU each."""
    device = use(task)
    rank = probe(device, task.recipe.model.precision, device_name(device), budget=task.budget)
    answer: Answer = {"rank": asdict(rank), "machine_flops": None}
    answer["environment"] = environment(device, task.commit)
    answer["gpus"] = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cpu" and allowed_cores() > task.threads and not task.side_by_side:
        torch.set_num_threads(allowed_cores())
        whole = probe(device, task.recipe.model.precision, device_name(device), budget=task.budget)
        answer["machine_flops"] = max(whole.matmul_flops, rank.matmul_flops)
    return answer


def _into_file(place: Place, work: Work, task: ScalingTask, path: Path) -> None:
    answer = work(place, task)
    if place.rank == 0:
        path.write_text(json.dumps(answer, allow_nan=False))


class Launcher:
    """Runs a task on as many ranks as it needs, and returns the result.

    Under torchrun the ranks are there already: `here` is this one's place, and a task for one rank is done by each of
    them alone. Otherwise CPU ranks are forked, even a single one, so that this process runs no tensor code.
    """

    def __init__(self, here: Place, device: str) -> None:
        self.here, self.device = here, device
        if here.world_size == 1 and device == "cpu":
            import_module("torch._dynamo")  # each rank would import it by itself, which takes longer than its steps

    def run(self, work: Work, task: ScalingTask, ranks: int) -> Answer:
        """Raises UserError for a task that cannot be done, and if communication fails."""
        here = self.here
        try:
            if here.world_size > 1:
                return work(here if ranks > 1 else Place(local_rank=here.local_rank), task)
            if self.device == "cuda" and ranks == 1:
                return work(Place(), task)
            with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
                path = Path(folder, "answer.json")
                run_ranks(_into_file, ranks, self.device, work, task, path)
                answer: Answer = json.loads(path.read_text())
                return answer
        except CommError as error:
            raise UserError(str(error)) from None
