"""FP8, hybrid sharding, partial recomputation, changed machines and `config.json`: against closed forms and facts."""

import json

import pytest

from cs336_systems.cost import count_parameters
from cs336_systems.cost.commands.settings import MachineOptions, ModelOptions
from cs336_systems.cost.domain import time_range
from cs336_systems.cost.machines import changed, system_preset
from cs336_systems.cost.operators import operators_of, repeated
from cs336_systems.cost.plan import MODULES, Plan
from cs336_systems.cost.plan_memory import rank_bytes
from cs336_systems.cost.rank import Rank
from cs336_systems.cost.shape import read_shape, shaped
from cs336_systems.cost.step_time import Seconds, data_parallel_seconds, optimizer_seconds, stage_weights, step_time
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig, model_preset
from tests.support.cost_cases import LATENT, LLAMA, MOE, SEQ, machine

H100 = system_preset("H100")
LLAMA_8B = model_preset("llama-8b").override(attention="sdpa", kernels="triton")
EIGHT = Plan(dp=8, global_batch=8, zero=1)


# FP8
def test_only_linear_layers_of_blocks_multiply_8_bit_numbers():
    rank = Rank(LATENT, Plan(fp8=True).alone(), SEQ)
    for group in ("dense", "sparse", "head"):
        for each in operators_of(rank, group):
            widths = {kernel.width for kernel in (*each.forward, *each.backward) if kernel.inner}
            wide = each.core or each.name in ("router", "logits")
            assert widths in ({2} if wide else {1}, set()), each.name


def test_fp8_halves_what_linear_layers_keep_and_the_bytes_of_gathered_weights():
    kept = [sum(each.kept for each in operators_of(Rank(LLAMA, Plan(fp8=fp8).alone(), SEQ), "dense")) for fp8 in (0, 1)]
    inputs = 2 * SEQ * (3 * LLAMA.d_model + LLAMA.d_ff)  # bytes: into qkv, out of attention, up; and down
    assert kept[0] - kept[1] == inputs / 2
    system, plan = machine(link=1.0), EIGHT.override(overlap="none")
    wide, narrow = (
        data_parallel_seconds(LLAMA, plan.override(fp8=fp8), SEQ, 0, Seconds(), system) for fp8 in (False, True)
    )
    weights = sum(stage_weights(LLAMA, plan, SEQ, 0)[:2])
    assert wide - narrow == pytest.approx(weights * 7 / 8, rel=1e-12)


def test_a_large_gemm_is_as_much_faster_as_8_bit_units_are():
    times = [step_time(LLAMA_8B, EIGHT.override(fp8=fp8), 8192, H100).total for fp8 in (False, True)]
    most = H100.rate(1) / H100.rate(2)
    assert 1.2 < times[0] / times[1] < most < 2


# Hybrid sharding
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_shard_of_all_replicas_is_the_default(zero):
    plan = EIGHT.override(zero=zero)
    assert step_time(LLAMA, plan.override(shard=8), SEQ, H100).parts == step_time(LLAMA, plan, SEQ, H100).parts
    assert rank_bytes(LLAMA, plan.override(shard=8), SEQ, 0) == rank_bytes(LLAMA, plan, SEQ, 0)


def test_gradients_are_scattered_in_the_node_and_summed_between_nodes():
    plan, system = EIGHT.override(shard=4, overlap="none"), machine(link=8.0, far=2.0, node=4)
    nbytes = sum(stage_weights(LLAMA, plan, SEQ, 0)[:2])
    found = data_parallel_seconds(LLAMA, plan, SEQ, 0, Seconds(), system)
    # Both ranks that have the same quarter are alone in their node, with a port each.
    assert found == pytest.approx(nbytes * (4 * 3 / 4 / 8 + 2 * 3 / 4 / 8 + 2 * 1 / 2 / 2), rel=1e-12)
    whole, half = (rank_bytes(LLAMA, each, SEQ, 0)["optimizer"] for each in (EIGHT.override(zero=0), plan))
    assert half == whole / 4
    assert optimizer_seconds(LLAMA, plan, SEQ, 0, H100) == 2 * optimizer_seconds(LLAMA, EIGHT, SEQ, 0, H100)


