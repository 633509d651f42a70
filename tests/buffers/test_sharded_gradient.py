"""A sharded gradient's stand-in: its norms are the whole gradient's on every rank, scaling reaches every piece, it has
no memory, and any other use ends in an error that names it."""

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.buffers.bucket import SHARDED
from cs336_systems.buffers.sharded_gradient import ShardedGradient
from cs336_systems.comm import record
from cs336_systems.ddp import BucketedDDP
from cs336_systems.errors import UserError
from tests.support import ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)


class Some(nn.Module):
    """A weight of five elements (two ranks have two and three), one of one, and one of none, in each dtype."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((5,), (), (0, 2))
        self.weights = nn.ParameterList(torch.ones(shape, dtype=dtype) for dtype in DTYPES for shape in shapes)

    def forward(self) -> Tensor:
        factors = (torch.arange(1, p.numel() + 1).view(p.shape) for p in self.weights)
        return sum((p * factor).real.double().sum() for p, factor in zip(self.weights, factors, strict=True))


def synchronised() -> tuple[BucketedDDP, Some]:
    """A wrapped module with gradients at rest, and one process's."""
    model, alone = BucketedDDP(Some(), gradients=SHARDED), Some()
    model().backward()
    alone().backward()
    model.finish_gradient_synchronization()
    return model, alone


def pairs(model: BucketedDDP, alone: Some) -> list[tuple[Tensor, Tensor]]:
    found = [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    assert all(isinstance(ours, ShardedGradient) for ours, _ in found)
    return found


def norm_case(group) -> None:
    model, alone = synchronised()
    found = pairs(model, alone)
    for order in (1.0, 2.0, 3.0, math.inf):
        for ours, want in found:
            assert (ours.shape, ours.dtype, ours.untyped_storage().nbytes()) == (want.shape, want.dtype, 0)
            if want.numel():  # torch refuses the maximum of nothing
                torch.testing.assert_close(torch.linalg.vector_norm(ours, order), torch.linalg.vector_norm(want, order))
        mixed = [(ours if i % 2 else want, want) for i, (ours, want) in enumerate(found) if want.numel()]
        norms = torch._foreach_norm([ours for ours, _ in mixed], order)
        torch.testing.assert_close(list(norms), list(torch._foreach_norm([want for _, want in mixed], order)))
    with record() as events:  # one for each dtype, not for each parameter
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.numel()], 1.0)
    assert [each.label for each in events] == ["gradient norm"] * len(DTYPES)
    found = pairs(*synchronised())
    wide = torch.linalg.vector_norm(found[6][0], dtype=torch.float64)
    torch.testing.assert_close(wide, torch.tensor(55.0, dtype=torch.float64).sqrt())


def scale_case(group) -> None:
    model, alone = synchronised()
    found = pairs(model, alone)
    for ours, want in found:
        for each in (ours, want):
            each.mul_(3).div_(torch.tensor(2.0))
            each.detach().mul_(5)
    torch._foreach_mul_([ours for ours, _ in found], torch.tensor(0.5))
    torch._foreach_mul_([want for _, want in found], torch.tensor(0.5))
    for ours, want in found:
        if not want.is_complex():
            assert ours.clamp_(-9, 9) is ours
            want.clamp_(-9, 9)
    kept = {each.parameter: each.gradient for each in model.kept_gradients()}
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        if q.numel() == 5:
            assert torch.equal(kept[p], q.grad[:2] if group.rank() == 0 else q.grad[2:])
    torch._foreach_zero_([ours for ours, _ in found])
    assert not any(piece.any() for piece in kept.values())


REFUSED = {
    "aten.add_.Tensor": lambda g: g.add_(torch.ones(5, dtype=g.dtype)),
    "aten.mul.Tensor": lambda g: g * 2,
    "aten.mul_.Tensor": lambda g: g.mul_(torch.ones(5, dtype=g.dtype)),
    "aten.clone.default": lambda g: g.clone(),
    "aten.linalg_vector_norm.default": lambda g: g.norm(0),
    "aten._to_copy.default": lambda g: g.to(torch.float16),
    "aten.unbind.int": list,
    "aten.copy_.default": lambda g: torch.zeros(5, dtype=g.dtype).copy_(g),
}


def refusal_case(group) -> None:
    model, _ = synchronised()
    gradient = model.module.weights[0].grad
    assert "weights.0" in repr(gradient)
    for operator, use in REFUSED.items():
        with pytest.raises(UserError, match="rests sharded over 2 ranks") as error:
            use(gradient)
        assert str(error.value).startswith(f"{operator} of weights.0.grad")
    model().backward()  # the first of its buckets are reduced before this ends
    pending = [p.grad for p in model.parameters() if isinstance(p.grad, ShardedGradient)]
    assert pending
    with pytest.raises(UserError, match=r"grad was used before finish_gradient_synchronization\(\)"):
        pending[0].norm()
    model.finish_gradient_synchronization()


def free_case(group) -> None:
    """Nothing keeps the wrapper, its shards or its gradients once the model is gone."""
    model, _ = synchronised()
    watched = [weakref.ref(each) for each in (model, *model.parameters(), *model.buckets)]
    watched += [weakref.ref(bucket.shard) for bucket in model.buckets]
    del model
    gc.collect()
    assert not any(each() is not None for each in watched)


@pytest.mark.parametrize("case", [norm_case, scale_case, refusal_case, free_case], ids=lambda case: case.__name__)
def test_a_gradient_that_rests_sharded(case):
    ranks.run(case, 2)
