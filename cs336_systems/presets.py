"""Models by name: the shape of a transformer, settings of its expert layers, and presets: the course's sizes of each
year, and published models. This file does not import torch, so that the cost model starts without it."""

from dataclasses import dataclass, field, fields, replace
from math import ceil, floor
from typing import Any, ClassVar, Literal, get_args, get_origin

from cs336_systems.errors import UserError, require_count

Positions = Literal["learned", "rotary", "sinusoidal", "none"]
Norm = Literal["rmsnorm", "layernorm"]
FeedForwardKind = Literal["gelu", "gelu-tanh", "swiglu"]
Attention = Literal["naive", "sdpa", "flash"]
Kernels = Literal["torch", "triton"]
Recompute = Literal["none", "segments", "nested", "attention"]
ContextType = Literal["ring", "gather", "ulysses"]

SecondPolicy = Literal["all", "sampling", "random"]
Normalize = Literal["after", "before"]
AuxScope = Literal["local", "global"]
Dispatch = Literal["sort", "einsum"]
ExpertGradient = Literal["exact", "sqrt"]

# Arithmetic of matrix products; bf16 and fp16 are mixed precision.
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


def _check_choices(settings: Any) -> None:
    """Raises UserError for a field whose value is not one of the choices of its type."""
    for each in fields(settings):
        if get_origin(each.type) is Literal and getattr(settings, each.name) not in get_args(each.type):
            known = ", ".join(get_args(each.type))
            raise UserError(f"{each.name} {getattr(settings, each.name)!r} does not exist; choose from {known}")


