"""One file a question: each runs alone or under torchrun, checks its candidates, and appends records."""
