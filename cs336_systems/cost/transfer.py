"""The words in which traffic is counted: a transfer, a parameter as far as traffic depends on it, and the buckets that
wrappers fill with gradients."""

from collections import Counter
from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple


class Transfer(NamedTuple):
    """One collective or message: along which axis of the mesh ("tp", "pp", "ep", "dp", "data", which joins these two,
    "ends" or "world"), what it is for, how many elements of how many bytes."""

    verb: str
    axis: str
    what: str
    elements: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.width


Traffic = Counter[Transfer]


class Parameter(NamedTuple):
    """A parameter or buffer of a module, by the first of its names; `width` is bytes an element and stands for the
    dtype."""

    name: str
    shape: tuple[int, ...]
    width: int = 4
    trainable: bool = True

    @property
    def elements(self) -> int:
        """Of all dimensions; a scalar has one."""
        return prod(self.shape)

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO stage 3 shards its rows: those of a matrix that is a layer's `weight`."""
        return len(self.shape) == 2 and self.elements > 0 and self.name.rpartition(".")[2] == "weight"


def plan_buckets(parameters: Sequence[Parameter], cap: float, alone: Collection[str] = ()) -> list[list[Parameter]]:
    """How a wrapper groups gradients: from the last parameter to the first, up to `cap` bytes a bucket and one dtype
    in each; those of `alone` by themselves, after all others."""
    done: list[list[Parameter]] = []
    filling: dict[int, list[Parameter]] = {}
    filled: dict[int, int] = {}
    trainable = [parameter for parameter in parameters if parameter.trainable]
    for parameter in (each for each in reversed(trainable) if each.name not in alone):
        width, nbytes = parameter.width, parameter.width * parameter.elements
        if filling.setdefault(width, []) and filled[width] + nbytes > cap:
            done.append(filling[width])
            filling[width] = []
        filled[width] = nbytes + (filled[width] if filling[width] else 0)
        filling[width].append(parameter)
    return [*done, *filling.values(), *([each] for each in reversed(trainable) if each.name in alone)]
