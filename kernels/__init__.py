"""The maths of the model's hot spots, importable without Triton and without a GPU."""
