"""Tests of cs336_systems/comm/."""
