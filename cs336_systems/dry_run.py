"""A dry run: what each rank would hold, compute and send, from the closed forms, before any rank is started."""

from collections import Counter

from rich.console import Group as Stacked

from cs336_systems.console import format_bytes, format_count
from cs336_systems.cost.layout import Layout, rank_parameters
from cs336_systems.cost.layout_activations import saved_by_sequence
from cs336_systems.cost.layout_memory import rank_memory
from cs336_systems.cost.layout_step import sample_flops
from cs336_systems.cost.layout_traffic import step_traffic
from cs336_systems.cost.memory import Precision
from cs336_systems.presets import ModelConfig
from cs336_systems.profiling.sheet import Sheet
from cs336_systems.recipe import Recipe
from cs336_systems.schedule import bubble_fraction, schedule, simulate
from cs336_systems.schedule_drawing import LEGEND

LABEL, WIDEST = 10, 140  # columns of a drawing's labels, and in all
PARTS = ("parameters", "gradients", "optimizer state", "activations", "workspace")


def dry_run(recipe: Recipe, ranks: int) -> Stacked:
    """What to print. Raises UserError for a layout that does not divide."""
    config = recipe.model_config()
    recipe.check_layout(config, ranks)
    layout, seq = recipe.layout(ranks), recipe.seq(config)
    shown = [memory_sheet(recipe, config, layout, seq).table()]
    if ranks > 1:
        shown.append(traffic_sheet(recipe, config, layout, seq).table())
    return Stacked(*shown, *closing(config, layout, seq, "bf16" if recipe.half else recipe.precision))


def memory_sheet(recipe: Recipe, config: ModelConfig, layout: Layout, seq: int) -> Sheet:
    """Parameters and memory of a rank of each stage; a stage's tensor-parallel ranks have equally many."""
    rows = []
    for stage in range(layout.pp):
        parameters = sum(rank_parameters(config, layout, stage).values())
        memory = rank_memory(config, layout, seq, "bf16" if recipe.half else recipe.precision, stage)
        cells = [format_bytes(memory[part]) for part in PARTS]
        rows.append([str(stage), format_count(parameters, "B"), *cells, format_bytes(sum(memory.values()))])
    title = f"{recipe.name}: parameters and memory of a rank"
    degrees = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"
    experts = ""
    if config.num_experts:
        degrees += f" x ep {layout.ep}"
        number, layers = config.num_experts // layout.ep, config.expert_layers
        experts = f" {number} of {config.num_experts} experts a rank, in {layers} layer{'s' * (layers > 1)}; balanced."
    note = (
        f"{degrees}, ZeRO stage {layout.zero}, {recipe.precision}, {config.vocab_size:,} words.{experts} Counted, not "
        "measured; workspace is what is needed for a moment on top."
    )
    return Sheet(title, ["stage", "count", *PARTS, "memory"], rows, note)


def traffic_sheet(recipe: Recipe, config: ModelConfig, layout: Layout, seq: int) -> Sheet:
    """The collectives and messages of a step of each stage's rank, by axis of the mesh and verb."""
    rows = []
    for stage in range(layout.pp):
        calls: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for transfer, times in step_traffic(config, layout, seq, stage, "bf16" if recipe.half else "fp32").items():
            calls[transfer.axis, transfer.verb] += times
            sizes[transfer.axis, transfer.verb] += times * transfer.nbytes
        rows += [[str(stage), *each, str(calls[each]), format_bytes(sizes[each])] for each in calls]
    note = "ends: the first and the last stage, which share the tied embedding; world: all ranks."
    if layout.ep > 1:
        note += " data: dp and ep together. How many rows travel to experts is counted as if the router were balanced."
    title = "A step's collectives and messages on one rank of each stage"
    return Sheet(title, ["stage", "axis", "verb", "calls", "size"], rows, note)


def closing(config: ModelConfig, layout: Layout, seq: int, precision: Precision) -> list[str]:
    """The schedule, drawn if there are stages, and the work of a step."""
    model, hardware = sample_flops(config, seq, layout.micro_batch)
    spent = f", {format_count(hardware * layout.global_batch)}FLOP computed" if hardware > model else ""
    lines = [
        f"a step of {layout.global_batch} x {seq} tokens: {format_count(model * layout.global_batch)}FLOP{spent}; "
        f"{layout.microbatches} microbatch{'es' * (layout.microbatches > 1)} of {layout.micro_batch} a replica"
    ]
    if layout.pp > 1:
        arguments = layout.schedule, layout.pp, layout.microbatches, layout.chunks
        idle = f"{bubble_fraction(*arguments):.1%} of the pipeline's time"
        lines.append(f"{layout.schedule}: idle {idle}, if stages are equal")
        simulation = simulate(schedule(*arguments))
        columns = LABEL + round(2 * layout.chunks * simulation.makespan)  # two for each forward: its number fits
        lines += [simulation.drawing(columns), LEGEND] if columns <= WIDEST else []
    if layout.tp > 1:
        without, with_it = saved_by_sequence(config, layout, seq, precision)
        lines.append(
            f"a block keeps {format_bytes(with_it)} a microbatch for backward with --sequence-parallel, "
            f"{format_bytes(without)} without"
        )
    return lines
