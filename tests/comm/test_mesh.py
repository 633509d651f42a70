"""The mesh: which ranks are in which group, against a grid of numbers; what the equation must be; and real groups."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.comm import Mesh, mesh_sizes
from cs336_systems.errors import UserError

AXES = ("pp", "dp", "ep", "cp", "tp")
JOINED = {axis: (axis,) for axis in AXES} | {"data": ("dp", "ep", "cp"), "model": ("pp", "tp")}
JOINED |= {"rows": ("dp", "ep"), "replicas": ("dp", "cp")}


def wanted(size: int, tp: int, pp: int, ep: int, cp: int, rank: int) -> dict[str, list[int] | None]:
    """A rank's groups, cut from the grid of all ranks."""
    grid = torch.arange(size).view(pp, size // (tp * pp * ep * cp), ep, cp, tp)
    place = (grid == rank).nonzero()[0].tolist()
    groups = {}
    for name, axes in JOINED.items():
        groups[name] = grid[tuple(slice(None) if a in axes else i for a, i in zip(AXES, place, strict=True))]
    groups = {name: group.flatten().tolist() for name, group in groups.items()}
    ends = [groups["pp"][0], groups["pp"][-1]]
    return groups | {"ends": ends if pp > 1 and rank in ends else None}


class Fake(SimpleNamespace):
    """A group that is only its ranks."""

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.me)


@pytest.fixture
def faked(monkeypatch):
    """Meshes of any size without a process: `faked(rank, size, tags)(tp=2)`. `made` lists the groups in order."""

    def world(rank: int, size: int, tags: bool = True):
        made = []
        world.greetings = []

        def greet(way, other):
            world.greetings.append((way, other))
            return SimpleNamespace(wait=lambda: None)

        def subgroup(group):
            made.append(tuple(group))
            return Fake(ranks=list(group), me=rank) if rank in group else None

        monkeypatch.setattr("cs336_systems.comm.mesh.default_group", lambda: Fake(ranks=list(range(size)), me=rank))
        monkeypatch.setattr("cs336_systems.comm.mesh.subgroup", subgroup)
        monkeypatch.setattr("cs336_systems.comm.mesh.has_tags", lambda group: tags)
        monkeypatch.setattr("cs336_systems.comm.mesh.send", lambda word, to, *_: greet("to", to))
        monkeypatch.setattr("cs336_systems.comm.mesh.receive", lambda word, source, *_: greet("from", source))
        return lambda **sizes: (Mesh(**sizes), made)

    return world


def factors(size: int):
    divisors = [each for each in range(1, size + 1) if size % each == 0]
    return [each for each in itertools.product(divisors, repeat=4) if size % math.prod(each) == 0]


@pytest.mark.parametrize("size", [1, 6, 8, 16])
def test_every_group_of_every_layout(faked, size):
    """Of 16 ranks, only layouts in three dimensions or more."""
    for tp, pp, ep, cp in (each for each in factors(size) if size < 16 or sum(degree > 1 for degree in each) > 2):
        orders = []
        for rank in range(size):
            mesh, made = faked(rank, size)(tp=tp, pp=pp, ep=ep, cp=cp)
            got = {name: getattr(mesh, name).ranks for name in JOINED}
            got["ends"] = mesh.ends and mesh.ends.ranks
            assert got == wanted(size, tp, pp, ep, cp, rank), (tp, pp, ep, cp, rank)
            assert all(len(group) == getattr(mesh, axis).size() for axis in AXES for group in mesh._lines(axis))
            assert len(set(made)) == len(made), "two axes over the same ranks share a group"
            assert tuple(range(size)) not in made, "all ranks have a group already"
            assert mesh.sizes == {"pp": pp, "dp": size // (tp * pp * ep * cp), "ep": ep, "cp": cp, "tp": tp}
            assert [mesh.place[axis] for axis in AXES] == [getattr(mesh, axis).rank() for axis in AXES]
            orders.append(made)
        assert all(order == orders[0] for order in orders), "ranks that make groups in another order hang"


def test_without_tags_what_may_overtake_has_a_connection_of_its_own(faked):
    mesh, _ = faked(2, 8, tags=False)(tp=2, pp=4)
    assert str(mesh) == "tp 2 x pp 4"
    kinds = list(itertools.product(("forward", "backward"), ((0, 1), (1, 0))))
    channels = [mesh.channel(kind, *way) for kind, way in kinds]
    assert len({id(channel) for channel in [*channels, mesh.pp]}) == 5
    assert all(channel.ranks == mesh.pp.ranks == [0, 2, 4, 6] for channel in channels)
    assert mesh.channel("forward", 3, 0) is mesh.channel("forward", 1, 0)  # the way back of interleaved chunks
    # Every neighbour is met in the order of the stages, so that no two wait for each other crosswise.
    assert faked.greetings == 4 * [("from", 0), ("to", 2)]
    faked(0, 8, tags=False)(tp=2, pp=4)
    assert faked.greetings == 4 * [("to", 1), ("from", 3)]
    assert faked(0, 8, tags=False)(tp=8)[0].channels == {}
    mesh, _ = faked(2, 8)(tp=2, pp=4)
    assert not faked.greetings
    assert all(mesh.channel(kind, *way) is mesh.pp for kind, way in kinds)


REFUSALS = [
    ((8, 2, 2, 1, 1, 4), "tp 2 x pp 2 x ep 1 x dp 4 = 16, but there are 8 ranks: start 16, or leave dp out"),
    ((8, 0, 2, 1, 1, None), "tp must be at least 1, not 0"),
    ((8, 2, 1, 1, 3, None), "tp 2 x pp 1 x ep 1 x cp 3 = 6 does not divide the 8 ranks: start a multiple of 6, or"),
    ((8, 1, 2, 1, 1, "2"), "dp must be an integer, not '2'"),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSALS, ids=lambda each: str(each)[:20])
def test_refusals(faked, sizes, message):
    size, *degrees = sizes
    for make in (
        lambda: mesh_sizes(*sizes),
        lambda: faked(0, size)(**dict(zip(("tp", "pp", "ep", "cp", "dp"), degrees, strict=True))),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            make()


def test_sizes_without_ranks():
    assert list(mesh_sizes(8, tp=2).items()) == [("pp", 1), ("dp", 4), ("ep", 1), ("cp", 1), ("tp", 2)]
    with pytest.raises(UserError, match="no process group"):
        Mesh()
