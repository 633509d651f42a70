"""Training steps in half precision, as the ranks of a layout take them, and as one process without ranks, buckets
and collectives takes them. It rounds and adds in the same order, so that both have the same bits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.data.corpus import IGNORED, Batch
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.train.recipe import Recipe
from tests.support.layout_cases import TIED, Watched
from tests.support.layout_table import STEPS, Layout

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HEAD = "tied_head.weight"  # of the last stage's copy of the embedding


class LastStage(nn.Module):
    """Tied head of a last stage: its weight has the embedding's values, and a gradient of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        return F.linear(x, self.weight)


def copies(x: Tensor, ranks: int) -> list[Tensor]:
    """The input of each rank. Gradients are added on each rank, then over the ranks."""
    return [x.view_as(x) for _ in range(ranks)]


class Columns(nn.Module):
    """A linear layer of which each rank computes some outputs, of its copy of the input."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        parts = zip(inputs, self.weight.chunk(len(inputs)), strict=True)
        return torch.cat([F.linear(x, weight) for x, weight in parts], -1)


class Rows(nn.Module):
    """A linear layer of which each rank multiplies some inputs: the sum of their rounded products."""

    def __init__(self, linear: nn.Linear, ranks: int) -> None:
        super().__init__()
        self.weight, self.ranks = linear.weight, ranks

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(self.ranks, -1), self.weight.chunk(self.ranks, 1), strict=True)
        return sum(F.linear(part, weight) for part, weight in parts)


class Words(nn.Module):
    """A tied head of which each rank has the logits of some words, some of which are padding."""

    def __init__(self, ranks: int, padding: int) -> None:
        super().__init__()
        self.ranks, self.padding = ranks, padding

    def forward(self, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        parts = zip(copies(x, self.ranks), F.pad(weight, (0, 0, 0, self.padding)).chunk(self.ranks), strict=True)
        return torch.cat([F.linear(part, words) for part, words in parts], -1)


class CrossEntropy(torch.autograd.Function):
    """The sum of -log softmax(logits)[target] in float32, exponentials added rank by rank, and (softmax - one-hot)."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, words: int, ranks: int) -> Tensor:
        counted = targets != IGNORED
        target = targets.clamp(min=0)[:, None]
        shifted = logits - logits[:, :words].amax(1, keepdim=True)
        exponentials = shifted.exp()
        exponentials[:, words:] = 0
        total = sum(each.sum(1) for each in exponentials.chunk(ranks, 1))
        ctx.save_for_backward(exponentials / total[:, None], counted, target)
        return (total.log() - shifted.gather(1, target)[:, 0])[counted.nonzero()[:, 0]].sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        softmax, counted, target = ctx.saved_tensors
        gradients = (gradient * counted)[:, None]
        return (softmax * gradients).scatter_add_(1, target, -gradients), None, None, None


