"""Every layout gives one process's results: losses, every parameter's gradient, its norm, and the parameters after
two steps of AdamW, in float64, for every factorisation of 2, 4 and 8 ranks with all options in pairs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support import ranks
from tests.support.layout_cases import (
    TIED,
    assemble,
    batched,
    dicts,
    errors,
    layout_case,
    load,
    name_of,
    reference_case,
    relative,
    rounding,
    traffic_case,
    write_text,
)
from tests.support.layout_table import STEPS, WRITTEN, Layout, existing, pairs_of, table

AT_ONCE = 6  # layouts that the same ranks run one after another
TOGETHER = [
    layouts
    for world in (2, 4, 8)
    for layouts in batched([layout for layout in table() if layout.ranks == world], AT_ONCE)
]


@pytest.fixture(scope="module")
def proof(tmp_path_factory, request):
    proof = Proof(tmp_path_factory.mktemp("layouts"))
    yield proof
    if proof.worst:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            proof.report()


class Proof:
    """Runs what a test needs, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references: dict[str, dict] = {}
        self.worst: dict[Layout, tuple[float, float]] = {}
        write_text(folder)

    def reference(self, layout: Layout, others: Sequence[Layout] = ()) -> dict:
        if layout.reference not in self.references:
            models = {each.reference: each for each in (layout, *others)}
            new = [each for name, each in models.items() if name not in self.references]
            ranks.run(reference_case, 1, folder=str(self.folder), layouts=dicts(new))
            self.references |= {each.reference: load(self.folder / f"{each.reference}.reference") for each in new}
        return self.references[layout.reference]

    def run(self, layouts: Sequence[Layout], **changes: object) -> None:
        ranks.run(layout_case, layouts[0].ranks, folder=str(self.folder), layouts=dicts(layouts), changes=changes)

    def records(self, layout: Layout, **changes: object) -> list[dict]:
        """Results of every rank of a layout."""
        name = name_of(layout, changes)
        if not (self.folder / f"{name}.0").exists():
            self.run([layout], **changes)
        return [load(self.folder / f"{name}.{rank}") for rank in range(layout.ranks)]

    def check(self, layout: Layout) -> None:
        """Raises AssertionError where ranks or names differ, or an error is larger than rounding may make it."""
        reference = self.reference(layout)
        name, worst = max(compare(self.records(layout), reference), key=lambda each: each[1])
        allowed = reference["amplification"] * rounding(layout.layers)
        assert worst <= allowed, (str(layout), name)
        self.worst[layout] = worst, allowed

    def report(self) -> None:
        worst, allowed = max(self.worst.values(), key=lambda each: each[0] / each[1])
        bounds = [each for _, each in self.worst.values()]
        print(
            f"\n{len(self.worst)} of {len(table())} layouts equal one process in float64 here ({STEPS} steps): largest "
            f"relative error {max(error for error, _ in self.worst.values()):.1e}, bound {min(bounds):.1e} to "
            f"{max(bounds):.1e}; the closest is {worst:.1e} of {allowed:.1e}"
        )


def compare(records: list[dict], reference: dict) -> Iterator[tuple[str, float]]:
    """Everything that a layout and one process both have, and its relative error."""
    shapes = {name: parameter.shape for name, parameter in reference["parameters"].items()}
    for number, want in enumerate(reference["steps"]):
        for record in records:
            for name in ("losses", "norm"):
                yield name, relative(record["steps"][number][name], want[name], want[name])
        whole = assemble(records, lambda record, number=number: record["steps"][number]["gradients"], shapes)
        yield from errors(whole, want["gradients"]).items()
    yield from errors(assemble(records, lambda record: record["parameters"], shapes), reference["parameters"]).items()


@cache
def everything() -> frozenset[tuple]:
    return frozenset().union(*map(pairs_of, existing()))


