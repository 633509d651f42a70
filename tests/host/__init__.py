"""Tests of cs336_systems/host/."""
