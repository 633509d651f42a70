"""Refusals when a module is wrapped, on every rank and with names, and groups of only some ranks."""

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
from tests.support.fault_cases import MODES, Case, Net, compare, drive, oracle, start
from tests.test_faults_ddp import steps


def wider(module: Net) -> None:
    module.last = nn.Linear(5, 7)


def one_more(module: Net) -> None:
    module.more = nn.Linear(2, 2)


def other_order(module: Net) -> None:
    module._modules["shared"] = module._modules.pop("shared")


def half(module: Net) -> None:
    module.norm.bfloat16()


def frozen(module: Net) -> None:
    module.norm.bias.requires_grad_(False)


def untied(module: Net) -> None:
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())


def longer_buffer(module: Net) -> None:
    module.calls = torch.zeros(4, dtype=torch.int64)


# What rank 1 does to its module, and what every rank says that rank 0 and rank 1 have.
DIFFERENCES = {
    "another shape": (wider, "parameter last.weight (6, 5) ", "parameter last.weight (7, 5) "),
    "one more parameter": (one_more, "buffer calls", "parameter more.weight (2, 2) "),
    "same shapes in another order": (other_order, "shared.weight (5, 5) ", "deep.0.weight (5, 5) "),
    "another dtype": (half, "norm.weight (5,) torch.float64", "norm.weight (5,) torch.bfloat16"),
    "frozen on one rank": (frozen, "norm.bias (5,) torch.float64 trainable", "norm.bias (5,) torch.float64 frozen"),
    "tied on one rank": (untied, "head.weight (11, 6) torch.float64 trainable tied to", "head.weight (11, 6)"),
    "another buffer": (longer_buffer, "buffer calls (3,)", "buffer calls (4,)"),
}
WRAPPERS = {kind.__name__: kind for kind in (*BY_NAME.values(), FSDP)}


def structure_case(group) -> None:
    """Every rank raises by itself: one that learned of it by waiting would raise CommError."""
    for change, mine, theirs in DIFFERENCES.values():
        for wrapper in WRAPPERS.values():
            module = Net()
            if group.rank() == 1:
                change(module)
            with pytest.raises(UserError, match="the ranks' modules differ: rank") as error:
                wrapper(module)
            before, after = str(error.value).split(", rank 1 has ")
            assert mine in before.split("rank 0 has ")[1]
            assert theirs in after


def test_modules_that_differ_are_refused_by_name_with_both_versions():
    ranks.run(structure_case, 2)


def other_wrapper_case(group, small: bool) -> None:
    if small:
        BucketedDDP(Net(), bucket_size_mb=0.001 if group.rank() == 1 else 25.0)
    elif group.rank() == 1:
        FSDP(Net())
    else:
        NaiveDDP(Net())


@pytest.mark.parametrize(("small", "words"), [(False, "rank 1 has wrapper FSDP"), (True, "buckets of 0.001 MB")])
def test_wrappers_that_differ_are_refused_by_name(small, words):
    for error in ranks.run_failing(other_wrapper_case, 2, small=small):
        assert error[0] == "UserError"
        assert words in error[1]


def replicas_case(group) -> None:
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


def test_replicas_are_compared_on_demand():
    ranks.run(replicas_case, 2)


def twice_case(group) -> None:
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


def test_a_module_has_one_wrapper():
    ranks.run(twice_case, 2)


def crossing_case(group, wrapper: str, finish: bool) -> None:
    """Of two equal modules rank 1 uses the second first, or finishes it first."""
    first, second = (WRAPPERS[wrapper](nn.Linear(3, 3)) for _ in range(2))
    pair = (first, second) if group.rank() == 0 else (second, first)
    for model in (first, second) if finish else pair:
        model(torch.ones(1, 3)).sum().backward()
    for model in pair if finish else (first, second):
        model.finish_gradient_synchronization()


@pytest.mark.parametrize(("wrapper", "finish"), [("OverlappedDDP", False), ("FSDP", False), ("OverlappedDDP", True)])
def test_gradients_of_equal_modules_are_not_mixed(wrapper, finish):
    for error in ranks.run_failing(crossing_case, 2, wrapper=wrapper, finish=finish):
        assert "of wrapper 2" in error[1]


