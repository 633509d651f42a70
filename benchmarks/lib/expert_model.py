"""The model that `moe_eval` evaluates: laid out over ranks, switched between formulations, and tagged from outside."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from cs336_systems.comm import Mesh
from cs336_systems.cost.capacity import describe_parts
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


def use(model: TransformerLM, experts: ExpertParallel, dispatch: Dispatch) -> None:
    """Compute expert layers by one sort or by one-hot tensors; with those, attention as torch did in 2021."""
    for layer in experts.layers():
        layer.mixture = replace(layer.mixture, dispatch=dispatch)
    for module in model.modules():
        if isinstance(module, Projection):
            module.apart = dispatch == "einsum"


def needed_memory(config: ModelConfig, model: nn.Module, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a rank at the fullest moment, from above: its parameters (which may be on the meta device), and what
    one batch makes."""
    seq, wide, tokens = config.context_length, max(4, dtype.itemsize), rows * config.context_length
    found = {
        "parameters": sum(p.numel() for p in model.parameters()) * wide,
        "logits": 3 * tokens * config.vocab_size * wide,
        "attention": 3 * rows * config.num_heads * seq**2 * wide if config.attention == "naive" else 0,
    }
    if config.mixture.dispatch == "einsum":
        slots = padded_rows(config, tokens, training=False)
        found |= {"one-hot tensors": ONE_HOT_COPIES * tokens * slots * wide, "slots": 3 * slots * config.d_model * wide}
    return found


def build(
    config: ModelConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype, rows: int, free: int
) -> tuple[TransformerLM, ExpertParallel]:
    """This rank's part of a model without gradients, and its experts; the random weights are the same in every layout.

    Raises UserError for experts or matrices that do not divide, and if a batch needs more than `free` bytes.
    """
    model = TransformerLM(config, "meta")
    plan = tensor_parallel(model, mesh.tp)
    experts = expert_parallel(model, mesh.ep, mesh.data)
    parts = needed_memory(config, model, rows, dtype)
    if (need := sum(parts.values())) > free:
        raise UserError(
            f"a batch of {rows} x {config.context_length} tokens needs {format_bytes(need)} on a rank "
            f"({describe_parts(parts)}), but {format_bytes(free)} are free; lower --context or --batch-size"
            + (", or use --moe sort or a lower --eval-fraction" if config.mixture.dispatch == "einsum" else "")
        )
    plan.init_weights(0, device)
    for block in model.blocks:
        for name in ("query", "key", "value", "out"):
            if isinstance(linear := getattr(block.attention, name), nn.Linear):
                block.set_submodule(f"attention.{name}", Projection(linear))
    return model.to(dtype).eval().requires_grad_(False), experts


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
