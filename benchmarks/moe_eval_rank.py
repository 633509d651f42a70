"""One rank's part of an evaluation: it scores its blocks, and tells the others what that took.

The score is the sum of the log-probabilities of all targets. Each block's is summed in float64 by the rank that has it,
and all are added up in the order of the blocks, so that it does not matter who had which.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.moe_blocks import NO_BLOCK, Blocks
from benchmarks.moe_eval_model import Evaluated, LayerClock
from benchmarks.moe_words import How, Words, make_words
from cs336_systems.comm import Event, Mesh, agree, all_gather, all_reduce, record
from cs336_systems.data.corpus import IGNORED
from cs336_systems.presets import Dispatch

SEPARATOR = " | "  # between a collective's verb and its label
EXTREME = 0.2  # of the experts: the most and the least loaded


@dataclass
class Tally:
    """Counts and times of one formulation on this rank; seconds by batch."""

    dispatch: Dispatch
    words: Words | None = None
    sums: list[Tensor] = field(default_factory=list)  # (rows,) of each batch, in nats
    log_probs: list[Tensor] = field(default_factory=list)  # (rows seq), if they are kept
    scoring: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)  # of words
    cpu: list[float] = field(default_factory=list)
    layers_cpu: list[float] = field(default_factory=list)  # of all expert layers
    collectives: dict[str, list[int]] = field(default_factory=dict)  # times and bytes, by verb and label
    wanted: list[Tensor] = field(default_factory=list)  # (layers top_k experts) of each batch
    kept: list[Tensor] = field(default_factory=list)  # (layers top_k)

    def count(self, events: Sequence[Event]) -> None:
        """Add collectives."""
        for event in events:
            entry = self.collectives.setdefault(f"{event.verb}{SEPARATOR}{event.label}", [0, 0])
            entry[0] += 1
            entry[1] += event.nbytes


@dataclass(frozen=True)
class Outcome:
    """Results of a formulation on all ranks; `ranks` has each rank's times and collectives."""

    dispatch: Dispatch
    score: float  # nats, negative
    tokens: int
    blocks: dict[int, float]  # the score of each
    ranks: list[dict[str, Any]]
    load: dict[str, float]  # empty where the formulation does not tell

    @property
    def loss(self) -> float:
        """Bits a token."""
        return -self.score / self.tokens / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.score / self.tokens)

    def seconds(self, words: bool) -> float:
        """The slowest rank's, with reading words or without."""
        return max(sum(rank["scoring"]) + (sum(rank["reading"]) if words else 0.0) for rank in self.ranks)

    def mean(self, what: str) -> float:
        """Of a batch, over batches and ranks, in seconds."""
        every = [value for rank in self.ranks for value in rank[what]]
        return sum(every) / len(every)


