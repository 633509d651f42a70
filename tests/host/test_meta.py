"""Operators on the meta device have the same results when these are looked up as when torch computes them."""

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.host.observe import Observer


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


OPERATORS = {
    "broadcast": lambda: meta(2, 1, 4) + meta(3, 1),
    "promoted": lambda: meta(2, dtype=torch.bfloat16) * meta(2),
    "integer times integer": lambda: meta(2, dtype=torch.int64) * 2,
    "integer times number": lambda: meta(2, dtype=torch.int64) * 2.0,
    "transposed": lambda: meta(3, 4).t().exp(),
    "several results": lambda: torch.native_layer_norm(meta(2, 4), (4,), meta(4), meta(4), 1e-5),
    "softmax in another precision": lambda: torch.softmax(meta(2, 4, dtype=torch.bfloat16), -1, dtype=torch.float32),
    "expanded": lambda: meta(1, 4).expand(3, 4).clone(),
    "product": lambda: meta(2, 3, 4) @ meta(4, 5),
    "attention": lambda: F.scaled_dot_product_attention(*(meta(1, 2, 3, 4) for _ in range(3))),
    "loss": lambda: F.cross_entropy(meta(3, 4), meta(3, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_looked_up_results_are_torchs(name):
    def kinds(results) -> list:
        results = results if isinstance(results, tuple) else (results,)
        return [(each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes()) for each in results]

    want = kinds(OPERATORS[name]())
    with Observer():
        assert [kinds(OPERATORS[name]()) for _ in range(3)] == [want] * 3


def test_results_share_the_storage_that_they_should():
    x, other, out = meta(4), meta(4), meta(4)
    with Observer():
        for _ in range(3):
            assert x.lerp_(other, 0.5) is x
            assert torch.add(x, other, out=out) is out
            assert x.view(2, 2).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (x + other).untyped_storage()._cdata not in {
                x.untyped_storage()._cdata,
                other.untyped_storage()._cdata,
            }
            assert len(x.clone().resize_(6)) == 6


def test_numbers_and_the_default_dtype_matter():
    with Observer():
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                assert (meta(2, dtype=torch.int64) / 2).dtype == dtype
            finally:
                torch.set_default_dtype(torch.float32)
        for value in (1.0, 2.0):
            assert (torch.full((1,), value) + 1).item() == value + 1
