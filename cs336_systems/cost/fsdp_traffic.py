"""What ZeRO stage 3 sends in a step, of any module: the walk of `fsdp.FSDP` over its list of layers, without tensors.

Where every matrix belongs to one layer, called once in the order of the list, no walk is needed: each is gathered for
forward and for backward, and its gradient reduce-scattered. But a weight that is tied, shared, lent or unused is
gathered ahead at its place in the list, freed, and gathered again where it is used, so its gathers depend on the order
of events: layers gathered `AHEAD` of the one that computes, and what a backward finds that the one before has left.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from math import ceil, inf

from cs336_systems.cost.transfer import Parameter, Traffic, Transfer, plan_buckets
from cs336_systems.errors import UserError

AHEAD = 2  # layers gathered before they are needed, as in `fsdp.py`


class Walk:
    """Which weights are whole at each moment of forwards and backwards, and how often each was gathered and reduced.

    `layers` names the weight of every layer, in the order of registration; `calls` is what a forward does: the number
    of a layer that is called, or the name of a weight that somebody outside its layer reads.
    """

    def __init__(self, layers: Sequence[str], calls: Sequence[int | str]) -> None:
        self.layers, self.calls = layers, calls
        self.used = [layers[call] if isinstance(call, int) else call for call in calls]  # a weight a call
        self.place = {name: number for number, name in reversed(list(enumerate(layers)))}  # of its first layer
        self.gathers: Counter[str] = Counter()
        self.reductions: Counter[str] = Counter()
        self.whole: set[str] = set()  # gathered, or on their way
        self.coming: set[str] = set()  # on their way, and not used yet
        self.borrowed: set[str] = set()
        self.expected: set[str] = set()  # took part in a forward and have no gradient yet
        self.reduced: set[str] = set()  # since the last backward was ended
        self.reached = 0  # layers before it have been gathered in this forward
        self.remaining = self.walked = 0  # layers from these on are gathered, and begun or left out, in this backward
        self.unfinished = False

    def forward(self) -> None:
        """The module's forward, which ends the backward before it."""
        if self.unfinished:
            self.finish()
        self.whole, self.coming, self.borrowed, self.reached = set(), set(), set(), 0
        for call, name in zip(self.calls, self.used, strict=True):
            if isinstance(call, str):
                if name not in self.whole - self.coming:
                    self._use(name)  # and keep it until the end of the pass
                    self.borrowed.add(name)
                    self.expected.add(name)
                continue
            soon = self.layers[call : max(self.reached, call + 1)]
            for skipped in [each for each in self.coming if self.place[each] < call and each not in soon]:
                self._free(skipped)
            self._gather_up_to(call + 1 + AHEAD)
            self._use(name)
            self.expected.add(name)
            self._free(name)
        self._gather_up_to(len(self.layers))
        self.whole, self.coming = set(), set()
        self.remaining = self.walked = len(self.layers)

    def backward(self) -> None:
        """Backward of a forward: the calls in reverse. A gradient is complete at the first use of its weight."""
        self.unfinished = True
        for name in self.borrowed:
            self._use(name)
        first = {name: number for number, name in reversed(list(enumerate(self.used)))}
        for number, call in reversed(list(enumerate(self.calls))):
            name = self.used[number]
            if isinstance(call, int):
                self._walk_back(call)
                self._use(name)
            if first[name] == number:
                self.expected.discard(name)
                self._free(name)
                self.reduced.discard(name)
                self._reduce(name)

    def finish(self) -> None:
        """The end of a synchronisation, or the next forward: what backward has not reached."""
        self._walk_back(-1)
        for name in dict.fromkeys(self.layers):
            self._free(name)
            self._reduce(name)
        self.expected, self.reduced, self.unfinished = set(), set(), False

    def _gather(self, name: str) -> None:
        if name not in self.whole:
            self.gathers[name] += 1
            self.whole.add(name)
            self.coming.add(name)

    def _use(self, name: str) -> None:
        self._gather(name)
        self.coming.discard(name)

    def _free(self, name: str) -> None:
        self.whole.discard(name)
        self.coming.discard(name)

    def _reduce(self, name: str) -> None:
        if name not in self.reduced:
            self.reductions[name] += 1
            self.reduced.add(name)

    def _gather_up_to(self, number: int) -> None:
        while self.reached < min(number, len(self.layers)):
            self._gather(self.layers[self.reached])
            self.reached += 1

    def _walk_back(self, number: int) -> None:
        while self.walked > max(number, 0):
            self.walked -= 1
            while self.remaining > max(self.walked - AHEAD, 0):
                self.remaining -= 1
                self._gather(self.layers[self.remaining])
            name = self.layers[self.walked]
            if self.walked > number and name not in self.expected and self.place[name] >= self.walked:
                self._free(name)
                self._reduce(name)


