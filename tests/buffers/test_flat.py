"""Layout of tensors in a flat buffer, its slices for ranks, and grouping of parameters into buckets; no processes."""

import pytest
import torch

from cs336_systems.buffers.flat import FlatLayout, FlatPiece, plan_buckets

SIZES = [(5,), (2,), (), (3, 4), (0,), (7,)]


def tensors() -> list[torch.Tensor]:
    return [torch.randn(size) for size in SIZES]


def test_layouts_drawn_in_the_docstring():
    two = [torch.empty(5), torch.empty(2)]
    assert FlatLayout.pack(two, 2).cuts == (0, 4, 8)
    assert FlatLayout.pack(two, 2).pieces(0) == [FlatPiece(0, 0, 4)]
    assert FlatLayout.pack(two, 2).pieces(1) == [FlatPiece(0, 4, 5), FlatPiece(1, 0, 2)]
    assert FlatLayout.whole(two, 2).cuts == (0, 5, 7)
    assert FlatLayout.whole(two, 2).pieces(1) == [FlatPiece(1, 0, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 40])
@pytest.mark.parametrize("pack", [FlatLayout.pack, FlatLayout.whole])
def test_every_element_has_one_owner(pack, ranks):
    given = tensors()
    layout = pack(given, ranks)
    flat = torch.full((layout.numel,), torch.nan)
    for index, tensor in enumerate(given):
        layout.view(flat, index).copy_(tensor)
        assert torch.equal(layout.view(flat, index), tensor)
    pieces = [piece for rank in range(ranks) for piece in layout.pieces(rank)]
    for index, tensor in enumerate(given):
        parts = sorted((piece.start, piece.stop) for piece in pieces if piece.index == index)
        covered = [i for start, stop in parts for i in range(start, stop)]
        assert covered == list(range(tensor.numel()))
    for rank in range(ranks):
        mine = torch.cat([given[p.index].flatten()[p.start : p.stop] for p in layout.pieces(rank)] or [torch.empty(0)])
        assert torch.equal(layout.shard(flat, rank)[: len(mine)], mine)


def test_equal_slices_are_a_multiple_of_the_granule():
    assert FlatLayout.pack([torch.empty(5, 3)], 2, granule=3).cuts == (0, 9, 18)  # three rows, and two


def test_the_largest_tensor_is_dealt_first():
    layout = FlatLayout.whole([torch.empty(n) for n in (1, 9, 4, 6)], 2)
    assert [sum(p.stop - p.start for p in layout.pieces(rank)) for rank in (0, 1)] == [10, 10]


FLOAT, DOUBLE, ANY = torch.float32, torch.float64, float("inf")


@pytest.mark.parametrize(
    ("given", "cap", "plan"),
    [  # elements of parameters, and their dtypes
        ([(10, FLOAT), (20, FLOAT), (30, FLOAT), (40, FLOAT)], 280, [[40, 30], [20, 10]]),
        ([(10, FLOAT), (20, FLOAT), (30, FLOAT), (40, FLOAT)], 0, [[40], [30], [20], [10]]),
        ([(10, FLOAT), (20, FLOAT), (30, FLOAT), (40, FLOAT)], ANY, [[40, 30, 20, 10]]),
        ([(1, FLOAT), (100, FLOAT), (1, FLOAT)], 40, [[1], [100], [1]]),
        ([(1, FLOAT), (2, DOUBLE), (3, FLOAT), (4, DOUBLE)], ANY, [[4, 2], [3, 1]]),
        ([], 0, []),
    ],
)
def test_buckets_are_filled_from_the_last_parameter_up_to_the_cap(given, cap, plan):
    """A larger parameter has a bucket of its own; a bucket has one dtype."""
    found = plan_buckets([torch.empty(n, dtype=dtype) for n, dtype in given], cap)
    assert [[len(p) for p in bucket] for bucket in found] == plan
