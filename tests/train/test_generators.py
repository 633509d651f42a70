"""Random number generators go on from a checkpoint with the same bits, each rank's own."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from cs336_systems.checkpoint.disk import RefusedError
from cs336_systems.checkpoint.folder import open_checkpoint, save
from cs336_systems.checkpoint.tensors import RANDOM, Box, Piece
from cs336_systems.comm import default_group, distributed
from cs336_systems.train.run_state import random_pieces, restore_random, seed_generators
from tests.support import ranks

CPU = torch.device("cpu")


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def draw() -> list[float]:
    """Numbers of all three. A normal number of Python and numpy is one of a pair, of which they keep the other."""
    return [*torch.rand(3).tolist(), random.gauss(0, 1), random.random(), *np.random.normal(size=3), np.random.rand()]


def continued_case(group, folder: str) -> list[list[float]]:
    return [continued(group, folder, odd) for odd in (False, True)]


def continued(group, folder: str, odd: bool) -> list[float]:
    """Numbers that a rank draws after a checkpoint, and again after it was restored. `odd`: half a pair is
    kept at the time."""
    rank = group.rank()
    seed(rank)
    for _ in range(700):  # on to the second block of every generator
        draw()
    if odd:
        random.gauss(0, 1), np.random.normal()
    path = save(Path(folder), int(odd), *random_pieces(rank, CPU), {}, group)
    drawn = draw()
    seed(7)
    draw()
    checkpoint = open_checkpoint(path, group)
    restore_random(checkpoint, rank, CPU)
    assert draw() == drawn
    restore_random(checkpoint, 1 - rank, CPU)
    assert draw() != drawn
    seed(3)
    own = draw()
    seed(3)
    restore_random(checkpoint, 2, CPU)  # a rank without a saved state keeps its own
    assert draw() == own
    return drawn


def test_each_rank_goes_on_with_the_same_bits(tmp_path):
    drawn = ranks.run(continued_case, 2, folder=str(tmp_path))
    assert len({tuple(each) for rank in drawn for each in rank}) == 4


def test_every_rank_of_every_seed_begins_with_its_own():
    def begun(*place: int) -> tuple[list[float], ...]:
        seed_generators(*place)
        return torch.rand(3).tolist(), [random.random()], np.random.rand(3).tolist()

    first = begun(0, 0)
    others = [begun(0, 1), begun(1, 0), begun(2**32 - 1, 7)]
    assert begun(0, 0) == first
    for kind in zip(first, *others, strict=True):
        assert len({tuple(each) for each in kind}) == 4


@pytest.mark.parametrize(
    ("kind", "spoilt"), [("torch", "cut"), ("python", "huge"), ("numpy", "cut"), ("numpy", "gone")]
)
def test_states_that_cannot_be_are_refused(tmp_path, kind, spoilt):
    def case() -> str:
        pieces, scalars = random_pieces(0, CPU)
        numbers = next(each for each in pieces if each.kind == kind).tensor
        numbers = {"cut": numbers[:-9], "huge": numbers + 2**40, "gone": None}[spoilt]
        kept = [each for each in pieces if each.kind != kind]
        if numbers is not None:
            kept.append(Piece(f"{RANDOM}rank 0", kind, Box.whole(numbers.shape), 0, numbers))
        checkpoint = open_checkpoint(save(tmp_path, 0, kept, scalars, {}, default_group()))
        with pytest.raises(RefusedError) as refused:
            restore_random(checkpoint, 0, CPU)
        return str(refused.value)

    with distributed():
        assert case().startswith("the random number generators of rank 0 cannot be set: ")
