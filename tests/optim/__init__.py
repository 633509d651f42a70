"""Tests of cs336_systems/optim/."""
