"""The operators of a profile: those with the longest self time, their counts from the model's shape, and sentences."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.cost import forward_flops
from cs336_systems.host.text import markdown_code
from cs336_systems.presets import ModelConfig, preset
from writeup.words import joined

OUTSIDE = "(Python between operators)"
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


def answers(record: Record, profile: Profile) -> list[str]:
    """The course's questions, a sentence or two each, from the profile of one model."""
    _, own_share, _ = clocked(profile)
    config, said = config_of(record), []
    for period, where in (("forward", "In the forward pass"), ("step", "Over the whole step")):
        row = by_own_time(profile, period)[0]
        calls = row["calls"] / profile["steps"]
        said.append(
            f"{where} {operator(row['name'])} takes the most time, {row[own_share]:.0%}, in {calls:,.0f} calls"
            f"{counted(row['name'], config, period, calls)}."
        )
    others = [row for row in by_own_time(profile, "forward") if not row["flops"] and row["name"] != OUTSIDE]
    if others:
        named = joined(f"{markdown_code(row['name'])} ({row[own_share]:.1%})" for row in others[:4])
        said.append(f"Of what is no product, these take most of the forward pass: {named}.")
    ahead, whole = (record.metrics[f"share_matrix_products{of}"] for of in ("_of_forward", ""))
    said.append(f"With backward and the optimizer, {changed(ahead, whole)}.")
    return said


def changed(ahead: float, whole: float) -> str:
    """Change of the matrix products' share from the forward pass to the whole step: a clause."""
    if abs(whole - ahead) < 0.02:
        return f"the share of products stays about the same ({ahead:.0%} of forward, {whole:.0%} of the step)"
    return f"the share of products {'rises' if whole > ahead else 'falls'} from {ahead:.0%} to {whole:.0%}"


def operator(name: str) -> str:
    """An operator's name in a sentence."""
    return "Python between operators" if name == OUTSIDE else markdown_code(name)


def counted(name: str, config: ModelConfig, period: str, calls: float) -> str:
    """Number of matrix products by the model's shape: one for each weight, and two more in backward."""
    if name != "aten::mm" or config.num_experts:
        return ""
    weights = config.num_layers * (4 + (3 if config.feed_forward == "swiglu" else 2)) + 1
    expected = weights * (1 if period == "forward" else 3)
    whence = f"{weights} weights" if period == "forward" else f"three for each of {weights} weights"
    return f", as the model's shape says ({whence})" if calls == expected else f" ({expected} by the model's shape)"
