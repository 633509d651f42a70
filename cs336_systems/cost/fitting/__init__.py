"""Fit the constants of the cost model to measurements: training logs, records of benchmarks, lists of runs."""
