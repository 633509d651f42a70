"""A training run: recipe, trainer, loop, run folder and its command line."""
