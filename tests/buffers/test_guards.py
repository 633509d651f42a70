"""Refusals when a module is wrapped, on every rank and with names, and groups of only some ranks."""

import re
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

from cs336_systems import comm
from cs336_systems.buffers import replicas
from cs336_systems.comm import agree, all_reduce, subgroup
from cs336_systems.ddp import BucketedDDP, NaiveDDP
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.zero import WRAPPERS as BY_NAME
from tests.support import ranks
from tests.support.fault_cases import MODES, Case, Net, compare, drive, oracle, start, steps

# What rank 1 does to its module, and what every rank says that rank 0 and rank 1 have.
DIFFERENCES = (
    (lambda m: setattr(m, "last", nn.Linear(5, 7)), "last.weight (6, 5) ", "last.weight (7, 5) "),
    (lambda m: m.add_module("more", nn.Linear(2, 2)), "buffer calls", "parameter more.weight (2, 2) "),
    (lambda m: m._modules.update(shared=m._modules.pop("shared")), "shared.weight (5, 5) ", "deep.0.weight (5, 5) "),
    (lambda m: m.norm.bfloat16(), "norm.weight (5,) torch.float64", "norm.weight (5,) torch.bfloat16"),
    (lambda m: m.norm.bias.requires_grad_(False), "norm.bias (5,) torch.float64 trainable", "torch.float64 frozen"),
    (lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(11, 6, dtype=torch.float64))),
     "head.weight (11, 6) torch.float64 trainable tied to", "head.weight (11, 6)"),
    (lambda m: setattr(m, "calls", torch.zeros(4, dtype=torch.int64)), "buffer calls (3,)", "buffer calls (4,)"),
)  # fmt: skip
WRAPPERS = {kind.__name__: kind for kind in (*BY_NAME.values(), FSDP)}


def modules_that_differ_case(group) -> None:
    """Every rank raises by itself, with both versions: one that learned of it by waiting would raise CommError."""
    for change, mine, theirs in DIFFERENCES:
        for wrapper in WRAPPERS.values():
            module = Net()
            if group.rank() == 1:
                change(module)
            with pytest.raises(UserError, match="the ranks' modules differ: rank") as error:
                wrapper(module)
            before, after = str(error.value).split(", rank 1 has ")
            assert mine in before.split("rank 0 has ")[1]
            assert theirs in after


def replicas_compared_on_demand_case(group) -> None:
    """What nobody has counted: rank 1 writes through `.data`, or to a buffer."""
    for wrapper in WRAPPERS.values():
        model = wrapper(Net())
        model.check_replicas()
        for name, tensor in (("norm.bias", model.module.norm.bias), ("calls", model.module.calls)):
            tensor.data.fill_(7 if group.rank() == 1 else 0)
            with pytest.raises(UserError, match=f"the ranks' weights differ: rank 0 has {name} with hash"):
                model.check_replicas()
            tensor.data.fill_(0)
        model.check_replicas()


def one_wrapper_each_case(group) -> None:
    """A module wrapped anew, or an encoder in two wrappers: the later one works, the earlier one says so."""
    for name, wrapper in WRAPPERS.items():
        encoder = nn.Linear(3, 3)
        earlier = BucketedDDP(nn.Sequential(encoder, nn.Linear(3, 2)))
        later = wrapper(nn.Sequential(encoder, nn.Linear(3, 4)))
        for use in (lambda: earlier(torch.ones(1, 3)), earlier.finish_gradient_synchronization):  # noqa: B023
            with pytest.raises(UserError, match=f"0.weight has been wrapped by another {name} since"):
                use()
        (later(torch.ones(1, 3)) * (group.rank() + 1)).sum().backward()
        later.finish_gradient_synchronization()
        assert later.module[1].bias.grad.tolist() == [1.5] * 4
        if name == "FSDP":
            with pytest.raises(UserError, match=r"0\.weight is sharded by another FSDP already"):
                NaiveDDP(later.module)
    shared, head = nn.Linear(3, 3), nn.Linear(3, 2)
    first = NaiveDDP(shared)
    second = BucketedDDP(nn.Sequential(shared, head), ignored=list(shared.parameters()))
    (second(torch.ones(1, 3)) * (group.rank() + 1)).sum().backward()
    for model in (first, second):
        model.finish_gradient_synchronization()
    assert head.bias.grad.tolist() == [1.5] * 2
    first.check_replicas()


def group_without_this_rank_case(group) -> None:
    alone = torch.distributed.new_group([0])
    module = Net()
    with pytest.raises(UserError, match="is not a process group"):
        BucketedDDP(module, group=torch.ones(2))
    for make in (partial(BucketedDDP, module), partial(ShardedOptimizer, module.parameters(), torch.optim.SGD)):
        if group.rank() == 1:
            with pytest.raises(UserError, match="is not a process group that this rank is in"):
                make(group=alone)


class Arrived:
    """In place of a CUDA event."""

    def synchronize(self) -> None:
        pass


