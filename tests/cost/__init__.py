"""Tests of cs336_systems/cost/."""
