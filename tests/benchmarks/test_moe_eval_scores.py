"""Evaluation of a mixture of experts: scores that are equal on any ranks, every target once, words in two ways."""

import math
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
import torch
from torch.profiler import profile

from benchmarks.lib.expert_scores import Blocks, Scorer, Tally, read_at_once, read_slowly
from cs336_systems.comm import Mesh
from cs336_systems.data.corpus import IGNORED
from cs336_systems.errors import UserError
from cs336_systems.presets import Mixture, ModelConfig
from tests.support import ranks
from tests.support.tolerances import bound

CONTEXT = 16
SHAPE = ModelConfig(
    vocab_size=64, context_length=CONTEXT, d_model=16, d_ff=32, num_layers=3, num_heads=2, positions="sinusoidal",
    bias=True, norm="layernorm", num_experts=4, expert_every=2,
)  # fmt: skip
# Of sixteen tokens with two choices each, four experts of six slots take twenty-four at most.
MIXTURES = {
    "dropless": Mixture(),
    "capped": Mixture(eval_fraction=6 / CONTEXT),
    "einsum": Mixture(eval_fraction=6 / CONTEXT, dispatch="einsum"),
    "masked": Mixture(eval_fraction=6 / CONTEXT, mask_padding=True),
}
TEXT = 5 * CONTEXT - 5  # targets: five blocks, the last of which is eleven long


def make_blocks() -> Blocks:
    return Blocks(np.random.default_rng(1).integers(SHAPE.vocab_size, size=TEXT + 1), CONTEXT)


def targets(blocks: Blocks, block: int) -> int:
    return int((blocks.rows[block, 1:] != IGNORED).sum())


def score(group, tp: int = 1, ep: int | None = None) -> dict:
    """Every mixture's score, and its log-probabilities by block."""
    mesh = Mesh(tp, 1, ep or group.size() // tp)
    found, device = {}, torch.device("cpu")
    for name, mixture in MIXTURES.items():
        config = replace(SHAPE, mixture=mixture)
        scorer = Scorer(config, make_blocks(), mesh, device, torch.float64, 2**30)
        for parameter in scorer.model.blocks.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)  # with which experts and attention matter
        tally, words = Tally(mixture.dispatch), {}
        for number in range(ceil(scorer.blocks.count / mesh.data.size())):
            scorer.take(number, tally, "fast")
            known, _, log_probs = scorer.log_probs(number)
            for block, line in zip(known.rows.tolist(), log_probs.tolist(), strict=True):
                words[block] = line[: targets(scorer.blocks, block)]
        _, metrics = scorer.share(tally)
        found[name] = {
            "score": metrics["score"], "tokens": metrics["tokens"],
            "log_probs": [each for each in words.items() if each[0] < scorer.blocks.count],
        }  # fmt: skip
    with pytest.raises(UserError, match=r"a block of 16 tokens needs .* 1\.0 KiB are free; lower --context") as no:
        Scorer(replace(SHAPE, mixture=MIXTURES["einsum"]), make_blocks(), mesh, device, torch.float64, 1024)
    assert "one-hot tensors" in str(no.value)
    return found


LAYOUTS = {1: {"alone": {}}, 4: {"ep4": {}, "tp2 ep2": {"tp": 2}, "dp2 ep2": {"ep": 2}}}


def layouts_case(group) -> dict:
    return {name: score(group, **layout) for name, layout in LAYOUTS[group.size()].items()}


@pytest.fixture(scope="module")
def scores() -> dict[str, list]:
    """By layout what every rank says."""
    found = {}
    for world in LAYOUTS:
        every = ranks.run(layouts_case, world)
        found |= {name: [said[name] for said in every] for name in LAYOUTS[world]}
    return found


@pytest.fixture(scope="module")
def alone(scores) -> dict:
    return scores["alone"][0]


# At most sixteen roundings a layer (norms, products, softmaxes, experts), of sums as long as the vocabulary.
TOLERANCE = bound(torch.float64, 16 * (SHAPE.num_layers + 1), SHAPE.vocab_size)


@pytest.mark.parametrize("layout", ["ep4", "tp2 ep2", "dp2 ep2"])
def test_scores_are_those_of_one_rank(scores, alone, layout):
    """Five blocks are no multiple of two or four: ranks run dry, and stay in the collectives."""
    for found in scores[layout]:
        for name, want in alone.items():
            got = found[name]
            assert got["tokens"] == want["tokens"] == TEXT
            assert math.isclose(got["score"], want["score"], rel_tol=TOLERANCE)
            one = dict(want["log_probs"])
            for block, mine in got["log_probs"]:
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(one[block]), rtol=TOLERANCE, atol=0)


def test_what_is_scored(alone):
    """The formulations agree; a capacity changes scores; a score is the sum of all words'."""
    assert math.isclose(alone["einsum"]["score"], alone["capped"]["score"], rel_tol=TOLERANCE)
    assert abs(alone["dropless"]["score"] - alone["capped"]["score"]) > 1e-3
    assert abs(alone["masked"]["score"] - alone["capped"]["score"]) > 1e-6
    for found in alone.values():
        total = math.fsum(value for _, values in found["log_probs"] for value in values)
        assert [len(values) for _, values in found["log_probs"]] == [16, 16, 16, 16, 11]
        assert found["score"] == pytest.approx(total, rel=1e-14)


def test_words_read_one_by_one_are_those_read_at_once_in_four_reads_each():
    generator = torch.Generator().manual_seed(0)
    for length in (9, 0, 1):
        targets = torch.randint(8, (2, 9), generator=generator)
        log_probs = -torch.rand(2, 9, generator=generator, dtype=torch.float64)
        log_probs[0, 4] = -torch.inf
        targets[1, length:] = IGNORED
        slow, fast = (read(targets, log_probs, targets) for read in (read_slowly, read_at_once))
        assert slow == fast
        assert len(slow) == 9 + length
        assert slow[0] == (targets[0, 0].item(), log_probs[0, 0].item())
    targets, log_probs = torch.arange(8)[None], -torch.ones(1, 8, dtype=torch.float64)
    counts = []
    for read in (read_slowly, read_at_once):
        with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
            read(targets, log_probs, targets)
        counts.append(sum(event.count for event in run.key_averages() if event.key == "aten::item"))
    assert counts == [4 * 8 - 1, 0]
