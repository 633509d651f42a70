"""Backward in unusual order, number or state, in every wrapper and stage: the result is right, or every rank raises
an error that names the cause, before the optimizer can step. CASES lists each case with its outcome."""

import pytest
import torch

from tests.support.fault_cases import ALL, KINDS, MODES, REDUCES_EARLY, SCATTERS, Case, Run, check
from tests.test_faults_ddp import USED_EARLY

REDUCED = " | ".join(REDUCES_EARLY)


def accumulate(run: Run):
    for step in range(2):
        with run.model.no_sync():
            run.backward(3 * step)
            run.backward(3 * step + 1)
        run.backward(3 * step + 2)
        yield
        run.step()


def fail_in_no_sync(run: Run):
    try:
        with run.model.no_sync():
            run.backward(0)
            raise KeyError
    except KeyError:
        run.model.zero_grad()
    for step in range(2):
        run.backward(step)
        yield
        run.step()


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


def keep_in_no_sync(run: Run):
    """Two losses, whose gradients are combined by hand; the layer that one of them leaves out is used by the other."""
    for step in range(2):
        found = []
        with run.model.no_sync():
            for number in range(2):
                run.backward(2 * step + number, skip=number == 1)
                found.append({p: p.grad for p in run.module.parameters() if p.grad is not None})
                for p in run.module.parameters():
                    p.grad = None
            for p, gradient in found[0].items():
                p.grad = gradient + 2 * found[1].get(p, 0)
        yield
        run.step()


def two_backwards(skip_first: bool = False, skip_second: bool = False):
    """Forward and backward twice without no_sync; rank 1 may leave a layer out."""

    def program(run: Run):
        for step in range(2):
            run.backward(2 * step, skip=skip_first and run.rank == 1)
            run.backward(2 * step + 1, skip=skip_second and run.rank == 1)
            yield
            run.step()

    return program


def two_forwards(skip: bool = False, together: bool = False):
    def program(run: Run):
        for step in range(2):
            losses = [run.loss(2 * step, skip=skip and run.rank == 1), run.loss(2 * step + 1)]
            for loss in [sum(losses)] if together else losses:
                loss.backward()
            yield
            run.step()

    return program


def same_graph_twice(run: Run):
    for step in range(2):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        yield
        run.step()


def stale_graph(run: Run):
    losses = [run.loss(0), run.loss(1)]
    losses[0].backward()
    yield
    run.step()
    losses[1].backward()
    yield
    run.step()


def keep_gradients(run: Run):
    for step in range(3):
        run.backward(step, skip=step == 2)
        yield
        run.optimizer.step()


def zero_in_place(of_model: bool):
    def program(run: Run):
        for step in range(3):
            run.backward(step, skip=step == 2)  # its gradient is zero then, not None, and the optimizer moves it
            yield
            run.optimizer.step()
            (run.model if of_model else run.optimizer).zero_grad(set_to_none=False)

    return program


def uneven(run: Run):
    for step in range(5 if run.rank == 0 else 3):
        run.backward(step)
        yield
        run.step()


def retry(zero: str, places: tuple[str, ...] = ("early", "early"), set_to_none: bool = True):
    """Each rank's backward fails at its place ("" for nowhere), and the ranks that failed try again."""

    def program(run: Run):
        for step in range(2):
            try:
                run.backward(step, boom=places[run.rank % len(places)])
            except ArithmeticError:
                if zero:
                    (run.model if zero == "model" else run.optimizer).zero_grad(set_to_none)
                run.backward(step)
            yield
            run.step()

    return program


def give_up(run: Run):
    """Gradients that a failed backward has left are used, as by one process."""
    for step in range(2):
        with pytest.raises(ArithmeticError):
            run.backward(step, boom="late")
        yield
        run.step()


def one_rank_dies(run: Run):
    run.backward(0, boom="late" if run.rank == 1 else "")
    yield
    run.step()


def skip_batch(zero: str, set_to_none: bool = True, skip: bool = False):
    """A batch is dropped after its backward; the next one may leave a layer out on one rank."""

    def program(run: Run):
        run.backward(0, skip=skip and run.rank == 1)
        (run.model if zero == "model" else run.optimizer).zero_grad(set_to_none)
        run.backward(1)
        yield
        run.step()

    return program


def drop_between_two(run: Run):
    losses = [run.loss(0), run.loss(1)]
    losses[0].backward()
    run.optimizer.zero_grad()
    losses[1].backward()
    yield
    run.step()


def drop_then_finish(zero=lambda run: run.optimizer.zero_grad()):
    def program(run: Run):
        run.backward(0)
        zero(run)
        yield
        run.step()

    return program


def write_before_finish(run: Run):
    run.backward(0)
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    yield
    run.step()


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


