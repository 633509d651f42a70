"""Backward in unusual order, number or state, in every wrapper and stage: the result is right, or every rank raises
an error that names the cause, before the optimizer can step. CASES lists each case with its outcome."""

from contextlib import suppress
from functools import partial

import pytest
import torch

from cs336_systems.check.cases import accumulate, twice
from tests.support.fault_cases import ALL, KINDS, MODES, REDUCES_EARLY, SCATTERS, Case, Run, change, check, steps
from tests.test_faults_ddp import USED_EARLY, WAITED

REDUCED = " | ".join(REDUCES_EARLY)
SAME, OTHER = ("early", "early"), ("early", "late")  # where backward fails on the ranks; "" is nowhere


def fail_in_no_sync(run: Run) -> None:
    with suppress(KeyError), run.model.no_sync():
        run.backward(0)
        raise KeyError
    run.model.zero_grad()


def keep_over_a_step(run: Run):
    """Momentum by hand: the gradients of the step before are kept without a clone, and added."""
    last = {}
    for step in range(3):
        run.backward(step)
        yield
        last, before = {p: p.grad for p in run.updated() if p.grad is not None}, last
        for p, gradient in before.items():
            p.grad = p.grad + gradient
        run.step()


def keep_in_no_sync(run: Run, step: int) -> None:
    """Two losses, whose gradients are combined by hand; the layer that one of them leaves out is used by the other."""
    found = []
    with run.model.no_sync():
        for number in range(2):
            run.backward(2 * step + number, skip=number == 1)
            found.append({p: p.grad for p in run.module.parameters() if p.grad is not None})
            for p in run.module.parameters():
                p.grad = None
        for p, gradient in found[0].items():
            p.grad = gradient + 2 * found[1].get(p, 0)


def two_backwards(run: Run, step: int) -> None:
    """Forward and backward twice without no_sync; rank 1 leaves a layer out in the first, the second, or both."""
    for number in range(2):
        run.backward(2 * step + number, skip=run.rank == 1 and step in (number, 2))


def two_forwards(run: Run, step: int, skip: bool = False, together: bool = False) -> None:
    losses = [run.loss(2 * step, skip=skip and run.rank == 1), run.loss(2 * step + 1)]
    for loss in [sum(losses)] if together else losses:
        loss.backward()


def stale_graph(run: Run):
    losses = [run.loss(0), run.loss(1)]
    for loss in losses:
        loss.backward()
        yield
        run.step()


def zeroed(zero):
    """Gradients are zeroed after each step by `zero`, or not. The last step leaves a layer out: if its gradient is
    zero then, not None, the optimizer moves it."""

    def program(run: Run):
        for step in range(3):
            run.backward(step, skip=step == 2)
            yield
            run.optimizer.step()
            run.remember()
            zero(run)

    return program


def uneven(run: Run):
    return steps(5 if run.rank == 0 else 3)(run)


def zero_grad(run: Run, of: str, set_to_none: bool = True) -> None:
    """Of the optimizer, the model, which is the wrapper, or the module."""
    getattr(run, of).zero_grad(set_to_none)


def retry(run: Run, step: int, zero: str = "", places: tuple = (SAME, OTHER), set_to_none: bool = True) -> None:
    """Each rank's backward fails at its place of this step, and the ranks that failed try again."""
    try:
        run.backward(step, boom=places[step][run.rank % 2])
    except ArithmeticError:
        if zero:
            zero_grad(run, zero, set_to_none)
        run.backward(step)


def give_up(run: Run, step: int) -> None:
    """Gradients that a failed backward has left are used, as by one process."""
    with pytest.raises(ArithmeticError):
        run.backward(step, boom="late")


def drop_batch(
    run: Run, step: int, zero: str, set_to_none: bool = True, skip: bool = False, again: bool = True
) -> None:
    """A batch is dropped after its backward, which may leave a layer out on one rank; another one may follow."""
    run.backward(0, skip=skip and run.rank == 1)
    zero_grad(run, zero, set_to_none)
    if again:
        run.backward(1)


def drop_between_two(run: Run, step: int) -> None:
    losses = [run.loss(0), run.loss(1)]
    losses[0].backward()
    run.optimizer.zero_grad()
    losses[1].backward()


def write_before_finish(run: Run, step: int) -> None:
    run.backward(0)
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def forget_to_finish(run: Run):
    run.backward(0)
    run.optimizer.step()
    yield


def forget_in_closure(run: Run):
    def closure():
        run.optimizer.zero_grad()
        run.backward(0)
        return 0.0

    run.optimizer.step(closure)
    yield


def register_step_in_hook(module, rank: int) -> None:
    optimizer = torch.optim.SGD([module.scale], lr=0.1)
    module.scale.register_post_accumulate_grad_hook(lambda p: optimizer.step())


