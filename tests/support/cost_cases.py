"""Shared parts of the cost model's tests: small models of every kind, and machines with a single kind of cost."""

from dataclasses import replace
from math import inf

from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.machines import Constants, System
from cs336_systems.cost.shape import Latent, Routing, Shape
from cs336_systems.presets import Mixture, ModelConfig

SEQ = 32
# Sizes with a different prime in each, as far as tp 4 divides them, so that no two terms can be taken for each other.
GPT = ModelConfig(
    vocab_size=4 * 53, context_length=SEQ, d_model=48, d_ff=4 * 44, num_layers=6, num_heads=12,
    bias=True, norm="layernorm", dropout=0.1, kernels="triton",
)  # fmt: skip
BERT = replace(GPT, causal=False, token_types=2, bert_heads=True)
LLAMA = replace(
    GPT, bias=False, norm="rmsnorm", dropout=0.0,
    positions="rotary", feed_forward="swiglu", tied_head=False, num_kv_heads=4,
)  # fmt: skip
MOE = replace(GPT, num_experts=8, expert_every=2, mixture=Mixture(top_k=2, expert_d_ff=4 * 20))
SHARED = replace(LLAMA, num_experts=4, expert_every=1, mixture=Mixture(top_k=1, shared_expert=True))
KINDS = {"gpt": GPT, "bert": BERT, "llama": LLAMA, "experts": MOE, "shared expert": SHARED}

# What the cost model predicts and the trainer does not build: heads of another width, latent attention, first layers
# without experts, a shared expert of its own width.
_ROUTING = Routing(top_k=3, expert_d_ff=4 * 5, shared_expert=True, shared_d_ff=4 * 7)
_LLAMA = dict(vars(LLAMA))
HEADS = Shape(**_LLAMA, head_width=10)
LATENT = Shape(
    **_LLAMA | {"num_kv_heads": 12, "num_experts": 8, "expert_every": 1, "mixture": _ROUTING},
    latent=Latent(key_value=13, plain=6, rotary=2, value=10, query=17),
    dense_layers=2,
)
SHAPES = {"heads": HEADS, "latent": LATENT}

# Nothing is lost on the way to a ceiling.
IDEAL = Constants(1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0)


def machine(
    flops: float = inf, memory: float = inf, link: float = inf, far: float = 0.0, node: int = 8, **losses: float
) -> System:
    """FLOP/s, bytes/s of memory, bytes/s of links; what is not said takes no time. `losses` are constants that are not
    ideal."""
    links, constants = (Link(0.0, link), Link(0.0, far or link)), replace(IDEAL, **losses)
    return System("test", flops, flops, 1.0, memory, inf, 1, node, *links, constants=constants)


COMPUTES, MOVES, SENDS = machine(flops=1.0), machine(memory=1.0), machine(link=1.0)


def block_activations(s: int, b: int, h: int, a: int, t: int, sequence: bool, recompute: str) -> float:
    """Bytes that a block with biases, GELU, LayerNorm, dropout and naive attention keeps for backward in 16 bits: s b h
    (10 + 24 / t + 5 a s / (h t)), or s b h / t (34 + 5 a s / h) under sequence parallelism. Selective `recompute`,
    "attention", saves the scores; "segments" keeps the input alone, 2 s b h (arXiv:2205.05198, table 2)."""
    if recompute == "segments":
        return 2 * s * b * h / (t if sequence else 1)
    scores = 0 if recompute == "attention" else 5 * a * s * s * b / t
    return s * b * h * (34 / t if sequence else 10 + 24 / t) + scores
