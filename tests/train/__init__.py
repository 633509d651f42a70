"""Tests of cs336_systems/train/."""
