"""Bytes that a rank sends in each collective: the formulas that records, predictions and benchmarks share."""

# Bytes that a rank sends in a collective, as a multiple of the tensor's times (ranks - 1) / ranks; no algorithm sends
# fewer (Patarasu and Yuan, J. Parallel Distrib. Comput. 69, 2009). A broadcast's are the root's, spread over all ranks.
TRAFFIC = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "broadcast": 1, "all-to-all": 1}
MESSAGES = {"send": 1.0, "receive": 0.0}


def sent(verb: str, ranks: int) -> float:
    """Bytes that one rank sends, as a multiple of the tensor's. Raises KeyError for an unknown verb."""
    return MESSAGES[verb] if verb in MESSAGES else TRAFFIC[verb] * (ranks - 1) / ranks
