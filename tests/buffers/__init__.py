"""Tests of cs336_systems/buffers/."""
