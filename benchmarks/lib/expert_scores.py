"""One rank's part of an evaluation: it scores its blocks of the text, and tells the others what that took.

Block i goes to rank i mod ranks. All ranks take equally many batches of one shape, since each must enter every
all-to-all: what is missing at the end is padding, whose targets count for nothing. The score is the sum of the
log-probabilities of all targets. Each block's is summed in float64 by the rank that has it, and all are added up in the
order of the blocks, so that it does not matter which rank had which.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import WrongResultError, summarise
from benchmarks.lib.expert_model import build, surround, use
from benchmarks.rank_times import now
from cs336_systems.comm import Mesh, agree, all_reduce, record
from cs336_systems.data.corpus import IGNORED, Batch
from cs336_systems.presets import Dispatch, ModelConfig

How = Literal["fast", "slow"]
Words = list[tuple[int, float]]  # each with its log-probability in nats
NO_BLOCK = -1  # the number of a row that is padding, which is the last
EXTREME = 0.2  # of the experts: the most and the least loaded


class Blocks:
    """Blocks of `context` tokens and, as their targets, the tokens after each; the last one may be shorter."""

    def __init__(self, tokens: np.ndarray, context: int, name: str = "") -> None:
        self.tokens, self.context, self.name = tokens, context, name
        self.count = ceil((len(tokens) - 1) / context)
        padded = np.full((self.count + 1) * context + 1, IGNORED)  # not in torch: ranks are forked after this
        padded[: len(tokens)] = tokens
        # Each block and the token after it; the last is padding.
        self.rows = np.lib.stride_tricks.sliding_window_view(padded, context + 1)[::context]

    def targets(self, block: int) -> int:
        """Number of targets in a block."""
        return int((self.rows[block, 1:] != IGNORED).sum())

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
        tokens, targets = (torch.from_numpy(self.rows[numbers, part]) for part in (slice(-1), slice(1, None)))
        real = targets != IGNORED
        return Batch(tokens * real, targets, torch.tensor(numbers), padding_mask=real)


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


READERS: dict[How, Callable[[Tensor, Tensor, Tensor], Words]] = {"fast": read_at_once, "slow": read_slowly}


@dataclass
class Tally:
    """Counts of one formulation on this rank, and its seconds per batch."""

    dispatch: Dispatch
    wanted: Tensor  # (layers top_k experts), choices
    kept: Tensor  # (layers top_k), of them
    blocks: dict[int, float] = field(default_factory=dict)  # the score of each, in nats
    laps: list[tuple[float, ...]] = field(default_factory=list)  # of a batch: scoring, reading, CPU, of that in experts
    sent: list[int] = field(default_factory=list)  # bytes of each all-to-all that carries tokens


class Scorer:
    """This rank's model and its batches of `rows` blocks. Every rank must construct it and call its methods alike.
    Raises UserError, as `build` does."""

    def __init__(
        self, config: ModelConfig, blocks: Blocks, mesh: Mesh, device: torch.device, dtype: torch.dtype, rows: int,
        free: int,
    ) -> None:  # fmt: skip
        self.config, self.blocks, self.mesh, self.device, self.rows = config, blocks, mesh, device, rows
        self.model, self.experts = build(config, mesh, device, dtype, rows, free)
        self.layers_cpu = 0.0  # seconds of this process, all threads, inside expert layers since they were reset
        for layer in self.experts.layers():
            surround(layer, self.clocked)

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Add the block's CPU time to that of expert layers."""
        begun = time.process_time()
        yield
        self.layers_cpu += time.process_time() - begun

    def new_tally(self, dispatch: Dispatch) -> Tally:
        """Make an empty tally."""
        shape = self.config.expert_layers, self.config.mixture.top_k, self.config.num_experts
        wanted = torch.zeros(shape, dtype=torch.float64, device=self.device)
        return Tally(dispatch, wanted, torch.zeros_like(wanted[..., 0]))

    @torch.no_grad()
    def log_probs(self, number: int) -> tuple[Batch, Tensor, Tensor]:
        """Score a batch: (it on the host, targets on the device, their log-probabilities in nats), each (rows seq);
        zero at padding."""
        known = self.blocks.batch(number, self.mesh.data.rank(), self.mesh.data.size(), self.rows)
        batch = known.to(self.device)
        real = batch.padding_mask if self.config.mixture.mask_padding else None
        logits = self.model(batch.tokens, padding_mask=real).flatten(0, 1)
        assert batch.targets is not None
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide, batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
        return known, batch.targets, -losses.view(batch.targets.shape).double()

    def take(self, number: int, tally: Tally, how: How) -> None:
        """Score a batch in the tally's formulation, and read its words."""
        use(self.model, self.experts, tally.dispatch)
        self.layers_cpu, cpu, begun = 0.0, time.process_time(), now(self.device)
        with record() as events:
            known, targets, log_probs = self.log_probs(number)
        sums = log_probs.sum(1)
        scored, cpu = now(self.device), time.process_time() - cpu
        tally.sent += [event.nbytes for event in events if event.label in ("dispatch", "combine")]
        assert known.targets is not None
        assert known.rows is not None
        if tally.dispatch == "sort" and bool((known.targets != IGNORED).any()):
            loads = [layer.load for layer in self.experts.layers() if layer.load is not None]
            tally.wanted += torch.stack([load.wanted for load in loads])
            tally.kept += torch.stack([load.kept for load in loads])
        reading = now(self.device)
        READERS[how](targets, log_probs, known.targets)
        tally.laps.append((scored - begun, now(self.device) - reading, cpu, self.layers_cpu))
        tally.blocks |= dict(zip(known.rows.tolist(), sums.tolist(), strict=True))
        tally.blocks.pop(NO_BLOCK, None)

    def share(self, tally: Tally) -> tuple[list[float], dict[str, Any]]:
        """(milliseconds of the batches, metrics) of all ranks, the same on each; `tally` then has all blocks. Every
        rank must call this. Raises WrongResultError for a score that is not finite."""
        load = {}
        if tally.dispatch == "sort":
            for total in (tally.wanted, tally.kept):
                all_reduce(total.view(-1), self.mesh.data, "load", "sum").wait()
            load = summarise_load(tally.wanted.cpu(), tally.kept.cpu())
        if not math.isfinite(score := sum(tally.blocks.values())):
            raise WrongResultError(f"{tally.dispatch}: the score is {score}; no speed reported")
        mine = json.dumps([tally.laps, tally.sent, list(tally.blocks.items())], allow_nan=False)
        ranks = [json.loads(said) for said in agree("evaluation", mine, self.mesh.world)]
        tally.blocks = dict(sorted(pair for *_, blocks in ranks for pair in blocks))
        tokens, score = sum(map(self.blocks.targets, tally.blocks)), math.fsum(tally.blocks.values())
        scoring, reading, cpu, layers_cpu = np.moveaxis(np.array([laps for laps, *_ in ranks]), 2, 0)  # (rank batch)
        samples = (1e3 * scoring.max(axis=0)).tolist()
        seconds, without = (each.sum(axis=1).max() for each in (scoring + reading, scoring))  # of the slowest rank
        sent = [nbytes for _, sizes, _ in ranks for nbytes in sizes]
        return samples, summarise(samples) | load | {
            "loss": -score / tokens / math.log(2), "perplexity": math.exp(-score / tokens), "score": score,  # bits
            "tokens": tokens, "tokens_per_s": tokens / seconds, "tokens_per_s_without_words": tokens / without,
            "cpu_ms_per_batch": 1e3 * cpu.mean(),
            "cpu_ms_per_layer": 1e3 * layers_cpu.mean() / self.config.expert_layers,
            "bytes_per_all_to_all": sum(sent) / len(sent) if sent else None,
        }  # fmt: skip


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
