"""A compact, from-scratch distributed training library; ARCHITECTURE.md is the map."""
