"""The operators of a profile: those with the longest self time, their counts from the model's shape, and sentences."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.cost import forward_flops
from cs336_systems.presets import ModelConfig, preset

SOFTMAX_FLOPS = 5  # of an element: compare, subtract, exponentiate, add, divide

Profile = dict[str, Any]


def config_of(record: Record) -> ModelConfig:
    """The model of a record, with the context that it ran."""
    config = record.config
    model = preset(config["size"], config["year"]).model
    return model.override(context_length=config["context"], norm=config["norm"], attention=config["attention"])


def clocked(profile: Profile) -> tuple[str, str, str]:
    """The names of a row's own time, of its share, and of its total: the device's where anything ran on one."""
    where = "device" if profile["clock"] == "device" else "cpu"
    return f"{where}_self", f"{where}_self_share", f"{where}_total"


def by_own_time(profile: Profile, period: str) -> list[dict[str, Any]]:
    """The operators of a phase, or of the step, with the longest self time."""
    own, _, _ = clocked(profile)
    return sorted(profile["operators"][period], key=lambda row: (-row[own], row["name"]))


def flops_ratio(config: ModelConfig) -> float:
    """FLOPs of the softmax over those of the two products, of any batch."""
    scores = config.num_layers * config.num_heads * config.context_length**2
    return SOFTMAX_FLOPS * scores / forward_flops(config, 1, config.context_length)["scores"]
