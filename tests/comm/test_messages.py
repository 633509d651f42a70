"""Messages between two ranks, which match by label in any order of arrival."""

import pytest
import torch

from cs336_systems.comm import (
    CommError,
    all_reduce,
    all_to_all,
    broadcast,
    receive,
    record,
    send,
    shared_memory,
)
from cs336_systems.comm.flight_recorder import recorder
from tests.support import ranks


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
    again = [torch.full((4,), 50.0 + i) for i in range(2)]  # of one label, in the order of their sending
    if me == 0:
        works = [send(each, 1, group, "again") for each in again]
    else:
        works = [receive(each.zero_(), 0, group, "again") for each in again]
    for work in works:
        work.wait()
    assert [each[0].item() for each in again] == [50.0, 51.0]
    return [[event.verb, event.label, event.nbytes, event.ranks, event.bytes_sent] for event in events]


def test_labels_keep_messages_apart():
    sent = [["send", label, 16, 2, 16.0] for label in "abc"]
    received = [["receive", label, 16, 2, 0.0] for label in "cab"]
    assert ranks.run(overtaking_case, 2) == [sent + received] * 2


def sizes_case(group) -> None:
    """The one that is there waits by label, size and dtype; what is another never meets it."""
    if group.rank() == 0:
        works = [send(torch.ones(4), 1, group, "sizes"), receive(torch.ones(1), 1, group, "answer")]
    else:
        works = [receive(torch.ones(6), 0, group, "sizes")]
    for work in works:
        work.wait()


def test_messages_of_other_sizes_never_meet():
    first, second = ranks.run_failing(sizes_case, 2)
    assert first[0] == second[0] == CommError.__name__
    assert second[1].startswith("rank 1 waited in receive no. 1 (sizes, 24 bytes); rank 0 waited in ")
    assert "(answer, 4 bytes)" in first[1] or "(sizes, 16 bytes)" in first[1]


def by_order_case(group, kind: str, shared: bool = True) -> None:
    """Collectives that ranks match by their order alone, and that are others on rank 1; `shared`: with its records."""
    first, ones = group.rank() == 0, torch.ones(4)
    if not shared:
        shared_memory.transport.on = False
        recorder.others.clear()
    calls = {"a": lambda: all_reduce(ones, group, "a", "sum"), "b": lambda: all_reduce(ones, group, "b", "sum")}
    if kind == "dtype":
        calls = {"b" if first else "a": lambda: all_reduce(ones if first else ones.int(), group, "a", "sum")}
    elif kind == "reduction":
        calls = {"b" if first else "a": lambda: all_reduce(ones, group, "a", "sum" if first else "max")}
    elif kind == "verb":
        calls["b"] = lambda: broadcast(ones, 0, group, "b")
    elif kind == "rows":
        calls = dict.fromkeys(
            "ab",
            lambda: all_to_all(ones if first else ones.int(), ones if first else ones.int(), [2, 2], [2, 2], group),
        )
    elif kind == "many":  # the first has left the recorder when it is waited for
        works = [all_reduce(ones, group, "a" if (i == 0) == first else "b", "sum") for i in range(200)]
        calls = dict.fromkeys("ab", lambda: works[-1])
    for name in sorted(calls, reverse=first):
        calls[name]().wait()


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
