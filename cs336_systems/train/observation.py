"""Observe one rank's step of a layout, and make the tables of a dry run: one process runs it on the meta device.

Nothing is sent and no number is computed, so one rank of 256 takes seconds. All else is as in training: `Assembly`, the
schedule, the hooks, the verbs. An expert layer's router is assumed to be balanced."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rich.console import Group as Stacked
from torch import Tensor

from cs336_systems.comm import Event, Mesh, fake_ranks, record
from cs336_systems.data.corpus import Batch
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes, format_count
from cs336_systems.host.observe import Counts, Observer
from cs336_systems.host.table import Table
from cs336_systems.layout import MAPPED, Layout, Observation, Transfer, Work
from cs336_systems.model.heads import Losses
from cs336_systems.presets import ModelConfig, with_edition
from cs336_systems.schedule import schedule, simulate
from cs336_systems.schedule.lists import SPLIT, bubble_fraction
from cs336_systems.schedule.simulation import LEGEND, SPLIT_LEGEND
from cs336_systems.train.assembly import Assembly
from cs336_systems.train.batches import most_tokens
from cs336_systems.train.recipe import Recipe

PHASES = ("forward", "backward", "after")  # of the microbatches, and the rest of the step
KINDS = ("bucket", "buffer", "replicated")
OF_CONTEXT = ("keys and values", "gradient of keys and values", "heads back", "heads")
LABEL, WIDEST = 10, 140  # columns of a drawing's labels, and in all
AXIS_OF = {"gradient norm": "world", "losses": "world", "tied embedding": "ends"}  # some axes have the same ranks


def observe(recipe: Recipe, config: ModelConfig, layout: Layout, rank: int = 0, most: int = 4) -> Observation:
    """Observe one optimizer step, not the first, of a rank. From the second on, each round of pp microbatches adds the
    same. So for more than `most` rounds, steps of two and of three rounds are run, and their difference is added for
    each further one. Raises UserError for a layout that does not divide."""
    pp, m = layout.pp, layout.microbatches
    if m > most * pp:
        sizes = (rounds * pp * layout.micro_batch * layout.rows for rounds in (2, 3))
        few, more = (observe(recipe, config, replace(layout, global_batch=n), rank) for n in sizes)

        def extrapolate(a: Any, b: Any) -> Any:
            if isinstance(b, dict):
                return type(b)({key: extrapolate(a[key], value) for key, value in b.items()})
            return type(b)(*map(extrapolate, a, b)) if isinstance(b, tuple) else a + (b - a) * (m - 2 * pp) // pp

        return Observation(**extrapolate(vars(few), vars(more)))
    with observed_rank(recipe, config, layout, rank) as step:
        return step.observe()


def observe_traffic(recipe: Recipe, config: ModelConfig, layout: Layout, rank: int = 0) -> Counter[Transfer]:
    """Observe only the transfers of one step, which takes less time than `observe`."""
    with observed_rank(recipe, config, layout, rank) as step:
        return step.run(layout.microbatches)


@contextmanager
def observed_rank(recipe: Recipe, config: ModelConfig, layout: Layout, rank: int) -> Iterator["RankStep"]:
    """Imitate a rank of a layout; yields its step. Raises UserError for tensors of 2^63 bytes or more."""
    layout.check(config, recipe.seq(config))
    try:
        with fake_ranks(rank, layout.ranks), Observer() as seen:
            mesh = Mesh(layout.tp, layout.pp, layout.ep, layout.cp, layout.dp)
            part = Assembly(recipe, config, layout, mesh, torch.device("meta"))
            yield RankStep(part, seen, recipe.seq(config) // layout.cp)
    except (RuntimeError, TypeError) as error:  # torch raises either
        if "verflow" not in str(error):
            raise
        raise UserError("a tensor of the model or the batch would have 2^63 bytes or more; use smaller ones") from None


class RankStep:
    """Step of an assembly on `seq` tokens of each sequence; the pipeline's timers mark its phases."""

    def __init__(self, part: Assembly, seen: Observer, seq: int) -> None:
        self.part, self.seen, self.seq, self.pipeline = part, seen, seq, part.pipeline(self.timer)

    def run(self, count: int) -> Counter[Transfer]:
        """Take a step of `count` microbatches; returns its transfers."""
        part, rows = self.part, count * self.part.layout.micro_batch
        tokens = next(part.stage.parameters()).new_zeros((rows, self.seq), dtype=torch.int64)
        is_bert = part.stage.model.config.bert_heads
        bert = (tokens, torch.ones_like(tokens, dtype=torch.bool), tokens[:, 0]) if is_bert else ()
        microbatches = Batch(tokens, tokens, tokens[:, 0], *bert).split(part.layout.micro_batch)
        self.rest = self.live_activations()
        self.traffic, self.counts = Counter[Transfer](), {phase: Counts() for phase in PHASES}
        self.kept: list[int] = []

        def loss(losses: Losses) -> Tensor:
            return losses.tokens if losses.pair is None else losses.tokens + losses.pair

        with record() as self.events:
            self.phase, self.counted, self.seen.counts = "after", 0, self.counts["after"]
            self.pipeline.run(microbatches, loss, part.dropout_keys(0, 0, microbatches), part.no_sync)
            part.finish_gradient_synchronization()
            part.add_shared()
            part.norm()
            self.gradients = self.seen.label("gradients", (each.gradient for each in part.kept().values()))
            for optimizer in part.optimizers:
                optimizer.step()
            part.zero_grad()
        self._begin("after")
        return self.traffic

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Count a part of the pipeline's work under the timer's name."""
        phase = name.removesuffix("-compute") if name.endswith("-compute") else "after"
        self._begin(phase)
        yield
        if phase == "forward":
            self.kept.append(self.live_activations())
        self._begin("after")

    def _begin(self, phase: str) -> None:
        """Count the transfers of the phase before, and begin a phase; a group of one sends nothing."""
        sent = (event for event in self.events[self.counted :] if event.ranks > 1)
        self.traffic.update(transfer(event, self.phase, self.part.mesh) for event in sent)
        self.counted, self.phase, self.seen.counts = len(self.events), phase, self.counts[phase]

    def live_activations(self) -> int:
        """Bytes of live storages, except gradients."""
        gradients = {self.seen.storage(p.grad) for p in self.part.stage.parameters() if p.grad is not None}
        return self.seen.live - sum(each.nbytes for each in gradients)

    def observe(self) -> Observation:
        """Take two steps and count the second: the optimizer makes its state in the first."""
        part, layout = self.part, self.part.layout
        self.run(layout.pp if layout.chunks > 1 else 1)
        self.seen.begin("step")
        self.run(layout.microbatches)
        states = [values for each in part.optimizers for values in each.state.values()]
        state = [value for values in states for value in values.values() if isinstance(value, Tensor) and value.dim()]
        at_rest = {"parameters": self.seen.label("parameters", part.stage.parameters()), "gradients": self.gradients}
        at_rest["optimizer state"] = self.seen.label("optimizer state", state)
        work = {}
        for phase, counts in self.counts.items():
            moved = sum(nbytes * n for (flops, nbytes), n in counts.work.items() if not flops)
            work[phase] = Work(counts.flops, counts.work.total(), moved, counts.new_bytes(MAPPED))
        activations, peak = [each - self.rest for each in self.kept], self.seen.peak()
        peak = {kind: peak.get(kind, 0) for kind in (*at_rest, "activations")}
        return Observation(part.parameters, at_rest, activations[0], max(activations), peak, work, self.traffic)


def transfer(event: Event, phase: str, mesh: Mesh) -> Transfer:
    """Convert an event to a transfer: its axis of the mesh, and its purpose, which is the label without numbers and
    names. Of several axes with the same ranks the purpose decides."""
    message = event.verb in ("send", "receive")
    what = re.split(" of microbatch| of wrapper | of optimizer ", event.label)[0]
    what = next((kind for kind in KINDS if what.startswith(f"{kind} ")), what)
    if what.endswith(".weight"):
        what = "weight, gradient" if what.startswith("gradient of ") else "weight"
    experts = what.startswith(("dispatch", "combine", "expert counts"))
    order = ("ep", "tp") if experts else ("tp", "dp", "data", "ep", "replicas", "world")
    along = (axis for axis in order if getattr(mesh, axis).group_name == event.group)
    of_context = next((name for name in OF_CONTEXT if mesh.cp.size() > 1 and what.startswith(name)), None)
    axis = "cp" if of_context else "pp" if message else AXIS_OF.get(what) or next(along)
    return Transfer(phase, axis, event.verb, of_context or what, event.nbytes, event.ranks)


def dry_run(recipe: Recipe, ranks: int) -> Stacked:
    """Make a report: tables, the work of a step, the schedule. Raises UserError for a layout that does not divide."""
    config, layout = recipe.model_config(most_tokens(recipe)), recipe.layout(ranks)
    seq, rows, microbatches = recipe.seq(config), layout.micro_batch, layout.microbatches
    stages = [observe(recipe, config, layout, stage * layout.tp * layout.data) for stage in range(layout.pp)]
    shown: list[Any] = [memory_table(recipe, config, layout, stages).table()]
    shown += [traffic_table(layout, stages).table()] if ranks > 1 else []
    model, hardware = (layout.global_batch // rows * flops for flops in microbatch_flops(recipe, config, rows))
    spent = f", {format_count(hardware)}FLOP computed" if hardware > model else ""
    line = f"a step of {layout.global_batch} x {seq} tokens: {format_count(model)}FLOP{spent}; "
    shown.append(f"{line}{microbatches} microbatch{'es' * (microbatches > 1)} of {rows} a replica")
    if layout.pp > 1:
        plan = layout.schedule, layout.pp, microbatches, layout.chunks
        idle, simulation = bubble_fraction(*plan), simulate(schedule(*plan), turn=layout.turn)
        shown.append(f"{layout.schedule}: idle {idle:.1%} of the pipeline's time, if stages are equal")
        columns = LABEL + round(2 * layout.chunks * simulation.makespan)  # two for each forward: its number fits
        legend = SPLIT_LEGEND if layout.schedule in SPLIT else LEGEND
        shown += [simulation.drawing(columns), legend] if columns <= WIDEST else []
    return Stacked(*shown)


def fullest(recipe: Recipe, config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Peak memory by part, in bytes, of the rank that needs most: one of the first stage, which keeps most
    microbatches, or of the last, which has the logits."""
    peaks = (observe(recipe, config, layout, stage * layout.tp * layout.data).peak for stage in {0, layout.pp - 1})
    return max(peaks, key=lambda peak: sum(peak.values()))