@dataclass(frozen=True)
class Mixture:
    """Settings by which expert layers route tokens, as GShard (Lepikhin et al., arXiv:2006.16668, section 2.2) and
    fairseq (branch moe) name them. Raises UserError for an unknown choice and a number out of range."""

    top_k: int = 2  # experts that a token is sent to; 1 is Switch Transformer's (arXiv:2101.03961)
    expert_d_ff: int = 0  # hidden width of an expert; 0: the model's d_ff
    gating_fp32: bool = True  # logits and probabilities in float32 at least, whatever the activations' precision
    second_policy: SecondPolicy = "all"  # in training; sampling: draw the second; random: drop an improbable one
    normalize: Normalize = "after"  # top_k 2: make the two weights add up to one before or after tokens are dropped
    capacity_factor: float = 0.0  # in training an expert takes factor x ceil(tokens / experts) rows; 0: all (dropless)
    eval_fraction: float = 0.0  # in evaluation it takes ceil(fraction x tokens) rows; 0: as in training
    mask_padding: bool = False  # padded tokens are sent to no expert
    prioritized: bool = False  # tokens of the highest probability get slots first (arXiv:2106.05974, section 4)
    aux_weight: float = 0.01  # weight of each layer's balancing loss
    aux_scope: AuxScope = "local"  # balance within a rank's microbatch, or over those of all ranks
    shared_expert: bool = False  # add an expert of the dense width, through which every token passes
    dispatch: Dispatch = "sort"  # einsum: the one-hot formulation, one expert after the other
    expert_gradient: ExpertGradient = "exact"  # sqrt: times the square root of the ranks, fairseq's heuristic
    most: ClassVar[int] = 2  # largest top_k

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.most:
            raise UserError(
                f"a token is sent to {'1 or 2' if self.most == 2 else f'1 to {self.most}'} experts, not {self.top_k}"
            )
        _check_choices(self)
        for name in ("expert_d_ff", "capacity_factor", "aux_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be a finite number of at least 0, not {getattr(self, name)}")
        if not 0 <= self.eval_fraction <= 1:
            raise UserError(f"eval_fraction must lie in [0, 1], not {self.eval_fraction}")

    def capacity(self, tokens: int, experts: int, training: bool) -> int | None:
        """Number of slots of an expert for a group of tokens: rounded up in evaluation and down in training, at least
        one and at most `tokens`; None for as many as are needed. As in fairseq, the group is all tokens that one rank
        routes in one call, and `experts` counts those of all ranks."""
        # First undo rounding errors: as floats, 0.05 x 2060 is more than 103, and 1.15 x 100 less than 115.
        if not training and self.eval_fraction:
            return min(tokens, max(1, ceil(round(self.eval_fraction * tokens, 6))))
        if not self.capacity_factor:
            return None
        asked = min(tokens, self.capacity_factor * ceil(tokens / experts))
        return min(tokens, max(1, floor(round(asked, 6))))

    @property
    def is_random(self) -> bool:
        """True if training routes with random numbers."""
        return self.top_k == 2 and self.second_policy != "all"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a transformer and the implementation of its parts. Raises UserError for what does not go together."""

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
    expert_every: int = 2  # with experts: every k-th layer has them in place of its feed-forward
    mixture: Mixture = field(default_factory=Mixture)  # settings of those layers
    attention: Attention = "naive"  # flash is this project's FlashAttention-2
    kernels: Kernels = "torch"  # triton: RMSNorm, SwiGLU, and the head with its loss are fused
    recompute: Recompute = "none"  # activation checkpointing (arXiv:1604.06174): parts that backward computes again
    recompute_every: int = 1  # blocks in a segment, for "segments"

    def __post_init__(self) -> None:
        sizes = "vocab_size", "context_length", "d_model", "d_ff", "num_layers", "num_heads"
        least = dict.fromkeys((*sizes, "recompute_every", "expert_every"), 1)
        for name, number in (least | dict.fromkeys(("num_kv_heads", "token_types", "num_experts"), 0)).items():
            require_count(name, getattr(self, name), number)
        if self.d_model % self.num_heads and not getattr(self, "head_width", 0):  # of `cost.shape`
            raise UserError(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.kv_heads:
            raise UserError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.positions == "rotary" and self.head_dim % 2:
            raise UserError(f"rotary positions turn pairs: the head dimension {self.head_dim} must be even")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UserError(f"sinusoidal positions come in pairs: d_model {self.d_model} must be even")
        top, number = self.mixture.top_k, self.num_experts
        if number and number < top:
            raise UserError(f"a token is sent to {top} experts, and the layer has {number}: use more, or top_k 1")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout must lie in [0, 1), not {self.dropout}")
        if self.attention == "flash" and (self.dropout or self.head_dim > 128):
            numbers = f"not dropout {self.dropout} and heads of {self.head_dim}"
            raise UserError(f"attention flash has no dropout and heads of 128 at most, {numbers}; use sdpa")
        if self.bert_heads and not (self.tied_head and self.bias):
            raise UserError("bert_heads need tied_head=True and bias=True, as BERT has them")
        _check_choices(self)

    def override(self, **changes: Any) -> "ModelConfig":
        """Make a copy with every change that is not None, and check it."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def has_experts(self, layer: int) -> bool:
        """True for a layer with experts, counted from 0: the k-th, the 2k-th and so on."""
        return bool(self.num_experts) and (layer + 1) % self.expert_every == 0

    @property
    def expert_d_ff(self) -> int:
        return self.mixture.expert_d_ff or self.d_ff

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts in place of the dense feed-forward."""
        return self.num_layers // self.expert_every if self.num_experts else 0


@dataclass(frozen=True)
class Preset:
    """A named model with the batch size (sequences) of the document it comes from."""

    model: ModelConfig
    batch_size: int


COURSE_YEARS = (2024, 2025, 2026)
DEFAULT_YEAR = 2024

# name: (d_model, d_ff, num_layers, num_heads)
_TO_LARGE = {"small": (768, 3072, 12, 12), "medium": (1024, 4096, 24, 16), "large": (1280, 5120, 36, 20)}
_TO_2_7B = _TO_LARGE | {"xl": (1600, 6400, 48, 25), "2.7B": (2560, 10_240, 32, 32)}
_TO_10B = _TO_LARGE | {"xl": (2560, 10_240, 32, 32), "10B": (4608, 12_288, 50, 36)}
_COURSE_SHAPES = {2024: _TO_2_7B, 2025: _TO_2_7B, 2026: _TO_10B}


# vocab_size, context_length, d_model, d_ff, num_layers, num_heads; then what differs from the defaults.
_GPT = ModelConfig(50_257, 2048, 12_288, 49_152, 96, 96, bias=True, norm="layernorm", feed_forward="gelu-tanh")
_BERT = ModelConfig(29_056, 512, 1024, 4096, 24, 16, causal=False, token_types=2).override(
    bias=True, norm="layernorm", bert_heads=True, dropout=0.1
)
_LLAMA = ModelConfig(128_256, 8192, 4096, 14_336, 32, 32, num_kv_heads=8, rotary_base=500_000.0).override(
    positions="rotary", feed_forward="swiglu", tied_head=False
)
_FAIRSEQ_MOE = ModelConfig(51_200, 2048, 768, 3072, 12, 12, num_experts=512, bias=True).override(
    positions="sinusoidal", norm="layernorm", dropout=0.1, mixture=Mixture(capacity_factor=2.0, eval_fraction=0.05)
)

_PRESETS = {  # the same in every year
    "tiny": Preset(ModelConfig(256, 128, 128, 512, 4, 4, attention="sdpa"), 16),  # trains in a minute on a laptop
    "bert-345m": Preset(_BERT, 4),  # Megatron-LM v2.5's BERT-345M, cased vocabulary padded to a multiple of 128
    "gpt3-175b": Preset(_GPT, 1),  # arXiv:2005.14165, table 2.1
    "llama-8b": Preset(_LLAMA, 1),  # arXiv:2407.21783, table 3, as the next two
    "llama-70b": Preset(replace(_LLAMA, d_model=8192, d_ff=28_672, num_layers=80, num_heads=64), 1),
    "llama-405b": Preset(replace(_LLAMA, d_model=16_384, d_ff=53_248, num_layers=126, num_heads=128), 1),
    "fairseq-moe-15b": Preset(_FAIRSEQ_MOE, 1),  # fairseq (branch moe) en_moe_lm_15b; the vocabulary size is assumed
    # The same experts, layers and tokens at a twelfth of the width: equal counts and ratios on a laptop.
    "fairseq-moe-twin": Preset(replace(_FAIRSEQ_MOE, vocab_size=8192, d_model=64, d_ff=256, num_heads=4), 1),
}


def course_sizes(year: int = DEFAULT_YEAR) -> tuple[str, ...]:
    """Names of one edition's sizes, small to large. Raises UserError for a year without an edition."""
    if year not in _COURSE_SHAPES:
        raise UserError(f"no {year} edition; the course's editions here are {', '.join(map(str, COURSE_YEARS))}")
    return tuple(_COURSE_SHAPES[year])