class Scorer:
    """This rank's model and its batches. Every rank must construct it and call its methods alike."""

    def __init__(self, evaluated: Evaluated, blocks: Blocks, mesh: Mesh, device: torch.device, rows: int) -> None:
        self.evaluated, self.blocks, self.mesh, self.device, self.rows = evaluated, blocks, mesh, device, rows
        self.config = evaluated.model.config
        self.clock = LayerClock(evaluated)

    def new_tally(self, dispatch: Dispatch, how: How) -> Tally:
        """An empty one."""
        return Tally(dispatch, make_words(how, self.config.vocab_size))

    @torch.no_grad()
    def log_probs(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a batch: (targets on the host, on the device, their log-probabilities in nats), each (rows seq); zero at
        padding."""
        known = self.blocks.batch(number, self.mesh.data.rank(), self.mesh.data.size(), self.rows)
        batch = known.to(self.device)
        real = batch.padding_mask if self.config.mixture.mask_padding else None
        logits = self.evaluated.model(batch.tokens, padding_mask=real).flatten(0, 1)
        assert known.targets is not None
        assert batch.targets is not None
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide, batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
        return known.targets, batch.targets, -losses.view(batch.targets.shape).double()

    def take(self, number: int, tally: Tally, keep: bool = False) -> None:
        """Score a batch in the tally's formulation."""
        self.evaluated.use(tally.dispatch)
        self.clock.take()
        cpu, begun = time.process_time(), self.now()
        with record() as events:
            known, targets, log_probs = self.log_probs(number)
        tally.sums.append(log_probs.sum(1))
        tally.scoring.append(self.now() - begun)
        tally.cpu.append(time.process_time() - cpu)
        tally.layers_cpu.append(self.clock.take())
        tally.count(events)
        if bool((known != IGNORED).any()):
            self._note_load(tally)
        begun = self.now()
        if tally.words is not None:
            tally.words.read(targets, log_probs, known)
        tally.reading.append(self.now() - begun)
        if keep:
            tally.log_probs.append(log_probs)

    def _note_load(self, tally: Tally) -> None:
        loads = [layer.load for layer in self.evaluated.experts.layers() if layer.load is not None]
        if loads:
            tally.wanted.append(torch.stack([load.wanted for load in loads]))
            tally.kept.append(torch.stack([load.kept for load in loads]))

    def now(self) -> float:
        """Seconds, once the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def line_up(self) -> None:
        """Let the ranks start as one."""
        all_reduce(torch.zeros(1, device=self.device), self.mesh.world, "line up").wait()

    def share(self, tally: Tally) -> Outcome:
        """Combine the results of all ranks, the same on each. Every rank must call this."""
        with record() as events:
            scores = self._gather(torch.stack(tally.sums))
        tally.count(events)
        load = self._load(tally)
        mine = {name: getattr(tally, name) for name in ("scoring", "reading", "cpu", "layers_cpu", "collectives")}
        ranks = [json.loads(said) for said in agree("evaluation", json.dumps(mine, allow_nan=False), self.mesh.world)]
        blocks = {number: float(score) for number, score in sorted(scores.items())}
        tokens = sum(self.blocks.targets(number) for number in blocks)
        return Outcome(tally.dispatch, math.fsum(blocks.values()), tokens, blocks, ranks, load)

    def every_log_prob(self, tally: Tally) -> dict[int, list[float]]:
        """The log-probability of each target by block, if they were kept. Every rank must call this."""
        found = self._gather(torch.stack(tally.log_probs))
        return {number: found[number][: self.blocks.targets(number)].tolist() for number in sorted(found)}

    def _gather(self, mine: Tensor) -> dict[int, Tensor]:
        """Something of every block, of all ranks, from this rank's (batches rows ...), by the block's number."""
        data = self.mesh.data
        table = mine.new_zeros((data.size(), *mine.shape))
        table[data.rank()] = mine
        all_gather(table.view(-1), data, "scores").wait()
        found = {}
        for rank, batches in enumerate(table.cpu()):
            for number, rows in enumerate(batches):
                for block, value in zip(self.blocks.numbers(number, rank, data.size(), self.rows), rows, strict=True):
                    if block != NO_BLOCK:
                        found[block] = value
        return found

    def _load(self, tally: Tally) -> dict[str, float]:
        config = self.config
        if tally.dispatch == "einsum" or not config.num_experts:
            return {}
        layers, top_k = config.expert_layers, config.mixture.top_k
        wanted = torch.zeros(layers, top_k, config.num_experts, dtype=torch.float64, device=self.device)
        kept = torch.zeros(layers, top_k, dtype=torch.float64, device=self.device)
        for total, parts in ((wanted, tally.wanted), (kept, tally.kept)):
            for part in parts:
                total += part
            all_reduce(total.view(-1), self.mesh.data, "load", "sum").wait()
        return summarise_load(wanted.cpu(), kept.cpu())


def summarise_load(wanted: Tensor, kept: Tensor) -> dict[str, float]:
    """How evenly the experts were chosen, from (layers top_k experts) choices and (layers top_k) of them kept: the
    share dropped, the shares on the most and least loaded fifth of the experts and how many nobody chose, the mean
    over layers. fairseq (branch moe) logs the same."""
    experts = wanted.sum(1).sort(dim=1, descending=True).values
    few = math.ceil(EXTREME * experts.shape[1])
    total = experts.sum(1)
    return {
        "dropped": 1 - float(kept.sum() / wanted.sum()),
        "dropped_first": 1 - float(kept[:, 0].sum() / wanted[:, 0].sum()),
        "most_loaded_share": float((experts[:, :few].sum(1) / total).mean()),
        "least_loaded_share": float((experts[:, -few:].sum(1) / total).mean()),
        "unused_experts": float((experts == 0).sum(1).double().mean()),
    }