# Partial recomputation
def test_every_second_block_costs_and_saves_half():
    found = []
    for name, nth in (("none", 1), ("segments", 1), ("segments", 2)):
        config, plan = LLAMA.override(recompute=name), Plan(recompute_nth=nth, tp=2, global_batch=4)
        parts = step_time(config, plan, SEQ, H100).parts
        activations = rank_bytes(config, plan, SEQ, 0)["activations"]
        found.append((parts["recompute"], parts["tensor-parallel"], activations))
    for none, whole, half in zip(*found, strict=True):
        assert half == pytest.approx((none + whole) / 2, rel=1e-12)
        assert none != whole


def test_modules_run_again_and_free_what_they_keep():
    plain = MOE.override(attention="sdpa", dropout=0.0)
    tokens, d, f, e = SEQ, MOE.d_model, MOE.d_ff, MOE.mixture.expert_d_ff
    rows = 2 * tokens  # top 2
    sizes = {
        "core_attn": ("dense", 1, 4 * MOE.num_heads * tokens),  # the row sums of softmax
        "layernorm": ("dense", 2, 2 * 2 * tokens * d),
        "mlp": ("dense", 3, 2 * 2 * tokens * f),
        "moe_act": ("sparse", 1, 2 * rows * e),
        "moe": ("sparse", 6, 2 * rows * (d + 2 * e + d)),  # rows in, twice the hidden ones, and rows out
    }
    assert set(sizes) == set(MODULES)
    for module, (group, count, freed) in sizes.items():
        again = repeated(Rank(plain, Plan(recompute_modules=(module,)).alone(), SEQ), group, "attention")
        assert (len(again.operators), again.dropped) == (count, freed), module
        assert bool(again.sent) == (module in ("mlp", "moe"))
    both = repeated(Rank(plain, Plan(recompute_modules=("moe_act", "moe")).alone(), SEQ), "sparse", "attention")
    assert both.dropped == sizes["moe"][2], "an activation is part of the experts"
    core = repeated(Rank(plain, Plan().alone(), SEQ), "dense", "attention")
    assert core.dropped == sizes["core_attn"][2]


# Machines
def test_a_machine_can_be_changed():
    found = changed(H100, peak=500.0, bandwidth=2000.0, memory=96.0, node=4, link=200.0, network=25.0)
    assert (found.matmul_flops, found.bandwidth, found.memory, found.node) == (500e12, 2e12, 96 * 2**30, 4)
    assert found.inside.bandwidth, found.between.bandwidth == (200e9, 25e9)
    assert found.narrow_flops == H100.narrow_flops * 500e12 / H100.matmul_flops
    assert changed(H100) == H100
    assert changed(H100, power=700.0).attainable == H100.attainable
    assert 0.8 < changed(H100, power=500.0).attainable / H100.attainable < 0.9
    with pytest.raises(UserError, match="--power 900 W is not one of H100, from 100 to 700 W"):
        changed(H100, power=900.0)
    with pytest.raises(UserError, match="which has no figure of it"):
        changed(machine(), power=300.0)
    with pytest.raises(UserError, match=r"--memory 1e\+300 is no figure of a machine: give one from 1e-09 to 1e\+15"):
        changed(H100, memory=1e300)
    assert MachineOptions(system="H100", memory=94.0).machine().name == "H100, changed"


def test_less_power_is_as_much_slower_as_a_run_at_500_watts():
    """torchtitan's Llama 3.1 8B, compiled, on 8 H100 limited to 500 W: 2.4575 s (its benchmarks of 2024)."""
    options = MachineOptions(system="H100", power=500.0, memory=96.0)
    plan = Plan(dp=8, zero=3, micro_batch=2, global_batch=16, overlap="all", stack="torchtitan")
    config = LLAMA_8B.override(recompute="attention", kernels="torch")
    low, high = time_range(step_time(config, plan, 8192, options.machine("torchtitan")))
    assert low < 2.4575 < high


