"""Layers that are split over ranks, over shared memory, to the last bit in float32 and bfloat16: against one process
that computes each rank's product, of the same shape, and adds these terms in the order of the ranks.

One process that multiplies the whole matrix need not have the same bits, since a product of another shape may be added
up in another order: those tests have derived bounds (tensor_parallel/test_plan.py). For pipelines, test_layouts.py
compares the bits of a whole step.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.comm import pairs
from cs336_systems.comm.shared_memory import transport
from cs336_systems.expert_parallel import AllToAllDispatcher
from cs336_systems.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, gather_input, my_part
from tests.comm.test_shared_memory import in_order
from tests.support import ranks

BATCH, SEQ, D_MODEL, D_FF = 2, 12, 40, 96


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def require_equal_bits(compared: dict[str, tuple[Tensor, Tensor]]) -> None:
    differ = [name for name, (got, want) in compared.items() if not torch.equal(got, want)]
    assert not differ, differ


def matrices(dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    up, down = nn.Linear(D_MODEL, D_FF, bias=False), nn.Linear(D_FF, D_MODEL, bias=False)
    return up.to(dtype), down.to(dtype)


def terms_of_one_process(x: Tensor, slope: Tensor, size: int) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """y, its gradient with respect to x, and those of the parts of both weights, one rank's product after the other."""
    up, down = matrices(x.dtype)
    outputs, inputs, ups, downs = [], [], [], []
    for first, second in zip(up.weight.chunk(size, 0), down.weight.chunk(size, 1), strict=True):
        mine = [each.detach().clone().requires_grad_() for each in (x, first, second)]
        outputs.append(F.linear(F.gelu(F.linear(mine[0], mine[1])), mine[2].contiguous()))
        gradients = torch.autograd.grad(outputs[-1], mine, slope)
        for kept, gradient in zip((inputs, ups, downs), gradients, strict=True):
            kept.append(gradient)
    return in_order([each.detach() for each in outputs], "sum"), in_order(inputs, "sum"), ups, downs


class SplitMatrices(nn.Module):
    """A feed-forward whose first matrix is split by its outputs and the second by its inputs."""

    def __init__(self, dtype: torch.dtype, group, sequence: bool) -> None:
        super().__init__()
        up, down = matrices(dtype)
        self.up, self.down = ColumnParallelLinear(up, group), RowParallelLinear(down, group, sequence)
        if sequence:
            gather_input(self, group, "x", again=True)
        else:
            self.register_forward_pre_hook(lambda module, args: (pairs.copy(args[0], group, "x"),))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def matrices_case(group, dtype: str) -> None:
    kind, size, me = getattr(torch, dtype), group.size(), group.rank()
    x, slope = (drawn(seed, BATCH, SEQ, D_MODEL, dtype=kind) for seed in (1, 2))
    y, x_gradient, ups, downs = terms_of_one_process(x, slope, size)
    assert transport.on
    for sequence in (False, True):

        def part(whole: Tensor, sequence: bool = sequence) -> Tensor:
            return my_part(whole, 1, SEQ, group) if sequence else whole

        layer, mine = SplitMatrices(kind, group, sequence), part(x).clone().requires_grad_()
        got = layer(mine)
        got.backward(part(slope))
        require_equal_bits(
            {
                "y": (got, part(y)),
                "x": (mine.grad, part(x_gradient)),
                "up": (layer.up.weight.grad, ups[me]),
                "down": (layer.down.weight.grad, downs[me]),
            }
        )


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_matrices_have_the_bits_of_their_products_added_in_order(dtype, world):
    ranks.run(matrices_case, world, dtype=dtype)


def experts_of(weights: list[Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Apply an expert to its rows (rows d_model), which are sorted; counts (experts,)."""

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([F.gelu(part @ weight) for part, weight in zip(parts, weights, strict=True)])

    return experts


def experts_case(group, dtype: str) -> None:
    """Two experts a rank; rank r has (r + e) % 4 + 1 rows for expert e."""
    kind, size, me, local = getattr(torch, dtype), group.size(), group.rank(), 2
    counts = torch.tensor([[(rank + expert) % 4 + 1 for expert in range(local * size)] for rank in range(size)])
    given = [drawn(rank, int(counts[rank].sum()), D_MODEL, dtype=kind).requires_grad_() for rank in range(size)]
    slopes = [drawn(100 + rank, len(rows), D_MODEL, dtype=kind) for rank, rows in enumerate(given)]
    weights = [drawn(200 + e, D_MODEL, D_MODEL, dtype=kind).requires_grad_() for e in range(local * size)]
    # One process: an expert's rows are those of the first rank, then those of the second.
    by_expert = [[rows.split(counts[rank].tolist())[e] for rank, rows in enumerate(given)] for e in range(local * size)]
    whole = experts_of(weights)(torch.cat([torch.cat(each) for each in by_expert]), counts.sum(0))
    results = zip(whole.split(counts.sum(0).tolist()), by_expert, strict=True)
    places = [result.split([len(part) for part in parts]) for result, parts in results]  # by expert, then by rank
    wanted = [torch.cat([each[rank] for each in places]) for rank in range(size)]
    gradients = torch.autograd.grad(wanted, [*given, *weights], slopes)
    mine = given[me].detach().clone().requires_grad_()
    own = [each.detach().clone().requires_grad_() for each in weights[local * me :][:local]]
    assert transport.on
    got = AllToAllDispatcher(group, local).dispatch(mine, counts[me])(experts_of(own))
    got.backward(slopes[me])
    found = {f"expert {i}": (each.grad, gradients[size + local * me + i]) for i, each in enumerate(own)}
    require_equal_bits({"y": (got, wanted[me]), "rows": (mine.grad, gradients[me]), **found})


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_on_their_ranks_have_the_bits_of_one_process(dtype, world):
    ranks.run(experts_case, world, dtype=dtype)
