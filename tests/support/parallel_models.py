"""Shared parts of the tests of model parallelism: three small models, batches, a loss, comparison of gradients."""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, pairs
from cs336_systems.data.corpus import IGNORED, Batch
from cs336_systems.expert_parallel import ExpertParallel
from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.heads import Losses
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import ModelConfig
from cs336_systems.tensor_parallel.plan import TensorParallel
from tests.support.tolerances import bound

SEED, STEP = 1, 2
SEQ = 8
_SHAPE = ModelConfig(
    vocab_size=37, context_length=8, d_model=32, d_ff=48, num_layers=2, num_heads=8, dropout=0.1, recompute="none"
)
CONFIGS = {
    "gpt": _SHAPE,
    "llama": replace(_SHAPE, positions="rotary", feed_forward="swiglu", num_kv_heads=4, tied_head=False),
    "bert": replace(_SHAPE, norm="layernorm", bias=True, causal=False, token_types=2, bert_heads=True),
}


def whole_model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> TransformerLM:
    """One process's model, with gains and biases that are not one and zero."""
    torch.manual_seed(SEED)
    model = TransformerLM(config).to(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(i)
            parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(dtype)
    return model


def with_recompute(model: TransformerLM, recompute: str) -> TransformerLM:
    """A copy that recomputes something else."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = replace(module.config, recompute=recompute)
    return model


def make_batch(config: ModelConfig, rows: int, seq: int = SEQ) -> Batch:
    """With targets that are ignored, not as many in each row, and for BERT with padding."""
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(config.vocab_size, (2, rows, seq), generator=generator)
    targets[0, : seq // 2] = IGNORED
    if not config.bert_heads:
        return Batch(tokens, targets, torch.arange(rows))
    real = torch.ones(rows, seq, dtype=torch.bool)
    real[rows // 2, seq - 2 :] = False
    return Batch(tokens, targets, torch.arange(rows), tokens % 2, real, torch.arange(rows) % 2)


def key_of(batch: Batch) -> Tensor:
    return dropout_key(SEED, STEP, batch.rows)


def combine(losses: Losses) -> Tensor:
    """Both losses in one, unlike in weight."""
    return losses.tokens / 7 + (0 if losses.pair is None else losses.pair / 3)


def run(model: TransformerLM, batch: Batch) -> Losses:
    """The losses, with dropout by place."""
    return model.losses(model.run_blocks(batch, key=key_of(batch)), batch)


def rounding(config: ModelConfig, dtype: torch.dtype, tokens: int) -> float:
    """The error of two computations of a gradient. A block's longest path has 20 operations (3 + 1 + 1 + 3 + 1 + 1 + 2
    in attention: norm, products, scores, softmax, values, out, dropout and sum; 8 in the feed-forward), and embedding,
    head and loss have 10; backward has as many. No sum has more terms than d_ff, words or tokens."""
    stages = 2 * (20 * config.num_layers + 10)
    return bound(dtype, stages, max(config.d_ff, config.vocab_size, tokens))


def gradients(model: nn.Module, plan: TensorParallel) -> dict[str, Tensor]:
    """This rank's parts of the gradients, with what is a part of a sum added up."""
    mine = {name: parameter.grad for name, parameter in model.named_parameters()}
    partial = [name for name in mine if name in plan.partial]
    if partial:
        sums = pairs.reduce(torch.cat([mine[name] for name in partial]), plan.group)
        sizes = [len(mine[name]) for name in partial]
        mine |= dict(zip(partial, sums.split(sizes), strict=True))
    return mine


def compare_gradients(got: dict[str, Tensor], plan: TensorParallel, dense: nn.Module, tolerance: float) -> None:
    """This rank's part of every gradient against that of one process."""
    wanted = {name: parameter.grad for name, parameter in dense.named_parameters()}
    for name, gradient in got.items():
        want = plan.part(name, wanted[name])
        assert gradient.shape == want.shape, name
        # Alike for all keys, it changes no softmax: what is left of its gradient is the rounding of the weight's.
        scale = wanted[name.replace("key.bias", "key.weight")].norm()
        error = ((gradient - want).norm() / scale).item()
        assert error <= tolerance, (name, error, tolerance)


def whole_of(plan: TensorParallel, name: str, part: Tensor) -> Tensor:
    """The tensor of the whole model from the ranks' parts. Every rank must call this."""
    if (dim := plan.cut.get(name)) is None:
        return part
    whole = pairs.gather(part.detach(), dim, plan.group, name)
    return whole.narrow(dim, 0, plan.whole_shape(name, part.shape)[dim])


def part_of_experts(plan: ExpertParallel, name: str, whole: Tensor) -> Tensor:
    """This rank's experts' part of a tensor (experts ...) of the whole model; other tensors unchanged."""
    return whole.narrow(0, plan.first, plan.local) if name in plan.names else whole


def only_rank(rank: int, size: int) -> Group:
    """A group that knows its size and this rank's place, for what says nothing to the others."""

    class One:
        def rank(self) -> int:
            return rank

        def size(self) -> int:
            return size

    return One()  # type: ignore[return-value]
