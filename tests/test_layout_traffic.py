"""The closed form of a layout's traffic against `comm.record()`: every collective and message of a step, by rank."""

from collections import Counter
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch

from cs336_systems import gating
from cs336_systems.comm import Event, Mesh, record
from cs336_systems.cost.layout import Layout
from cs336_systems.cost.layout_traffic import Transfer, step_traffic
from cs336_systems.data import Batch
from cs336_systems.dropout import dropout_key
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.expert_zero import expert_zero
from cs336_systems.mixture import Mixture
from cs336_systems.model import TransformerLM
from cs336_systems.model_gradients import ModelGradients, tied_copy
from cs336_systems.optim import AdamW, decay_groups
from cs336_systems.pipeline import Pipeline, Stage
from cs336_systems.presets import ModelConfig
from cs336_systems.tensor_parallel import tensor_parallel
from tests.ranks import run

SEQ = 8
SMALL = ModelConfig(vocab_size=30, context_length=SEQ, d_model=16, d_ff=32, num_layers=4, num_heads=4)
BERT = {"norm": "layernorm", "bias": True, "bert_heads": True, "token_types": 2, "causal": False, "dropout": 0.1}
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
GPT = {"norm": "layernorm", "bias": True}


def batch_of(config: ModelConfig, rows: int) -> Batch:
    tokens = torch.randint(config.vocab_size, (rows, SEQ))
    if not config.bert_heads:
        return Batch(tokens, tokens, torch.arange(rows))
    real = torch.ones(rows, SEQ, dtype=torch.bool)
    return Batch(tokens, tokens, torch.arange(rows), torch.zeros_like(tokens), real, torch.arange(rows) % 2)


def seen(event: Event, mesh: Mesh) -> Transfer:
    """An event in the words of the closed form: its axis is told by what it is for."""
    what = event.label.split(" of microbatch")[0] if event.verb in ("send", "receive") else event.label
    what = "bucket" if what.startswith("bucket ") else what
    what = "replicated" if what.startswith("replicated ") else what
    if what.endswith(".weight"):
        what = "weight, gradient" if what.startswith("gradient of ") else "weight"
    # Of experts that are split the wrapper is over dp, of all else over all data-parallel ranks.
    split = mesh.ep.size() > 1
    data = "data" if split and event.ranks == mesh.data.size() else "dp"
    every = ("bucket", "ballot", "updated parameters", "replicated", "weight", "weight, gradient", "balance")
    over = dict.fromkeys(every, data) | {"tied embedding": "ends", "gradient norm": "world"}
    for way in ("dispatch", "combine"):
        over |= {way: "ep", f"{way}, gradient": "ep", "expert counts": "ep"}
    axis = "pp" if event.verb in ("send", "receive") else over.get(what, "tp")
    sizes = {"world": mesh.world.size(), "ends": 2, "pp": 2} | {"tp": mesh.tp.size(), "dp": mesh.dp.size()}
    assert event.ranks == (sizes | {"ep": mesh.ep.size(), "data": mesh.data.size()})[axis], event
    return Transfer(event.verb, axis, what, event.numel, event.dtype.itemsize)


def in_turn(logits: torch.Tensor, *rest: object) -> torch.Tensor:
    """What a balanced router chooses: (top_k tokens)."""
    tokens, experts = logits.shape
    top_k = next(each.top_k for each in rest if isinstance(each, Mixture))
    return (torch.arange(tokens) + torch.arange(top_k)[:, None]) % experts


@cache
def mesh_of(tp: int, pp: int, ep: int) -> Mesh:
    """Of this process; one for all layouts of these degrees, since groups take long to make."""
    return Mesh(tp, pp, ep)


def step_case(group, steps):
    """Where a recorded step differs from the closed form: (settings, too many, missing)."""
    wrong, gating.choose = [], in_turn  # in the process of this case only
    for changes, settings in steps:
        changes = dict(changes)
        mixture = Mixture(**changes.pop("mixture", {}))
        config, layout = replace(SMALL, mixture=mixture, **changes), Layout(**settings)
        mesh = mesh_of(layout.tp, layout.pp, layout.ep)
        stage = Stage(TransformerLM(config), mesh.pp.rank(), layout.pp, layout.chunks)
        plan = tensor_parallel(stage.model, mesh.tp, layout.sequence, layout.vocabulary_multiple)
        experts = expert_parallel(stage.model, mesh.ep, mesh.data)
        groups = lambda module: decay_groups(module, 0.1)  # noqa: E731
        wrapper, optimizer = expert_zero(stage, experts, AdamW, layout.zero, mesh, groups, tied_copy(stage))
        parts = layout.tp if layout.sequence else 1
        pipeline = Pipeline(stage, wrapper, mesh, layout.schedule, parts)
        batches = batch_of(config, layout.microbatches * layout.micro_batch).split(layout.micro_batch)
        keys = [dropout_key(1, 2, each.rows) for each in batches]
        gradients = ModelGradients(wrapper, stage, plan, experts.names, mesh)
        with record() as events:
            pipeline.run(batches, lambda losses: losses.tokens, keys, wrapper.no_sync)
            wrapper.finish_gradient_synchronization()
            gradients.add_partial()
            gradients.add_tied()
            gradients.norm()
            optimizer.step()
        got = Counter(seen(event, mesh) for event in events if event.ranks > 1)
        want = step_traffic(config, layout, SEQ, mesh.pp.rank(), "fp32", mesh.data.rank())
        if got != want:
            wrong.append([str(settings), str(changes), str(mixture), str(got - want), str(want - got)])
    return wrong


