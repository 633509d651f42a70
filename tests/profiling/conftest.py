"""Profiles of two real ranks, made once for all tests of this folder that a worker runs."""

from pathlib import Path

import pytest
import torch
from torch import nn

from cs336_systems.comm import all_reduce, reduce_scatter, subgroup
from cs336_systems.ddp import BucketedDDP, FlatDDP, NaiveDDP
from cs336_systems.profiling.capture import Capture
from tests.support import ranks


class Synchronous(nn.Module):
    """Reduces every gradient inside its hook and waits for it there: never an overlap."""

    def __init__(self, module: nn.Module, group) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: all_reduce(p.grad, group, "in a hook").wait())

    def forward(self, x):
        return self.module(x)

    def finish_gradient_synchronization(self) -> None:
        pass


KINDS = {
    "naive": lambda model, group: NaiveDDP(model, group=group),
    "flat": lambda model, group: FlatDDP(model, group=group),
    "synchronous": Synchronous,
    "bucketed": lambda model, group: BucketedDDP(model, 0.01, group=group),
}


def profile_all(group, folder: str) -> None:
    """Profiles of every kind of wrapper, and of reductions in two groups at once, in folders of their names."""
    for kind in KINDS:
        torch.manual_seed(0)
        wrapped = KINDS[kind](nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)]), group)
        with Capture(Path(folder, kind), group, wrapped, None, warmup=1, steps=2) as capture:
            for _ in range(capture.total):
                with capture.step():
                    with capture.phase("forward"):
                        loss = wrapped(torch.ones(8, 48)).square().mean()
                    with capture.phase("backward"):
                        loss.backward()
                    with capture.phase("synchronise"):
                        wrapped.finish_gradient_synchronization()
                    wrapped.zero_grad()
    pair, big, small = subgroup([0, 1]), torch.ones(300_000), torch.ones(8)
    with Capture(Path(folder, "groups"), group) as capture, capture.step():
        works = [all_reduce(big, group, f"big {i}") for i in range(3)]
        works.append(all_reduce(small, pair, "small"))
        works += [reduce_scatter(torch.ones(1024), group, f"shard {i}") for i in range(3)]
        for work in reversed(works):
            work.wait()


@pytest.fixture(scope="session")
def profiles(tmp_path_factory) -> Path:
    """The folder in which two ranks leave their profiles."""
    folder = tmp_path_factory.mktemp("profiles")
    ranks.run_on_gloo(profile_all, 2, folder=str(folder))
    return folder
