"""Shapes of models that the cost model can predict and this project's trainer does not build.

They have heads of any width, multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), experts from the
k-th layer on, more than two for a token, or shared ones of any width. A `config.json` of Hugging Face names one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cs336_systems.cost.machines import read_json
from cs336_systems.cost.template import read_data
from cs336_systems.errors import UserError
from cs336_systems.presets import Mixture, ModelConfig

MOST_CHOICES = 1024
MOST = 10**15  # of any size


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values are made from one narrow vector, queries perhaps from another.
    Widths: `query` and `key_value` of these vectors, `plain` and `rotary` of a head's key, `value` of its value."""

    key_value: int
    plain: int
    rotary: int
    value: int
    query: int = 0  # 0: queries are made from the stream


@dataclass(frozen=True)
class Routing(Mixture):
    """A mixture that sends a token to any number of experts, with a shared expert of a width of its own."""

    shared_d_ff: int = 0  # 0: the model's d_ff

    most = MOST_CHOICES


@dataclass(frozen=True)
class Shape(ModelConfig):
    """A `ModelConfig` with features that the trainer does not have."""

    head_width: int = 0  # 0: d_model / num_heads
    latent: Latent | None = None
    dense_layers: int = 0  # the first layers, which have no experts

    @property
    def head_dim(self) -> int:
        return self.head_width or self.d_model // self.num_heads

    @property
    def expert_layers(self) -> int:
        return sum(map(self.has_experts, range(self.num_layers)))

    def has_experts(self, layer: int) -> bool:
        return layer >= self.dense_layers and super().has_experts(layer)


def shaped(**sizes: Any) -> ModelConfig:
    """A model of these sizes, a `Shape` only if one of them needs it; None counts as not given. Sizes of `Routing`
    change its mixture. Raises UserError for what does not divide."""
    sizes = {name: value for name, value in sizes.items() if value is not None}
    routing = {each.name: sizes.pop(each.name) for each in fields(Routing) if each.name in sizes}
    of_experts = [*routing, *["dense_layers"] * bool(sizes.get("dense_layers"))]
    if of_experts and not sizes.get("num_experts"):
        raise UserError(f"{', '.join(of_experts)}: the model has no experts: give their number with --num-experts")
    if routing:
        whole = {"shared_d_ff": 0} | vars(sizes.get("mixture", Mixture())) | routing
        if whole["top_k"] <= Mixture.most and not whole["shared_d_ff"]:
            del whole["shared_d_ff"]
        sizes["mixture"] = Routing(**whole) if "shared_d_ff" in whole else Mixture(**whole)
    own = {each.name for each in fields(Shape)} - {each.name for each in fields(ModelConfig)}
    plain = not any(sizes.get(name) for name in own)
    model = ModelConfig(**{n: value for n, value in sizes.items() if n not in own}) if plain else Shape(**sizes)
    if model.num_experts and not model.expert_layers:
        dense = sizes.get("dense_layers")
        why = f"the first {dense} have none" if dense else f"every {model.expert_every}-th would have them"
        raise UserError(f"none of the {model.num_layers} layers has experts: {why}")
    return model


