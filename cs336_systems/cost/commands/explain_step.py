"""`explain step`: the derivation of a predicted step; `templates/step.txt` has the words, this file the numbers."""

from collections import Counter
from typing import Any

from rich.table import Table

from cs336_systems.cost.commands.output import new_table
from cs336_systems.cost.commands.request import Request
from cs336_systems.cost.flops import forward_flops
from cs336_systems.cost.operator_time import (
    TILE,
    TimedPart,
    Timing,
    collective_seconds,
    product_rate,
    timing,
)
from cs336_systems.cost.operators import Collective, Kernel, Operator
from cs336_systems.cost.step_time import (
    GRADIENT,
    bucket_size,
    data_parallel_seconds,
    optimizer_bytes,
    stage_groups,
    stage_seconds,
    stage_weights,
)
from cs336_systems.host.console import format_bytes, format_count, format_seconds

AXES = {"tp": "tensor-parallel", "cp": "context-parallel", "ep": "expert-parallel"}
PASSES = ("forward", "backward", "recompute")


class Derivation:
    """A predicted step with the numbers behind it: the slowest stage, and its groups of operators timed."""

    def __init__(self, request: Request) -> None:
        self.request, self.step = request, request.step()
        self.plan, self.system, self.constants = request.plan, request.system, request.constants
        stage = request.config, request.plan, request.seq, self.step.stage
        self.stage = stage_seconds(*stage, request.system, request.constants)
        self.parts = request.timed(stage_groups(request.config, request.plan, self.step.stage))
        self.peak = self.system.matmul_flops if self.plan.width == 2 else self.system.wide_flops
        self.axes = [axis for axis, part in AXES.items() if self.step.parts[part]]

    def collectives(self, part: TimedPart, axis: str) -> dict[str, Counter[Collective]]:
        """How often a part of the model launches each collective along an axis, by pass."""
        operators = [each.operator for each in part.operators]
        again = self.request.config.recompute not in ("none", "attention") and part.group in ("dense", "sparse")
        sent = {"forward": [each.sent for each in operators], "backward": [each.returned for each in operators]}
        sent["recompute"] = sent["forward"] if again else []
        return {way: Counter(one for many in each for one in many if one.axis == axis) for way, each in sent.items()}

    def largest_product(self) -> tuple[Operator, Kernel]:
        """The product of most FLOPs in a block, or in the end of the model that a stage without blocks is."""
        blocks = [part for part in self.parts if part.group in ("dense", "sparse")]
        operators = [each.operator for part in blocks or self.parts for each in part.operators]
        kernels = [(one, each) for one in operators for each in one.forward if each.inner and not each.fused]
        return max(kernels, key=lambda found: found[1].flops)


def explain_step(request: Request) -> tuple[dict[str, Any], dict[str, Table]]:
    """Numbers and tables of the derivation of `step_time`, from a model's FLOPs to the last second. Raises UserError as
    `step_time` does."""
    found = Derivation(request)
    plan, step, constants = found.plan, found.step, found.constants
    flops = forward_flops(request.config, 1, request.seq)
    memory_rate = found.system.bandwidth * constants.memory
    terms = {way: [(part.times, getattr(part, way).busy) for part in found.parts] for way in PASSES}
    numbers = {
        "request": request,
        "plan": plan,
        "system": found.system,
        "constants": constants,
        "step": step,
        "parts": step.parts,
        "stage": found.stage,
        "forward_flops": ", ".join(f"{name} {format_count(count)}" for name, count in flops.items()),
        "sequence_flops": step.model_flops / plan.global_batch,
        "peak": found.peak,
        "least": step.model_flops / (plan.ranks * found.peak),
        **_product(found),
        "terms": {
            way: " + ".join(f"{times:g} x {format_seconds(one)}" for times, one in busy if one) or None
            for way, busy in terms.items()
        },
        "all": {way: plan.microbatches * getattr(found.stage, way) for way in PASSES},
        "rerun": "attention's core" if request.config.recompute == "attention" else "whole blocks",
        "collectives": "" if found.axes else None,
        "cut": plan.tp if plan.overlap == "all" and plan.sequence and "tp" in found.axes else None,
        **_between(found),
        "adamw_bytes": optimizer_bytes(plan),
        "adamw_moved": step.parts["optimizer"] * memory_rate,
        "memory_rate": memory_rate,
        "zero": plan.zero > 0,
        "sum": " + ".join(f"{seconds:.4g}" for seconds in step.parts.values() if seconds),
    }
    return numbers, {"kernels": _kernels(found), "axes": _axes(found), "collectives": _collectives(found)}


