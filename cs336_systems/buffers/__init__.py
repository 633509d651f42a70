"""Storage of the data-parallel strategies (flat layout, buckets, sharded parameters, state), and their guards."""