def wider(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Copy of the model with changes, made by `shaped`."""
    changes = {name: value for name, value in changes.items() if value is not None}
    return shaped(**vars(config) | changes)


def shared_width(config: ModelConfig) -> int:
    """Hidden width of the shared expert."""
    return getattr(config.mixture, "shared_d_ff", 0) or config.d_ff


def latent_of(config: ModelConfig) -> Latent | None:
    """Latent attention of a model that has it."""
    return config.latent if isinstance(config, Shape) else None


def head_widths(config: ModelConfig) -> tuple[int, int]:
    """(width of a head's query and key, of its value)."""
    latent = latent_of(config)
    return (latent.plain + latent.rotary, latent.value) if latent else (config.head_dim, config.head_dim)


def projection_sizes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(inner, columns) of the matrices of attention in one layer: into queries, keys and values, and out."""
    d, heads, latent = config.d_model, config.num_heads, latent_of(config)
    if latent is None:
        return (d, heads * config.head_dim + 2 * config.kv_heads * config.head_dim), (heads * config.head_dim, d)
    queries = heads * (latent.plain + latent.rotary)
    down = (d, latent.query + latent.key_value + latent.rotary)
    ups = (latent.query or d, queries), (latent.key_value, heads * (latent.plain + latent.value))
    return down, *ups, (heads * latent.value, d)


NAMES = read_data("data/config_json")


def read_shape(path: Path) -> ModelConfig:
    """The model of a Hugging Face `config.json`. Raises UserError for a bad file, and a size missing or not whole."""
    given = read_json(path, "no config.json")
    if not isinstance(given, dict):
        raise UserError(f"{path} is no config.json, which is one JSON object")
    inner = given.get("text_config")  # the sizes of a model of pictures and text
    given = inner if isinstance(inner, dict) else given
    if (kind := given.get("model_type", "")) in NAMES["refused"]:
        raise UserError(f"{path}: models of the type {kind} are built otherwise: give the sizes, as in --d-model 1024")
    if odd := next((key for key in NAMES["uncounted"] if given.get(key)), None):
        raise UserError(f"{path}: models with {odd} are built otherwise: give the sizes, as in --d-model 1024")
    said = {name: _count(path, given, keys) for name, keys in NAMES["sizes"].items()}
    if missing := [name for name in NAMES["required"] if not said[name]]:
        named = "; ".join(f"{name} ({NAMES['sizes'][name].replace(' ', ' or ')})" for name in missing)
        raise UserError(f"{path} does not say {named}")
    latent = {name: _count(path, given, key) for name, key in NAMES["latent"].items()}
    family = next(each["has"] for each in NAMES["families"] if kind in each["types"] or not each["types"])
    if not isinstance(tied := given.get("tie_word_embeddings", family["tied_head"]), bool):
        raise UserError(f"{path}: tie_word_embeddings must be true or false, not {tied!r}")
    sizes = {name: said.pop(name) for name in (*NAMES["required"], "d_ff")}
    sizes["d_ff"] = sizes["d_ff"] or 4 * (sizes["d_model"] or 0)
    if latent["key_value"]:
        if missing := [NAMES["latent"][name] for name in ("plain", "rotary", "value") if not latent[name]]:
            raise UserError(f"{path} does not say {', '.join(missing)}, widths of latent attention's heads")
        said["head_width"], said["num_kv_heads"] = None, None
    if said["num_experts"] and said["top_k"] not in (None, *range(1, MOST_CHOICES + 1)):
        sent = f"1 to {MOST_CHOICES} experts for a token, not {said['top_k']}"
        raise UserError(f"{path}: {NAMES['sizes']['top_k']} must be {sent}; a model without experts has num_experts 0")
    if not said["num_experts"]:
        said |= dict.fromkeys(("top_k", "expert_d_ff", "shared_d_ff", "dense_layers", "expert_every"))
    elif shared := _count(path, given, "n_shared_experts"):
        said["shared_d_ff"] = shared * (said["expert_d_ff"] or sizes["d_ff"] or 0)
    said["expert_every"] = said["expert_every"] or (1 if said["num_experts"] else None)
    latent_widths = Latent(**{name: size or 0 for name, size in latent.items()}) if latent["key_value"] else None
    return shaped(
        **sizes,
        **said,
        shared_expert=bool(said["shared_d_ff"]) or None,
        latent=latent_widths,
        **family | {"tied_head": tied},
    )


def _count(path: Path, given: Mapping[str, Any], keys: str) -> int | None:
    """The value of the first of these keys that is present. Raises UserError unless it is a whole number from 0 on."""
    key = next((key for key in keys.split() if given.get(key) is not None), None)
    if key is None:
        return None
    value = given[key]
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST
    if not number or value != int(value):
        raise UserError(f"{path}: {key} must be a whole number, not {value!r:.40}, of 10^15 at most")
    return int(value)