def test_the_table_has_every_factorisation_and_every_pair_of_options():
    factors = {(tp, pp, dp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) for dp in (1, 2, 4, 8)}
    factors = {each for each in factors if math.prod(each) in (2, 4, 8)}
    assert len(factors) == 3 + 6 + 10
    assert {(each.tp, each.pp, each.dp) for each in table()} == factors
    assert everything() == frozenset().union(*map(pairs_of, table()))
    assert len(set(table())) == len(table()) >= 40


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(each, marks=[pytest.mark.slow] * (each[0].ranks == 8)) for each in TOGETHER],
    ids=lambda layouts: f"{len(layouts)} from {layouts[0]}",
)
def test_layouts_learn_what_one_process_learns(proof, layouts):
    proof.run(layouts)
    for layout in layouts:
        proof.reference(layout, layouts)
        proof.check(layout)


def test_the_reference_can_tell(proof):
    """Weights that differ by 1e-6 show: the bound is not so wide that everything passes."""
    layout = table()[0]
    reference = proof.reference(layout)
    allowed = reference["amplification"] * rounding(layout.layers)
    assert allowed < 1e-9
    for name in ("blocks.0.attention.query.weight", TIED):
        changed = {key: value.clone() for key, value in reference["parameters"].items()}
        changed[name][0, 0] *= 1 + 1e-6
        assert errors(changed, reference["parameters"])[name] > allowed


