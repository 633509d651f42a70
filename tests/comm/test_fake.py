"""One rank alone in a group whose other ranks do not exist."""

import pytest
import torch
import torch.distributed as dist

from cs336_systems.comm import (
    Mesh,
    agree,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    fake_ranks,
    is_fake,
    record,
    reduce_scatter,
)
from cs336_systems.ddp import BucketedDDP
from cs336_systems.errors import UserError


def test_a_rank_of_many_meets_nobody_and_records_what_it_would_send():
    flat = torch.empty(512, device="meta")
    with fake_ranks(200, 256) as world, record() as events:
        assert is_fake(world)
        assert (world.rank(), world.size()) == (200, 256)
        assert agree("topic", "mine", world) == ["mine"] * 256
        all_reduce(flat, world, "label").wait()
        with record() as inner:
            for verb in (reduce_scatter, all_gather):
                verb(flat, world, "label").wait()
            broadcast(flat, 0, world, "label").wait()
        all_to_all(flat, flat, [2] * 256, [2] * 256, world, "label").wait()
        mesh = Mesh(tp=8, pp=4)
        assert [mesh.place[axis] for axis in ("pp", "dp", "tp")] == [3, 1, 0]
        assert (mesh.dp.size(), is_fake(mesh.dp)) == (8, True)
    assert inner == events[1:4]
    sent = {"all-reduce": 4080, "reduce-scatter": 2040, "all-gather": 2040, "broadcast": 2040, "all-to-all": 2040}
    assert [(event.verb, event.numel, event.nbytes, event.bytes_sent) for event in events] == [
        (verb, 512, 2048, count) for verb, count in sent.items()
    ]
    assert {(event.label, event.ranks) for event in events} == {("label", 256)}
    assert not dist.is_initialized()


def test_wrappers_take_parameters_without_values_only_where_nobody_is():
    with fake_ranks(0, 2):
        BucketedDDP(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(UserError, match="no process group"):
        BucketedDDP(torch.nn.Linear(2, 2, device="meta"))


def test_ranks_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="rank 2 does not exist among 2 ranks"), fake_ranks(2, 2):
        pass
    with fake_ranks(0, 2), pytest.raises(UserError, match="is running"), fake_ranks(0, 2):
        pass
