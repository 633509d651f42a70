"""Tensor and sequence parallelism, applied to a model from outside."""
