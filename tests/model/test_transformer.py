"""The transformer against a second one written head by head, against GPT-2 and Llama, and against itself."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.errors import UserError
from cs336_systems.model import transformer
from cs336_systems.model.attention import attention_bias
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig, model_preset
from tests.support.oracles import one_sequence
from tests.support.tolerances import bound, relative_error

TOY = ModelConfig(vocab_size=19, context_length=7, d_model=24, d_ff=40, num_layers=2, num_heads=4)
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
GPT2 = {"norm": "layernorm", "bias": True, "feed_forward": "gelu-tanh"}
BERT = {"norm": "layernorm", "bias": True, "causal": False, "token_types": 2, "bert_heads": True}
VARIANTS = [
    {},
    GPT2,
    LLAMA,
    BERT,
    {"positions": "sinusoidal", "norm": "layernorm"},
    {"positions": "none", "causal": False},
    {"num_kv_heads": 1, "token_types": 3},
]

# Forward and backward of two blocks, the norms and the heads; the longest sum is over the feed-forward's width.
ROUNDING = bound(torch.float64, stages=100, longest_sum=TOY.d_ff)


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64, every parameter random, gains and biases too, so that none can be forgotten."""
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    return model


def build(config: ModelConfig) -> TransformerLM:
    return randomized(TransformerLM(config)).train()


