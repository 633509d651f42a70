"""The order in which fully sharded weights are gathered: up the list of layers in forward, down it in backward.

    forward     gather 0 1 2 | compute 0, gather 3 | compute 1, gather 4 | ...
    backward    gather N N-1 N-2 | compute N, gather N-3 | ...

Collectives match only if every rank launches the same ones in the same order. So the order is that of the list and not
that of the calls, and a layer that this rank leaves out is gathered all the same: another rank may use it.
"""

from collections.abc import Iterator, Sequence

from cs336_systems.buffers.sharded_parameter import ShardedParameter

AHEAD = 2  # layers gathered before they are needed


class GatherOrder:
    """Positions in the list of the layers' `weights`, in which a tied weight stands once for each of its layers."""

    def __init__(self, weights: Sequence[ShardedParameter]) -> None:
        self.weights = weights
        self.first = {weight: number for number, weight in reversed([*enumerate(weights)])}
        self.gathered = 0  # layers before this one have been gathered in this forward
        self.gathered_back = self.passed_back = 0  # layers from these on have been gathered, and passed, in backward

    def forward_to(self, number: int) -> None:
        """Come to a layer in forward: free the weights of layers that were left out before it, and gather ahead."""
        coming = set(self.weights[number : max(self.gathered, number + 1)])
        for weight in self.weights[:number]:
            if weight.work and weight not in coming:  # it may be the tied weight of a layer to come
                weight.reshard()
        self._gather_before(number + 1 + AHEAD)

    def end_forward(self, backward_follows: bool) -> None:
        """Gather what is left of the list, and stand at its end for a backward."""
        self._gather_before(len(self.weights))
        if backward_follows:
            self.gathered_back = self.passed_back = len(self.weights)

    def _gather_before(self, number: int) -> None:
        while self.gathered < min(number, len(self.weights)):
            self.weights[self.gathered].launch_unshard()
            self.gathered += 1

    def back_to(self, number: int) -> Iterator[ShardedParameter]:
        """Come to a layer in backward (-1: to the end), gathering ahead. Yields each weight that is passed on the way
        and belongs to no layer further down, for its reduction to take place in this order, too."""
        while self.passed_back > max(number, 0):
            self.passed_back -= 1
            while self.gathered_back > max(self.passed_back - AHEAD, 0):
                self.gathered_back -= 1
                self.weights[self.gathered_back].launch_unshard()
            weight = self.weights[self.passed_back]
            if self.passed_back > number and self.first[weight] == self.passed_back:
                yield weight
