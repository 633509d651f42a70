"""Experts over ranks give one process's results: losses, every gradient of router and experts, their norm, and the
parameters after two steps of AdamW, in float64, for ep with itself, dp, tp, pp, ZeRO and recomputation."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cs336_systems.comm import record
from cs336_systems.optim.loss_scaler import LossScaler
from tests.support import ranks
from tests.support.expert_cases import (
    Layout,
    Watched,
    amplification_case,
    gradients_case,
    layout_case,
    reference_case,
    rounding,
)
from tests.support.layout_cases import dicts, errors, load, relative, wide, write_text
from tests.test_layouts import compare

LAYOUTS = (
    Layout(mixture="sampling", dropout=0.1),  # one process that sorts, where the reference has one-hot tensors
    Layout(mixture="capped", ep=2, moe="einsum"),
    Layout(mixture="padded", ep=2, model="bert"),
    Layout(mixture="sqrt", ep=2, zero=1),
    Layout(mixture="global", dp=2, zero=1),
    Layout(mixture="dropless", ep=4, zero=1),
    Layout(mixture="few", ep=2, dp=2, zero=2),  # more ranks than experts
    Layout(mixture="sampling", ep=2, dp=2, recompute="nested", dropout=0.1),
    Layout(mixture="shared", ep=2, dp=2, model="llama", zero=3),
    Layout(mixture="padded", tp=2, ep=2, model="bert", zero=1, sequence_parallel=True),
    Layout(mixture="random", tp=2, ep=2, moe="einsum", recompute="segments"),
    Layout(mixture="top1", pp=2, ep=2),  # the first stage has no experts
    Layout(mixture="global", pp=2, ep=2, schedule="gpipe", zero=3),
    Layout(mixture="shared", pp=2, ep=2, model="llama", schedule="interleaved", zero=2),
    Layout(mixture="shared", pp=2, ep=2, schedule="zb-h1"),
    Layout(mixture="shared", pp=2, ep=2, schedule="zbv"),
    Layout(mixture="together", cp=2, ep=2, zero=3),
    Layout(mixture="padded", tp=2, pp=2, ep=2, model="bert", zero=2, sequence_parallel=True),
)
CONDITIONED = {
    model: Layout(mixture=name, model=model)
    for model, name in (("gpt", "capped"), ("llama", "shared"), ("bert", "padded"))
}


class Proof:
    """Runs what a test needs, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_text(folder)
        models = {layout.reference: layout for layout in LAYOUTS}
        ranks.run(reference_case, 2, folder=str(folder), layouts=dicts(models.values()))
        found = ranks.run(amplification_case, len(CONDITIONED), folder=str(folder), layouts=dicts(CONDITIONED.values()))
        self.amplification = {model: each for model, (each,) in zip(CONDITIONED, found, strict=True)}

    def allowed(self, layout: Layout) -> float:
        """Bound of the rounding in a layout's results. How much a model amplifies depends little on how its experts
        route, and is measured for one way."""
        return self.amplification[layout.model] * rounding(layout.layers)

    def reference(self, layout: Layout) -> dict:
        return load(self.folder / f"{layout.reference}.reference")

    def records(self, layout: Layout) -> list[dict]:
        """Results of every rank of a layout."""
        if not (self.folder / f"{layout}.0").exists():
            together = [each for each in LAYOUTS if each.ranks == layout.ranks]
            ranks.run(layout_case, layout.ranks, folder=str(self.folder), layouts=dicts(together))
        return [load(self.folder / f"{layout}.{rank}") for rank in range(layout.ranks)]


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    return Proof(tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_experts_over_ranks_learn_what_one_process_learns(proof, layout):
    reference = proof.reference(layout)
    records, validation = proof.records(layout), reference["validation"]
    name, worst = max(compare(records, reference), key=lambda each: each[1])
    assert worst <= proof.allowed(layout), name
    assert max(relative(each["validation"], validation, validation) for each in records) <= proof.allowed(layout)


def test_the_reference_can_tell(proof):
    """A balancing loss that is larger by 1e-6 shows, and so does one expert's weight."""
    layout = Layout(mixture="dropless", ep=4, zero=1)
    reference = proof.reference(layout)
    assert proof.allowed(layout) < 1e-9
    (other,) = ranks.run(
        gradients_case, 1, folder=str(proof.folder), layout=asdict(layout), aux_weight=0.5 * (1 + 1e-6)
    )
    router = reference["steps"][0]["gradients"]["blocks.0.feed_forward.router.weight"]
    assert (torch.tensor(other) - router.flatten()).norm() > proof.allowed(layout) * router.norm()
    changed = {name: value.clone() for name, value in reference["parameters"].items()}
    changed["blocks.1.feed_forward.experts.up.weight"][3, 0, 0] *= 1 + 1e-6
    assert max(errors(changed, reference["parameters"]).values()) > proof.allowed(layout)


def precision_case(group, folder: str) -> None:
    """A loss scale, a power of two, multiplies every gradient, that of the balancing loss included, and nothing else;
    and half precision runs."""
    layout = Layout(mixture="shared", model="llama", ep=group.size())
    torch.set_default_dtype(torch.float32)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        trainer = Watched(layout.recipe(folder, precision=precision, initial_loss_scale=256.0))
        step = trainer.step(0)
        assert not step.skipped
        assert torch.isfinite(step.norm)
        assert {each.dtype for each, *_ in trainer.weights().values()} == {dtype}
    wide()
    found = []
    for scale in (1.0, 1024.0):
        trainer = Watched(layout.recipe(folder))
        trainer.scaler = LossScaler(scale)
        norm = trainer.step(0).norm
        found.append((norm, {name: each[0] / scale for name, each in trainer.seen.items()}))
    (norm, gradients), (other_norm, others) = found
    assert norm == other_norm
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert trainer.routing()["balance"] >= 0.5


def test_the_balancing_loss_follows_the_loss_scale(proof):
    ranks.run(precision_case, 2, folder=str(proof.folder))


def once_case(group, folder: str) -> None:
    """Two microbatches: gradients are reduced once, the experts' over dp and the others over dp x ep."""
    trainer = Watched(Layout(mixture="shared", model="llama", ep=2, dp=2).recipe(folder, micro_batch_size=1))
    with record() as events:
        trainer.step(0)
    dense, experts = trainer.part.wrappers
    found = Counter(event.ranks for event in events if event.label.startswith("bucket"))
    assert found == {4: len(dense.buckets), 2: len(experts.buckets)}


def test_gradients_of_several_microbatches_are_reduced_once(proof):
    ranks.run(once_case, 4, folder=str(proof.folder))
