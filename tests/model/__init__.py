"""Tests of cs336_systems/model/."""
