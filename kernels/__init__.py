"""Kernels for the operators that take most of the model's time; importable without Triton and without a GPU."""