def settings(ranks: int, **changes) -> dict:
    """A layout of so many ranks, dp what the others leave, with rows for every microbatch."""
    tp, pp, ep, m = changes.get("tp", 1), changes.get("pp", 1), changes.get("ep", 1), changes.pop("m", 2)
    chunks = changes.get("chunks", 1)
    dp, micro = ranks // (tp * pp * ep), 2
    kind = {} if "schedule" in changes else {"schedule": "interleaved" if chunks > 1 else "1f1b"}
    sizes = {"dp": dp, "micro_batch": micro, "global_batch": micro * dp * ep * m, "vocabulary_multiple": 8}
    return asdict(Layout(**sizes, **kind, **changes))


MODELS = [{}, LLAMA, BERT]
ON_TWO = [
    *((model, {"tp": 2, "sequence": sequence}) for model in MODELS for sequence in (False, True)),
    *((model | {"recompute": "attention"}, {"tp": 2, "sequence": True}) for model in MODELS),
    *(
        (model | {"recompute": recompute, "recompute_every": every, "num_layers": layers}, {"tp": 2, "sequence": True})
        for model in (LLAMA, BERT)
        for recompute, every, layers in (("segments", 1, 2), ("segments", 2, 3), ("nested", 1, 1), ("nested", 1, 5))
    ),
    ({"recompute": "segments"}, {"tp": 2}),
    ({"recompute": "nested", "dropout": 0.1}, {"tp": 2}),
    *((model, {"pp": 2, "schedule": schedule, "m": 3}) for model in MODELS for schedule in ("1f1b", "gpipe")),
    *((model, {"pp": 2, "chunks": 2}) for model in MODELS),
    *((BERT, {"zero": stage}) for stage in (0, 1, 2, 3)),
    *((LLAMA | {"recompute": recompute}, {"zero": 3}) for recompute in ("none", "segments")),
]
ON_FOUR = [
    (BERT, {"tp": 2, "pp": 2, "sequence": True, "m": 3}),
    (LLAMA | {"recompute": "segments"}, {"tp": 2, "pp": 2, "chunks": 2, "sequence": True}),
    *((BERT, {"tp": 2, "sequence": True, "zero": stage}) for stage in (1, 2)),
    *(({}, {"pp": 2, "zero": stage}) for stage in (1, 2)),
    *((LLAMA, {"pp": 2, "zero": 3, "schedule": schedule, "m": 3}) for schedule in ("1f1b", "gpipe")),
    (BERT, {"tp": 2, "sequence": True, "zero": 3}),
    ({"dropout": 0.1}, {"tp": 4, "sequence": True}),
]


EXPERTS = {"num_experts": 4}
SHARED = GPT | EXPERTS | {"mixture": {"shared_expert": True, "expert_d_ff": 64, "aux_scope": "global"}}
EVERY = LLAMA | EXPERTS | {"expert_every": 1, "mixture": {"top_k": 1, "capacity_factor": 0.75}}
EINSUM = EXPERTS | {"mixture": {"dispatch": "einsum", "capacity_factor": 1.5, "aux_scope": "global"}}
SPARSE_ON_TWO = [
    *((model, {"ep": 2}) for model in (EXPERTS, SHARED, EVERY, EINSUM)),
    *((SHARED, {"zero": zero}) for zero in (1, 2, 3)),
    *((SHARED | {"recompute": recompute}, {"ep": 2}) for recompute in ("attention", "segments", "nested")),
    *((EVERY, {"tp": 2, "sequence": sequence}) for sequence in (False, True)),
    *((GPT | EXPERTS | {"recompute": each}, {"tp": 2, "sequence": True}) for each in ("segments", "nested")),
    (EXPERTS | {"recompute": "segments", "recompute_every": 3}, {"tp": 2}),
    (EINSUM, {"tp": 2}),
    (SHARED, {"pp": 2, "chunks": 2}),
]
SPARSE_ON_FOUR = [
    (SHARED, {"tp": 2, "ep": 2, "sequence": True}),
    *((SHARED, {"ep": 2, "zero": zero}) for zero in (1, 2, 3)),
    (EVERY, {"ep": 4}),
    (EXPERTS, {"pp": 2, "ep": 2, "zero": 1}),
    # The first stage has no experts.
    (EXPERTS | {"num_layers": 2}, {"pp": 2, "ep": 2, "zero": 2}),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, ON_TWO), (4, ON_FOUR), (2, SPARSE_ON_TWO), (4, SPARSE_ON_FOUR)],
    ids=["2", "4", "experts on 2", "experts on 4"],
)
def test_a_step_sends_what_the_formula_says(ranks, cases):
    steps = [(changes, settings(ranks, **layout)) for changes, layout in cases]
    assert run(step_case, ranks, steps=steps) == [[]] * ranks
