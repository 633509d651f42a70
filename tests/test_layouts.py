"""Every layout gives one process's results: losses, every parameter's gradient, its norm, and the parameters after
two steps of AdamW, in float64, for all options in pairs on 2, 4 and 8 ranks."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.support import ranks
from tests.support.layout_cases import (
    TIED,
    assemble,
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
from tests.support.layout_table import MODELS, STEPS, TABLE, Layout

AXES = ("tp", "pp", "dp")
CHOICES = {
    **dict.fromkeys(AXES, (False, True)),
    "model": tuple(MODELS),
    "dropout": (0.0, 0.1),
    "recompute": ("none", "segments", "attention", "nested"),
    "accumulate": (False, True),
    "schedule": ("gpipe", "1f1b", "interleaved"),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
}


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    return Proof(tmp_path_factory.mktemp("layouts"))


class Proof:
    """Runs what a test needs, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references: dict[str, dict] = {}
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

    def check_all(self, layouts: Sequence[Layout]) -> None:
        """Raises AssertionError where ranks or names differ, or an error is larger than rounding may make it."""
        self.run(layouts)
        for layout in layouts:
            reference = self.reference(layout, layouts)
            name, worst = max(compare(self.records(layout), reference), key=lambda each: each[1])
            assert worst <= reference["amplification"] * rounding(layout.layers), (str(layout), name)


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


def pairs(options: Sequence) -> set[tuple]:
    return set(itertools.combinations(zip(CHOICES, options, strict=True), 2))


def test_the_table_has_every_pair_of_options():
    """That can be combined; and each with each axis."""
    missing = set()
    for options in itertools.product(*CHOICES.values()):
        tp, pp, dp, *_, accumulate, schedule, zero, sequence = options
        scheduled = schedule == "1f1b" or (pp and (schedule == "gpipe" or (accumulate and zero < 3)))
        if (tp or pp or dp) and scheduled and (tp or not sequence):
            missing |= pairs(options)
    for layout in TABLE:
        missing -= pairs([getattr(layout, name) > 1 if name in AXES else getattr(layout, name) for name in CHOICES])
    assert not missing
    assert {(each.tp, each.pp, each.dp) for each in TABLE} > set(itertools.permutations((1, 1, 8)))


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_layouts_learn_what_one_process_learns(proof, world):
    proof.check_all([layout for layout in TABLE if layout.ranks == world])


def test_the_reference_can_tell(proof):
    """Weights that differ by 1e-6 show: the bound is not so wide that everything passes."""
    layout = TABLE[0]
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


# One step of the small decoder on all axes, counted by hand. d_model 16, d_ff 64, 2 blocks, 16 rows of 8 tokens, 261
# words, padded to 264 and split. A block has 1568 of 3104 parameters on a rank, the positions 128, the tokens 2112, the
# last norm 16. Elements are those of the whole tensor, on every rank that takes part.
def by_hand(rank: int) -> dict:
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
        ("all-gather", 8, 8): 1,  # of the gradient's norm, a number of each rank
    }
    # Buckets are filled from the last parameter on: the last norm lies in the first half, a block's in the second.
    if stage:
        counted |= {("all-reduce", 16, 2): 4, ("all-reduce", 32, 2): 4}
        counted[("all-reduce", 32 if second else 16, 2)] += 1
    else:
        counted |= {("all-reduce", 256, 2): 4} | ({("all-reduce", 32, 2): 1} if second else {})
    return counted


def test_a_step_sends_what_was_counted_by_hand(proof):
    layout = asdict(replace(TABLE[-1], schedule="1f1b"))
    for rank, found in enumerate(ranks.run(traffic_case, 8, folder=str(proof.folder), layout=layout)):
        assert {tuple(kind): often for *kind, often in found} == by_hand(rank), rank
