"""Optimizers: AdamW, fp32 master weights, loss scaling, the gradient norm."""
