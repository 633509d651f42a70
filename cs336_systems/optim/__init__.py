"""Optimizers: AdamW, fp32 master weights, loss scaling, the gradient norm."""

from cs336_systems.optim.adamw import AdamW

__all__ = ["AdamW"]
