"""The four data-parallel wrappers: equal to one process, in the order that their lesson claims, on any parameter."""

import pytest
import torch

from cs336_systems.comm import record
from cs336_systems.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from tests import ranks
from tests.parallel_cases import loss_of, make, naive_mean, one_process, spread
from tests.tolerances import bound

WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "bucketed-small": lambda module: BucketedDDP(module, bucket_size_mb=0.0005),
    "bucketed-one": lambda module: BucketedDDP(module, bucket_size_mb=None),
}
every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)
# One reduction adds `world size` numbers and divides; a step of AdamW amplifies by at most a constant; the longest sum of
# the model and its loss has 48 terms.
TOLERANCE = bound(torch.float64, stages=64, longest_sum=48)


def gradients_case(group, wrapper: str) -> None:
    model = WRAPPERS[wrapper](make(seed=group.rank()))
    loss_of(model, 0, group.rank(), group.size()).backward()
    model.finish_gradient_synchronization()
    want = naive_mean(make(seed=0), 0, group.size())
    got = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        if group.size() <= 2:
            assert torch.equal(gradient, want[name]), name
        torch.testing.assert_close(gradient, want[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert spread(group, list(got.values())) == 0


@every_wrapper
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_are_the_mean_over_ranks(wrapper, world_size):
    ranks.run(gradients_case, world_size, wrapper=wrapper)
