"""Mesh: ranks in a grid with an axis for each kind of parallelism, and the groups of ranks along its axes.

As in Megatron-LM (arXiv:2104.04473, section 3), tensor parallelism, which communicates most, has neighbouring ranks, so
that it stays inside a machine; then come context, experts, data, and pipeline stages. With tp, dp, pp = 2, 2, 2:

    stage 0    (0 1) (2 3)        tp groups: 0 1, 2 3, 4 5, 6 7
    stage 1    (4 5) (6 7)        dp groups: 0 2, 1 3, 4 6, 5 7      pp groups: 0 4, 1 5, 2 6, 3 7
"""

import itertools
import math

import numpy as np
import torch

from cs336_systems.comm.agreement import subgroup
from cs336_systems.comm.group import Group, default_group, has_tags
from cs336_systems.comm.verbs import receive, send
from cs336_systems.errors import UserError, require_count

AXES = ("pp", "dp", "ep", "cp", "tp")  # from slowest to fastest: neighbours along the last are neighbouring ranks


class Mesh:
    """Groups that this rank belongs to, one for each axis: `tp`, `pp`, `ep`, `cp`, `dp`. Every rank must construct it
    with the same degrees.

    `data` joins dp, ep and cp: its ranks see different tokens and hold the same dense parameters. The ranks of `rows`
    (dp and ep) see different rows of a batch, those of `replicas` (dp and cp) hold the same experts, and those of
    `model` (tp and pp) together hold one model. `ends` is the first and last stage of this rank's pipeline, which share
    a tied embedding; None on the stages between. `dp` defaults to the rest of the ranks.

    Raises UserError, with the equation, if the degrees do not multiply to the number of ranks.
    """

    def __init__(self, tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, dp: int | None = None) -> None:
        self.world = world = default_group()
        self.sizes = mesh_sizes(world.size(), tp, pp, ep, cp, dp)
        self.ranks = np.arange(world.size()).reshape(*self.sizes.values())
        self.place = dict(zip(AXES, map(int, np.argwhere(self.ranks == world.rank())[0]), strict=True))
        self.groups: dict[tuple[int, ...], Group | None] = {tuple(range(world.size())): world}
        self.tp, self.pp, self.ep, self.cp, self.dp = map(self._along, ("tp", "pp", "ep", "cp", "dp"))
        self.data, self.model = self._along("dp", "ep", "cp"), self._along("pp", "tp")
        self.rows, self.replicas = self._along("dp", "ep"), self._along("dp", "cp")
        ends: list[tuple[int, ...]] = [(stages[0], stages[-1]) for stages in self._lines("pp")]
        self.ends = self._join(ends, self.groups) if self.pp.size() > 1 else None
        # NCCL has no tags: messages between two ranks match in the order of posting. Activations and gradients, up and
        # down the stages, may overtake each other, so each kind has its own connection; gloo's tags keep them apart.
        apart = self.pp.size() > 1 and not has_tags(world)
        kinds = itertools.product(("forward", "backward"), (True, False)) if apart else ()
        self.channels = {kind: self._along("pp", fresh=True) for kind in kinds}
        self._greet()

    def _lines(self, *axes: str) -> list[tuple[int, ...]]:
        """Sets of ranks that differ in these axes only, each in ascending order."""
        along = [number for number, axis in enumerate(AXES) if axis in axes]
        lines = np.moveaxis(self.ranks, along, range(-len(along), 0))
        return [tuple(line) for line in lines.reshape(-1, math.prod(lines.shape[-len(along) :])).tolist()]

    def _along(self, *axes: str, fresh: bool = False) -> Group:
        group = self._join(self._lines(*axes), {} if fresh else self.groups)
        assert group is not None
        return group

    def _join(self, lines: list[tuple[int, ...]], known: dict[tuple[int, ...], Group | None]) -> Group | None:
        """This rank's group among disjoint sets of ranks; axes over the same ranks, which are `known`, share one."""
        for ranks in lines:
            if ranks not in known:
                known[ranks] = subgroup(ranks)
        return next((known[ranks] for ranks in lines if self.world.rank() in ranks), None)

    def channel(self, kind: str, source: int, target: int) -> Group:
        """Group of the pp axis for "forward" or "backward" messages from rank `source` to rank `target`."""
        return self.channels.get((kind, source < target), self.pp)

    def _greet(self) -> None:
        """Connect neighbouring stages. NCCL connects at the first message and blocks both hosts until then, so a
        receive that is posted ahead would deadlock. Therefore all neighbours exchange a message now, in one order."""
        me, stages = self.pp.rank(), self.pp.size()
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        for group in self.channels.values():
            for source in range(stages):
                target = (source + 1) % stages
                if me == source:
                    send(torch.zeros(1, device=device), target, group, "greeting").wait()
                elif me == target:
                    receive(torch.zeros(1, device=device), source, group, "greeting").wait()

    def __str__(self) -> str:
        order = ("tp", "pp", "ep", "cp", "dp")
        return " x ".join(f"{axis} {self.sizes[axis]}" for axis in order if self.sizes[axis] > 1)


def mesh_sizes(ranks: int, tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, dp: int | None = None) -> dict[str, int]:
    """Size of every axis, in the order of AXES. Raises UserError as `Mesh` does."""
    given = {"tp": tp, "pp": pp, "ep": ep, "cp": cp} | ({} if dp is None else {"dp": dp})
    for axis, size in given.items():
        require_count(axis, size)
    equation = " x ".join(f"{axis} {size}" for axis, size in given.items() if axis != "cp" or size != 1)
    product, ending = math.prod(given.values()), "s" * (ranks > 1)
    if dp is None and ranks % product:
        help = f"start a multiple of {product}, or lower a degree"
        raise UserError(f"{equation} = {product} does not divide the {ranks} rank{ending}: {help}")
    if dp is not None and product != ranks:
        raise UserError(f"{equation} = {product}, but there are {ranks} ranks: start {product}, or leave dp out")
    sizes = {"dp": ranks // product} | given
    return {axis: sizes[axis] for axis in AXES}