def answer_of_a_gpu_case(group) -> None:
    """A GPU's answer is read one synchronisation later; a rank that only wrote the same values is asked once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(replicas, "_to_host", lambda number: (number.clone(), Arrived()))
        run = start(PLAIN, "bucketed", group)
        for step in range(4):
            if step == 1 and group.rank() == 1:
                with torch.no_grad():
                    run.module.scale.mul_(1)
            if step == 2 and group.rank() == 1:
                run.optimizer.param_groups[0]["lr"] = 0.5
            run.backward(step)
            run.model.finish_gradient_synchronization()
            run.step()
        run.backward(4)
        with pytest.raises(UserError, match=r"rank 0 has AdamW, group 0, lr = 0.05, rank 1 has AdamW, group 0, lr = 0"):
            run.model.finish_gradient_synchronization()


LAZY = (
    (BucketedDDP, lambda: nn.LazyLinear(4), "weight"),
    (FSDP, lambda: nn.Linear(3, 4, device="meta"), "weight"),
    (NaiveDDP, lambda: nn.LazyBatchNorm1d(affine=False), "running_mean"),
)


def parameters_without_values_case(group) -> None:
    for wrapper, layer, name in LAZY:
        with pytest.raises(UserError, match=f"1.{name} has no values yet: materialise the module before it is wrapped"):
            wrapper(nn.Sequential(nn.Linear(2, 3), layer()))


PLAIN = Case(steps())


def group_of_some_ranks_case(group) -> None:
    """Ranks 1 and 2 of 3 train by themselves; the first of them has seed 0."""
    members = subgroup([1, 2])
    assert (members is None) == (group.rank() == 0)
    want = oracle(PLAIN, 2)
    for mode in MODES if members else ():
        run = start(PLAIN, mode, members)
        drive(run, PLAIN.program)
        compare(members, PLAIN, run, mode, want)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    "case", [it for name, it in globals().items() if name.endswith("_case")], ids=lambda it: it.__name__
)
def test_right_or_refused_on_every_rank(case):
    ranks.run(case, 3 if case is group_of_some_ranks_case else 2)


def no_group(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    for make in (BucketedDDP, FSDP, lambda module: ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)):
        with pytest.raises(Exception, match="no process group: ") as error:
            make(Net())
        said.append(type(error.value).__name__)
    return said


def test_wrapping_without_a_process_group_says_how_to_start_one():
    assert ranks.run_alone(no_group, 1) == [["UserError"] * 3]


def other_wrapper(group) -> None:
    (FSDP if group.rank() == 1 else NaiveDDP)(Net())


def other_size(group) -> None:
    BucketedDDP(Net(), bucket_size_mb=0.001 if group.rank() == 1 else 25.0)


def values_missing(group) -> None:
    wrapper, layer, _ = LAZY[0]
    wrapper(nn.Sequential(nn.Linear(2, 3), layer() if group.rank() == 1 else nn.Linear(3, 4)))


def crossing(group, wrapper: str, finish: bool) -> None:
    """Of two equal modules rank 1 uses the second first, or finishes it first."""
    first, second = (WRAPPERS[wrapper](nn.Linear(3, 3)) for _ in range(2))
    pair = (first, second) if group.rank() == 0 else (second, first)
    for model in (first, second) if finish else pair:
        model(torch.ones(1, 3)).sum().backward()
    for model in pair if finish else (first, second):
        model.finish_gradient_synchronization()


def group_that_fails(group, fails: bool) -> None:
    """Rank 1 waits for rank 2, which fails, or looks on while rank 1 gives up after the timeout of all ranks."""
    comm.agreement.EXPLAIN_SECONDS = 0.3
    members = subgroup([1, 2])
    agree("connected", "", group, counted=False)
    if group.rank() == 1:
        all_reduce(torch.zeros(3), members, "alone").wait()
    elif fails and group.rank() == 2:
        raise KeyError("no such column")
    elif group.rank() == 2:
        assert not comm.store.wait_for(group.get_group_store(), ["reason/1"], timedelta(seconds=40))


def absent(group) -> None:
    """Rank 1 fails where the others make a group with it."""
    comm.agreement.EXPLAIN_SECONDS = 0.3
    if group.rank() == 1:
        raise KeyError("no such column")
    subgroup([0, 1])


def group_that_differs(group) -> None:
    """Errors call ranks by their number among all."""
    if members := subgroup([1, 2]):
        NaiveDDP(nn.Linear(2, group.rank()), group=members)


WAITED = r"rank 1 waited in all-reduce no\. 1 \(alone, 12 bytes\); rank 2 .*"
MIXED = "of wrapper 2"
DIFFER = r"^UserError: .*rank 1 has parameter weight \(1, 2\) .*, rank 2 has parameter weight \(2, 2\) "


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("case", "arguments", "words"),
    [
        (other_wrapper, {}, ["^UserError: .*rank 1 has wrapper FSDP"] * 2),
        (other_size, {}, ["^UserError: .*buckets of 0.001 MB"] * 2),
        (values_missing, {}, [r"1\.weight has no values yet: materialise the module before it is wrapped"] * 2),
        (crossing, {"wrapper": "OverlappedDDP", "finish": False}, [MIXED] * 2),
        (crossing, {"wrapper": "OverlappedDDP", "finish": True}, [MIXED] * 2),
        (crossing, {"wrapper": "FSDP", "finish": False}, [MIXED] * 2),
        (group_that_fails, {"fails": True}, ["", f"{WAITED}failed: KeyError: 'no such column'", ""]),
        (group_that_fails, {"fails": False}, ["", f"{WAITED}ended after 0 collectives", "^CommError: "]),
        (absent, {}, ["^CommError: rank 0 was joining a group of ranks 0, 1; rank 1 failed: KeyError: 'no such", ""]),
        (group_that_differs, {}, ["", DIFFER, DIFFER]),
    ],
)
def test_the_cause_is_named_on_every_rank(case, arguments, words):
    errors = ranks.run_failing(case, len(words), **arguments)
    for error, said in zip(errors, words, strict=True):
        assert not said or re.search(said, ": ".join(error), re.DOTALL), error