def step_in_hook(run: Run):
    run.backward(0)
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
    "accumulation in no_sync": Case(accumulate, inexact=("stage 3",), modes=ALL),
    "exception inside no_sync, then a normal step": Case(fail_in_no_sync),
    "gradients kept over a step without a clone": Case(keep_over_a_step, {" | ".join(SCATTERS[:-1]): "rests sharded"}),
    "gradients kept over a backward in no_sync": Case(keep_in_no_sync, modes=KINDS[:-1]),
    "two backward passes without no_sync": Case(two_backwards(), inexact=MANY),
    "two backward passes, a layer unused in both on one rank": Case(two_backwards(True, True), inexact=MANY),
    "two backward passes, a layer unused in the first on one rank": Case(two_backwards(True, False), inexact=MANY),
    "two backward passes, a layer unused in the second on one rank": Case(
        two_backwards(False, True), inexact=MANY, modes=ALL
    ),
    "two forwards, then one backward": Case(two_forwards(together=True)),
    "two forwards, then two backwards": Case(two_forwards(), inexact=MANY, modes=ALL),
    "two forwards, then two backwards, a layer unused on one rank": Case(
        two_forwards(skip=True), {"stage 3": "waited in"}, inexact=MANY, waits=True
    ),
    "backward twice through one graph": Case(same_graph_twice, inexact=MANY),
    "backward through a graph from before the step": Case(stale_graph, "modified by an inplace operation"),
    "no zero_grad between steps": Case(keep_gradients, inexact=SCATTERS),
    "optimizer.zero_grad(set_to_none=False)": Case(zero_in_place(of_model=False)),
    "model.zero_grad(set_to_none=False)": Case(zero_in_place(of_model=True)),
    "5 batches on one rank, 3 on the other": Case(uneven, "ended after", modes=("bucketed", "stage 3"), waits=True),
    "backward fails, retry on top": Case(retry(""), inexact=MANY, modes=ALL),
    "backward fails at other places, retry on top": Case(retry("", ("early", "late")), inexact=MANY),
    "backward fails, optimizer.zero_grad(), retry": Case(retry("optimizer")),
    "backward fails at other places, optimizer.zero_grad(), retry": Case(
        retry("optimizer", ("early", "late")), waits=True
    ),
    "backward fails, optimizer.zero_grad(set_to_none=False), retry": Case(
        retry("optimizer", set_to_none=False), {"overlapped": CHANGED, "stage 3": USED_EARLY}, modes=ALL
    ),
    "backward fails, model.zero_grad(), retry": Case(retry("model")),
    "backward fails at other places, model.zero_grad(), retry": Case(retry("model", ("early", "late"))),
    "backward fails on one rank, which retries on top": Case(
        retry("", ("", "early")),
        {"overlapped": VOTE, "stage 3": "waited in"},
        modes=("flat", "overlapped", "stage 3"),
        waits=True,
    ),
    "backward fails on one rank, which zeroes and retries": Case(
        retry("model", ("", "late")), {"overlapped": VOTE}, modes=("naive", "overlapped"), waits=True
    ),
    "backward fails on all ranks, its gradients are used": Case(give_up),
    "backward fails on one rank, which ends": Case(one_rank_dies, "a backward that fails", waits=True),
    "a batch dropped by optimizer.zero_grad()": Case(skip_batch("optimizer")),
    "a batch dropped by optimizer.zero_grad(), a layer unused in it on one rank": Case(
        skip_batch("optimizer", skip=True)
    ),
    "a batch dropped by optimizer.zero_grad(set_to_none=False)": Case(
        skip_batch("optimizer", set_to_none=False), {REDUCED: CHANGED, "stage 3": USED_EARLY}, modes=ALL
    ),
    "a batch dropped by model.zero_grad()": Case(skip_batch("model")),
    "optimizer.zero_grad() between two backward passes": Case(drop_between_two, {REDUCED: DROPPED}, modes=ALL),
    "optimizer.zero_grad() after backward, then finish": Case(drop_then_finish(), {REDUCED: DROPPED}, modes=ALL),
    ".grad written to before finish": Case(
        write_before_finish,
        {f"{REDUCED} | stage 2": CHANGED, "stage 2 in small buckets | stage 3": USED_EARLY},
        modes=tuple(MODES),
    ),
    "finish forgotten before the step": Case(forget_to_finish, NOT_SYNCHRONISED),
    "finish forgotten in a closure": Case(forget_in_closure, NOT_SYNCHRONISED),
    "an optimizer that steps in a gradient hook": Case(step_in_hook, NOT_SYNCHRONISED, prepare=register_step_in_hook),
}


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])


@pytest.mark.parametrize(
    "name",
    [
        "accumulation in no_sync",
        "two backward passes, a layer unused in both on one rank",
        "backward fails, retry on top",
    ],
)
def test_right_on_three_ranks(name):
    check(__name__, name, CASES[name], world=3)