def stranger_case(group) -> None:
    alone = torch.distributed.new_group([0])
    module = Net()
    with pytest.raises(UserError, match="is not a process group"):
        BucketedDDP(module, group=torch.ones(2))
    for make in (partial(BucketedDDP, module), partial(ShardedOptimizer, module.parameters(), torch.optim.SGD)):
        if group.rank() == 1:
            with pytest.raises(UserError, match="is not a process group that this rank is in"):
                make(group=alone)


def test_a_group_without_this_rank_is_refused():
    ranks.run(stranger_case, 2)


class Arrived:
    """In place of a CUDA event."""

    def synchronize(self) -> None:
        pass


def later_case(group) -> None:
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


def test_a_gpus_answer_is_read_at_the_next_synchronisation():
    ranks.run(later_case, 2)


def lazy_case(group, wrapper: str, kind: str, on_all: bool) -> None:
    mine = on_all or group.rank() == 1
    layer = LAZY[kind]()
    WRAPPERS[wrapper](nn.Sequential(nn.Linear(2, 3), layer if mine else nn.Linear(3, 4)))


LAZY = {
    "lazy": partial(nn.LazyLinear, 4),
    "meta": partial(nn.Linear, 3, 4, device="meta"),
    "lazy buffers": partial(nn.LazyBatchNorm1d, affine=False),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("on_all", [True, False])
@pytest.mark.parametrize(("wrapper", "kind"), [("BucketedDDP", "lazy"), ("FSDP", "meta"), ("NaiveDDP", "lazy buffers")])
def test_parameters_without_values_are_refused_by_name(wrapper, kind, on_all):
    name = "running_mean" if kind == "lazy buffers" else "weight"
    for error in ranks.run_failing(lazy_case, 2, wrapper=wrapper, kind=kind, on_all=on_all):
        assert f"1.{name} has no values yet: materialise the module before it is wrapped" in error[1]


def no_group_case(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    for make in (BucketedDDP, FSDP, lambda module: ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)):
        with pytest.raises(Exception, match="no process group: ") as error:
            make(Net())
        said.append(type(error.value).__name__)
    return said


def test_wrapping_without_a_process_group_says_how_to_start_one():
    assert ranks.run_alone(no_group_case, 1) == [["UserError"] * 3]


PLAIN = Case(steps())


def group_case(group) -> None:
    """Ranks 1 and 2 of 3 train by themselves; the first of them has seed 0."""
    members = subgroup([1, 2])
    assert (members is None) == (group.rank() == 0)
    want = oracle(PLAIN, 2)
    for mode in MODES if members else ():
        run = start(PLAIN, mode, members)
        drive(run, PLAIN.program)
        compare(members, PLAIN, run, mode, want)


def test_a_group_of_some_ranks_trains_by_itself():
    ranks.run(group_case, 3)


def group_failure_case(group, fails: bool) -> None:
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


@pytest.mark.parametrize("fails", [True, False])
def test_a_group_of_some_ranks_has_the_timeout_of_all_and_names_the_cause(fails):
    errors = ranks.run_failing(group_failure_case, 3, fails=fails)
    assert "rank 1 waited in all-reduce no. 1 (alone, 12 bytes); rank 2 " in errors[1][1]
    assert ("failed: KeyError: 'no such column'" if fails else "ended after 0 collectives") in errors[1][1]
    assert fails or errors[2][0] == "CommError"


def absent_case(group) -> None:
    """Rank 1 fails where the others make a group with it."""
    comm.agreement.EXPLAIN_SECONDS = 0.3
    if group.rank() == 1:
        raise KeyError("no such column")
    subgroup([0, 1])


def test_a_group_that_cannot_be_made_names_the_cause():
    errors = ranks.run_failing(absent_case, 2)
    assert errors[0][0] == "CommError"
    assert errors[0][1].startswith(
        "rank 0 was joining a group of ranks 0, 1; rank 1 failed: KeyError: 'no such column'"
    )


def group_structure_case(group) -> None:
    members = subgroup([1, 2])
    if members:
        NaiveDDP(nn.Linear(2, group.rank()), group=members)


def test_errors_call_ranks_by_their_number_among_all():
    for error in ranks.run_failing(group_structure_case, 3)[1:]:
        assert "rank 1 has parameter weight (1, 2)" in error[1]
        assert "rank 2 has parameter weight (2, 2)" in error[1]
