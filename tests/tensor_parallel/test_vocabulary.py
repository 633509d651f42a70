"""Embedding, head and cross entropy split by words, against those of one process in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.comm import pairs, record
from cs336_systems.data.corpus import IGNORED
from cs336_systems.errors import UserError
from cs336_systems.model.heads import TiedHead, TokenLoss
from cs336_systems.tensor_parallel.layers import my_part
from cs336_systems.tensor_parallel.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelLoss,
)
from tests.support import ranks
from tests.support.tolerances import bound, relative_error

D_MODEL = 6
TOKENS = (3, 5)
SIZES = ((8, 8), (7, 8), (13, 24), (3, 12))  # words, padded: none, one, and a last rank or several of padding alone
# Three matrix products or sums over words, tokens and features, and some operations of one term between them.
ROUNDING = bound(torch.float64, stages=12, longest_sum=24)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def words(vocab_size: int, seed: int) -> Tensor:
    return torch.randint(vocab_size, TOKENS, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor) -> None:
    assert relative_error(got, want) <= ROUNDING


def check_embedding(vocab_size: int, padded: int, group) -> None:
    dense = nn.Embedding(vocab_size, D_MODEL, dtype=torch.float64)
    dense.weight.data = draw(vocab_size, D_MODEL)
    parallel = VocabParallelEmbedding(dense, padded, group)
    tokens, direction = words(vocab_size, 1), draw(*TOKENS, D_MODEL, seed=2)
    got, want = parallel(tokens), dense(tokens)
    assert torch.equal(got, want), "all but one of the terms are zero"
    (got * direction).sum().backward()
    (want * direction).sum().backward()
    gradient = pairs.gather(parallel.weight.grad, 0, group)
    assert torch.equal(gradient[:vocab_size], dense.weight.grad)
    assert not gradient[vocab_size:].any()
    for token in (vocab_size, padded, -1):
        with pytest.raises(UserError) as error:
            parallel(torch.tensor([[0, token]]))
        assert str(error.value) == f"token {token} lies outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"


def check_head_and_loss(vocab_size: int, padded: int, group, scale: float) -> None:
    """From x to the loss, by a head with a bias; the last two tokens have no target."""
    x, weight, bias = draw(*TOKENS, D_MODEL, seed=3, scale=scale), draw(vocab_size, D_MODEL), draw(vocab_size, seed=4)
    targets = words(vocab_size, 5)
    targets[-1, -2:] = IGNORED
    for reduction in ("sum", "mean"):
        whole = [each.clone().requires_grad_() for each in (x, weight, bias)]
        want = TokenLoss()(TiedHead()(*whole), targets, reduction)
        want.backward()
        mine = [x.clone(), my_part(weight, 0, padded, group), my_part(bias, 0, padded, group)]
        mine = [each.requires_grad_() for each in mine]
        loss = VocabParallelLoss(vocab_size, padded, group)
        with record() as events:
            logits = TiedHead()(pairs.copy(mine[0], group, "head"), *mine[1:])
            got = loss(logits, targets, reduction)
            (3 * got).backward()
        tokens = targets.numel()
        assert [(event.label, event.numel) for event in events] == [
            ("largest logit", tokens),
            ("softmax", 2 * tokens),
            ("head, gradient", x.numel()),
        ], "the logits never leave their rank"
        close(got.detach(), want.detach())
        close(mine[0].grad, 3 * whole[0].grad)
        for part, dense in zip(mine[1:], whole[1:], strict=True):
            gradient = pairs.gather(part.grad, 0, group)
            close(gradient[:vocab_size], 3 * dense.grad)
            assert not gradient[vocab_size:].any(), "padding keeps its zeros"
        close(loss.whole(logits.detach()), F.linear(*whole).detach())


def check_loss(group) -> None:
    """Valid targets and logits."""
    vocab_size, padded = 13, 8 * group.size()
    loss, dense = VocabParallelLoss(vocab_size, padded, group), TokenLoss()
    logits, targets = draw(*TOKENS, vocab_size, seed=6), words(vocab_size, 7)

    def part(whole: Tensor) -> Tensor:
        return my_part(whole, 2, padded, group).requires_grad_()

    nothing = torch.full_like(targets, IGNORED)
    mine = part(logits)
    total = loss(mine, nothing, "sum")
    total.backward()
    assert total == 0
    assert not mine.grad.any()
    assert loss(part(logits), nothing, "mean").isnan(), "as torch's mean of nothing"
    mine = part(logits)
    total = loss(mine, targets, "mean")
    (gradient,) = torch.autograd.grad(total, mine, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (total + gradient.norm()).backward()

    for huge in (logits * 1e6, logits - 1e6, logits + 1e6):
        mine, whole = part(huge), huge.clone().requires_grad_()
        got, want = loss(mine, targets, "sum"), dense(whole, targets, "sum")
        got.backward()
        want.backward()
        # A logit near 10^6 is known to its own rounding, which the loss then has absolutely.
        assert abs(got - want) <= ROUNDING * huge.abs().max() * targets.numel()
        gradient = pairs.gather(mine.grad, 2, group)[..., :vocab_size]
        assert (gradient - whole.grad).abs().max() <= ROUNDING * huge.abs().max()

    for odd in (torch.nan, torch.inf):
        poisoned = logits.clone()
        poisoned[1, 2, 12] = odd  # the last rank that has words
        assert loss(part(poisoned), targets, "sum").isnan(), odd
        targets_elsewhere = targets.clone()
        targets_elsewhere[1, 2] = IGNORED
        assert loss(part(poisoned), targets_elsewhere, "sum").isfinite(), odd

    for target in (vocab_size, padded - 1, padded, -1):
        with pytest.raises(UserError) as error:
            loss(part(logits), torch.where(targets == 5, target, targets), "sum")
        assert str(error.value) == f"target {target} lies outside the vocabulary of 13 (0 to 12)"

    for half in (torch.bfloat16, torch.float16):
        got, want = loss(part(logits.to(half)), targets, "sum"), dense(logits.to(half), targets, "sum")
        assert got.dtype == torch.float32, "sums over words want float32"
        assert relative_error(got.detach(), want) <= bound(torch.float32, stages=12, longest_sum=13)


def vocabulary_case(group) -> None:
    for vocab_size, padded in SIZES:
        check_embedding(vocab_size, padded, group)
        check_head_and_loss(vocab_size, padded, group, 1.0)
        check_head_and_loss(vocab_size, padded, group, 1e-3)
    check_loss(group)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_vocabulary_in_parts(world_size):
    ranks.run(vocabulary_case, world_size)
