"""Memory and work of a rank: observed on the meta device, and on real ranks with real tensors."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from cs336_systems.errors import UserError
from cs336_systems.host.observe import Observer
from cs336_systems.layout import Layout
from cs336_systems.model import routing as gating
from cs336_systems.presets import model_preset
from cs336_systems.train.__main__ import least_memory
from cs336_systems.train.assembly import Assembly
from cs336_systems.train.observation import RankStep, dry_run, fullest, observe
from cs336_systems.train.recipe import Recipe
from tests.support.ranks import run
from tests.support.traffic_cases import BERT, GPT, LLAMA, SEQ, config_of, in_turn, mesh_of, settings

ODD = GPT | {"vocab_size": 45, "d_ff": 111, "num_layers": 3}  # nothing divides over two ranks
CASES = [  # changes of the model, of the layout, precision
    (ODD, {"zero": 2}, "fp32"),
    # A CPU's LayerNorm keeps its two numbers a token in two bytes, a GPU's and the meta device's in four.
    *((ODD | {"norm": "rmsnorm"}, {"zero": zero}, "bf16") for zero in (1, 3)),
    *((GPT | {"recompute": each}, {"tp": 2, "sequence": True}, "fp32") for each in ("attention", "segments")),
    (LLAMA | {"attention": "sdpa"}, {"tp": 2}, "fp32"),
    (BERT, {"pp": 2, "schedule": "gpipe", "m": 3}, "fp32"),
    (GPT | {"num_layers": 4}, {"pp": 2, "m": 4}, "fp32"),
    (GPT | {"num_layers": 4}, {"pp": 2, "chunks": 2, "m": 4}, "fp32"),
    (GPT | {"num_experts": 4, "mixture": {"shared_expert": True, "expert_d_ff": 64}}, {"ep": 2, "zero": 1}, "fp32"),
]


def real_case(group, cases) -> list:
    """[state, bytes kept, activations, FLOPs by phase] of each case on a real rank."""
    found, gating.choose = [], in_turn
    for changes, degrees, precision in cases:
        config, layout = config_of(changes), Layout(**degrees)
        mesh = mesh_of(layout.tp, layout.pp, layout.ep, layout.cp)
        with Observer() as seen:
            part = Assembly(Recipe.of(precision=precision), config, layout, mesh, torch.device("cpu"))
            seen_in_step = RankStep(part, seen, SEQ).observe()
        found.append(told(seen_in_step, layout))
    return found


def told(seen, layout: Layout) -> list:
    """Figures equal on a CPU. Buffers in use by real reductions are alive beside several microbatches; a real
    router keeps its counts, and torch's counter does not know the experts' grouped products."""
    activations = seen.activations if layout.data == 1 else None
    flops = {phase: work.flops for phase, work in seen.work.items()}
    return [seen.parameters, seen.state, *((seen.kept, activations, flops) if layout.ep == 1 else ())]


def test_real_ranks_hold_and_compute_what_one_observes():
    """Also the least memory of a run, its state alone: no more than the fullest rank needs."""
    cases = [(changes, settings(2, **degrees), precision) for changes, degrees, precision in CASES]
    for (changes, degrees, precision), *reals in zip(cases, *run(real_case, 2, cases=cases), strict=True):
        recipe, config, layout = Recipe.of(context=SEQ, precision=precision), config_of(changes), Layout(**degrees)
        apart = 2 if layout.zero else layout.pp  # ranks that do not hold the same
        alone = [observe(recipe, config, layout, rank) for rank in range(apart)] * (2 // apart)
        assert reals == [told(each, layout) for each in alone], (changes, degrees)
        least = sum(least_memory(recipe, config, layout).values())
        assert 0 < least <= max(sum(each.peak.values()) for each in alone), (changes, degrees)


def test_the_fullest_moment_by_part():
    """Few tokens: it is in the update, when all gradients are there."""
    recipe = Recipe.of(context=SEQ)
    parts = fullest(recipe, config_of(ODD), Layout())
    seen = observe(recipe, config_of(ODD), Layout())
    assert {part: parts[part] for part in seen.state} == seen.state
    assert list(parts) == ["parameters", "gradients", "optimizer state", "activations"]


def test_bert_345m_on_two_by_two():
    """Megatron's padding to 128 tp: 29,056 words become 29,184. The last stage has the tied embedding as well."""
    layout = Layout(tp=2, pp=2, vocabulary_multiple=256, global_batch=2)
    config, recipe = model_preset("bert-345m"), Recipe.of(size="bert-345m", precision="fp16", context=32)
    for stage, parameters in enumerate((91_082_752, 92_676_354)):
        seen = observe(recipe, config, layout, 2 * stage)
        assert seen.parameters == parameters
        weights = 2 * parameters
        assert seen.state == {"parameters": weights, "gradients": weights, "optimizer state": 6 * weights}


def shown(ranks: int, **options) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(dry_run(Recipe.of(**options), ranks))
    return " ".join(console.export_text().split())


def test_a_tensor_too_large_to_count_is_refused():
    """By torch with an error of either of two types; a batch of 10^11 rows takes no memory to observe."""
    sizes = [{name: 10**20} for name in ("batch_size", "context", "vocab_size", "d_ff")]
    for size in (*sizes, {"d_model": 10**12, "num_heads": 1}):
        with pytest.raises(UserError, match="would have 2\\^63 bytes or more"):
            dry_run(Recipe.of(num_layers=1, **size), 1)
    assert "100000000000 x 16 tokens" in shown(1, num_layers=1, context=16, batch_size=10**11, dropout=0.1)


def test_the_tables_of_a_dry_run():
    said = shown(4, size="small", num_layers=2, tp=2, pp=2, batch_size=4, micro_batch_size=1, context=16)
    assert "small (2024): parameters and memory of a rank" in said
    assert "tp 2 x pp 2 x dp 1, ZeRO stage 0, fp32, 10,000 words." in said
    assert "│ 0 │ pp │ send │ 4 │" in said
    assert "│ 1 │ ends │ all-reduce │ 1 │" in said
    assert "1f1b: idle 20.0% of the pipeline's time, if stages are equal" in said
    in_a_v = shown(2, size="tiny", pp=2, schedule="zbv", context=16)
    assert "zbv: idle 2.0%" in in_a_v  # 8 microbatches
    assert "0w of weights" in in_a_v
    assert "ends:" not in in_a_v  # one stage has both uses of the tied embedding
    recomputed = shown(1, size="tiny", recompute="segments")
    assert "collectives" not in recomputed
    assert "FLOP computed; 1 microbatch of 16 a replica" in recomputed