# Shapes
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "max_position_embeddings": 4096,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
}  # fmt: skip
PYTHIA = {
    "model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 16, "vocab_size": 50304, "max_position_embeddings": 2048,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 256000, "max_position_embeddings": 8192,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def written(tmp_path, config: object) -> ModelConfig:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return read_shape(path)


@pytest.mark.parametrize(
    ("config", "billions"),
    [(DEEPSEEK_V3, 671.0), (QWEN3_30B, 30.5), (GPT2, 0.1244), (PYTHIA, 1.4146), (GEMMA, 2.5062)],
    ids=["v3", "qwen3", "gpt2", "pythia", "gemma"],
)
def test_models_of_hugging_face_have_the_parameters_that_they_are_known_for(tmp_path, config, billions):
    model = written(tmp_path, config)
    assert sum(count_parameters(model).values()) / 1e9 == pytest.approx(billions, rel=2e-3)
    if model.num_experts:  # many of them have a range of their own
        step = step_time(model, Plan(), SEQ, H100)
        assert time_range(step) == (step.total, 2.5 * step.total)


def test_a_config_of_a_preset_is_that_preset(tmp_path):
    one = model_preset("llama-8b")
    given = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    found = written(tmp_path, given)
    assert type(found) is ModelConfig
    assert found.override(rotary_base=one.rotary_base) == one
    options = ModelOptions(size=str(tmp_path / "config.json"), context=4096)
    assert options.model_config().context_length == 4096
    assert options.title == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("no", "is no config.json: it is not JSON: Expecting value"),
        ([], "is no config.json"),
        ({"text_config": [1]}, "does not say d_model"),
        ({}, r"does not say d_model \(hidden_size or n_embd or d_model\)"),
        (GPT2 | {"model_type": "bert"}, "models of the type bert are built otherwise: give the sizes"),
        ({"model_type": "falcon"}, "models of the type falcon are built otherwise"),  # whose files lack a size
        (GPT2 | {"model_type": "jamba"}, "models of the type jamba are built otherwise"),
        (QWEN3_30B | {"mlp_only_layers": [0]}, "json: models with mlp_only_layers are built otherwise: give the sizes"),
        (QWEN3_30B | {"decoder_sparse_step": 49}, "none of the 48 layers has experts: every 49-th would have them"),
        (GPT2 | {"n_layer": 1.5}, "n_layer must be a whole number, not 1.5"),
        (GPT2 | {"vocab_size": 10**400}, "vocab_size must be a whole number, not 10000+.*, of 10.15 at most"),
        (GPT2 | {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        (GPT2 | {"kv_lora_rank": 8, "qk_rope_head_dim": 4}, "does not say qk_nope_head_dim, v_head_dim, widths of"),
        (QWEN3_30B | {"num_experts_per_tok": 0}, "json: num_experts_per_tok must be 1 to 1024 experts .*, not 0"),
        (QWEN3_30B | {"num_experts_per_tok": 2000}, "num_experts_per_tok must be 1 to 1024 .*, not 2000"),
        (QWEN3_30B | {"first_k_dense_replace": 99}, "none of the 48 layers has experts"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path, config, says):
    with pytest.raises(UserError, match=says):
        written(tmp_path, config)


def test_experts_of_their_own_need_experts():
    for name in ("top_k", "dense_layers", "expert_every"):
        with pytest.raises(UserError, match=f"{name}: the model has no experts"):
            ModelOptions(size="llama-8b", **{name: 2}).model_config()
    with pytest.raises(UserError, match=r"^cannot read missing/config\.json: No such file"):
        ModelOptions(size="missing/config.json").model_config()


def test_heads_of_a_width_of_their_own_need_not_divide_the_stream():
    model = shaped(**vars(model_preset("llama-8b")) | {"d_model": 2881, "num_heads": 64, "head_width": 64})
    assert (model.d_model, model.head_dim) == (2881, 64)
    with pytest.raises(UserError, match="d_model 2881 is not a multiple of num_heads 64"):
        shaped(**vars(model_preset("llama-8b")) | {"d_model": 2881, "num_heads": 64})
