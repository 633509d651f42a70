"""The verbs against their documentation, the record of what was sent, and agreement through the store."""

import os
import re
import signal
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from cs336_systems.comm import (
    agree,
    agreement,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    record,
    reduce_scatter,
    subgroup,
)
from cs336_systems.comm import store as stores
from cs336_systems.comm.store import wait_for
from cs336_systems.comm.verbs import receive
from cs336_systems.errors import UserError
from tests.support import ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums every dtype holds exactly."""
    return ((torch.arange(numel) % 7 - 2) * (rank + 1)).to(dtype)


def verbs_case(group) -> None:
    warnings.simplefilter("error")  # torch's names change; ours must follow without a word
    for dtype in DTYPES:
        check_verbs(group, dtype)
    size, me = group.size(), group.rank()
    terms = torch.randn(size, 6 * size, generator=torch.Generator().manual_seed(0))
    flat, total = terms[me].clone(), terms[0].clone()
    reduce_scatter(flat, group).wait()
    for term in terms[1:]:
        total += term
    assert torch.equal(flat.chunk(size)[me], (total / size).chunk(size)[me]), "added in the order of the ranks"
    # Rank s sends s + r rows of its number to rank r: uneven, and none from rank 0 to itself.
    given = torch.cat([torch.full((me + rank, 2), 10.0 * me + rank) for rank in range(size)])
    output = torch.empty(sum(rank + me for rank in range(size)), 2)
    all_to_all(output, given, [rank + me for rank in range(size)], [me + rank for rank in range(size)], group).wait()
    assert torch.equal(output, torch.cat([torch.full((rank + me, 2), 10.0 * rank + me) for rank in range(size)]))


def check_verbs(group, dtype: torch.dtype) -> None:
    size, me = group.size(), group.rank()
    numel = 5 * size
    every = torch.stack([values(rank, numel, dtype) for rank in range(size)])
    wanted = {"mean": every.sum(0) / size, "sum": every.sum(0)} | ({} if dtype.is_complex else {"max": every.amax(0)})
    for reduction, want in wanted.items():
        flat = every[me].clone()
        work = all_reduce(flat, group, reduction=reduction)
        work.wait()
        work.wait()  # waiting twice is waiting once
        torch.testing.assert_close(flat, want)
        if reduction != "max":
            flat = every[me].clone()
            reduce_scatter(flat, group, reduction=reduction).wait()
            torch.testing.assert_close(flat.chunk(size)[me], want.chunk(size)[me])

    flat = torch.full((numel,), torch.nan, dtype=dtype)
    flat.chunk(size)[me].copy_(every[me].chunk(size)[me])
    all_gather(flat, group).wait()
    assert torch.equal(flat, torch.cat([term.chunk(size)[rank] for rank, term in enumerate(every)]))

    for source in range(size):
        grid = values(me, 12, dtype).view(3, 4).T  # not contiguous
        broadcast(grid, source, group).wait()
        assert torch.equal(grid, values(source, 12, dtype).view(3, 4).T)


@pytest.mark.parametrize(
    ("run", "world_size"), [(ranks.run, 1), (ranks.run, 3), *((ranks.run_on_gloo, each) for each in (3, 4))]
)
def test_verbs(run, world_size):
    """In shared memory, whose bits tests/comm/test_shared_memory.py compares, and on gloo."""
    run(verbs_case, world_size)


def record_case(group) -> list[list]:
    flat = torch.zeros(12)
    with record() as outer:
        all_reduce(flat, group, "first").wait()
        with record() as inner:
            reduce_scatter(flat, group, "second").wait()
            all_gather(flat, group, "third").wait()
            broadcast(flat, 0, group, "fourth").wait()
    assert outer[1:] == inner
    all_reduce(flat, group, "not recorded").wait()
    return [[event.verb, event.label, event.ranks, event.nbytes, event.bytes_sent] for event in outer]


def test_the_record_lists_verbs_and_bytes():
    for events in ranks.run(record_case, 4):
        assert events == [
            ["all-reduce", "first", 4, 48, 72.0],
            ["reduce-scatter", "second", 4, 48, 36.0],
            ["all-gather", "third", 4, 48, 36.0],
            ["broadcast", "fourth", 4, 48, 36.0],
        ]


def agree_case(group) -> list[str]:
    first = agree("topic", f"a{group.rank()}", group)
    second = agree("topic", f"b{group.rank()}", group)
    return first + second


def test_ranks_agree_again_and_again():
    assert ranks.run(agree_case, 3) == [["a0", "a1", "a2", "b0", "b1", "b2"]] * 3


def silent_case(group) -> None:
    if group.rank() != 1:
        agree("topic", "", group)
    else:
        torch.ones(1)
        all_reduce(torch.ones(1), group, "elsewhere").wait()


def test_a_rank_that_does_not_answer_is_named():
    errors = ranks.run_failing(silent_case, 3)
    for rank in (0, 2):
        assert re.match(r"topic: rank 1 of 3 did not answer within [\d.]+ s", errors[rank][1])
    assert "waited in all-reduce no. 1 (elsewhere, 4 bytes)" in errors[1][1]


def ends_case(group, fails: bool) -> None:
    if group.rank() != 1:
        agree("topic", "", group)
    elif fails:
        raise UserError("no file bad\udcff\n")


@pytest.mark.parametrize("fails", [True, False])
def test_nobody_waits_for_the_answer_of_a_rank_that_has_ended(fails):
    """With a timeout of a minute, and killed after ten seconds."""
    with pytest.raises(ranks.RanksFailedError) as error:
        ranks.ask(ends_case, 3, True, 10.0, 60.0, {"fails": fails})
    for rank in (0, 2):
        kind, text = error.value.errors[rank]
        assert kind == "CommError"
        said = (
            r"failed: UserError: no file bad\udcff"
            if fails
            else "ended after 0 collectives; did it have fewer batches?"
        )
        assert text.startswith("topic: rank 1 of 3 did not answer; ")
        assert f"rank 1 {said}" in text.splitlines()[0]


def test_who_answers_and_then_ends_has_answered():
    """The answer and the end come between two questions to the store."""
    store, keys = HashStore(), ["a", "b", "c"]
    store.set("a", "")

    def answers_at_last(index: int) -> bool:
        store.set(keys[index], "")
        return True

    assert wait_for(store, keys, timedelta(seconds=10), in_vain=answers_at_last) == []
    assert wait_for(store, ["a", "d"], timedelta(seconds=10), in_vain=lambda index: index == 1) == [1]


def test_only_who_ended_without_an_answer_did_not_answer():
    """Rank 2 answers and ends as well, between the question to the store and the one to rank 1."""
    store, keys = HashStore(), ["a", "b", "c"]
    store.set("a", "")

    def ended(index: int) -> bool:
        store.set(keys[2], "")
        return index in (1, 2)

    assert wait_for(store, keys, timedelta(seconds=10), in_vain=ended) == [1]


def patience_case(group) -> list[str]:
    time.sleep(0.1 * group.rank())
    agree("no less than the timeout", "", group, patience=timedelta())
    patient = agreement.timed_store(group)  # each of its answers may be late on a busy machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "group_timeout", lambda _: timedelta(seconds=0.1))
        patch.setattr(agreement, "timed_store", lambda *_: patient)
        time.sleep(0.3 * group.rank())
        return agree("more than the timeout", f"{group.rank()}", group, patience=timedelta(seconds=30))


def test_an_agreement_may_take_longer_than_the_timeout():
    assert ranks.run(patience_case, 2) == [["0", "1"]] * 2


ODD = ["", "caf\u00e9 \U0001f600", "bad\udcff\ud800", "a\0b\n\x1b[2J", "\udcc3\udca9"]


def text_case(group) -> None:
    for text in ODD:
        assert agree("text", text if group.rank() else text[::-1], group) == [text[::-1], text]


def test_any_text_can_be_agreed_on():
    ranks.run(text_case, 2)


class Stopped:
    """A store that answers no more until it goes on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.goes_on.wait(30)


