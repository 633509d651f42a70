"""One rank's part of an evaluation: it scores its blocks of the text, and tells the others what that took.

Block i goes to rank i mod ranks. All ranks take equally many batches of one shape, since each must enter every
all-to-all: what is missing at the end is padding, whose targets count for nothing. The score is the sum of the
log-probabilities of all targets, in float64.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from benchmarks.harness import WrongResultError, gather_times, now, summarise
from cs336_systems.comm import Mesh, record
from cs336_systems.cost.capacity import describe_parts
from cs336_systems.cost.flops import padded_rows
from cs336_systems.data.corpus import IGNORED, Batch, count_targets
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.host.console import format_bytes
from cs336_systems.model.moe import MoELayer
from cs336_systems.model.transformer import Block, TransformerLM
from cs336_systems.presets import Dispatch, ModelConfig
from cs336_systems.tensor_parallel.plan import tensor_parallel

# What the published profile of fairseq's eval_lm tagged, by its names; each call is a span of the trace.
RUN, DECODER, WITH, WITHOUT, ATTENTION, MOE = TAGS = (
    *("eval_lm", "TransformerDecoder", "TransformerDecoderLayer with MoE", "TransformerDecoderLayer without MoE"),
    *("MultiheadAttention", "MoELayer"),
)
ONE_HOT_COPIES = 4  # of tokens x experts x slots that are alive at once: each choice's, their sum, and a cast


class Projection(nn.Module):
    """A linear layer that can add its bias `apart` from the product, as torch of 2021 did, where now is one `addmm`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.apart = linear.weight, linear.bias, False

    def forward(self, x: Tensor) -> Tensor:
        if self.apart and self.bias is not None:
            return F.linear(x, self.weight) + self.bias
        return F.linear(x, self.weight, self.bias)


