"""One turn of a layout: its ranks start, take real training steps, and return the time of every part on every rank."""

import math
import subprocess
from dataclasses import asdict

import torch

from benchmarks.harness import gather_times, time_ranks
from benchmarks.lib.collective import probe as probe_link
from benchmarks.lib.launcher import Answer
from cs336_systems.comm import Group, Place, distributed
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.host.machine import PeakMemory, allowed_cores, choose_device, device_name, environment, out_of_memory
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.trainer import Trainer


def take_turn(place: Place, recipe: Recipe, steps: int, warmup: int) -> Answer:
    """One rank's part of a turn, a CPU's with one thread: `warmup` steps that are not timed, then `steps` that are.

    Every rank returns the same. `losses` (in all, nats) and `norms` are of the warm-up's steps. `samples_ms` are the
    timed steps, of the rank that took longest, which a small all-reduce before each lets start as one. `timers_ms` are
    a step's mean by name and rank, None where a rank has not used the timer. `memory_bytes` is each rank's peak,
    weights and optimizer included. `link` is probed where no step is timed. Raises UserError for a run that cannot be
    made.
    """
    device = _device(recipe)
    with distributed(device, recipe.launch.backend, recipe.launch.timeout, place) as group:
        try:
            memory, trainer = PeakMemory(device), Trainer(recipe)
            answer: Answer = {"losses": [], "norms": [], "link": None}
            for number in range(warmup):
                step = trainer.step(number)
                answer["losses"].append(_number(sum(trainer.mean_losses([step]))))
                answer["norms"].append(_number(step.norm.item()))
            if steps:
                answer |= _timed_steps(trainer, warmup, steps, group)
            answer["memory_bytes"] = _of_ranks(memory.read(), group, device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError("out of memory; choose a smaller --size or --micro-batch-size") from error
        if not steps and group.size() > 1:
            answer["link"] = asdict(probe_link(group, device))
    return answer


def _device(recipe: Recipe) -> torch.device:
    device = choose_device(recipe.launch.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    return device


def _timed_steps(trainer: Trainer, first: int, count: int, group: Group) -> Answer:
    skipped, device, steps = [], trainer.device, iter(range(first, first + count))
    trainer.timers.reset()
    times = time_ranks(lambda: skipped.append(trainer.step(next(steps)).skipped), group, device, 0, count)
    busy = gpu_utilisation(device)  # at once: it looks back for less than a second
    timers = trainer.timers.by_rank()
    return {
        "samples_ms": times.amax(dim=0).tolist(),
        "timers_ms": {name: [each and each / count for each in values] for name, values in timers.items()},
        "gpu_utilisation": _of_ranks(busy, group, device),
        "skipped": sum(skipped),
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON has neither NaN nor infinity


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


def measure_peak(place: Place, recipe: Recipe, budget: float, commit: str | None, side_by_side: bool) -> Answer:
    """Peak rates of this machine, from probes of `budget` seconds: `rank` is the ceiling of a rank by itself;
    `machine_flops` that of all cores at once, None where ranks that torchrun started are measured
    `side_by_side` or have a GPU each."""
    device = _device(recipe)
    rank = probe(device, recipe.model.precision, device_name(device), budget=budget)
    answer: Answer = {"rank": asdict(rank), "machine_flops": None, "environment": environment(device, commit)}
    answer["gpus"] = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cpu" and allowed_cores() > 1 and not side_by_side:
        torch.set_num_threads(allowed_cores())
        whole = probe(device, recipe.model.precision, device_name(device), budget=budget)
        answer["machine_flops"] = max(whole.matmul_flops, rank.matmul_flops)
    return answer