def test_a_store_that_does_not_answer_is_given_up_until_it_does():
    stopped = Stopped()
    hasty, patient = (stores.TimedStore(stopped, timedelta(seconds=seconds)) for seconds in (0.05, 20))
    with pytest.raises(stores.StoreLostError, match=r"^the store of the ranks did not answer within 0\.05 s$"):
        hasty.check(["a"])
    with pytest.raises(stores.StoreLostError, match=r"^the store of the ranks does not answer$"):
        patient.check(["a"])
    stopped.goes_on.set()
    stores._asker.late.result(20)
    assert patient.check(["a"])


def fork_case(rank: int, world: int, folder: str) -> int:
    """A process that was forked from one that has asked asks, too."""
    store = stores.TimedStore(HashStore(), timedelta(seconds=20))
    store.set("a", "b")
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if store.get("a") == "b" else 1)
    return os.waitpid(child, 0)[1]


def test_a_fork_asks_by_itself():
    assert ranks.run_alone(fork_case, 1) == [0]


def sizes_case(group) -> None:
    flat = torch.zeros(4 * group.size() * (1 + group.rank()))
    reduce_scatter(flat, group, "slices").wait()


def wrong_case(group) -> None:
    whole, odd = torch.ones(4, dtype=torch.int64), torch.ones(2 * group.size() + 1)
    for call, message in (
        (lambda: all_reduce(odd, group, reduction="median"), "no reduction is called 'median'"),
        (lambda: all_reduce(odd, group, reduction=None), "no reduction is called None"),
        (lambda: all_reduce(whole, group), "a mean needs a floating-point dtype, not torch.int64"),
        (
            lambda: all_reduce(whole.to(torch.float8_e5m2), group),
            "torch cannot add torch.float8_e5m2: reduce a copy in a",
        ),
        (lambda: all_reduce(torch.ones(2, 3).t(), group), "a tensor of shape (3, 2) is not contiguous"),
        (lambda: all_gather(odd, group), "5 elements do not divide into slices of 2 ranks"),
        (lambda: reduce_scatter(odd, group), "5 elements do not divide into slices of 2 ranks"),
        (lambda: broadcast(odd, 2, group), "rank 2 does not exist: the group's 2 ranks are 0 to 1"),
        (lambda: receive(odd, -1, group, "no"), "rank -1 does not exist: the group's 2 ranks are 0 to 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    for chosen in ([], [0, 0], [1, 2]):
        with pytest.raises(UserError, match=r"a group needs ranks from 0 to 1, each once, not \["):
            subgroup(chosen)


def test_wrong_arguments_are_named_before_ranks_meet():
    ranks.run(wrong_case, 2)


def grid_case(group) -> None:
    """Slices of a grid are of its elements, not of its rows; what gloo would read or write beside is refused."""
    want = torch.arange(12.0).view(3, 4)
    grid = want.clone()
    reduce_scatter(grid, group).wait()
    grid.view(-1).chunk(2)[1 - group.rank()].fill_(torch.nan)
    all_gather(grid, group).wait()
    assert torch.equal(grid, want)
    for verb, arguments in (
        (all_reduce, (torch.ones(8)[::2],)),
        (all_gather, (torch.ones(8)[::2],)),
        (all_to_all, (torch.empty(4, 2).t(), torch.ones(2, 4), [1, 1], [1, 1])),
    ):
        with pytest.raises(ValueError, match="is not contiguous"):
            verb(*arguments, group)


def test_gloo_takes_grids_and_refuses_what_is_not_contiguous():
    ranks.run_on_gloo(grid_case, 2)


def test_slices_of_other_sizes_never_meet():
    for error in ranks.run_failing(sizes_case, 2):
        assert error[0] == "CommError"
        assert "32 bytes" in error[1]
        assert "64 bytes" in error[1]
