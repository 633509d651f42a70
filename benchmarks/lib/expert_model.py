"""The model that `moe_eval` evaluates: laid out over ranks, switched between formulations, and tagged from outside."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from cs336_systems.comm import Mesh
from cs336_systems.cost.experts import padded_rows
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import ExpertParallel, expert_parallel
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
    """A linear layer that can add its bias `apart` from the product, with the same weights.

    torch of 2021 did so for inputs of three dimensions; since then that is one `addmm`. Only where operators are
    counted does it matter.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.apart = linear.weight, linear.bias, False

    def forward(self, x: Tensor) -> Tensor:
        if self.apart and self.bias is not None:
            return F.linear(x, self.weight) + self.bias
        return F.linear(x, self.weight, self.bias)


@dataclass
class Evaluated:
    """A model without gradients whose formulation of experts can be changed between two batches."""

    model: TransformerLM
    experts: ExpertParallel

    def use(self, dispatch: Dispatch) -> None:
        """Compute expert layers by one sort or by one-hot tensors; with those, attention as torch did in 2021."""
        for layer in self.experts.layers():
            layer.mixture = replace(layer.mixture, dispatch=dispatch)
        for module in self.model.modules():
            if isinstance(module, Projection):
                module.apart = dispatch == "einsum"


def needed_memory(config: ModelConfig, model: nn.Module, rows: int, seq: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a rank at the fullest moment, from above: its parameters (which may be on the meta device), and what
    one batch makes."""
    tokens, wide = rows * seq, max(4, dtype.itemsize)
    found = {
        "parameters": sum(p.numel() for p in model.parameters()) * wide,
        "logits": 3 * tokens * config.vocab_size * wide,
        "attention": 3 * rows * config.num_heads * seq**2 * wide if config.attention == "naive" else 0,
    }
    if config.num_experts and config.mixture.dispatch == "einsum":
        slots = padded_rows(config, tokens, training=False)
        found["one-hot tensors"] = ONE_HOT_COPIES * tokens * slots * wide
        found["slots"] = 3 * slots * config.d_model * dtype.itemsize
    return found


def build(
    config: ModelConfig, mesh: Mesh, seed: int, device: torch.device, dtype: torch.dtype, rows: int, seq: int, free: int
) -> Evaluated:
    """This rank's part of a model with random weights of a seed, which are the same in every layout.

    Raises UserError for experts or matrices that do not divide, and if a batch needs more than `free` bytes.
    """
    model = TransformerLM(config, "meta")
    plan = tensor_parallel(model, mesh.tp)
    experts = expert_parallel(model, mesh.ep, mesh.data)
    parts = needed_memory(config, model, rows, seq, dtype)
    if sum(parts.values()) > free:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        raise UserError(
            f"a batch of {rows} x {seq} tokens needs {format_bytes(sum(parts.values()))} on a rank ({listed}), but "
            f"{format_bytes(free)} are free; lower --context or --batch-size"
            + (", or use --moe sort or a lower --eval-fraction" if config.mixture.dispatch == "einsum" else "")
        )
    plan.init_weights(seed, device)
    for block in model.blocks:
        for name in ("query", "key", "value", "out"):
            if isinstance(linear := getattr(block.attention, name), nn.Linear):
                block.set_submodule(f"attention.{name}", Projection(linear))
    return Evaluated(model.to(dtype).eval().requires_grad_(False), experts)


@contextmanager
def tagged(model: TransformerLM) -> Iterator[None]:
    """Inside the block, calls of the model's parts are spans of the names above. The model knows nothing of it."""
    parts: list[tuple[nn.Module, str]] = [(model, DECODER)]
    for block in model.blocks:
        assert isinstance(block, Block)
        has_experts = isinstance(block.feed_forward, MoELayer)
        parts += [(block, WITH if has_experts else WITHOUT), (block.attention, ATTENTION)]
        parts += [(block.feed_forward, MOE)] if has_experts else []
    for module, tag in parts:
        module.forward = _spanned(module.forward, tag)
    try:
        yield
    finally:
        for module, _ in parts:
            del module.forward


def _spanned(forward: Callable[..., Any], tag: str) -> Callable[..., Any]:
    """Around `forward` itself and not by hooks, whose spans would cross those that `Capture` makes by hooks."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(tag):
            return forward(*args, **kwargs)

    return run


class LayerClock:
    """Seconds of CPU time of this process, all threads, inside expert layers since the last `take`."""

    def __init__(self, evaluated: Evaluated) -> None:
        self.seconds, self.begun = 0.0, 0.0
        for layer in evaluated.experts.layers():
            layer.register_forward_pre_hook(self._begin, prepend=True)
            layer.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.begun = time.process_time()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.seconds += time.process_time() - self.begun

    def take(self) -> float:
        """The seconds, which restart from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
