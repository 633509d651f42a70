"""One rank's step of a layout, observed: the library runs alone as that rank, on the meta device.

Nothing is sent and no number is computed, so that a rank of 256 takes seconds. Everything else is what training does:
the parts that `assemble` builds, the schedule, the hooks, the verbs. An expert layer's router counts as balanced.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.comm import Event, Mesh, fake_ranks, record
from cs336_systems.data.corpus import Batch
from cs336_systems.host.meta import QuickMeta
from cs336_systems.host.observe import Counts, Observer
from cs336_systems.layout import Layout, Observation, Transfer, Work
from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.heads import Losses
from cs336_systems.pipeline import Pipeline
from cs336_systems.presets import ModelConfig
from cs336_systems.train.assembly import Assembly, assemble
from cs336_systems.train.recipe import Recipe

PHASES = ("forward", "backward", "after")  # of the microbatches, and what follows them all
KINDS = ("bucket", "buffer", "replicated")
AXIS_OF = {"gradient norm": "world", "losses": "world", "tied embedding": "ends"}  # some axes have the same ranks


def observe(
    recipe: Recipe, config: ModelConfig, layout: Layout, rank: int = 0, mapped: int = 2**25, most: int = 4
) -> Observation:
    """One optimizer step, not the first, of a rank. `mapped` is the size of new storages that count as new memory.

    From the second round of a pipeline's stages on each adds the same, so that of more than `most` rounds two and three
    are run and the rest is added. Raises UserError for a layout that does not divide.
    """
    layout.check(config, recipe.seq(config))
    pp, m = layout.pp, layout.microbatches
    if m <= most * pp:
        return _observe(recipe, config, layout, rank, mapped)
    sizes = (rounds * pp * layout.micro_batch * layout.data for rounds in (2, 3))
    few, more = (_observe(recipe, config, replace(layout, global_batch=size), rank, mapped) for size in sizes)

    def at(a: int, b: int) -> int:
        return a + (b - a) * (m - 2 * pp) // pp

    return Observation(
        few.parameters,
        few.state,
        few.kept,
        at(few.activations, more.activations),
        at(few.peak, more.peak),
        {phase: Work(*map(at, few.work[phase], more.work[phase])) for phase in PHASES},
        Counter({each: at(few.traffic[each], n) for each, n in more.traffic.items()}),
    )


def _observe(recipe: Recipe, config: ModelConfig, layout: Layout, rank: int, mapped: int) -> Observation:
    with fake_ranks(rank, layout.ranks), TotalsObserver() as seen:
        mesh = Mesh(layout.tp, layout.pp, layout.ep, layout.dp)
        part = assemble(recipe, config, layout, mesh, torch.device("meta"))
        first = layout.pp if layout.chunks > 1 else 1
        step = RankStep(part, mesh, layout, seen)
        step.run(batches(config, recipe.seq(config), layout, first))  # the optimizer makes its state
        return step.observed(batches(config, recipe.seq(config), layout, layout.microbatches), mapped)


def observe_traffic(recipe: Recipe, config: ModelConfig, layout: Layout, rank: int = 0) -> Counter[Transfer]:
    """The transfers alone of one step, which takes less time than `observe`."""
    layout.check(config, recipe.seq(config))
    with fake_ranks(rank, layout.ranks), QuickMeta():
        mesh = Mesh(layout.tp, layout.pp, layout.ep, layout.dp)
        step = RankStep(assemble(recipe, config, layout, mesh, torch.device("meta")), mesh, layout, TotalsObserver())
        with record() as step.events:
            step.run(batches(config, recipe.seq(config), layout, layout.microbatches))
        return step.traffic()


def batches(config: ModelConfig, seq: int, layout: Layout, count: int, device: str = "meta") -> list[Batch]:
    """Microbatches of a rank; on the meta device they have no values."""
    rows = count * layout.micro_batch
    tokens = torch.zeros((rows, seq), dtype=torch.int64, device=device)
    numbers = torch.arange(rows)
    if not config.bert_heads:
        return Batch(tokens, tokens, numbers).split(layout.micro_batch)
    real = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, tokens, numbers, tokens, real, tokens[:, 0]).split(layout.micro_batch)


class TotalsObserver(Observer):
    """An observer that keeps sums only, which takes a tenth of the time."""

    def _remember_peak(self) -> None:
        pass


class RankStep:
    """A step of an assembly, whose phases the pipeline's timers tell apart."""

    def __init__(self, part: Assembly, mesh: Mesh, layout: Layout, seen: Observer) -> None:
        self.part, self.mesh, self.seen = part, mesh, seen
        parts = layout.tp if layout.sequence else 1
        self.pipeline = Pipeline(part.stage, part.model, mesh, layout.schedule, parts, self.timer)
        self.events: list[Event] = []
        self.phases: list[tuple[int, str]] = [(0, "after")]  # number of events before a phase began
        self.counts = {phase: Counts() for phase in PHASES}
        self.kept: list[int] = []

    def run(self, microbatches: list[Batch]) -> dict[int, int]:
        """One step, in the trainer's order; returns the bytes of its gradients."""
        part, config = self.part, self.part.stage.model.config
        drawn = config.dropout or (config.num_experts and config.mixture.is_random)
        keys = [dropout_key(0, 0, each.rows) for each in microbatches if each.rows is not None] if drawn else None
        self.pipeline.run(microbatches, total_loss, keys, part.model.no_sync)
        part.model.finish_gradient_synchronization()
        part.gradients.add_partial()
        part.gradients.add_tied()
        part.gradients.norm()
        gradients = storages(each.gradient for each in part.model.kept_gradients())
        part.optimizer.step()
        part.optimizer.zero_grad()
        return gradients

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """A part of the pipeline's work under the timer's name."""
        phase = name.removesuffix("-compute") if name.endswith("-compute") else "after"
        self._begin(phase)
        yield
        if phase == "forward":
            self.kept.append(self.live_activations())
        self._begin("after")

    def _begin(self, phase: str) -> None:
        self.phases.append((len(self.events), phase))
        self.seen.counts = self.counts[phase]

    def live_activations(self) -> int:
        """Bytes that are alive and no gradient."""
        gradients = (p.grad for p in self.part.model.parameters() if p.grad is not None)
        return self.seen.live - sum(storages(gradients).values())

    def observed(self, microbatches: list[Batch], mapped: int) -> Observation:
        """One more step, counted."""
        self.phases, self.counts, self.kept = [(0, "after")], {phase: Counts() for phase in PHASES}, []
        part, rest = self.part, self.live_activations()
        self.seen.begin("step")
        with record() as self.events:
            gradients = self.run(microbatches)
        peak = self.seen.most
        optimizers: Any = getattr(part.optimizer, "optimizers", [part.optimizer])
        values = [
            value
            for each in optimizers
            for kept in getattr(each, "inner", each).state.values()
            for value in kept.values()
        ]
        state = storages(value for value in values if isinstance(value, Tensor) and value.dim())
        at_rest = {"parameters": storages(part.model.parameters()), "gradients": gradients, "optimizer state": state}
        kept = [each - rest for each in self.kept]
        return Observation(
            part.parameters,
            {kind: sum(each.values()) for kind, each in at_rest.items()},
            kept[0],
            max(kept),
            peak,
            {phase: work_of(counts, mapped) for phase, counts in self.counts.items()},
            self.traffic(),
        )

    def traffic(self) -> Counter[Transfer]:
        """The transfers of the step; a group of one sends nothing."""
        found: Counter[Transfer] = Counter()
        ends = [start for start, _ in self.phases[1:]] + [len(self.events)]
        for (start, phase), end in zip(self.phases, ends, strict=True):
            for event in self.events[start:end]:
                if event.ranks > 1:
                    what = purpose(event)
                    axis = axis_of(event, what, self.mesh)
                    found[Transfer(phase, axis, event.verb, what, event.nbytes, event.ranks)] += 1
        return found


