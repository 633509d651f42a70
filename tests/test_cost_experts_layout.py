"""The closed forms of a layout with experts against ranks that have one: bytes kept for backward, and state by ZeRO
stage. The router is balanced, as the closed forms take it to be."""

from dataclasses import asdict

import torch

from cs336_systems import gating
from cs336_systems.comm import Mesh
from cs336_systems.cost.layout import Layout
from cs336_systems.cost.layout_activations import pass_activations
from cs336_systems.cost.layout_memory import rank_memory
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.expert_zero import expert_zero
from cs336_systems.model import TransformerLM
from cs336_systems.optim import AdamW, decay_groups
from cs336_systems.pipeline import Stage
from cs336_systems.presets import ModelConfig
from tests.ranks import run
from tests.test_cost_experts import GPT, LLAMA, SEQ, sparse
from tests.test_cost_layout import BATCH as ROWS
from tests.test_cost_layout import batch_of, saved_bytes
from tests.traffic_cases import in_turn, mesh_of


def layout_case(group, cases, states):
    """Where autograd and the storages after a step keep other than the formulas say, in bytes."""
    wrong, gating.choose = [], in_turn  # in the process of this case only
    for changes, mixture, settings, precision in cases:
        layout, config = Layout(**settings), sparse(mixture, **changes)
        mesh, dtype = mesh_of(layout.tp, 1, layout.ep), torch.bfloat16 if precision == "bf16" else torch.float32
        got = saved_bytes(config, layout, mesh.tp, 0, 0, dtype, mesh.ep)
        want = pass_activations(config, layout, SEQ, 0, 0, precision).kept
        if got != want:
            wrong.append([str(changes), str(mixture), str(settings), precision, got - want])
    for changes, mixture, settings in states:
        layout, config = Layout(**settings), sparse(mixture, **changes)
        parts = rank_memory(config, layout, SEQ)
        want = [parts["parameters"], parts["gradients"], parts["optimizer state"]]
        mesh = mesh_of(1, 1, layout.ep)
        if (got := state_bytes(config, layout, mesh)) != want and mesh.dp.rank() == 0:
            wrong.append([str(settings), got, want])
    return wrong


def state_bytes(config: ModelConfig, layout: Layout, mesh: Mesh) -> list[int]:
    """Bytes of parameters, gradients and optimizer state that a rank has after a step."""
    stage = Stage(TransformerLM(config), 0, 1)
    experts = expert_parallel(stage.model, mesh.ep, mesh.data)
    groups = lambda module: decay_groups(module, 0.1)  # noqa: E731
    wrapper, optimizer = expert_zero(stage, experts, AdamW, layout.zero, mesh, groups)
    wrapper(batch_of(config)).tokens.backward()
    wrapper.finish_gradient_synchronization()
    kept = [each.gradient for each in wrapper.kept_gradients()]
    gradients = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    optimizer.step()
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in wrapper.parameters()}
    state = 0
    for each in getattr(optimizer, "optimizers", [optimizer]):
        inner = getattr(each, "inner", each)
        state += sum(t.nbytes for found in inner.state.values() for t in found.values() if torch.is_tensor(t))
    return [sum(weights.values()), sum(gradients.values()), state]


def laid_out(**changes) -> dict:
    """On four ranks, with a microbatch of ROWS sequences for each."""
    layout = {"dp": 4 // (changes.get("tp", 1) * changes.get("ep", 1)), "micro_batch": ROWS} | changes
    return asdict(Layout(**layout, global_batch=ROWS * layout["dp"] * layout.get("ep", 1)))


EINSUM = {"dispatch": "einsum", "capacity_factor": 1.5}
SHARED = {"shared_expert": True, "expert_d_ff": 64}
NARROW = {"gating_fp32": False, "normalize": "before"}
CASES = [
    *((GPT, mixture, laid_out(ep=2), "fp32") for mixture in ({}, EINSUM)),
    (LLAMA | {"recompute": "attention"}, SHARED | {"top_k": 1}, laid_out(ep=4), "bf16"),
    (GPT | {"dropout": 0.1}, SHARED, laid_out(tp=2, ep=2, sequence=True), "fp32"),
    (GPT | {"expert_every": 1}, {"capacity_factor": 1.0}, laid_out(tp=2, ep=2), "fp32"),
    (GPT, SHARED | NARROW, laid_out(tp=2, ep=2, sequence=True), "bf16"),
    (LLAMA, NARROW | EINSUM, laid_out(tp=2), "bf16"),
    (GPT | {"recompute": "segments", "recompute_every": 2}, {}, laid_out(tp=2, ep=2, sequence=True), "fp32"),
]
ODD = GPT | {"vocab_size": 45, "d_ff": 111, "num_layers": 3}
STATES = [
    *((ODD, SHARED, laid_out(ep=2, zero=zero)) for zero in (1, 2, 3)),
    *((ODD, SHARED, laid_out(zero=zero)) for zero in (1, 3)),
]


def test_a_rank_keeps_what_the_formulas_say():
    assert run(layout_case, 4, cases=CASES, states=STATES) == [[]] * 4
