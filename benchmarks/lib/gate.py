"""The check of whole models before timing (the gate): no speed is reported for a model whose results are wrong."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import require_close, rounding
from benchmarks.lib.workload import Case, compile_model
from cs336_systems.cost import count_parameters
from cs336_systems.model.precision import autocast, set_matmul_precision
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig
from cs336_systems.train.recipe import Recipe

CONTEXT = 128  # tokens at most: the reference keeps every score, in float64
# Roundings that follow one another through one block, its norms, the head and the loss, and back.
STAGES = 32


@torch.no_grad()
def make_it_matter(model: TransformerLM) -> None:
    """Draw weights with which every part of the model affects the loss; fresh ones leave attention nearly uniform."""
    for p in model.parameters():
        if p.dim() >= 2:
            p.normal_(std=p.shape[-1] ** -0.5)
        else:
            p.add_(torch.randn_like(p), alpha=0.1)


def loss_and_gradient(model: TransformerLM, run: nn.Module, case: Case, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The loss, and every gradient behind it as one vector."""
    # Gradients of a mean over many tokens are small enough for fp16 to lose them; a power of two loses nothing else.
    scale = 1024.0 if case.precision == "fp16" else 1.0
    set_matmul_precision(case.device, case.precision)
    with autocast(case.device, case.precision):
        loss = lm_loss(run, *batch)
    (loss * scale).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad / scale for p in model.parameters()]
    return [loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])]


def tolerance(config: ModelConfig, precision: str) -> float:
    """Relative tolerance of a loss or a gradient of a model, in the L2 norm."""
    longest = max(config.d_ff, config.vocab_size, 2 * config.context_length)
    return rounding(STAGES * config.num_layers, precision, longest)


def check(case: Case) -> tuple[float, float]:
    """One block of the model's width, as it will be timed, against plain float64: (largest error, tolerance).

    The block has experts if the model does, in fp32. The errors are those of the loss and of all gradients as one
    vector. Raises WrongResultError.
    """
    context = min(case.config.context_length, CONTEXT)
    # In half precision a router takes other experts than in float64 wherever two are nearly as good.
    every = 1 if case.precision == "fp32" else case.config.expert_every
    config = replace(case.config, num_layers=1, dropout=0.0, context_length=context, expert_every=every)
    batch = case.make_batch(config, batch=2)
    candidate = case.make_model(config)
    make_it_matter(candidate)
    reference = case.make_model(replace(config, attention="naive", kernels="torch", recompute="none")).double()
    reference.load_state_dict(candidate.state_dict())
    run = compile_model(candidate, case.device) if case.compiled else candidate
    got = loss_and_gradient(candidate, run, case, batch)
    want = loss_and_gradient(reference, reference, replace(case, precision="fp32"), batch)
    allowed, names = tolerance(config, case.precision), ("one block's loss", "one block's gradient")
    return max(require_close(*each, allowed) for each in zip(names, got, want, strict=True)), allowed


def compare_steps(got: Mapping[str, Any], want: Mapping[str, Any], config: ModelConfig, recipe: Recipe) -> str:
    """Differences of a layout's first two steps from one rank's with the same global batch; empty if there are none.

    The first loss and the gradient's norm may be off by the tolerance t. The second loss comes after an update, and
    Adam's first is lr g / |g| for each weight: an error d in a gradient g changes it by lr min(2, 2 d / |g|) at most,
    and so the loss, to first order, by 2 lr d. Over all P weights that is at most 2 lr sqrt(P) |d|, with |d| = t |g|.
    """
    precision, weights = recipe.model.precision, sum(count_parameters(config).values())
    moved = 2 * recipe.optimizer.lr * weights**0.5 * (want["norms"][0] or 0.0)
    figures = (
        ("first loss", "losses", 0, 0.0),
        ("gradient norm", "norms", 0, 0.0),
        ("second loss", "losses", 1, moved),
    )
    for name, kind, step, more in figures:
        mine, one = got[kind][step], want[kind][step]
        if mine is None or one is None:
            return f"the {name} is not finite ({precision})"
        allowed = tolerance(config, precision) * (abs(one) + more)
        if not abs(mine - one) <= allowed:
            return (
                f"the {name} is {mine:.6g} and {one:.6g} on one rank: off by {abs(mine - one):.1e}, more than "
                f"{allowed:.1e} ({precision}); no speed reported"
            )
    return ""