def total_loss(losses: Losses) -> Tensor:
    """The scalar that backward begins with."""
    return losses.tokens if losses.pair is None else losses.tokens + losses.pair


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the distinct storages of some tensors."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {each._cdata: each.nbytes() for each in found}


def work_of(counts: Counts, mapped: int) -> Work:
    """The sums of a phase's counts."""
    moved = sum(nbytes * n for (flops, nbytes), n in counts.work.items() if not flops)
    return Work(counts.flops, counts.operators, moved, counts.new_bytes(mapped))


def purpose(event: Event) -> str:
    """An event's label without numbers and names: of a message, and of a weight."""
    what = event.label.split(" of microbatch")[0] if event.verb in ("send", "receive") else event.label
    what = next((kind for kind in KINDS if what.startswith(f"{kind} ")), what)
    if what.endswith(".weight"):
        what = "weight, gradient" if what.startswith("gradient of ") else "weight"
    return what


def axis_of(event: Event, what: str, mesh: Mesh) -> str:
    """The axis of the mesh along which an event went, by its group; of axes with the same ranks by what it is for."""
    if event.verb in ("send", "receive"):
        return "pp"
    if what in AXIS_OF:
        return AXIS_OF[what]
    experts = what.startswith(("dispatch", "combine", "expert counts"))
    order = ("ep", "tp") if experts else ("tp", "dp", "data", "ep", "world")
    return next(axis for axis in order if getattr(mesh, axis).group_name == event.group)
