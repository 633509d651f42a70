"""The prediction of a step in words: where each of its numbers comes from, with the numbers put in."""

from cs336_systems.console import format_bytes, format_count, format_seconds
from cs336_systems.cost.commands.network_words import AXES, explain_axis, explain_pipeline
from cs336_systems.cost.commands.request import Request
from cs336_systems.cost.commands.told import Section, Told
from cs336_systems.cost.flops import forward_flops
from cs336_systems.cost.large.data_parallel_time import (
    GRADIENT,
    bucket_size,
    data_parallel_seconds,
    optimizer_bytes,
    stage_weights,
)
from cs336_systems.cost.large.efficiency import TILE, product_rate
from cs336_systems.cost.large.operator_time import GROUPS, passed
from cs336_systems.cost.large.operators import Operator, Work
from cs336_systems.cost.large.step_time import StepTime


def explain_step(request: Request) -> list[Section]:
    """The derivation of `step_time` from a model's FLOPs to the last second. Raises UserError as `step_time` does."""
    told = Told(request)
    parts = told.step.parts
    sections = [_model(told), _largest(told), _way(told, "forward", "Forward"), _way(told, "backward", "Backward")]
    sections += [_way(told, "again", "Recomputation")] if parts["recompute"] else []
    sections += [_host(told)]
    sections += [explain_axis(told, axis) for axis in AXES if parts[AXES[axis]]]
    sections += [explain_pipeline(told)] if request.plan.pp > 1 else []
    sections += [_replicas(told)] if parts["data-parallel"] else []
    return [*sections, _optimizer(told), _sum(told.step)]


def _peak(request: Request) -> float:
    return request.system.matmul_flops if request.plan.width == 2 else request.system.wide_flops


def _model(told: Told) -> Section:
    request, step = told.request, told.step
    found = forward_flops(request.config, 1, request.seq)
    one = step.model_flops / request.plan.global_batch
    least = step.model_flops / (request.plan.ranks * _peak(request))
    listed = ", ".join(f"{name} {format_count(count)}" for name, count in found.items())
    return Section(
        "What the model asks for",
        [
            f"Forward of a sequence of {request.seq} tokens: {listed}FLOP. A product of (m k) and (k n) is 2 m k n.",
            f"Backward has two products for each, the gradients of both factors, so a sequence is 3 times forward: "
            f"{format_count(one)}FLOP. A step of {request.plan.global_batch} is {format_count(step.model_flops)}FLOP.",
            f"{request.plan.ranks} x {request.system.name} of {format_count(_peak(request))}FLOP/s cannot take less "
            f"than {format_seconds(least)}. The step is predicted to take {format_seconds(step.total)}: MFU is "
            f"{least:.4g} s / {step.total:.4g} s = {step.mfu:.1%}. The rest says where the difference goes.",
        ],
    )


def _largest(told: Told) -> Section:
    """The roofline of the largest product of a block, or of the end of the model that a stage without blocks is."""
    request = told.request
    works = [
        (each.operator, work)
        for group, _ in [each for each in told.groups if each[0] in ("dense", "sparse")] or told.groups
        for each in told.timed[group]
        for work in each.operator.forward
        if work.inner and not work.fused
    ]
    operator, work = max(works, key=lambda each: each[1].flops)
    constants, system = request.constants, request.system
    waves = work.number * work.rows * work.columns / (TILE * system.processors)
    full, long = waves / (waves + constants.wave), work.inner / (work.inner + constants.ramp)
    rate = product_rate(work, system, constants)
    times = f"{work.number} times " if work.number > 1 else ""
    return Section(
        "How fast its largest product is",
        [
            f'"{operator.name}" is {times}({work.rows} x {work.inner}) by ({work.inner} x {work.columns}) on a rank: '
            f"2 x {work.number * work.rows} x {work.inner} x {work.columns} = {format_count(work.flops)}FLOP.",
            f"Its result is cut into tiles of {TILE} numbers, which {system.processors} processors compute in "
            f"{waves:.2f} waves; {constants.wave:g} of a wave is empty: {full:.1%} are busy. A tile takes "
            f"{work.inner} steps and as long as {constants.ramp:g} more to begin and end: {long:.1%}.",
            f"{format_count(_peak(request))}FLOP/s x {system.attainable:g} that the best products reach x "
            f"{constants.product:g} fitted x {full:.3f} x {long:.3f} = {format_count(rate)}FLOP/s, "
            f"{rate / _peak(request):.1%} of peak: {format_seconds(work.flops / rate)}.",
            _against(told, operator, work),
        ],
    )


