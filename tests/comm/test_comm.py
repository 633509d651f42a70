"""Agreement through the store, messages, which match by label, and arguments and orders that verbs refuse."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from cs336_systems.comm import (
    CommError,
    agree,
    agreement,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    receive,
    record,
    reduce_scatter,
    send,
    shared_memory,
    subgroup,
)
from cs336_systems.comm import store as stores
from cs336_systems.comm.flight_recorder import recorder
from cs336_systems.comm.group import group_timeout
from cs336_systems.comm.store import StoreLostError, TimedStore, wait_for
from cs336_systems.errors import UserError
from tests.support import ranks

ODD = ["", "caf\u00e9 \U0001f600", "bad\udcff\ud800", "a\0b\n\x1b[2J", "\udcc3\udca9"]


def agree_case(group) -> list[str]:
    """On any text, again and again, and for longer than the timeout."""
    for text in ODD:
        assert agree("text", text if group.rank() else text[::-1], group) == [text[::-1], text]
    time.sleep(0.1 * group.rank())
    agree("no less than the timeout", "", group, patience=timedelta())
    patient = agreement.timed_store(group)  # each of its answers may be late on a busy machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "group_timeout", lambda _: timedelta(seconds=0.1))
        patch.setattr(agreement, "timed_store", lambda *_: patient)
        time.sleep(0.3 * group.rank())
        return agree("more than the timeout", f"{group.rank()}", group, patience=timedelta(seconds=30))


def test_ranks_agree():
    assert ranks.run(agree_case, 2) == [["0", "1"]] * 2


def silent_case(group) -> None:
    if group.rank() != 1:
        agree("topic", "", group)
    else:
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
    said = r"failed: UserError: no file bad\udcff" if fails else "ended after 0 collectives; did it have fewer batches?"
    for rank in (0, 2):
        kind, text = error.value.errors[rank]
        assert kind == "CommError"
        first = text.splitlines()[0].replace(f"rank {2 - rank} waited for an answer: topic; ", "")  # news or not
        assert first.startswith(f"topic: rank 1 of 3 did not answer; rank 1 {said}")


def test_who_answers_and_then_ends_has_answered():
    """The answer and the end come between two questions to the store."""
    store, limit = HashStore(), timedelta(seconds=10)
    store.set("a", "")

    def ends(answers: str) -> Callable[[int], bool]:
        return lambda index: store.set(answers, "") or index > 0

    assert wait_for(store, ["a", "b"], limit, in_vain=ends("b")) == []
    assert wait_for(store, ["a", "c", "d"], limit, in_vain=ends("d")) == [1]


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


def wrong_case(group) -> None:
    whole, odd = torch.ones(4, dtype=torch.int64), torch.ones(2 * group.size() + 1)
    narrow, tall = whole.to(torch.float8_e5m2), torch.ones(2, 3).t()
    for message, verb, *arguments in (
        ("no reduction is called 'median'", all_reduce, odd, group, "", "median"),
        ("no reduction is called None", all_reduce, odd, group, "", None),
        ("a mean needs a floating-point dtype, not torch.int64", all_reduce, whole, group),
        ("torch cannot add torch.float8_e5m2: reduce a copy in a", all_reduce, narrow, group),
        ("a tensor of shape (3, 2) is not contiguous", all_reduce, tall, group),
        ("5 elements do not divide into slices of 2 ranks", all_gather, odd, group),
        ("5 elements do not divide into slices of 2 ranks", reduce_scatter, odd, group),
        ("rank 2 does not exist: the group's 2 ranks are 0 to 1", broadcast, odd, 2, group),
        ("rank -1 does not exist: the group's 2 ranks are 0 to 1", receive, odd, -1, group, "no"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            verb(*arguments)
    alone = [subgroup([rank]) for rank in range(group.size())][group.rank()]
    assert group_timeout(alone) == group_timeout(group)
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
    for verb, *arguments in (
        (all_reduce, torch.ones(8)[::2]),
        (all_gather, torch.ones(8)[::2]),
        (all_to_all, torch.empty(4, 2).t(), torch.ones(2, 4), [1, 1], [1, 1]),
    ):
        with pytest.raises(ValueError, match="is not contiguous"):
            verb(*arguments, group)


def test_gloo_takes_grids_and_refuses_what_is_not_contiguous():
    ranks.run_on_gloo(grid_case, 2)


def overtaking_case(group) -> list[list]:
    """Each rank sends three messages to the other; they are taken in another order, and one label comes twice."""
    me, other = group.rank(), 1 - group.rank()
    outbox = {label: torch.full((4,), 10.0 * me + i) for i, label in enumerate("abc")}
    inbox = {label: torch.empty(4) for label in "abc"}
    with record() as events:
        sent = [send(outbox[label], other, group, label) for label in "abc"]
        received = [receive(inbox[label], other, group, label) for label in "cab"]
        for work in [*received, *sent]:
            work.wait()
            work.wait()
    assert [inbox[label][0].item() for label in "abc"] == [10.0 * other + i for i in range(3)]
    again = [torch.full((4,), 50.0 + i) if me == 0 else torch.empty(4) for i in range(2)]  # in the order of sending
    for work in [(send if me == 0 else receive)(each, other, group, "again") for each in again]:
        work.wait()
    assert [each[0].item() for each in again] == [50.0, 51.0]
    return [[event.verb, event.label, event.nbytes, event.ranks, event.bytes_sent] for event in events]


def test_labels_keep_messages_apart():
    sent = [["send", label, 16, 2, 16.0] for label in "abc"]
    received = [["receive", label, 16, 2, 0.0] for label in "cab"]
    assert ranks.run(overtaking_case, 2) == [sent + received] * 2


def sizes_case(group, verb: str) -> None:
    """What has another size never meets: messages wait by label, size and dtype."""
    if verb == "reduce_scatter":
        reduce_scatter(torch.zeros(4 * group.size() * (1 + group.rank())), group, "slices").wait()
    elif group.rank() == 0:
        send(torch.ones(4), 1, group, "sizes")
        receive(torch.ones(1), 1, group, "answer").wait()
    else:
        receive(torch.ones(6), 0, group, "sizes").wait()


@pytest.mark.parametrize("verb", ["reduce_scatter", "send"])
def test_other_sizes_never_meet(verb):
    (kind, first), (other, second) = ranks.run_failing(sizes_case, 2, verb=verb)
    assert kind == other == CommError.__name__
    if verb == "send":
        assert second.startswith("rank 1 waited in receive no. 1 (sizes, 24 bytes); rank 0 waited in ")
        assert "(answer, 4 bytes)" in first or "(sizes, 16 bytes)" in first
    else:
        assert all(size in text for size in ("32 bytes", "64 bytes") for text in (first, second))


def by_order_case(group, kind: str, shared: bool = True) -> None:
    """Collectives that ranks match by their order alone, and that are others on rank 1; `shared`: with its records."""
    first, ones = group.rank() == 0, torch.ones(4)
    whole = ones if first else ones.int()
    if not shared:
        shared_memory.transport.on = False
        recorder.others.clear()
    calls = {
        "order": [lambda: all_reduce(ones, group, "a", "sum"), lambda: all_reduce(ones, group, "b", "sum")],
        "dtype": [lambda: all_reduce(whole, group, "a", "sum")],
        "reduction": [lambda: all_reduce(ones, group, "a", "sum" if first else "max")],
        "verb": [lambda: all_reduce(ones, group, "a", "sum"), lambda: broadcast(ones, 0, group, "b")],
        "rows": [lambda: all_to_all(whole, whole, [2, 2], [2, 2], group)],
    }
    if kind == "many":  # the first has left the recorder when it is waited for
        works = [all_reduce(ones, group, "a" if (i == 0) == first else "b", "sum") for i in range(200)]
        works[-1].wait()
    else:
        for call in calls[kind] if first else calls[kind][::-1]:
            call().wait()


@pytest.mark.parametrize("kind", ["order", "dtype", "reduction", "verb", "rows", "many"])
def test_collectives_that_differ_in_kind_or_order_are_refused(kind):
    errors = ranks.run_failing(by_order_case, 2, collective_timeout=5, kind=kind)
    assert [each[0] for each in errors] == [CommError.__name__] * 2
    lines = [text.splitlines()[0] for _, text in errors]
    assert any(" meets rank " in line and line.endswith("in the same order on all ranks") for line in lines), lines
    assert all(" meets rank " in line or " refused " in line for line in lines), lines


def test_collectives_that_differ_are_named_at_the_end_where_no_record_can_be_read():
    errors = ranks.run_failing(by_order_case, 2, kind="order", shared=False)
    said = "the ranks' collectives differed in kind, size or order: what they computed together is wrong"
    assert errors == [(CommError.__name__, said)] * 2


def test_a_store_that_does_not_answer_is_given_up_until_it_does():
    goes_on = threading.Event()
    stopped = SimpleNamespace(check=lambda keys: goes_on.wait(30))
    hasty, patient = (TimedStore(stopped, timedelta(seconds=seconds)) for seconds in (0.05, 20))
    with pytest.raises(StoreLostError, match=r"^the store of the ranks did not answer within 0\.05 s$"):
        hasty.check(["a"])
    with pytest.raises(StoreLostError, match=r"^the store of the ranks does not answer$"):
        patient.check(["a"])
    goes_on.set()
    stores._asker.late.result(20)
    assert patient.check(["a"])
