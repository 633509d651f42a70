"""The commands of `python -m cs336_systems.cost`, one per file."""
