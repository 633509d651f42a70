"""Tests of cs336_systems/profiling/."""
