"""One rank's part of an evaluation: it scores its blocks of the text, and tells the others what that took.

Block i goes to rank i mod ranks. All ranks take equally many batches of one shape, since each must enter every
all-to-all: what is missing at the end is padding, whose targets count for nothing. The score is the sum of the
log-probabilities of all targets. Each block's is summed in float64 by the rank that has it, and all are added up in the
order of the blocks, so that it does not matter which rank had which.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.expert_model import Evaluated, LayerClock
from cs336_systems.comm import Mesh, agree, all_reduce, record
from cs336_systems.data.corpus import IGNORED, Batch
from cs336_systems.presets import Dispatch

How = Literal["none", "fast", "slow"]
Words = list[tuple[int, float]]  # each with its log-probability in nats
NO_BLOCK = -1  # the number of a row that is padding
SEPARATOR = " | "  # between a collective's verb and its label
EXTREME = 0.2  # of the experts: the most and the least loaded


class Blocks:
    """Blocks of `context` tokens and, as their targets, the tokens after each; the last one may be shorter."""

    def __init__(self, tokens: np.ndarray, context: int, name: str = "") -> None:
        self.tokens, self.context, self.name = tokens, context, name
        self.count = ceil((len(tokens) - 1) / context)

    def targets(self, block: int) -> int:
        """Number of targets in a block."""
        return max(0, min(self.context, len(self.tokens) - 1 - block * self.context)) if block != NO_BLOCK else 0

    def batches(self, ranks: int, rows: int) -> int:
        """Batches of `rows` blocks that each of `ranks` ranks takes until all are scored."""
        return ceil(self.count / (ranks * rows))

    def numbers(self, batch: int, rank: int, ranks: int, rows: int) -> list[int]:
        """The blocks of a rank's batch, NO_BLOCK where there is none left."""
        found = [rank + ranks * (batch * rows + row) for row in range(rows)]
        return [number if number < self.count else NO_BLOCK for number in found]

    def batch(self, batch: int, rank: int, ranks: int, rows: int) -> Batch:
        """A rank's batch: tokens, targets and the mask of real tokens, (rows context), and the blocks' numbers."""
        numbers = self.numbers(batch, rank, ranks, rows)
        tokens = torch.zeros(rows, self.context, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        for row, number in enumerate(numbers):
            if length := self.targets(number):
                first = number * self.context
                stretch = torch.from_numpy(self.tokens[first : first + length + 1].astype(np.int64))
                tokens[row, :length], targets[row, :length] = stretch[:-1], stretch[1:]
        return Batch(tokens, targets, torch.tensor(numbers), padding_mask=targets != IGNORED)


def read_slowly(targets: Tensor, log_probs: Tensor, known: Tensor) -> Words:
    """The words of a batch (rows seq), one number at a time from the device, as fairseq's eval_lm reads them (branch
    moe, with its `output_word_probs`): for each word its number, its log-probability twice, and the next word's. The
    host waits at each of the four until the device has nothing left to do, and a sum that stays there is a launch."""
    found, totals, after = Words(), dict[int, float](), dict[int, Tensor]()
    for row, length in enumerate((known != IGNORED).sum(1).tolist()):
        words, values = targets[row], log_probs[row]
        for i in range(length):
            word = int(words[i].item())
            found.append((word, values[i].item()))
            totals[word] = totals.get(word, 0.0) + values[i].item()
            if i + 1 < length and math.isfinite(values[i + 1].item()):
                after[word] = after.get(word, 0) + values[i + 1]
    return found


def read_at_once(targets: Tensor, log_probs: Tensor, known: Tensor) -> Words:
    """Read the same words by one copy from the device; `known` are the targets on the host."""
    real = known != IGNORED
    return list(zip(known[real].tolist(), log_probs.double().cpu()[real].tolist(), strict=True))


READERS: dict[How, Callable[[Tensor, Tensor, Tensor], Words]] = {
    "none": lambda *_: [],
    "fast": read_at_once,
    "slow": read_slowly,
}


@dataclass
class Tally:
    """Counts of one formulation on this rank, and its seconds per batch."""

    dispatch: Dispatch
    wanted: Tensor  # (layers top_k experts), choices
    kept: Tensor  # (layers top_k), of them
    blocks: dict[int, float] = field(default_factory=dict)  # the score of each, in nats
    words: Words = field(default_factory=list)
    scoring: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)  # of words
    cpu: list[float] = field(default_factory=list)
    layers_cpu: list[float] = field(default_factory=list)  # of all expert layers
    collectives: dict[str, list[int]] = field(default_factory=dict)  # times and bytes, by verb and label


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
        """Loss in bits per token."""
        return -self.score / self.tokens / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.score / self.tokens)

    def seconds(self, words: bool) -> float:
        """Seconds of the slowest rank, with or without reading words."""
        return max(sum(rank["scoring"]) + (sum(rank["reading"]) if words else 0.0) for rank in self.ranks)

    def mean(self, what: str) -> float:
        """Mean seconds of a batch, over batches and ranks."""
        every = [value for rank in self.ranks for value in rank[what]]
        return sum(every) / len(every)