def memory_table(recipe: Recipe, config: ModelConfig, layout: Layout, stages: Sequence[Observation]) -> Table:
    """Make the table of parameters and memory of a rank of each stage; the first data-parallel rank has most."""
    note = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}" + f" x ep {layout.ep}" * bool(config.num_experts)
    note += f" x cp {layout.cp} ({layout.cp_type})" * (layout.cp > 1)
    note += f", ZeRO stage {layout.zero}, {recipe.model.precision}, {config.vocab_size:,} words. "
    note += "Packed rows are counted as if each were one document. " * recipe.data.pack
    if config.num_experts:
        number, layers = config.num_experts // layout.ep, config.expert_layers
        note += f"{number} of {config.num_experts} experts a rank, in {layers} layer{'s' * (layers > 1)}; balanced. "
    note += "Counted, not measured; workspace is what is needed for a moment on top, memory the most at once."
    rows = []
    for stage, seen in enumerate(stages):
        cells = map(format_bytes, (*seen.memory().values(), sum(seen.peak.values())))
        rows.append([str(stage), format_count(seen.parameters, "B"), *cells])
    title = f"{with_edition(recipe.model.name, recipe.model.year)}: parameters and memory of a rank"
    return Table(title, ["stage", "count", *stages[0].memory(), "memory"], rows, note)