CHANGED = "were changed while they were being reduced"
DROPPED = "dropped between backward and finish_gradient_synchronization"
VOTE = "in all-reduce no. 31 (used parameters"  # where the rank that did not fail is, in both ranks' words
NOT_SYNCHRONISED = "step() before "
MANY = (*REDUCES_EARLY, *SCATTERS)  # modes that add the mean of one backward to that of another

CASES = {
    "accumulation in no_sync": Case(partial(accumulate, quiet=True), inexact=("stage 3",), modes=ALL, worlds=(2, 3)),
    "exception inside no_sync, then a normal step": Case(change(fail_in_no_sync)),
    "gradients kept over a step without a clone": Case(keep_over_a_step, {" | ".join(SCATTERS[:-1]): "rests sharded"}),
    "gradients kept over a backward in no_sync": Case(steps(of=keep_in_no_sync), modes=KINDS[:-1]),
    "two backward passes without no_sync, a layer unused in one or both on one rank": Case(
        steps(4, two_backwards), inexact=MANY, modes=ALL, worlds=(2, 3)
    ),
    "two forwards, then one backward": Case(steps(of=two_forwards, together=True)),
    "two forwards, then two backwards": Case(steps(of=two_forwards), inexact=MANY, modes=ALL),
    "two forwards, then two backwards, a layer unused on one rank": Case(
        steps(of=two_forwards, skip=True), WAITED, inexact=MANY, waits=True
    ),
    "backward twice through one graph": Case(partial(twice, graphs=1), inexact=MANY),
    "backward through a graph from before the step": Case(stale_graph, "modified by an inplace operation"),
    "no zero_grad between steps": Case(zeroed(lambda run: None), inexact=SCATTERS),
    "optimizer.zero_grad(set_to_none=False)": Case(zeroed(lambda run: zero_grad(run, "optimizer", False))),
    "model.zero_grad(set_to_none=False)": Case(zeroed(lambda run: zero_grad(run, "model", False))),
    "5 batches on one rank, 3 on the other": Case(uneven, "ended after", modes=("bucketed", "stage 3"), waits=True),
    "backward fails, retry on top": Case(steps(of=retry), inexact=MANY, modes=ALL, worlds=(2, 3)),
    "backward fails, optimizer.zero_grad(), retry": Case(steps(of=retry, zero="optimizer")),
    "backward fails, optimizer.zero_grad(set_to_none=False), retry": Case(
        steps(of=retry, zero="optimizer", places=(SAME, SAME), set_to_none=False),
        {"overlapped": CHANGED, "stage 3": USED_EARLY}, modes=ALL,
    ),
    "backward fails, model.zero_grad(), retry": Case(steps(of=retry, zero="model")),
    "backward fails on one rank, which retries on top": Case(
        steps(of=retry, places=(("", "early"),) * 2), {"overlapped": VOTE, **WAITED},
        modes=("flat", "overlapped", "stage 3"), waits=True,
    ),
    "backward fails on one rank, which zeroes and retries": Case(
        steps(of=retry, zero="model", places=(("", "late"),) * 2), {"overlapped": VOTE},
        modes=("naive", "overlapped"), waits=True,
    ),
    "backward fails on all ranks, its gradients are used": Case(steps(of=give_up)),
    "backward fails on one rank, which ends": Case(
        steps(1, boom=lambda step, rank: rank * "late"), "a backward that fails",
        modes=("flat", "bucketed", "stage 3"), waits=True,
    ),
    "a batch dropped by optimizer.zero_grad(), a layer unused in it on one rank": Case(
        steps(1, drop_batch, zero="optimizer", skip=True)
    ),
    "a batch dropped by optimizer.zero_grad(set_to_none=False)": Case(
        steps(1, drop_batch, zero="optimizer", set_to_none=False), {REDUCED: CHANGED, "stage 3": USED_EARLY}, modes=ALL
    ),
    "a batch dropped by model.zero_grad()": Case(steps(1, drop_batch, zero="model")),
    "optimizer.zero_grad() between two backward passes": Case(
        steps(1, drop_between_two), {REDUCED: DROPPED}, modes=ALL
    ),
    "optimizer.zero_grad() after backward, then finish": Case(
        steps(1, drop_batch, zero="optimizer", again=False), {REDUCED: DROPPED}, modes=ALL
    ),
    ".grad written to before finish": Case(
        steps(1, write_before_finish),
        {f"{REDUCED} | stage 2": CHANGED, "stage 2 in small buckets | stage 3": USED_EARLY}, modes=tuple(MODES),
    ),
    "finish forgotten before the step": Case(forget_to_finish, NOT_SYNCHRONISED),
    "finish forgotten in a closure": Case(forget_in_closure, NOT_SYNCHRONISED),
    "an optimizer that steps in a gradient hook": Case(steps(1), NOT_SYNCHRONISED, prepare=register_step_in_hook),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])