def _against(told: Told, operator: Operator, work: Work) -> str:
    """The other side of the roofline."""
    request = told.request
    reached = request.system.bandwidth * request.constants.memory
    found = passed([work], [], request.plan, request.system, request.constants)
    more = "more" if found.compute else "less"
    return (
        f"It moves {format_bytes(work.nbytes)} at {format_count(request.system.bandwidth)}B/s x "
        f"{request.constants.memory:g} fitted: {format_seconds(work.nbytes / reached)}. Computing takes {more}, so "
        f"it is bound by {'compute' if found.compute else 'memory'}: {format_seconds(found.busy)} with "
        f"{format_seconds(request.constants.start)} to start."
    )


def _way(told: Told, way: str, title: str) -> Section:
    """Kernels of one direction, of a block and of the stage."""
    name = {"again": "recompute"}.get(way, way)
    seconds = float(getattr(told.spent, name))
    lines = []
    for group, _ in told.groups:
        one = told.total(group, way)
        flops = f"{format_count(one.flops)}FLOP and " if one.flops else ""
        if one.busy:
            lines.append(
                f"{GROUPS[group].capitalize()}: {flops}{format_bytes(one.nbytes)}; kernels bound by computing "
                f"{format_seconds(one.compute)}, by memory {format_seconds(one.memory)}, starting {one.kernels} "
                f"{format_seconds(one.launch)}: {format_seconds(one.busy)}."
            )
    busy = [(times, told.total(group, way).busy) for group, times in told.groups]
    terms = [f"{_times(times)} x {format_seconds(one)}" for times, one in busy if one]
    m = told.request.plan.microbatches
    what = {"again": f"Backward of a block runs {_rerun(told)} again. "}.get(way, "")
    lines.append(
        f"{what}Stage {told.step.stage}: {' + '.join(terms)} = {format_seconds(seconds)} a microbatch; x {m} = "
        f"{format_seconds(m * seconds)}."
    )
    return Section(title, lines)


def _rerun(told: Told) -> str:
    return "attention's core" if told.request.config.recompute == "attention" else "all of it"


def _times(count: float) -> str:
    return f"{count:g}" if count == int(count) else f"{count:.2f}"


def _host(told: Told) -> Section:
    host, lines = told.request.constants.host, []
    for group, _ in told.groups:
        one = told.total(group, "forward")
        waits = one.waits(host)
        verdict = f"the device waits {format_seconds(waits)}" if waits else "nothing waits"
        lines.append(
            f"{GROUPS[group].capitalize()}, forward: {one.kernels} kernels x {format_seconds(host)} to give them out = "
            f"{format_seconds(host * one.kernels)}, against {format_seconds(one.busy)} of computing: {verdict}."
        )
    lines.append(f"With backward, of all microbatches: {format_seconds(told.step.parts['host'])}.")
    return Section("Waiting for the host", lines)


def _replicas(told: Told) -> Section:
    request, step = told.request, told.step
    plan = request.plan
    shared, owned, _ = stage_weights(request.config, plan, request.seq, step.stage)
    arguments = (request.seq, step.stage, told.spent, request.system, request.constants)
    bare = data_parallel_seconds(request.config, plan.override(overlap="none"), *arguments)
    verbs = {0: "all-reduced", 3: "gathered as weights for each pass, and reduce-scattered"}
    verb = verbs.get(plan.zero, "reduce-scattered, and weights gathered")
    hidden = "nothing overlaps"
    if plan.overlap != "none":
        bucket, loss = format_count(bucket_size(plan.replicas)), f"{request.constants.hidden:g}"
        hidden = (
            f"behind computing, where all but the last bucket of {bucket} gradients can be, it takes {loss} of its "
            "time from the processors"
        )
    lines = [
        f"A rank of stage {step.stage} has {format_count(shared + owned, 'B')} weights: "
        f"{format_bytes(GRADIENT * (shared + owned))} of gradients in 32 bits, which over {plan.replicas} replicas are "
        f"{verb}.",
        f"Alone that takes {format_seconds(bare)}; {hidden}: {format_seconds(step.parts['data-parallel'])} of a step.",
    ]
    if plan.pp > 1 and request.config.tied_head:
        lines.append("This has the sum over first and last stage of the embedding's gradient, which both have.")
    return Section("Sends of data parallelism", lines)


def _optimizer(told: Told) -> Section:
    request, step = told.request, told.step
    seconds = step.parts["optimizer"]
    reached = request.system.bandwidth * request.constants.memory
    share = f", of which ZeRO leaves this rank its share of {request.plan.replicas}" if request.plan.zero else ""
    return Section(
        "AdamW",
        [
            f"Gradient, master weight and two moments are read and written, {optimizer_bytes(request.plan)} bytes a "
            f"weight{share}: {format_bytes(seconds * reached)} at {format_count(reached)}B/s = "
            f"{format_seconds(seconds)}."
        ],
    )


def _sum(step: StepTime) -> Section:
    terms = " + ".join(f"{seconds:.4g}" for seconds in step.parts.values() if seconds)
    return Section("Together", [f"{terms} = {step.total:.4g} s."])