def _product(found: Derivation) -> dict[str, Any]:
    """Both sides of the roofline of the largest product."""
    operator, product = found.largest_product()
    system, constants = found.system, found.constants
    waves = product.number * product.rows * product.columns / (TILE * system.processors)
    rate, kernel = product_rate(product, system, constants), timing([product], [], found.plan, system, constants)
    return {
        "operator": operator,
        "product": product,
        "batched": product.number > 1,
        "rows": product.number * product.rows,
        "waves": waves,
        "tile": TILE,
        "full": waves / (waves + constants.wave),
        "long": product.inner / (product.inner + constants.ramp),
        "rate": rate,
        "rate_share": rate / found.peak,
        "compute": product.flops / rate,
        "moving": product.nbytes / (system.bandwidth * constants.memory),
        "kernel": kernel,
        "compute_bound": kernel.compute > 0,
    }


def _between(found: Derivation) -> dict[str, Any]:
    """Messages and the bubble of a pipeline, and collectives of data parallelism."""
    request, plan, step, constants = found.request, found.plan, found.step, found.constants
    weights = sum(stage_weights(request.config, plan, request.seq, step.stage)[:2])
    work = sum(found.stage) * plan.microbatches
    unhidden, stage = plan.override(overlap="none"), (request.seq, step.stage, found.stage)
    verbs = {0: "all-reduced", 3: "reduce-scattered, and weights gathered for each pass"}
    sends = step.parts["data-parallel"] > 0
    return {
        "pipeline": "" if plan.pp > 1 else None,
        "messages": 2 * plan.chunks,
        "message": plan.width * plan.micro_batch * request.seq * request.config.d_model / (plan.cp * plan.tp),
        "hides": plan.overlap == "all" and plan.chunks > 1,
        "others": plan.pp - 1,
        "chunked": plan.chunks > 1,
        "bubble_share": step.parts["bubble"] / work,
        "work": work,
        "ideal": (plan.pp - 1) / (plan.microbatches * plan.chunks),
        "replicas": "" if sends else None,
        "weights": weights,
        "gradients": GRADIENT * weights,
        "verb": verbs.get(plan.zero, "reduce-scattered, and weights gathered"),
        "alone": data_parallel_seconds(request.config, unhidden, *stage, found.system, constants),
        "overlaps": plan.overlap != "none",
        "bucket": bucket_size(plan.replicas),
        "tied": "" if sends and plan.pp > 1 and request.config.tied_head else None,
    }


def _kernels(found: Derivation) -> Table:
    """Kernels of one block or end of the model in each pass, and how long the host takes to launch them."""
    columns = ["one of", "<pass", "FLOPs", "bytes", "by compute", "by memory", "kernels", "start", "together"]
    rows, host = [], found.constants.host
    for part in found.parts:
        for way in PASSES:
            one: Timing = getattr(part, way)
            if one.busy:
                counts = [format_count(one.flops), format_bytes(one.nbytes)]
                bounds = [*map(format_seconds, (one.compute, one.memory)), str(one.kernels)]
                seconds = (one.launch, one.busy, host * one.kernels, one.waits(host))
                rows.append([part.name, way, *counts, *bounds, *map(format_seconds, seconds)])
    return new_table([*columns, "host", "wait"], rows)


def _axes(found: Derivation) -> Table:
    """Ranks of each axis, the bandwidth at which they send, and the seconds that they take on the stage."""
    system, constants, m = found.system, found.constants, found.plan.microbatches
    inside, between = system.inside.bandwidth * constants.inside, system.between.bandwidth * constants.between
    rows = []
    for axis in found.axes:
        ranks, local = getattr(found.plan, axis), found.plan.local(axis, node=system.node)
        reached = f"{format_count(inside if local == ranks else min(inside, local * between))}B/s"
        if axis == "ep":
            reached = f"{format_count(inside)}B/s"
            reached += f", to other nodes {format_count(between)}B/s at the same time" if local < ranks else ""
        seconds: float = getattr(found.stage, axis)
        rows.append([axis, str(ranks), str(local), reached, format_seconds(seconds), format_seconds(m * seconds)])
    return new_table(["axis", "ranks", "in a node", "<each sends at", f"stage {found.step.stage}", f"x {m}"], rows)


def _collectives(found: Derivation) -> Table:
    """Collectives of one block or end of the model in each pass, by axis."""
    rows = []
    for axis in found.axes:
        for part in found.parts:
            for way, sent in found.collectives(part, axis).items():
                for each, count in sent.items():
                    seconds = format_seconds(collective_seconds(each, found.plan, found.system, found.constants))
                    rows.append([axis, part.name, way, str(count), each.verb, format_bytes(each.nbytes), seconds])
    return new_table(["axis", "<one of", "<pass", "count", "<collective", "bytes", "each takes"], rows)
