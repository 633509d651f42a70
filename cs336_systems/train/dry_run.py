"""A dry run: what a rank of each stage would hold, compute and send, observed before any rank is started."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group as Stacked

from cs336_systems.host.console import format_bytes, format_count
from cs336_systems.host.table import Table
from cs336_systems.layout import Layout, Observation
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import LEGEND, bubble_fraction, schedule, simulate
from cs336_systems.train.observation import observe
from cs336_systems.train.recipe import Recipe

LABEL, WIDEST = 10, 140  # columns of a drawing's labels, and in all


def dry_run(recipe: Recipe, ranks: int) -> Stacked:
    """The tables to print. Raises UserError for a layout that does not divide."""
    config = recipe.model_config()
    recipe.check_layout(config, ranks)
    layout = recipe.layout(ranks)
    stages = [observe(recipe, config, layout, stage * layout.tp * layout.data) for stage in range(layout.pp)]
    shown = [memory_table(recipe, config, layout, stages).table()]
    if ranks > 1:
        shown.append(traffic_table(layout, stages).table())
    return Stacked(*shown, *closing(recipe, config, layout))


def fullest(recipe: Recipe, config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Bytes by part at the fullest moment of the rank that needs most: of the first stage, which keeps most
    microbatches, or the last, which has the logits."""
    peaks = (observe(recipe, config, layout, stage * layout.tp * layout.data).peak for stage in {0, layout.pp - 1})
    return max(peaks, key=lambda peak: sum(peak.values()))


def memory_table(recipe: Recipe, config: ModelConfig, layout: Layout, stages: Sequence[Observation]) -> Table:
    """Parameters and memory of a rank of each stage; the first data-parallel rank has most."""
    note = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}" + f" x ep {layout.ep}" * bool(config.num_experts)
    note += f", ZeRO stage {layout.zero}, {recipe.model.precision}, {config.vocab_size:,} words. "
    if config.num_experts:
        number, layers = config.num_experts // layout.ep, config.expert_layers
        note += f"{number} of {config.num_experts} experts a rank, in {layers} layer{'s' * (layers > 1)}; balanced. "
    note += "Counted, not measured; workspace is what is needed for a moment on top, memory the most at once."
    rows = []
    for stage, seen in enumerate(stages):
        cells = map(format_bytes, (*seen.memory().values(), sum(seen.peak.values())))
        rows.append([str(stage), format_count(seen.parameters, "B"), *cells])
    title = f"{recipe.model.name}: parameters and memory of a rank"
    return Table(title, ["stage", "count", *stages[0].memory(), "memory"], rows, note)


def traffic_table(layout: Layout, stages: Sequence[Observation]) -> Table:
    """The collectives and messages of a step of each stage's rank, by axis of the mesh and verb."""
    rows = []
    for stage, seen in enumerate(stages):
        calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for transfer, times in seen.traffic.items():
            calls[transfer.axis, transfer.verb] += times
            sizes[transfer.axis, transfer.verb] += times * transfer.nbytes
        rows += [[str(stage), *each, str(calls[each]), format_bytes(sizes[each])] for each in calls]
    note = "ends: the first and the last stage, which share the tied embedding; world: all ranks."
    if layout.ep > 1:
        note += " data: dp and ep together. How many rows travel to experts is counted as if the router were balanced."
    title = "A step's collectives and messages on one rank of each stage"
    return Table(title, ["stage", "axis", "verb", "calls", "size"], rows, note)


def closing(recipe: Recipe, config: ModelConfig, layout: Layout) -> list[str]:
    """The work of a step and the schedule, drawn if there are stages."""
    seq, together = recipe.seq(config), layout.global_batch // layout.micro_batch
    model, hardware = (together * flops for flops in microbatch_flops(recipe, config, layout.micro_batch))
    spent = f", {format_count(hardware)}FLOP computed" if hardware > model else ""
    lines = [
        f"a step of {layout.global_batch} x {seq} tokens: {format_count(model)}FLOP{spent}; "
        f"{layout.microbatches} microbatch{'es' * (layout.microbatches > 1)} of {layout.micro_batch} a replica"
    ]
    if layout.pp > 1:
        simulation = simulate(schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks))
        idle = bubble_fraction(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
        lines.append(f"{layout.schedule}: idle {idle:.1%} of the pipeline's time, if stages are equal")
        columns = LABEL + round(2 * layout.chunks * simulation.makespan)  # two for each forward: its number fits
        lines += [simulation.drawing(columns), LEGEND] if columns <= WIDEST else []
    return lines


def microbatch_flops(recipe: Recipe, config: ModelConfig, rows: int) -> tuple[int, int]:
    """(model, hardware) FLOPs of a microbatch of `rows` sequences in one process: what the model asks for, three times
    its forward, and what is computed, with what backward repeats and with experts' empty slots and one-hot products."""
    alone = Layout(micro_batch=rows, global_batch=rows)
    work = observe(recipe, config, alone).work
    hardware = model = work["forward"].flops + work["backward"].flops
    if config.recompute != "none" or config.num_experts:
        mixture = replace(config.mixture, dispatch="sort", capacity_factor=0.0)
        plain = observe(recipe, replace(config, recompute="none", mixture=mixture), alone).work
        model = plain["forward"].flops + plain["backward"].flops
    return model, hardware
