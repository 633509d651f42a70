"""Model shapes by name: the course's sizes of each year and the published models that this project reproduces.

No torch here, so that the analytic model (cost/) can read a shape without loading it.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cs336_systems.errors import UserError
from cs336_systems.mixture import Mixture

Positions = Literal["learned", "rotary", "sinusoidal", "none"]
Norm = Literal["rmsnorm", "layernorm"]
FeedForwardKind = Literal["gelu", "gelu-tanh", "swiglu"]
Attention = Literal["naive", "sdpa", "flash"]
Kernels = Literal["torch", "triton"]
Recompute = Literal["none", "segments", "nested", "attention"]


@dataclass(frozen=True)
class ModelConfig:
    """A transformer's shape and the implementations chosen for its parts; checked on construction.

    Raises UserError if the sizes do not divide or a choice does not exist.
    """

    vocab_size: int
    context_length: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0  # 0: as many as num_heads; fewer: grouped-query attention (arXiv:2305.13245)
    causal: bool = True  # False: an encoder, every token sees every other
    positions: Positions = "learned"
    rotary_base: float = 10_000.0
    token_types: int = 0  # BERT's segment embedding; 0: none
    bias: bool = False  # of the linear layers and of LayerNorm
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    feed_forward: FeedForwardKind = "gelu"
    tied_head: bool = True  # logits reuse the token embedding's weight
    bert_heads: bool = False  # BERT's transform before the logits, and its classifier of sentence pairs
    dropout: float = 0.0  # on the embeddings, the attention weights and both branches of a block
    num_experts: int = 0  # 0: every feed-forward layer is dense
    expert_every: int = 2  # with experts: every k-th layer's feed-forward is a mixture
    mixture: Mixture = field(default_factory=Mixture)  # how those layers route
    attention: Attention = "naive"  # flash is this project's FlashAttention-2
    kernels: Kernels = "torch"  # triton: RMSNorm, SwiGLU, and the head with its loss are fused
    recompute: Recompute = "none"  # activation checkpointing (arXiv:1604.06174): what backward runs again
    recompute_every: int = 1  # blocks in a segment, for "segments"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "context_length",
            "d_model",
            "d_ff",
            "num_layers",
            "num_heads",
            "recompute_every",
            "expert_every",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.d_model % self.num_heads:
            raise UserError(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.kv_heads:
            raise UserError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.positions == "rotary" and self.head_dim % 2:
            raise UserError(f"rotary positions turn pairs: the head dimension {self.head_dim} must be even")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UserError(f"sinusoidal positions come in pairs: d_model {self.d_model} must be even")
        if self.num_experts < 0 or (self.num_experts and self.num_experts < self.mixture.top_k):
            top, number = self.mixture.top_k, self.num_experts
            raise UserError(f"a token is sent to {top} experts, and the layer has {number}: use more, or top_k 1")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout must lie in [0, 1), not {self.dropout}")
        if self.attention == "flash" and (self.dropout or self.head_dim > 128):
            raise UserError(
                f"attention flash has no dropout and heads of 128 at most, not dropout {self.dropout} and heads of "
                f"{self.head_dim}; use sdpa"
            )
        if self.bert_heads and not (self.tied_head and self.bias):
            raise UserError("bert_heads need tied_head=True and bias=True, as BERT has them")
        for name, choices in (
            ("positions", Positions),
            ("norm", Norm),
            ("feed_forward", FeedForwardKind),
            ("attention", Attention),
            ("kernels", Kernels),
            ("recompute", Recompute),
        ):
            if getattr(self, name) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise UserError(f"{name} {getattr(self, name)!r} does not exist; choose from {known}")

    def override(self, **changes: Any) -> "ModelConfig":
        """The same with every change that is not None, checked anew."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts: the k-th, the 2k-th and so on."""
        return bool(self.num_experts) and (layer + 1) % self.expert_every == 0

    @property
    def expert_d_ff(self) -> int:
        """Hidden width of an expert."""
        return self.mixture.expert_d_ff or self.d_ff

    @property
    def expert_layers(self) -> int:
        """How many layers have experts in place of the dense feed-forward."""
        return self.num_layers // self.expert_every if self.num_experts else 0


@dataclass(frozen=True)
class Preset:
    """A named model with the batch size (sequences) of the document it comes from."""

    model: ModelConfig
    batch_size: int
    source: str


COURSE_YEARS = (2024, 2025, 2026)
DEFAULT_YEAR = 2024

# name: (d_model, d_ff, num_layers, num_heads)
_SMALL_TO_LARGE = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
}
_COURSE_SHAPES = {
    2024: _SMALL_TO_LARGE | {"xl": (1600, 6400, 48, 25), "2.7B": (2560, 10_240, 32, 32)},
    2025: _SMALL_TO_LARGE | {"xl": (1600, 6400, 48, 25), "2.7B": (2560, 10_240, 32, 32)},
    2026: _SMALL_TO_LARGE | {"xl": (2560, 10_240, 32, 32), "10B": (4608, 12_288, 50, 36)},
}


