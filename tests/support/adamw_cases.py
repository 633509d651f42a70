"""Shared parts of FusedAdamW's tests: hyperparameters, parameters, steps on equal gradients, the bound of an error."""

import torch
from torch import nn

from kernels.adamw import BLOCK, CHUNK
from tests.support.tolerances import bound

# An eps and a decay so large that an error in either of them shows.
HYPER = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 0.05, "weight_decay": 0.2}
SHAPES = [(0,), (1,), (7,), (1023,), (4, 1024), (3, 5), (CHUNK + BLOCK + 9,), ()]
STEPS = 4
# Of one step: eight constants are rounded; m takes 3 operations, v 4, the step 5, the parameter 2.
ONE_STEP = bound(torch.float32, stages=22)
ROUNDING = STEPS * ONE_STEP  # a step inherits the errors of those before it


def make(shapes=SHAPES, dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def copies(params, dtype=None):
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype)) for p in params]


def give(gradients, params):
    for gradient, p in zip(gradients, params, strict=True):
        p.grad = gradient.to(p.dtype).clone()


def train(optimizers, steps=STEPS):
    """Steps of all optimizers on the same gradients."""
    for _ in range(steps):
        lists = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
        gradients = [torch.randn(p.shape) for p in lists[0]]
        for optimizer, params in zip(optimizers, lists, strict=True):
            give(gradients, params)
            optimizer.step()


def assert_close(ours, truth, allowed=ROUNDING):
    for p, q in zip(ours, truth, strict=True):
        assert p.shape == q.shape
        if p.numel():
            assert (p.double() - q).abs().max() <= allowed * q.abs().max()