class WordsLoss(nn.Module):
    """The sum of the losses of logits that ranks have of some words each."""

    def __init__(self, words: int, ranks: int) -> None:
        super().__init__()
        self.words, self.ranks = words, ranks

    def forward(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return CrossEntropy.apply(logits.flatten(0, 1).float(), targets.flatten(), self.words, self.ranks)


def split(model: TransformerLM, ranks: int, multiple: int) -> None:
    """Compute what tensor-parallel ranks do, side by side in one process."""
    words = model.config.vocab_size
    for block in model.blocks:
        for layer, inner, outer in (
            (block.attention, ("query", "key", "value"), "out"),
            (block.feed_forward, ("up",), "down"),
        ):
            for name in inner:
                setattr(layer, name, Columns(getattr(layer, name)))
            setattr(layer, outer, Rows(getattr(layer, outer), ranks))
            layer.register_forward_pre_hook(lambda module, args: (copies(args[0], ranks), *args[1:]))
    model.tied_head, model.token_loss = Words(ranks, -words % multiple), WordsLoss(words, ranks)


def added(tensors: Sequence[Tensor]) -> Tensor:
    """The sum from the first to the last, rounded at each step."""
    return reduce(torch.add, tensors)


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean over ranks, added in float32 and rounded once, as in shared memory."""
    return (added([tensor.float() for tensor in tensors]) / len(tensors)).to(tensors[0].dtype)


class OneProcess:
    """A model in half precision and its masters in float32, which torch's AdamW steps."""

    def __init__(self, recipe: Recipe, feed: object, layout: Layout) -> None:
        self.recipe, self.feed, self.layout = recipe, feed, layout
        self.scale = recipe.optimizer.initial_loss_scale if recipe.model.precision == "fp16" else 1.0
        self.model = TransformerLM(replace(recipe.model_config(feed.vocab_size), recompute="none"), "cpu")
        self.model.init_weights(recipe.run.seed)
        self.model.to(DTYPES[recipe.model.precision])
        self.named = dict(self.model.named_parameters())  # by the names in the model that is not split
        if layout.tp > 1:
            split(self.model, layout.tp, recipe.parallel.pad_vocabulary)
        if layout.pp > 1:
            self.model.tied_head = LastStage(self.named[TIED])
            self.named[HEAD] = self.model.tied_head.weight
        self.masters = {name: p.detach().float() for name, p in self.named.items() if name != HEAD}
        decays = {name: master.dim() > 1 for name, master in self.masters.items()}
        said = recipe.optimizer
        groups = [
            {"params": [p for name, p in self.masters.items() if decays[name] is kind], "weight_decay": decay}
            for kind, decay in ((True, said.weight_decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=1.0, betas=(said.beta1, said.beta2), eps=said.adam_eps, foreach=False
        )

    def step(self, number: int, norm: Tensor) -> dict:
        """Losses, gradients and weights of a step. `norm` is the run's, by which gradients are clipped: a sum in
        another order, which is checked apart."""
        losses, gradients = torch.zeros(2, dtype=torch.float64), []
        batches = [self.feed.batch(number, rank, self.layout.dp) for rank in range(self.layout.dp)]
        counted = sum((batch.targets != IGNORED).sum() for batch in batches).float()
        for batch in batches:
            found = [self.backward(rows, counted) for rows in batch.split(self.recipe.data.micro_batch_size)]
            losses += torch.stack([torch.stack((loss, torch.zeros(()))) for loss, _ in found]).sum(0)
            gradients.append([each for _, each in found])
        whole = {name: self.reduced(name, [[each[name] for each in rank] for rank in gradients]) for name in self.named}
        if HEAD in whole:
            whole[TIED] = whole[TIED] + whole.pop(HEAD)
        said = self.recipe.optimizer
        for name, master in self.masters.items():
            master.grad = whole[name].float() * ((said.clip / norm).clamp(max=1.0) / self.scale)
        for group in self.optimizer.param_groups:
            group["lr"] = said.lr * (number + 1) / said.warmup_steps
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(self.masters[TIED if name == HEAD else name])
        weights = {name: parameter.detach().clone() for name, parameter in self.named.items() if name != HEAD}
        return {"losses": losses, "gradients": whole, "parameters": weights}

    def backward(self, rows: Batch, counted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a microbatch, a share of the global mean, and its gradients."""
        loss = self.model.losses(self.model.run_blocks(rows), rows).tokens / counted
        (self.layout.dp * self.scale * loss).backward()
        found = {name: parameter.grad for name, parameter in self.named.items()}
        self.model.zero_grad()
        return loss.detach(), found

    def reduced(self, name: str, gradients: list[list[Tensor]]) -> Tensor:
        """The mean over ranks of the sum over microbatches; of a weight that is sharded, whose gradient is reduced
        after each microbatch, the sum of the means."""
        if self.layout.zero == 3 and self.named[name].dim() == 2:
            return added([mean(each) for each in zip(*gradients, strict=True)])
        return mean([added(each) for each in gradients])


def half_case(group, folder: str, layout: dict, changes: dict) -> None:
    """Steps of a layout in both precisions; the first rank notes what one process makes of them."""
    torch.set_default_dtype(torch.float32)
    layout = Layout(**layout)
    for precision in DTYPES:
        recipe = layout.recipe(folder, precision=precision, **changes)
        trainer, found = Watched(recipe), []
        alone = OneProcess(recipe, trainer.batches, layout) if group.rank() == 0 else None
        for number in range(STEPS):
            step = trainer.step(number)
            losses = torch.tensor(trainer.mean_losses([step]), dtype=torch.float64)
            got = {"losses": losses, "norm": step.norm, "gradients": trainer.seen, "parameters": trainer.weights()}
            found.append(got | {"place": trainer.mesh.place, "want": alone and alone.step(number, step.norm)})
        torch.save(found, Path(folder, f"{layout} {precision}.{group.rank()}"))
