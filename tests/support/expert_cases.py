"""Parts of the proof of expert parallelism: one process that gates group by group with the one-hot formulation
and adds the balancing loss by its formula, the ranks that run a layout, and the whole gradients of all experts."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.comm import subgroup
from cs336_systems.data.corpus import IGNORED, Batch
from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.moe import MoELayer
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.train.batches import make_batches
from cs336_systems.train.recipe import Recipe
from tests.support import layout_table
from tests.support.layout_cases import WIGGLE, Watched, amplification, learn, shake, wide
from tests.support.layout_table import STEPS
from tests.support.tolerances import bound

GROUP, BATCH = 2, 8  # rows that are routed together on a rank, the same groups in every layout; rows of a step
EVALUATED = 2  # batches of an evaluation
MIXTURES = {
    "dropless": {},
    "capped": {"capacity_factor": 1.0, "normalize_gates": "before", "expert_d_ff": 24, "eval_fraction": 0.25},
    "shared": {"capacity_factor": 1.5, "shared_expert": True},
    "sampling": {"second_expert": "sampling", "capacity_factor": 1.5},
    "random": {"second_expert": "random", "normalize_gates": "before"},
    "top1": {"top_k": 1, "capacity_factor": 1.0, "prioritized": True, "expert_every": 2},
    "global": {"aux_scope": "global", "capacity_factor": 1.5, "num_experts": 8},
    "together": {"aux_scope": "global", "second_expert": "sampling"},
    "padded": {"mask_padding": True, "capacity_factor": 1.5, "shared_expert": True},
    "sqrt": {"expert_gradient": "sqrt"},
    "few": {"num_experts": 2},
}


@dataclass(frozen=True)
class Layout(layout_table.Layout):
    """A place of the model on the ranks, and how its experts route. With cp a rank's tokens are balanced by themselves:
    equal to one process if all ranks balance together."""

    mixture: str = "dropless"
    ep: int = 1
    moe: str = "sort"

    def __str__(self) -> str:
        parts = [f"{axis}{getattr(self, axis)}" for axis in ("tp", "pp", "ep", "dp", "cp") if getattr(self, axis) > 1]
        parts += [self.mixture, self.model, f"zero{self.zero}", self.recompute, self.moe]
        parts += [self.schedule] * (self.pp > 1) + ["dropout"] * (self.dropout > 0)
        return "-".join(parts + ["sequence"] * self.sequence_parallel)

    @property
    def ranks(self) -> int:
        return super().ranks * self.ep

    @property
    def data(self) -> int:
        return self.ep * self.dp

    @property
    def reference(self) -> str:
        """The name of what one process makes of the same model: it balances over ranks, or scales by their number, only
        where asked to."""
        data = self.data if self.mixture in ("global", "together", "sqrt") else 1
        return f"{self.mixture}-{self.model}-{self.layers}-{self.dropout}-{data}"

    def recipe(self, folder: str, **changes: object) -> Recipe:
        settings = {"num_experts": 4, "expert_every": 1, "aux_weight": 0.5, "ep": self.ep, "moe": self.moe}
        settings |= {"micro_batch_size": GROUP, "batch_size": BATCH, "eval_iters": EVALUATED, **MIXTURES[self.mixture]}
        return super().recipe(folder, **settings | changes)


class Gated:
    """Notes what an expert layer is called with, to write the balancing loss down by its formula."""

    def __init__(self, layer: MoELayer) -> None:
        self.layer, self.calls = layer, []
        layer.balance_scale = 0.0  # the layer's own way to add it
        layer.register_forward_pre_hook(lambda module, args: self.calls.append(args))

    def loss(self, ranks: int, scope: str) -> Tensor:
        """The mean over all groups of E sum_e (mean probability) (share of first choices), arXiv:2101.03961. Group i of
        rank r is call r x (groups of a rank) + i; with the scope `global` the share is that of the i-th of all ranks.
        """
        gates, shares = [], []
        for x, real, *_ in self.calls:
            probabilities = torch.softmax(x.flatten(0, 1) @ self.layer.router.weight.T, dim=1)
            first = (probabilities == probabilities.max(dim=1, keepdim=True).values).to(x.dtype)
            if real is not None and self.layer.mixture.mask_padding:
                first = first * real.flatten()[:, None]
            gates.append(probabilities.mean(0))
            shares.append(first.mean(0))
        self.calls.clear()
        gates, shares = torch.stack(gates), torch.stack(shares)
        if scope == "global":
            together = shares.view(ranks, -1, shares.shape[1]).mean(0, keepdim=True)
            shares = together.expand(ranks, -1, -1).flatten(0, 1)
        return gates.shape[1] * (gates * shares).sum(1).mean()


def global_losses(model: TransformerLM, batch: Batch, keys: list | None) -> Tensor:
    """Token and pair losses of the whole batch, group by group."""
    tokens, pairs, counted = 0.0, torch.zeros(()), (batch.targets != IGNORED).sum()
    for number, group in enumerate(batch.split(GROUP)):
        key = keys[number] if keys else None
        losses = model.losses(model.run_blocks(group, key=key), group)
        tokens = tokens + losses.tokens / counted
        pairs = pairs + (0.0 if losses.pair is None else losses.pair / len(batch.tokens))
    return torch.stack((tokens, pairs))


def one_process(recipe: Recipe, feed: object, ranks: int, wiggle: float = 0.0, steps: int = STEPS) -> dict:
    """A plain loop: one model, its expert layers by einsum, torch's AdamW. `ranks` data-parallel ones are imitated
    where the recipe asks for their number. `wiggle` changes all weights by this share, up or down."""
    config = recipe.model_config(feed.vocab_size)
    mixture = replace(config.mixture, dispatch="einsum")
    model = TransformerLM(replace(config, mixture=mixture, recompute="none"), "cpu")
    model.init_weights(recipe.run.seed)
    layers = [Gated(module) for module in model.modules() if isinstance(module, MoELayer)]
    shake(model, wiggle)

    def losses(step: int) -> tuple[Tensor, Tensor]:
        batch = feed.batch(step, 0, 1)
        drawn = recipe.model.dropout or mixture.is_random
        rows = torch.arange(len(batch.tokens)).split(GROUP)
        found = global_losses(
            model, batch, [dropout_key(recipe.run.seed, step, each) for each in rows] if drawn else None
        )
        balance = sum(layer.loss(ranks, mixture.aux_scope) for layer in layers)
        return found, found.sum() + mixture.aux_weight * balance

    def adjust() -> None:
        for name, parameter in model.named_parameters():
            if ".experts." in name and mixture.expert_gradient == "sqrt":
                parameter.grad.mul_(math.sqrt(ranks))

    found = learn(model, recipe, losses, steps, adjust)
    return found | {"validation": validated(model, feed)}


@torch.no_grad()
def validated(model: TransformerLM, feed: object) -> Tensor:
    """The mean losses of what is kept for evaluation, of tokens and of pairs."""
    model.eval()
    batches = [feed.validation(number, 0, 1) for number in range(EVALUATED)]
    counts = [(batch.targets != IGNORED).sum() for batch in batches]
    losses = torch.stack([global_losses(model, batch, None) for batch in batches])
    tokens = sum(mean * count for mean, count in zip(losses[:, 0], counts, strict=True)) / sum(counts)
    return torch.stack((tokens, losses[:, 1].mean()))


def reference_case(group, folder: str, layouts: list[dict]) -> None:
    """Results of one process for a model, in float64. Each rank takes some of the models."""
    wide()
    myself = subgroup([group.rank()])
    for layout in [Layout(**each) for each in layouts][group.rank() :: group.size()]:
        alone = Layout(mixture=layout.mixture, model=layout.model, schedule=layout.schedule, dropout=layout.dropout)
        alone = replace(alone, pp=layout.chunks)  # for its number of layers
        recipe = alone.recipe(folder)
        feed = make_batches(recipe, BATCH, myself)
        result = one_process(recipe, feed, layout.data)
        torch.save(result, Path(folder, f"{layout.reference}.reference"))


def amplification_case(group, folder: str, layouts: list[dict], steps: int = STEPS) -> list[float]:
    """How much more what is learned changes than the weights it begins with, of the models that this rank takes."""
    wide()
    myself, found = subgroup([group.rank()]), []
    for layout in [Layout(**each) for each in layouts][group.rank() :: group.size()]:
        recipe = layout.recipe(folder)
        feed = make_batches(recipe, BATCH, myself)
        found.append(amplification(*(one_process(recipe, feed, layout.data, each, steps) for each in (0.0, WIGGLE))))
    return found


def gradients_case(group, folder: str, layout: dict, aux_weight: float) -> list[float]:
    """One process's first gradient of the first router, with a balancing loss of this weight."""
    wide()
    recipe = Layout(**layout | {"ep": 1, "dp": 1}).recipe(folder, aux_weight=aux_weight)
    found = one_process(recipe, make_batches(recipe, BATCH, group), 1, steps=1)
    return found["steps"][0]["gradients"]["blocks.0.feed_forward.router.weight"].flatten().tolist()