def needed_memory(config: ModelConfig, model: nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a rank at the fullest moment, from above: its parameters (which may be on the meta device), and what
    one batch makes."""
    tokens, wide = config.context_length, max(4, dtype.itemsize)
    found = {
        "parameters": sum(p.numel() for p in model.parameters()) * wide,
        "logits": 3 * tokens * config.vocab_size * wide,
        "attention": 3 * config.num_heads * tokens**2 * wide if config.attention == "naive" else 0,
    }
    if config.mixture.dispatch == "einsum":
        slots = padded_rows(config, tokens, training=False)
        found |= {"one-hot tensors": ONE_HOT_COPIES * tokens * slots * wide, "slots": 3 * slots * config.d_model * wide}
    return found


@contextmanager
def tagged(model: TransformerLM) -> Iterator[None]:
    """Inside the block, calls of the model's parts are spans of the names above. The model knows nothing of it."""
    parts: list[tuple[nn.Module, str]] = [(model, DECODER)]
    for block in model.blocks:
        assert isinstance(block, Block)
        has_experts = isinstance(block.feed_forward, MoELayer)
        parts += [(block, WITH if has_experts else WITHOUT), (block.attention, ATTENTION)]
        parts += [(block.feed_forward, MOE)] if has_experts else []
    plain = [surround(module, partial(record_function, tag)) for module, tag in parts]
    try:
        yield
    finally:
        for (module, _), forward in zip(parts, plain, strict=True):
            module.forward = forward


def surround(module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Make a module run its forward inside a context; returns the forward before. Around `forward` itself and not by
    hooks, whose spans would cross those that `Capture` makes by hooks."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    module.forward = run
    return forward


How = Literal["fast", "slow"]
Words = list[tuple[int, float]]  # each with its log-probability in nats


class Blocks:
    """Blocks of `context` tokens and, as their targets, the tokens after each; the last one may be shorter."""

    def __init__(self, tokens: np.ndarray, context: int, name: str = "") -> None:
        self.tokens, self.context, self.name = tokens, context, name
        self.count = ceil((len(tokens) - 1) / context)
        padded = np.full((self.count + 1) * context + 1, IGNORED)  # not in torch: ranks are forked after this
        padded[: len(tokens)] = tokens
        # Each block and the token after it; number `count` is padding.
        self.rows = np.lib.stride_tricks.sliding_window_view(padded, context + 1)[::context]

    def batch(self, number: int) -> Batch:
        """A block as a batch: tokens, targets and the mask of real tokens, (1 context), and its number."""
        rows = [min(number, self.count)]
        tokens, targets = (torch.from_numpy(self.rows[rows, part]) for part in (slice(-1), slice(1, None)))
        real = targets != IGNORED
        return Batch(tokens * real, targets, torch.tensor(rows), padding_mask=real)


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
    score: float = 0.0  # the sum of the targets' log-probabilities, in nats
    tokens: int = 0
    laps: list[float] = field(default_factory=list)  # of each batch: scoring, reading, CPU, of that in experts
    sent: list[int] = field(default_factory=list)  # bytes of each all-to-all that carries tokens


class Scorer:
    """This rank's part of a model, without gradients and with the same random weights in every layout, and its blocks,
    one a batch. Every rank must construct it and call its methods alike.

    Raises UserError for experts or matrices that do not divide, and if a batch needs more than `free` bytes.
    """

    def __init__(
        self, config: ModelConfig, blocks: Blocks, mesh: Mesh, device: torch.device, dtype: torch.dtype, free: int
    ) -> None:
        self.config, self.blocks, self.mesh, self.device = config, blocks, mesh, device
        model = TransformerLM(config, "meta")
        plan = tensor_parallel(model, mesh.tp)
        self.experts = expert_parallel(model, mesh.ep, mesh.data)
        parts = needed_memory(config, model, dtype)
        if (need := sum(parts.values())) > free:
            raise UserError(
                f"a block of {config.context_length} tokens needs {format_bytes(need)} on a rank "
                f"({describe_parts(parts)}), but {format_bytes(free)} are free; lower --context"
                + (", or use --moe sort or a lower --eval-fraction" if config.mixture.dispatch == "einsum" else "")
            )
        plan.init_weights(0, device)
        self.projections = list[Projection]()
        for block in model.blocks:
            for name in ("query", "key", "value", "out"):
                if isinstance(linear := getattr(block.attention, name), nn.Linear):
                    self.projections.append(Projection(linear))
                    block.set_submodule(f"attention.{name}", self.projections[-1])
        self.model = model.to(dtype).eval().requires_grad_(False)
        self.layers_cpu = 0.0  # seconds of this process, all threads, inside expert layers since they were reset
        for layer in self.experts.layers():
            surround(layer, self.clocked)

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Add the block's CPU time to that of expert layers."""
        begun = time.process_time()
        yield
        self.layers_cpu += time.process_time() - begun

    @torch.no_grad()
    def log_probs(self, number: int) -> tuple[Batch, Tensor, Tensor]:
        """Score a batch: (it on the host, targets on the device, their log-probabilities in nats), each (rows seq);
        zero at padding."""
        known = self.blocks.batch(self.mesh.data.rank() + self.mesh.data.size() * number)
        batch = known.to(self.device)
        real = batch.padding_mask if self.config.mixture.mask_padding else None
        logits = self.model(batch.tokens, padding_mask=real).flatten(0, 1)
        assert batch.targets is not None
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide, batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
        return known, batch.targets, -losses.view(batch.targets.shape).double()

    def take(self, number: int, tally: Tally, how: How) -> None:
        """Score a batch in the tally's formulation, and read its words. With one-hot tensors, attention is as torch
        computed it in 2021."""
        for layer in self.experts.layers():
            layer.mixture = replace(layer.mixture, dispatch=tally.dispatch)
        for projection in self.projections:
            projection.apart = tally.dispatch == "einsum"
        self.layers_cpu, cpu, begun = 0.0, time.process_time(), now(self.device)
        with record() as events:
            known, targets, log_probs = self.log_probs(number)
        total = log_probs.sum()
        scored, cpu = now(self.device), time.process_time() - cpu
        assert known.targets is not None
        READERS[how](targets, log_probs, known.targets)
        tally.laps += [scored - begun, now(self.device) - scored, cpu, self.layers_cpu]
        tally.sent += [event.nbytes for event in events if event.label in ("dispatch", "combine")]
        tally.score += total.item()
        tally.tokens += int(count_targets(known))

    def share(self, tally: Tally) -> tuple[list[float], dict[str, Any]]:
        """(milliseconds of the batches, metrics) of all ranks, the same on each. Every rank must call this. Raises
        WrongResultError for a score that is not finite."""
        score, tokens = gather_times([tally.score, tally.tokens], self.mesh.data, self.device).sum(0).tolist()
        if not math.isfinite(score):
            raise WrongResultError(f"{tally.dispatch}: the score is {score}; no speed reported")
        laps = gather_times(tally.laps, self.mesh.world, self.device).view(self.mesh.world.size(), -1, 4)
        scoring, reading, cpu, layers_cpu = laps.unbind(2)  # (rank batch)
        samples = (1e3 * scoring.amax(0)).tolist()
        seconds, without = (each.sum(1).max().item() for each in (scoring + reading, scoring))  # of the slowest rank
        sent, times = gather_times([sum(tally.sent), len(tally.sent)], self.mesh.world, self.device).sum(0).tolist()
        return samples, summarise(samples) | {
            "loss": -score / tokens / math.log(2), "perplexity": math.exp(-score / tokens), "score": score,  # bits
            "tokens": int(tokens), "tokens_per_s": tokens / seconds, "tokens_per_s_without_words": tokens / without,
            "cpu_ms_per_batch": 1e3 * cpu.mean().item(),
            "cpu_ms_per_layer": 1e3 * layers_cpu.mean().item() / self.config.expert_layers,
            "bytes_per_all_to_all": sent / times if times else None,
        }  # fmt: skip