def _course_preset(year: int, d_model: int, d_ff: int, num_layers: int, num_heads: int) -> Preset:
    model = ModelConfig(
        vocab_size=10_000, context_length=128, d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads
    )
    if year == 2024:
        return Preset(model, batch_size=16, source="CS336 assignment 2, 2024 edition")
    # From 2025 on the course's model has rotary positions, a gated feed-forward of the same d_ff and its own head.
    model = replace(
        model,
        positions="rotary",
        feed_forward="swiglu",
        tied_head=False,
        context_length=512 if year == 2026 else 128,
    )
    return Preset(model, batch_size=4, source=f"CS336 assignment 2, {year} edition")


_TINY = ModelConfig(
    vocab_size=256, context_length=128, d_model=128, d_ff=512, num_layers=4, num_heads=4, attention="sdpa"
)
_GPT = ModelConfig(
    vocab_size=50_257,
    context_length=2048,
    d_model=12_288,
    d_ff=49_152,
    num_layers=96,
    num_heads=96,
    bias=True,
    norm="layernorm",
    feed_forward="gelu-tanh",
)
_BERT = ModelConfig(
    vocab_size=29_056,
    context_length=512,
    d_model=1024,
    d_ff=4096,
    num_layers=24,
    num_heads=16,
    causal=False,
    token_types=2,
    bias=True,
    norm="layernorm",
    bert_heads=True,
    dropout=0.1,
)
_FAIRSEQ_MOE = ModelConfig(
    vocab_size=51_200,
    context_length=2048,
    d_model=768,
    d_ff=3072,
    num_layers=12,
    num_heads=12,
    positions="sinusoidal",
    bias=True,
    norm="layernorm",
    dropout=0.1,
    num_experts=512,
    mixture=Mixture(capacity_factor=2.0, eval_fraction=0.05),
)
_LLAMA = ModelConfig(
    vocab_size=128_256,
    context_length=8192,
    d_model=4096,
    d_ff=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    positions="rotary",
    rotary_base=500_000.0,
    feed_forward="swiglu",
    tied_head=False,
)

# The same in every year.
_PRESETS = {
    "tiny": Preset(_TINY, 16, "ours: trains on a laptop in under a minute"),
    "bert-345m": Preset(_BERT, 4, "Megatron-LM v2.5's BERT-345M, cased vocabulary padded to a multiple of 128"),
    "gpt3-175b": Preset(_GPT, 1, "arXiv:2005.14165, table 2.1"),
    "llama-8b": Preset(_LLAMA, 1, "arXiv:2407.21783, table 3"),
    "llama-70b": Preset(
        replace(_LLAMA, d_model=8192, d_ff=28_672, num_layers=80, num_heads=64), 1, "arXiv:2407.21783, table 3"
    ),
    "llama-405b": Preset(
        replace(_LLAMA, d_model=16_384, d_ff=53_248, num_layers=126, num_heads=128), 1, "arXiv:2407.21783, table 3"
    ),
    "fairseq-moe-15b": Preset(_FAIRSEQ_MOE, 1, "fairseq (branch moe) en_moe_lm_15b; the vocabulary size is assumed"),
    "fairseq-moe-twin": Preset(
        replace(_FAIRSEQ_MOE, vocab_size=8192, d_model=64, d_ff=256, num_heads=4),
        1,
        "the same experts, layers and tokens at a twelfth of the width: equal counts and ratios on a laptop",
    ),
}


def course_sizes(year: int = DEFAULT_YEAR) -> tuple[str, ...]:
    """The names of one edition's sizes, small to large. Raises UserError for a year without an edition."""
    if year not in _COURSE_SHAPES:
        raise UserError(f"no {year} edition; the course's editions here are {', '.join(map(str, COURSE_YEARS))}")
    return tuple(_COURSE_SHAPES[year])


def preset_names(year: int = DEFAULT_YEAR) -> tuple[str, ...]:
    """Every name that `model_preset` knows in one year."""
    return ("tiny", *course_sizes(year), *(name for name in _PRESETS if name != "tiny"))


def preset(name: str, year: int = DEFAULT_YEAR) -> Preset:
    """The named model with its batch size and source.

    Raises UserError for a name that the year does not have, saying where it exists.
    """
    known = {each.lower(): each for each in preset_names(year)}
    if name.lower() not in known:
        elsewhere = [str(other) for other in COURSE_YEARS if name.lower() in map(str.lower, preset_names(other))]
        hint = f" ({name} exists with --year {elsewhere[0]})" if elsewhere else ""
        raise UserError(f"no size {name!r} in {year}; choose from {', '.join(known.values())}{hint}")
    name = known[name.lower()]
    if name in _PRESETS:
        return _PRESETS[name]
    return _course_preset(year, *_COURSE_SHAPES[year][name])


def model_preset(name: str, year: int = DEFAULT_YEAR) -> ModelConfig:
    """The named model's shape; the course's sizes differ by edition (`xl` of 2026 is the 2.7B of 2025).

    Raises UserError for a name that the year does not have.
    """
    return preset(name, year).model
