"""Does the suite see the bugs that such libraries have had? Each is planted in the ranks, and a test then fails."""

from contextlib import contextmanager

import pytest

from cs336_systems import bucket, comm, ddp, flat, param_store, unit
from cs336_systems.comm import verbs
from tests import ranks
from tests.test_ddp import gradients_case
from tests.test_zero import training_case


def no_division() -> None:
    """The gradients are added and not divided."""
    real = comm.all_reduce

    def summed(tensor, group, label=""):
        work = real(tensor, group, label)
        work.finish = lambda: tensor.mul_(group.size())
        return work

    ddp.DataParallel.verb = staticmethod(summed)


def missing_wait() -> None:
    """Nobody waits for a collective, which here does nothing before somebody does."""

    def lazy(tensor, group, label=""):
        event = comm.Event("all-reduce", label, tensor.numel(), tensor.dtype, group.size(), "all-reduce")
        return verbs.Work(event, group, finish=lambda: comm.all_reduce(tensor, group, label).wait())

    real = bucket.GradBucket.finish

    def finish(self):
        if self.work is not None:
            self.work.finish = None
        real(self)

    ddp.DataParallel.verb = staticmethod(lazy)
    bucket.GradBucket.finish = finish


def skipped_bucket() -> None:
    """The last bucket, which backward never fills by itself here, is not reduced."""
    real = bucket.GradBucket.launch

    def launch(self, *arguments):
        if not self.label.startswith("bucket 1"):
            real(self, *arguments)

    bucket.GradBucket.launch = launch


def sticky_no_sync() -> None:
    """no_sync forgets to switch synchronisation on again, and the end of a step trusts that it was on."""

    @contextmanager
    def no_sync(self):
        self.accumulating = True
        yield

    real = ddp.DataParallel.finish_gradient_synchronization

    def finish(self):
        if self.accumulating:
            self.synchronised = True
        else:
            real(self)

    ddp.DataParallel.no_sync = no_sync
    ddp.DataParallel.finish_gradient_synchronization = finish


def wrong_slice() -> None:
    """A rank takes the next rank's slice of the reduced gradients for its own."""
    real = flat.FlatLayout.shard
    flat.FlatLayout.shard = lambda self, buffer, rank: real(self, buffer, (rank + 1) % (len(self.cuts) - 1))


def lost_tail_row() -> None:
    """The last row of a weight whose rows the ranks do not divide is left out."""
    real = unit.Unit.deliver_gradient

    def deliver(self):
        real(self)
        if self.shard.grad is not None and self.rows[1] == self.shape[0] and self.shape[0] % self.group.size():
            self.shard.grad[-1:].zero_()

    unit.Unit.deliver_gradient = deliver


def lost_tail() -> None:
    """The last, shorter slice of the parameters is not updated."""
    real = param_store.ParamStore.__init__

    def init(self, *arguments, **options):
        real(self, *arguments, **options)
        if self.group.rank() == self.group.size() - 1:
            self.parts = self.parts[:-1]

    param_store.ParamStore.__init__ = init


def tied_twice() -> None:
    """A tied weight's gradient is counted once for each of its two uses."""
    real = bucket.GradBucket.collect

    def collect(self, parameter):
        real(self, parameter)
        if tuple(parameter.shape) == (11, 7):
            self.gradient(parameter).mul_(2)

    bucket.GradBucket.collect = collect


def planted_case(group, bug: str, case: str, **arguments) -> None:
    if bug:
        globals()[bug]()
    {"gradients": gradients_case, "training": training_case}[case](group, **arguments)


def bitwise(wrapper: str) -> dict:
    return {"case": "gradients", "wrapper": wrapper}


def trained(stage: int, **options) -> dict:
    return {"case": "training", "stage": stage, "optimizer": "sgd", **options}


BUGS = [
    *(("no_division", bitwise(wrapper)) for wrapper in ("naive", "flat", "overlapped", "bucketed")),
    *(("missing_wait", bitwise(wrapper)) for wrapper in ("naive", "flat", "overlapped", "bucketed-small")),
    *(("skipped_bucket", bitwise(wrapper)) for wrapper in ("naive", "overlapped", "bucketed-small")),
    ("sticky_no_sync", trained(0, micro=3)),
    ("sticky_no_sync", trained(1, micro=3)),
    ("wrong_slice", trained(2)),
    ("wrong_slice", trained(3)),
    ("lost_tail", trained(1)),
    ("lost_tail", trained(2)),
    ("lost_tail_row", trained(3)),
    *(("tied_twice", bitwise(wrapper)) for wrapper in ("naive", "flat", "overlapped", "bucketed")),
    ("tied_twice", trained(2)),
    ("tied_twice", trained(3)),
]


def ids(value) -> str | None:
    return value if isinstance(value, str) else "-".join(str(each) for each in value.values())


@pytest.mark.parametrize(("bug", "where"), BUGS, ids=ids)
def test_the_suite_sees(bug, where):
    errors = ranks.run_failing(planted_case, 2, bug=bug, **where)
    assert any(error and error[0] == "AssertionError" for error in errors), errors


@pytest.mark.parametrize("where", {str(sorted(where.items())): where for _, where in BUGS}.values(), ids=ids)
def test_and_passes_without(where):
    ranks.run(planted_case, 2, bug="", **where)


def test_every_bug_is_planted():
    here = [each for each in globals().values() if callable(each) and each.__module__ == __name__ and each.__doc__]
    assert {bug for bug, _ in BUGS} == {each.__name__ for each in here}