def with_edition(name: str, year: int) -> str:
    """Name for headings: `xl (2024)` for a size of the course, since its editions differ."""
    return f"{name} ({year})" if name.lower() in map(str.lower, course_sizes(year)) else name


def preset_names(year: int = DEFAULT_YEAR) -> tuple[str, ...]:
    """Every name that `model_preset` knows in one year."""
    return ("tiny", *course_sizes(year), *(name for name in _PRESETS if name != "tiny"))


def preset(name: str, year: int = DEFAULT_YEAR) -> Preset:
    """Find the named model and its batch size. The course's sizes differ by edition (`xl` of 2026 is the 2.7B of 2025).
    Raises UserError for a name that the year does not have; it says in which year the name exists."""
    known = {each.lower(): each for each in preset_names(year)}
    if name.lower() not in known:
        elsewhere = [str(other) for other in COURSE_YEARS if name.lower() in map(str.lower, preset_names(other))]
        hint = f" ({name} exists with --year {elsewhere[0]})" if elsewhere else ""
        raise UserError(f"no size {name!r} in {year}; choose from {', '.join(known.values())}{hint}")
    if (name := known[name.lower()]) in _PRESETS:
        return _PRESETS[name]
    model = ModelConfig(10_000, 512 if year == 2026 else 128, *_COURSE_SHAPES[year][name])
    if year > 2024:  # since then rotary positions, a gated feed-forward of the same d_ff, and a head of its own
        model = model.override(positions="rotary", feed_forward="swiglu", tied_head=False)
    return Preset(model, 16 if year == 2024 else 4)


def model_preset(name: str, year: int = DEFAULT_YEAR) -> ModelConfig:
    """Configuration of the named `preset`'s model."""
    return preset(name, year).model
