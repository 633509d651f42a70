"""Tests of cs336_systems/checkpoint/."""