# Two layouts that add up the same terms in the same order, and what they have in common. A norm is a sum over ranks,
# so clipping, which would spread its rounding, is kept out. Terms are added in another order, so that these differ in
# the last digit: a tied embedding over two stages, gloo's all-reduce over four ranks, products split by tp.
ALONE = Layout(model="llama", accumulate=True)
SAME = {
    "gpipe": (Layout(pp=2, model="llama", accumulate=True, schedule="gpipe"), ALONE, {"micro_batch_size": 4}),
    "1f1b": (Layout(pp=4, model="llama", accumulate=True), ALONE, {"micro_batch_size": 4}),
    "interleaved": (
        Layout(pp=2, model="llama", accumulate=True, schedule="interleaved"),
        ALONE,
        {"micro_batch_size": 4},
    ),
    "pipeline of split matrices": (
        Layout(tp=2, pp=2, model="llama", accumulate=True, sequence_parallel=True),
        Layout(tp=2, model="llama", accumulate=True, sequence_parallel=True),
        {"micro_batch_size": 4},
    ),
    "two ranks, all-reduce": (Layout(dp=2), Layout(accumulate=True), {"micro_batch_size": 8}),
    "two ranks, sharded state": (Layout(dp=2, zero=1), Layout(accumulate=True), {"micro_batch_size": 8}),
    "two ranks, sharded weights": (Layout(dp=2, zero=3), Layout(accumulate=True), {"micro_batch_size": 8}),
    "eight ranks, in the order of the ranks": (Layout(dp=8, zero=2), Layout(accumulate=True), {"micro_batch_size": 2}),
    "recomputed blocks": (Layout(recompute="nested", dropout=0.1), Layout(dropout=0.1), {}),
    "recomputed attention": (Layout(recompute="attention", dropout=0.1), Layout(dropout=0.1), {}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_order_of_additions_gives_the_same_bits(proof, name):
    *layouts, changes = SAME[name]
    changes = {"clip": 1e9, "num_layers": 4, **changes}
    one, other = (proof.records(layout, **changes) for layout in layouts)
    reference = proof.reference(Layout(pp=4, model=layouts[0].model))
    shapes = {key: value.shape for key, value in reference["parameters"].items()}
    for number in range(STEPS):
        first, second = (each[0]["steps"][number]["losses"] for each in (one, other))
        assert torch.equal(first, second) or layouts[0].dp > 2  # whose shares are added by an all-reduce
        pair = [
            assemble(each, lambda r, number=number: r["steps"][number]["gradients"], shapes) for each in (one, other)
        ]
        require_equal(*pair)
    require_equal(*(assemble(each, lambda r: r["parameters"], shapes) for each in (one, other)))


def require_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def test_sequence_parallelism_moves_sums_and_changes_none_of_the_matrices_terms(proof):
    """Its reduce-scatter adds the two terms of the all-reduce: losses and gradients of split matrices are the same."""
    one, other = (proof.records(Layout(tp=2, model="llama", sequence_parallel=each)) for each in (True, False))
    assert torch.equal(one[0]["steps"][0]["losses"], other[0]["steps"][0]["losses"])
    for mine, theirs in zip(one, other, strict=True):
        for name, (gradient, *_) in mine["steps"][0]["gradients"].items():
            if gradient.dim() > 1:
                assert torch.equal(gradient, theirs["steps"][0]["gradients"][name][0]), name


# One step of the small decoder, counted by hand. d_model 16, d_ff 64, 2 blocks, 16 rows of 8 tokens, 261 words, padded
# to 264 where they are split. A block has 3104 parameters in 8 tensors (with tp 2: 1568), the positions 128, the tokens
# 4176 (2112), the last norm 16. Elements are those of the whole tensor, on every rank that takes part.
def tensor(rank: int) -> dict:
    # Stream: 16 x 8 x 16. Forward and backward, two branches of two blocks; the embedding forward, the head backward.
    return {("all-reduce", 2048, 2): 2 * 2 * 2 + 2, ("all-reduce", 128, 2): 1, ("all-reduce", 256, 2): 1, **norm(2)}


def norm(ranks: int) -> dict:
    return {("all-gather", ranks, ranks): 1}  # of the gradient, a number of each rank


def sequence(rank: int) -> dict:
    return {
        # Forward, again in backward, and the gradient of what was scattered; the embedding's gradient, and the head.
        ("all-gather", 2048, 2): 2 * 2 * 3 + 2,
        ("reduce-scatter", 2048, 2): 2 * 2 * 2 + 1,
        ("all-reduce", 2048, 2): 1,  # the embedding
        ("all-reduce", 128, 2): 1,  # largest logits
        ("all-reduce", 256, 2): 1,  # sums of exponentials, targets' logits
        ("all-reduce", 80, 2): 1,  # five norms, of this rank's tokens only
        **norm(2),
    }


def pipeline(rank: int) -> dict:
    first = rank < 2
    return {
        ("send", 256, 2): 4,  # two rows in each of four microbatches
        ("receive", 256, 2): 4,
        ("all-reduce", 3104 + 128 if first else 3104 + 16, 2): 1,
        ("all-reduce", 4176, 2): 2,  # the tokens over dp, then over the ends
        ("all-reduce", 12, 2): 1,  # ten tensors' votes, the hash of what is equal, and whether all are finite
        **norm(4),
    }


def everything_at_once(rank: int) -> dict:
    stage, second = rank // 4, rank // 2 % 2  # dp's second rank
    bucket = 1568 + (16 if stage else 128)
    counted = {
        ("send", 128, 2): 4,
        ("receive", 128, 2): 4,
        ("all-gather", 256, 2): 4 * (2 * 3 + 1),
        ("reduce-scatter", 256, 2): 4 * (2 * 2 + stage),
        ("reduce-scatter", bucket, 2): 1,
        ("reduce-scatter", 2112, 2): 1,
        ("all-gather", bucket, 2): 1,  # updated parameters
        ("all-gather", 2112, 2): 1,
        ("all-reduce", 12, 2): 1,
        ("all-reduce", 1056, 2): 1,  # this rank's half of the tokens' gradient, over the ends
        **norm(8),
    }
    # Buckets are filled from the last parameter on: the last norm lies in the first half, a block's in the second.
    if stage:
        counted |= {("all-reduce", 16, 2): 4, ("all-reduce", 32, 2): 4}
        counted[("all-reduce", 32 if second else 16, 2)] += 1
    else:
        counted |= {("all-reduce", 256, 2): 4} | ({("all-reduce", 32, 2): 1} if second else {})
    return counted


COUNTED = {
    "tensor": (Layout(tp=2), tensor),
    "sequence": (Layout(tp=2, sequence_parallel=True), sequence),
    "pipeline": (Layout(pp=2, dp=2, accumulate=True), pipeline),
    "everything": (WRITTEN[-1], everything_at_once),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_step_sends_what_was_counted_by_hand(proof, name):
    layout, by_hand = COUNTED[name]
    layout = replace(layout, schedule="1f1b")
    for rank, found in enumerate(
        ranks.run(traffic_case, layout.ranks, folder=str(proof.folder), layout=asdict(layout))
    ):
        assert {tuple(kind): often for *kind, often in found} == by_hand(rank), rank
