"""Code that several benchmarks share: measuring, records, tables and pictures."""
