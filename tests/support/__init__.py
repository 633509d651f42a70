"""Shared parts of several tests: ranks, oracles, cases and fault programs."""
