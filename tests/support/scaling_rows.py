"""Rows of a scaling study made by hand, with nothing wrong in them."""

from dataclasses import replace

from benchmarks.lib.scaling_logs import ScalingRun


def clean(world: int, forward: float = 60.0, **changes) -> ScalingRun:
    """A row of a grid with nothing wrong: 4 samples a rank, times that grow a little with the ranks."""
    timers = {
        "forward-compute": forward, "forward-recv": 12.0, "backward-compute": 100.0, "backward-send": 0.2,
        "backward-send-forward-recv": 2.0, "backward-params-all-reduce": 5.0 + world / 4,
        "backward-embedding-all-reduce": 25.0, "optimizer-copy-to-main-grad": 1.8,
        "optimizer-unscale-and-check-inf": 2.6 + world / 64, "optimizer-copy-main-to-model-params": 1.5,
        "optimizer": 10.0 + world / 64, "batch-generator": 3.0,
    }  # fmt: skip
    batch, per_iteration = 4 * world, 225.0 + world / 2
    run = ScalingRun(
        "clean", 2, 2, world // 4, 4, batch, per_iteration / batch, timers, iterations=100, samples=100 * batch
    )
    return replace(run, **changes)


def with_timers(run: ScalingRun, **times) -> ScalingRun:
    return replace(run, timers=run.timers | {name.replace("_", "-"): value for name, value in times.items()})
