"""Programs that use `.grad` themselves after the synchronisation, as with PyTorch's wrapper: the result is right, or
every rank raises an error that names the parameter, before the optimizer can step. CASES lists the cases."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support.fault_cases import ALL, REDUCES_EARLY, SCATTERS, Case, Run, check, steps
from tests.test_faults_backward import DROPPED, drop_batch, zero_grad, zeroed

STAGE_2 = SCATTERS[:-1]


def then(change, number: int = 2):
    """Steps in which `change` does something with the gradients after the synchronisation."""

    def program(run: Run):
        for step in range(number):
            run.backward(step, skip=step == 1)
            yield
            change(run, step)
            run.step()

    return program


def each(act):
    """Steps after whose synchronisation `act` does something with each parameter that has a gradient."""

    @torch.no_grad()
    def change(run: Run, step: int) -> None:
        for p in run.model.parameters():
            if p.grad is not None:
                act(p)

    return then(change)


def clip_norm(run: Run, step: int) -> None:
    order, foreach = ((2.0, None), (float("inf"), True), (1.0, True))[step]
    clip_grad_norm_(run.model.parameters(), 0.01, order, foreach=foreach)


def clip_groups(run: Run, step: int) -> None:
    """Of the optimizer's parameters, one group after another."""
    for group in run.optimizer.param_groups:
        clip_grad_norm_(group["params"], 0.01)


def clip_value(run: Run, step: int) -> None:
    clip_grad_value_(run.model.parameters(), 0.001, foreach=(None, True)[step])


def scale(p: nn.Parameter) -> None:
    p.grad *= 0.5
    p.grad.div_(torch.tensor(3.0))
    p.grad.data.mul_(7)


def cancel(run: Run, step: int) -> None:
    """The gradients of some layers are dropped: their weights stay as they are."""
    for p in (*run.module.last.parameters(), *run.module.optional.parameters()):
        p.grad = None


def mark(module: nn.Module, rank: int) -> None:
    module.last.weight.stays = module.scale.stays = True


def take_out(run: Run, step: int, only: int | None = None) -> None:
    """Parameters with a mark of the user's stay as they are from the second step on, or on one rank from the first."""
    if step == 1 or run.rank == only:
        group = run.optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if not hasattr(p, "stays")]


def scale_momentum(run: Run, step: int) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg"].mul_(0.5)
    for p in run.optimizer.param_groups[0]["params"]:
        if p in run.optimizer.state:
            run.optimizer.state[p]["exp_avg_sq"].mul_(2)


def assign(p: nn.Parameter) -> None:
    p.grad = torch.full_like(p, 0.01)


def keep_some(run: Run):
    """Synchronised gradients add up, and some are dropped after the first time, one of which then gets no other."""
    run.backward(0)
    yield
    cancel(run, 0)
    run.backward(1, skip=True)
    yield
    run.step()


def sam(run: Run):
    """Sharpness-aware minimisation: the gradient is taken a small step uphill (arXiv:2010.01412)."""
    run.backward(0)
    yield
    with torch.no_grad():
        moved = [(p, p.grad * 0.05) for p in run.model.parameters() if p.grad is not None]
        for p, e in moved:
            p.add_(e)
    run.model.zero_grad()
    run.backward(0)
    yield
    with torch.no_grad():
        for p, e in moved:
            p.sub_(e)
    run.step()


def plain_optimizer(of):
    def program(run: Run):
        run.optimizer = torch.optim.AdamW(of(run), lr=0.1, weight_decay=0.5)
        run.remember()
        yield from run.train(0)

    return program


def keep_parameters(module: nn.Module, rank: int) -> None:
    module.before = list(module.parameters())


REFUSED = {" | ".join(STAGE_2): "which rests sharded"}
CASES = {
    "torch's clip_grad_norm_ after finish": Case(then(clip_norm, 3), inexact=SCATTERS, worlds=(2, 3)),
    "torch's clip_grad_norm_ of the optimizer's own groups": Case(then(clip_groups), inexact=SCATTERS),
    "torch's clip_grad_value_": Case(then(clip_value)),
    "gradients scaled in place": Case(each(scale)),
    "gradients of some layers dropped after finish": Case(then(cancel, 3), worlds=(2, 3)),
    "gradients of some layers dropped between two synchronisations": Case(keep_some, inexact=SCATTERS),
    "zero_grad() of the bare module": Case(zeroed(lambda run: zero_grad(run, "module"))),
    "zero_grad(set_to_none=False) of the bare module": Case(zeroed(lambda run: zero_grad(run, "module", False))),
    "zero_grad() of the bare module after backward, then finish": Case(
        steps(1, drop_batch, zero="module", again=False), {" | ".join((*REDUCES_EARLY, *STAGE_2)): DROPPED}
    ),
    "a batch dropped by zero_grad() of the bare module": Case(steps(1, drop_batch, zero="module")),
    # What a hook must not do to each rank's own gradient.
    "each gradient normalised after finish": Case(each(lambda p: p.grad.div_(p.grad.norm() + 1)), inexact=SCATTERS),
    "marked parameters taken out of their group": Case(then(take_out, 3), prepare=mark),
    "marked parameters taken out of their group on one rank": Case(
        then(partial(take_out, only=1)),
        {" | ".join(ALL[:4]): "the ranks' weights differ", " | ".join(ALL[4:]): "hash of the parameters' names = "},
        prepare=mark,
    ),
    "the optimizer's state cleared": Case(then(lambda run, step: run.optimizer.state.clear(), 3)),
    "the optimizer's momentum scaled": Case(then(scale_momentum, 3)),
    "noise added to gradients": Case(each(lambda p: p.grad.add_(torch.full_like(p, 0.01))), REFUSED),
    "weights updated by hand": Case(each(lambda p: p.sub_(0.1 * p.grad)), REFUSED),
    "gradients assigned": Case(each(assign), {" | ".join(STAGE_2): "was assigned after the synchronisation"}),
    "sharpness-aware minimisation": Case(sam, REFUSED),
    "a plain optimizer from before wrapping": Case(
        plain_optimizer(lambda run: run.module.before),
        {**REFUSED, "stage 3": "AdamW was made before embedding.weight was sharded"},
        prepare=keep_parameters,
        modes=("bucketed", *SCATTERS),
    ),
    "a plain optimizer of named_parameters()": Case(
        plain_optimizer(lambda run: [p for _, p in run.model.named_parameters()]), REFUSED, modes=("bucketed", *STAGE_2)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_right_or_an_error_that_names_the_cause(name):
    check(__name__, name, CASES[name])