def run_steps(trainer: Watched, first: int, last: int) -> list[dict]:
    steps = []
    for number in range(first, last):
        step = trainer.step(number)
        losses = torch.tensor(trainer.mean_losses([step]))
        steps.append({"losses": losses, "norm": step.norm, "gradients": trainer.seen})
    return steps


def layout_case(group, folder: str, layouts: list[dict]) -> None:
    """Two steps of several layouts, one after another."""
    wide()
    for layout in (Layout(**each) for each in layouts):
        try:
            trainer = Watched(layout.recipe(folder))
            steps = run_steps(trainer, 0, STEPS)
        except BaseException as error:
            error.add_note(f"in layout {layout}")
            raise
        found = {"place": trainer.mesh.place, "steps": steps, "parameters": trainer.weights()}
        losses = {"validation_sop_loss": 0.0} | trainer.validate()
        found["validation"] = torch.tensor([losses["validation_loss"], losses["validation_sop_loss"]])
        torch.save(found, Path(folder, f"{layout}.{group.rank()}"))


def rounding(layers: int) -> float:
    """Bound of the rounding of a gradient, relative to its size, as in `layout_cases.rounding`; a layer with experts
    adds 12 operations to the 16 of a block: the router's product, softmax, two sums and a quotient of weights, three
    products of an expert, the weighted rows and their sum, and the two of the balancing loss."""
    return bound(torch.float64, stages=3 * 28 * (layers + 1), longest_sum=264)