def traffic_table(layout: Layout, stages: Sequence[Observation]) -> Table:
    """Make the table of collectives and messages of a step on a rank of each stage, by axis of the mesh and verb."""
    rows = []
    for stage, seen in enumerate(stages):
        calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for transfer, times in seen.traffic.items():
            calls[transfer.axis, transfer.verb] += times
            sizes[transfer.axis, transfer.verb] += times * transfer.nbytes
        rows += [[str(stage), *each, str(calls[each]), format_bytes(sizes[each])] for each in calls]
    ends = any(row[1] == "ends" for row in rows)
    note = "ends: the first and the last stage, which share the tied embedding; " * ends + "world: all ranks."
    note += " data: dp, ep and cp together." * (layout.ep > 1 or layout.cp > 1)
    note += " How many rows travel to experts is counted as if the router were balanced." * (layout.ep > 1)
    title = "A step's collectives and messages on one rank of each stage"
    return Table(title, ["stage", "axis", "verb", "calls", "size"], rows, note)


def microbatch_flops(recipe: Recipe, config: ModelConfig, rows: int) -> tuple[int, int]:
    """Count FLOPs of a microbatch of `rows` sequences in one process: (model, hardware). The model's are three times
    its forward. The hardware's add recomputation in backward, experts' empty slots and one-hot products."""
    alone = Layout(micro_batch=rows, global_batch=rows)
    work = observe(recipe, config, alone).work
    hardware = model = work["forward"].flops + work["backward"].flops
    if config.recompute != "none" or config.num_experts:
        mixture = replace(config.mixture, dispatch="sort", capacity_factor=0.0)
        plain = observe(recipe, replace(config, recompute="none", mixture=mixture), alone).work
        model = plain["forward"].flops + plain["backward"].flops
    return model, hardware
