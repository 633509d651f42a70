"""How much each rank sends in a collective: the one table that records, predictions and benchmarks share."""

# As a multiple of the tensor times (ranks - 1) / ranks (Patarasu and Yuan, J. Parallel Distrib. Comput. 69, 2009: no
# algorithm sends less). A broadcast's is the root's share spread over all.
TRAFFIC = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "broadcast": 1, "all-to-all": 1}
MESSAGES = {"send": 1.0, "receive": 0.0}


def sent(verb: str, ranks: int) -> float:
    """What one rank sends, as a multiple of the tensor. Raises KeyError for a verb that does not exist."""
    return MESSAGES[verb] if verb in MESSAGES else TRAFFIC[verb] * (ranks - 1) / ranks
