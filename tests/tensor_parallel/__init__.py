"""Tests of cs336_systems/tensor_parallel/."""
