"""Tests of cs336_systems/data/."""