def inputs(config: ModelConfig, batch: int = 2, seq: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    types = torch.randint(config.token_types, (batch, seq)) if config.token_types else None
    return torch.randint(config.vocab_size, (batch, seq)), types


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_equals_the_plain_transformer_gradients_included(changes, attention, padded):
    model = build(config := replace(TOY, **changes, attention=attention))
    tokens, types = inputs(config)
    real = torch.ones_like(tokens, dtype=torch.bool)
    if padded:
        real[1, 4:] = False
    output = model(tokens, types, real if padded else None)
    outputs = [output.tokens, output.pair] if config.bert_heads else [output]
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    kinds = tokens * 0 if types is None else types
    plain = [one_sequence(weights, config, tokens[i], kinds[i], real[i]) for i in range(2)]
    wanted = [torch.stack(each) for each in zip(*plain, strict=True) if each[0] is not None]
    for mine, theirs in zip(outputs, wanted, strict=True):
        assert relative_error(mine, theirs) < ROUNDING
    directions = [torch.randn_like(each) for each in wanted]
    for results in (outputs, wanted):
        sum((each * direction).sum() for each, direction in zip(results, directions, strict=True)).backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    want = torch.cat([w.grad.flatten() for w in weights.values()])
    assert relative_error(got, want) < ROUNDING


def renamed(model: torch.nn.Module, names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, each part of whose names is this library's."""
    for name, p in model.named_parameters():
        yield ".".join(names.get(part, part) for part in name.split(".")), p.detach()


def test_equals_gpt2():
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(vocab_size=19, n_positions=7, n_embd=24, n_layer=2, n_head=4, n_inner=40)
    theirs, ours = randomized(transformers.GPT2LMHeadModel(gpt2)), TransformerLM(replace(TOY, **GPT2)).double()
    names = {"wte": "embedding.tokens", "wpe": "embedding.positions", "h": "blocks", "attn": "attention"}
    names |= {"mlp": "feed_forward", "c_fc": "up", "c_proj": "out"}
    names |= {"ln_1": "attention_norm", "ln_2": "feed_forward_norm", "ln_f": "final_norm"}
    state = {}
    for name, p in renamed(theirs.transformer, names):
        # Their linear layers are (in, out), and those of queries, keys and values are one.
        parts = (p.T if name.startswith("blocks") and p.dim() == 2 else p).chunk(3 if "c_attn" in name else 1)
        for part, each in zip(("query", "key", "value"), parts, strict=False):
            state[name.replace("c_attn", part).replace("feed_forward.out", "feed_forward.down")] = each
    ours.load_state_dict(state)
    tokens, _ = inputs(TOY)
    assert relative_error(ours(tokens), theirs(tokens).logits) < ROUNDING


def test_equals_llama():
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        vocab_size=19, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=7, rms_norm_eps=1e-5, rope_theta=10_000.0,
    )  # fmt: skip
    theirs = randomized(transformers.LlamaForCausalLM(llama))
    ours = TransformerLM(config := replace(TOY, **LLAMA)).double()
    names = {"embed_tokens": "embedding.tokens", "layers": "blocks", "self_attn": "attention", "mlp": "feed_forward"}
    names |= {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate"}
    names |= {"up_proj": "up", "down_proj": "down", "input_layernorm": "attention_norm", "norm": "final_norm"}
    names |= {"post_attention_layernorm": "feed_forward_norm", "lm_head": "head"}
    ours.load_state_dict({name.removeprefix("model."): p for name, p in renamed(theirs, names)})
    tokens, _ = inputs(config)
    # Llama's library computes its rotary angles in float32: position times rate, then cosine and sine, at size <= 7.
    angle_error = bound(torch.float32, stages=3) * config.context_length
    assert relative_error(ours(tokens), theirs(tokens).logits) < 2 * config.num_layers * angle_error


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_a_row_of_padding_alone_stays_finite(attention, precision):
    """Fused attention gets a finite mask, also in half precision: float32's lowest number rounds to minus infinity
    there, and some kernels turn a row of those into NaN."""
    model = build(replace(TOY, causal=False, attention=attention)).to(torch.float32 if precision else torch.float64)
    (tokens, _), low = inputs(TOY), torch.autocast("cpu", precision) if precision else nullcontext()
    with patch("torch.nn.functional.scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as fused, low:
        output = model(tokens, None, torch.tensor([[True] * 6, [False] * 6]))
    masks = [call.kwargs["attn_mask"] for call in fused.call_args_list]
    output.float().sum().backward()
    assert output.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert [mask.dtype for mask in masks] == [precision or torch.float64] * (2 * (attention == "sdpa"))
    assert all(mask.isfinite().all() for mask in masks)


def step(model: TransformerLM, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and all gradients in one."""
    loss = lm_loss(model, tokens, targets)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("changes", [LLAMA, BERT], ids=["llama", "bert"])
@pytest.mark.parametrize("mode", ["segments", "nested", "attention"])
def test_checkpointing_changes_no_bit(mode, changes):
    found = []
    for chosen in ("none", mode):
        torch.manual_seed(1)
        config = replace(TOY, **changes, num_layers=5, recompute=chosen, recompute_every=2, dropout=0.2)
        model, (tokens, _) = TransformerLM(config), inputs(config)
        found.append(step(model, tokens, tokens))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_checkpointing_runs_blocks_again():
    tokens, _ = inputs(TOY)
    with patch("cs336_systems.model.transformer.recompute", wraps=transformer.recompute) as again:
        TransformerLM(replace(TOY, num_layers=5, recompute="segments", recompute_every=2))(tokens)
        assert [call.args[1] for call in again.call_args_list] == [range(0, 2), range(2, 4), range(4, 5)]
        with torch.no_grad():
            TransformerLM(replace(TOY, recompute="segments"))(tokens)
    assert again.call_count == 3  # nothing is kept for backward, so nothing is worth recomputing


def test_dropout_acts_everywhere_it_should():
    model, (tokens, _) = TransformerLM(replace(TOY, dropout=0.5)), inputs(TOY)
    stream, weights = ((2, 6, 24), 0.5), ((2, 4, 6, 6), 0.5)
    with patch("torch.nn.functional.dropout", wraps=F.dropout) as drop:
        model(tokens)
        calls = [(tuple(call.args[0].shape), call.args[1]) for call in drop.call_args_list]
        assert calls == [stream] + [weights, stream, stream] * 2  # the embedding; each block's weights and branches
        model.eval()(tokens)
    assert drop.call_count == len(calls)


def test_initial_weights():
    model = TransformerLM(replace(model_preset("tiny"), bias=True, norm="layernorm"))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm." in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / 8**0.5 if name.endswith(("attention.out.weight", "down.weight")) else 0.02
            # The deviation of n normal numbers is known to std / sqrt(2 n); six of those are never seen.
            assert abs(p.std().item() - std) < 6 * std / (2 * p.numel()) ** 0.5, name
    again = torch.manual_seed(0) and TransformerLM(replace(model_preset("tiny"), bias=True, norm="layernorm"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("changes", [LLAMA, BERT], ids=["llama", "bert"])
def test_fused_kernels_change_nothing(changes):
    plain = build(config := replace(TOY, **changes, num_layers=1))
    fused = TransformerLM(replace(config, kernels="triton", attention="flash"))
    fused.load_state_dict(plain.state_dict())
    tokens, targets = torch.randint(config.vocab_size, (2, 1, 7))
    for got, want in zip(step(fused, tokens, targets), step(plain, tokens, targets), strict=True):
        assert relative_error(got, want) < bound(torch.float32, stages=100, longest_sum=TOY.d_ff)


def test_what_cannot_be_computed_is_refused():
    model, tokens = TransformerLM(TOY), torch.zeros(1, 7, dtype=torch.long)
    for given, said in (
        ((torch.zeros(1, 8, dtype=torch.long),), "8 tokens do not fit the context of 7"),
        ((tokens[0],), r"tokens have shape \(7,\); \(batch seq\) is meant"),
        ((tokens, tokens), "token_types were given, but the model has none"),
        ((tokens, None, tokens[:, 1:] == 0), r"padding_mask: shape \(1, 6\), tokens: shape \(1, 7\)"),
        ((tokens, None, tokens), r"the padding mask is torch\.int64: it must be torch\.bool, True"),
    ):
        with pytest.raises(UserError, match=said):
            model(*given)
    with pytest.raises(UserError, match=r"targets: shape \(7,\), tokens: shape \(1, 7\)"):
        lm_loss(model, tokens, tokens[0])
    with pytest.raises(UserError, match="attention flash knows no padding mask; use sdpa"):
        TransformerLM(replace(TOY, attention="flash"))(tokens, None, torch.ones(1, 7))
    for cut in ([0, 1, 2, 0, 1, 2, 7], [0, 1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 3, 0, 1]):
        with pytest.raises(UserError, match="positions begin at 0 and count up"):
            model(tokens, positions=torch.tensor([cut]))
    assert model(tokens, positions=torch.arange(7, dtype=torch.uint8)[None]).shape[:2] == (1, 7)
    assert model(tokens[:, :0], positions=tokens[:, :0]).shape[:2] == (1, 0)
    with pytest.raises(UserError, match=r"attention flash has no dropout and heads of 128 at most, not dropout 0\.1"):
        replace(TOY, attention="flash", dropout=0.1)


@pytest.mark.parametrize("recompute", ["none", "segments", "nested"])
def test_a_step_leaves_nothing_to_the_garbage_collector(recompute, monkeypatch):
    """A mask that only the collector frees would pile up, step by step."""
    biases = []

    def spied(*arguments):
        bias = attention_bias(*arguments)
        biases.append(weakref.ref(bias))
        return bias

    monkeypatch.setattr("cs336_systems.model.attention.attention_bias", spied)
    config = model_preset("tiny").override(attention="naive", num_layers=3, context_length=8, recompute=recompute)
    model, tokens = TransformerLM(config), torch.zeros(1, 8, dtype=torch.long)
    gc.disable()
    try:
        lm_loss(model, tokens, tokens).backward()
        assert biases[0]() is None
    finally:
        gc.enable()