class Scorer:
    """This rank's model and its batches. Every rank must construct it and call its methods alike."""

    def __init__(self, evaluated: Evaluated, blocks: Blocks, mesh: Mesh, device: torch.device, rows: int) -> None:
        self.evaluated, self.blocks, self.mesh, self.device, self.rows = evaluated, blocks, mesh, device, rows
        self.config = evaluated.model.config
        self.clock = LayerClock(evaluated)

    def new_tally(self, dispatch: Dispatch) -> Tally:
        """Make an empty tally."""
        shape = self.config.expert_layers, self.config.mixture.top_k, self.config.num_experts
        wanted = torch.zeros(shape, dtype=torch.float64, device=self.device)
        return Tally(dispatch, wanted, torch.zeros_like(wanted[..., 0]))

    @torch.no_grad()
    def log_probs(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Score a batch: (host targets, device targets, their log-probabilities in nats), each (rows seq); zero at
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

    def take(self, number: int, tally: Tally, how: How) -> None:
        """Score a batch in the tally's formulation, and read its words."""
        self.evaluated.use(tally.dispatch)
        self.clock.take()
        cpu, begun = time.process_time(), self.now()
        with record() as events:
            known, targets, log_probs = self.log_probs(number)
        sums = log_probs.sum(1)
        tally.scoring.append(self.now() - begun)
        tally.cpu.append(time.process_time() - cpu)
        tally.layers_cpu.append(self.clock.take())
        for event in events:
            entry = tally.collectives.setdefault(f"{event.verb}{SEPARATOR}{event.label}", [0, 0])
            entry[:] = entry[0] + 1, entry[1] + event.nbytes
        if tally.dispatch == "sort" and bool((known != IGNORED).any()):
            loads = [layer.load for layer in self.evaluated.experts.layers() if layer.load is not None]
            for layer, load in enumerate(loads):
                tally.wanted[layer] += load.wanted
                tally.kept[layer] += load.kept
        begun = self.now()
        tally.words += READERS[how](targets, log_probs, known)
        tally.reading.append(self.now() - begun)
        numbers = self.blocks.numbers(number, self.mesh.data.rank(), self.mesh.data.size(), self.rows)
        tally.blocks |= dict(zip(numbers, sums.tolist(), strict=True))
        tally.blocks.pop(NO_BLOCK, None)

    def now(self) -> float:
        """Seconds on the clock, after the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def line_up(self) -> None:
        """Synchronise the ranks, so that they start together."""
        all_reduce(torch.zeros(1, device=self.device), self.mesh.world, "line up").wait()

    def share(self, tally: Tally) -> Outcome:
        """Combine the results of all ranks, the same on each. Every rank must call this."""
        load = {}
        if tally.dispatch == "sort" and self.config.num_experts:
            for total in (tally.wanted, tally.kept):
                all_reduce(total.view(-1), self.mesh.data, "load", "sum").wait()
            load = summarise_load(tally.wanted.cpu(), tally.kept.cpu())
        mine = {name: getattr(tally, name) for name in ("scoring", "reading", "cpu", "layers_cpu", "collectives")}
        mine["blocks"] = list(tally.blocks.items())
        ranks = [json.loads(said) for said in agree("evaluation", json.dumps(mine, allow_nan=False), self.mesh.world)]
        blocks = dict(sorted(pair for rank in ranks for pair in rank.pop("blocks")))
        tokens = sum(map(self.blocks.targets, blocks))
        return Outcome(tally.dispatch, math.fsum(blocks.values()), tokens, blocks, ranks, load)


def summarise_load(wanted: Tensor, kept: Tensor) -> dict[str, float]:
    """Balance of the experts' load, from (layers top_k experts) choices and (layers top_k) of them kept: the
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
