"""The commands of `python -m cs336_systems.cost`, one a file."""
