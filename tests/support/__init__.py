"""What several tests share: ranks, oracles, cases and fault programs."""
