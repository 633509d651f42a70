"""Parts of the proof of layouts: one process without a layout, the ranks that run one, and the whole
gradients put together from each rank's part."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.comm import record
from cs336_systems.data.corpus import IGNORED, Batch
from cs336_systems.fsdp import FSDP
from cs336_systems.model.attention import SelfAttention
from cs336_systems.model.blockwise import BlockKernel, Visible
from cs336_systems.model.dropout import drop, dropout_key
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.train.batches import make_batches
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.trainer import Trainer
from tests.support.layout_table import BATCH, STEPS, Layout
from tests.support.tolerances import bound

TIED = "embedding.tokens.weight"
WIGGLE = 2.0**-26  # half the digits of float64


def write_text(folder: Path) -> None:
    """Documents of a few sentences, long enough for a dozen batches, and documents of a word."""
    draw = random.Random(1)
    words = ["model", "of", "the", "stage", "rank", "a", "sum", "over", "each", "row", "is", "split"]
    sentence = lambda: " ".join(draw.choices(words, k=draw.randint(2, 5))) + "."  # noqa: E731
    documents = ["\n".join(sentence() for _ in range(draw.randint(3, 6))) for _ in range(60)]
    (folder / "text").write_text("\n\n".join(documents))
    (folder / "words").write_text("\n\n".join(draw.choices(words, k=400)))  # packed: several documents in a row


def global_loss(model: TransformerLM, batch: Batch, key: object) -> Tensor:
    """Token and pair losses of the whole batch, as their means are defined."""
    losses = model.losses(model.run_blocks(batch, key=key), batch)
    tokens = losses.tokens / (batch.targets != IGNORED).sum()
    return torch.stack((tokens, torch.zeros(()) if losses.pair is None else losses.pair / len(batch.tokens)))


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, kernel: BlockKernel) -> Tensor:
    """Attention of packed rows in one process with a mask of every pair of tokens, differentiated by autograd."""
    rows, heads, seq, dim = q.shape
    k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
    mask = torch.zeros(rows, 1, seq, seq, dtype=torch.bool)
    for at, starts in visible.documents:
        document = torch.tensor([sum(start <= place for start in starts) for place in range(seq)])
        mask[at] = (document[:, None] == document) & torch.ones(seq, seq, dtype=torch.bool).tril()
    weights = ((q @ k.mT) / math.sqrt(dim)).masked_fill(~mask, -torch.inf).softmax(-1)
    return drop(weights, kernel.dropout, kernel.key, kernel.site, (kernel.first_head,)) @ v


def one_process(recipe: Recipe, feed: object, wiggle: float = 0.0) -> dict:
    """A plain loop: one model, the whole batch at once. `wiggle` changes all weights by this share, up or down."""
    model = TransformerLM(recipe.model_config(feed.vocab_size), "cpu")
    model.init_weights(recipe.run.seed)
    shake(model, wiggle)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.blockwise = dense_attention

    def losses(step: int) -> tuple[Tensor, Tensor]:
        batch = feed.batch(step, 0, 1)
        key = dropout_key(recipe.run.seed, step, torch.arange(len(batch.tokens)))
        found = global_loss(model, batch, key if recipe.model.dropout else None)
        return found, found.sum()

    return learn(model, recipe, losses, recipe.run.steps)


@torch.no_grad()
def shake(model: TransformerLM, share: float) -> None:
    """Change all weights by this share, up or down."""
    for parameter in model.parameters():
        parameter.mul_(1 + share * torch.randint_like(parameter, 2).mul(2).sub(1))


def learn(
    model: TransformerLM,
    recipe: Recipe,
    losses: Callable[[int], tuple[Tensor, Tensor]],
    steps: int,
    adjust: Callable[[], object] = lambda: None,
) -> dict:
    """Steps of torch's AdamW, clipped, with the recipe's rates written down once more. `losses` gives those of a step
    to be noted, and what is differentiated; `adjust` may change the gradients."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.endswith("weight") and "norm." not in name]
    vectors = [p for name, p in named.items() if not name.endswith("weight") or "norm." in name]
    said = recipe.optimizer
    groups = [{"params": matrices, "weight_decay": said.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(said.beta1, said.beta2), eps=said.adam_eps, foreach=False)
    found = []
    for step in range(steps):
        noted, total = losses(step)
        total.backward()
        adjust()
        gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        found.append({"losses": noted.detach(), "norm": norm, "gradients": gradients})
        for parameter in named.values():
            parameter.grad.mul_(min(1.0, said.clip / norm.item()))
        for each in optimizer.param_groups:
            # Two steps of warm-up, then half a cosine down to a tenth.
            done = (step - said.warmup_steps) / (said.decay_steps - said.warmup_steps)
            fall = said.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
            each["lr"] = said.lr * (step + 1) / said.warmup_steps if step < said.warmup_steps else fall
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": found, "parameters": {name: p.detach() for name, p in named.items()}}


def relative(got: Tensor, want: Tensor, scale: Tensor) -> float:
    return ((got - want).norm() / scale.norm()).item()


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Each tensor's error, relative to its own size. A bias of the keys adds the same to all scores of a query, which
    the softmax does not see: its gradient is zero but for rounding, and is compared to that of the keys' weight."""
    assert got.keys() == want.keys()
    return {name: relative(got[name], want[name], want[name.replace("key.bias", "key.weight")]) for name in want}


def amplification(one: dict, other: dict) -> float:
    """How much more what is learned changes than the weights that it begins with, which differ by WIGGLE."""
    moved = [errors(b["gradients"], a["gradients"]) for a, b in zip(one["steps"], other["steps"], strict=True)]
    moved.append(errors(other["parameters"], one["parameters"]))
    return max(max(each.values()) for each in moved) / WIGGLE


def reference_case(group, folder: str, layouts: list[dict]) -> None:
    """Results of one process for a model, in float64, and how much more they change than the initial weights."""
    torch.set_default_dtype(torch.float64)
    for layout in (Layout(**each) for each in layouts):
        alone = Layout(
            model=layout.model, dropout=layout.dropout, schedule=layout.schedule, pp=layout.pp, pack=layout.pack
        )
        recipe = alone.recipe(folder)
        feed = make_batches(recipe, BATCH, group)
        result, other = one_process(recipe, feed), one_process(recipe, feed, WIGGLE)
        result["amplification"] = amplification(result, other)
        torch.save(result, Path(folder, f"{layout.reference}.reference"))


class Watched(Trainer):
    """Notes what the ranks have of the gradients when all is added up, before they are clipped."""

    def _update(self, rate):
        kept = self.part.kept()
        self.seen = {name: (each.gradient.clone(), each.sharded, each.parameter.shape) for name, each in kept.items()}
        return super()._update(rate)

    def weights(self) -> dict[str, tuple[Tensor, bool, torch.Size]]:
        shards = {weight.shard for each in self.part.wrappers if isinstance(each, FSDP) for weight in each.sharded}
        named = self.stage.model.named_parameters()
        return {name: (p.detach().clone(), p in shards, p.shape) for name, p in named}


def wide() -> None:
    """Compute in float64 from now on."""
    torch.set_default_dtype(torch.float64)


def layout_case(group, folder: str, layouts: list[dict], changes: dict) -> None:
    """Two steps of several layouts, one after another."""
    wide()
    for layout in (Layout(**each) for each in layouts):
        try:
            trainer = Watched(layout.recipe(folder, **changes))
            steps = []
            for number in range(STEPS):
                step = trainer.step(number)
                losses = torch.tensor(trainer.mean_losses([step]))
                steps.append({"losses": losses, "norm": step.norm, "gradients": trainer.seen})
            found = {"place": trainer.mesh.place, "steps": steps, "parameters": trainer.weights()}
        except BaseException as error:
            error.add_note(f"in layout {layout}")
            raise
        torch.save(found, Path(folder, f"{name_of(layout, changes)}.{group.rank()}"))


def name_of(layout: Layout, changes: dict) -> str:
    return " ".join([str(layout), *(f"{name} {value}" for name, value in changes.items())])


def traffic_case(group, folder: str, layout: dict) -> list[list]:
    """Traffic of this rank in the second step of a layout: (verb, elements, ranks, how often). What a
    group of one is asked to do moves nothing."""
    trainer = Trainer(Layout(**layout).recipe(folder))
    trainer.step(0)
    with record() as events:
        trainer.step(1)
    found = Counter((event.verb, event.numel, event.ranks) for event in events if event.ranks > 1)
    return [[*kind, often] for kind, often in sorted(found.items())]


def load(path: Path) -> dict:
    return torch.load(path, weights_only=False)


def assemble(records: list[dict], pick: object, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The whole tensors from what every rank has, by their shapes alone: experts by their global number. What several
    ranks have must be equal."""
    parts: dict[str, dict[tuple, dict[tuple, tuple]]] = {}
    for each in records:
        place = each["place"]
        for name, mine in pick(each).items():
            expert = place["ep"] if ".experts." in name else 0
            copies = parts.setdefault(name, {}).setdefault((place["pp"], place["tp"], expert), {})
            copies[place["dp"], place["ep"], place["cp"]] = mine
    return {name: _whole(name, owners, shapes[name]) for name, owners in parts.items()}


def _whole(name: str, owners: dict[tuple, dict[tuple, tuple]], shape: torch.Size) -> Tensor:
    stages: dict[int, dict[int, list[Tensor]]] = {}
    for (stage, tp, _), copies in sorted(owners.items()):
        pieces = [copies[rank] for rank in sorted(copies)]
        tensors, (_, sharded, like) = [piece[0] for piece in pieces], pieces[0]
        if sharded:  # rows, or a stretch of the flat tensor, in the order of the ranks
            part = torch.cat([tensor.flatten() for tensor in tensors]).view(-1, *like[1:])
        else:
            part = alike(tensors, f"{name} over its replicas")
        stages.setdefault(stage, {}).setdefault(tp, []).append(part)
    by_stage = [[torch.cat(experts) for _, experts in sorted(each.items())] for each in stages.values()]
    return alike([over_tp(name, each, shape) for each in by_stage], f"{name} over pp")


def over_tp(name: str, tensors: list[Tensor], shape: torch.Size) -> Tensor:
    cut = [dim for dim, (size, whole) in enumerate(zip(tensors[0].shape, shape, strict=True)) if size != whole]
    if not cut:
        return alike(tensors, f"{name} over tp")
    whole = torch.cat(tensors, cut[0])
    assert not whole.narrow(cut[0], shape[cut[0]], whole.shape[cut[0]] - shape[cut[0]]).any(), f"padding of {name}"
    return whole.narrow(cut[0], 0, shape[cut[0]])


def alike(tensors: list[Tensor], what: str) -> Tensor:
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), f"{what}: the ranks differ"
    return tensors[0]


def dicts(layouts: Iterable[Layout]) -> list[dict]:
    return [asdict(layout) for layout in layouts]


def rounding(layers: int) -> float:
    """Bound of the rounding of a gradient of a model whose parts are all well conditioned, relative to its size: 16
    operations of a block (two norms, six products of matrices, softmax, activation, sums), as many again for embedding,
    head and loss, all three times, since backward has two for each; the longest sum is over the padded vocabulary."""
    return bound(torch.float64, stages=3 * 16 * (layers + 1), longest_sum=264)