def count_walks(
    layers: Sequence[str], calls: Sequence[int | str], passes: Sequence[str]
) -> tuple[Counter[str], Counter[str]]:
    """How often each weight is gathered and reduced in a step of `passes`, each forward of which has its backward.

    A forward begins anew, so that each run of backwards after it can be walked by itself; from the third on, the
    backwards of a run are alike.
    """

    def walk(backwards: int) -> tuple[Counter[str], Counter[str]]:
        found = Walk(layers, calls)
        found.forward()
        for _ in range(backwards):
            found.backward()
        found.gathers.subtract(ahead.gathers)
        found.finish()
        return found.gathers, found.reductions

    ahead = Walk(layers, calls)
    ahead.forward()
    gathers = Counter({name: times * passes.count("forward") for name, times in ahead.gathers.items()})
    reductions: Counter[str] = Counter()
    lengths = Counter(len(list(run)) for kind, run in groupby(passes) if kind == "backward")
    for length, times in lengths.items():
        for total, some, more in zip((gathers, reductions), walk(min(length, 3)), walk(2), strict=True):
            for name in dict.fromkeys(layers):
                total[name] += times * (some[name] + max(0, length - 3) * (some[name] - more[name]))
    return gathers, reductions


def fsdp_traffic(
    parameters: Sequence[Parameter],
    ranks: int,
    passes: Sequence[str] = ("forward", "backward"),
    layers: Sequence[str] | None = None,
    calls: Sequence[int | str] | None = None,
    buffers: Sequence[Parameter] = (),
    compute_width: int | None = None,
    axis: str = "dp",
) -> Traffic:
    """A step of FSDP with `finish_gradient_synchronization`, and no more: its optimizer sends nothing.

    `passes` are the step's "forward" and "backward" in order, one of each a microbatch. `layers` and `calls` are those
    of `Walk` (default: one layer a matrix, in order, each called once). `compute_width` is bytes an element of the
    weights while they compute. Raises UserError for a frozen matrix, whose gathers depend on what is before it.
    """
    found, sharded = Traffic(), {each.name: each for each in parameters if each.is_sharded}
    if ranks == 1:
        return found
    for each in sharded.values():
        if not each.trainable:
            raise UserError(f"{each.name} is frozen: how often FSDP gathers it is not predicted; count it by record()")
    layers = list(sharded) if layers is None else layers
    gathers, reductions = count_walks(layers, range(len(layers)) if calls is None else calls, passes)
    for name, each in sharded.items():
        elements, width = whole_rows(each, ranks), compute_width or each.width
        found[Transfer("all-gather", axis, "weight", elements, width)] += gathers[name]
        found[Transfer("reduce-scatter", axis, "weight, gradient", elements, each.width)] += reductions[name]
    return +found + closing_traffic(parameters, ranks, buffers, axis)


def whole_rows(parameter: Parameter, ranks: int) -> int:
    """Elements of a matrix whose rows are padded so that every rank has as many."""
    rows, columns = parameter.shape
    return ceil(rows / ranks) * ranks * columns


def closing_traffic(
    parameters: Sequence[Parameter], ranks: int, buffers: Sequence[Parameter] = (), axis: str = "dp"
) -> Traffic:
    """What follows the last backward: the gradients of what is replicated, all in one bucket a dtype, the vote, and
    the buffers."""
    found = Traffic()
    if ranks == 1:
        return found
    replicated = [each for each in parameters if not each.is_sharded]
    groups = plan_buckets(replicated, inf)
    for group in groups:
        found[Transfer("all-reduce", axis, "replicated", sum(each.elements for each in group), group[0].width)] += 1
    voters = len(parameters) - len(replicated) + sum(map(len, groups))
    found[Transfer("all-reduce", axis, "ballot", voters + 1, 4)] += 1
    for buffer in buffers:
        found[Transfer("broadcast", axis, "buffer", buffer.elements, buffer.width)] += 1
    return found
