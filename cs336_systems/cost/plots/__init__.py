"""Pictures of predictions: one file for each, with its numbers, which need no matplotlib, apart from its drawing."""
