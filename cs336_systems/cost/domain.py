"""The domain of predictions of time, and one warning for each way in which a request lies outside.

The domain are the ranges of the runs of `data/published_runs.json` to which constants are fitted. Outside it the same
formulas are used, with an unknown error.
"""

from typing import Any

from cs336_systems.cost.machines import System
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.shape import latent_of
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.cost.template import fill_file
from cs336_systems.host.console import format_seconds
from cs336_systems.presets import ModelConfig

# Ranges of the fitted runs, from the least to the most, and the features that some of them have (`features`).
COUNT, RANKS = 202, 3360
MACHINES = ("A100-40GB", "A100-80GB", "H100", "V100-32GB-DGX2")
SEQUENCES, WIDTHS = (512, 65536), (768, 25600)  # tokens; d_model
NARROWEST = 256  # d_model / tp; tp never left a node
FEATURES = (
    *("ZeRO stage 1", "ZeRO stage 2", "ZeRO stage 3", "a gated feed-forward", "context parallelism"),
    *("fused attention", "grouped-query attention"),
)
WAITING = 0.1  # share of a step spent waiting for the host, from which a warning says so
WIDER = 1.1  # factor by which a range is wider at both ends outside the domain: a judgement
# Mixtures of many experts launch many small kernels, copy rows between them and wait for the host. The range is the
# measured over the predicted time of four of five published runs with 128 experts.
MANY_EXPERTS, MANY_RANGE = 16, (1.0, 2.5)


def features(config: ModelConfig, plan: Plan) -> list[str]:
    """Features that set a run apart from a plain GPT of 2020 on a plan of tp, pp and dp."""
    named = {
        "context parallelism": plan.cp > 1,
        f"ZeRO stage {plan.zero}": plan.zero > 0,
        "a gated feed-forward": config.feed_forward == "swiglu",
        "grouped-query attention": config.kv_heads != config.num_heads,
        "fused attention": config.attention != "naive",
        "experts": bool(config.num_experts),
        "32-bit products": plan.width == 4,
        "8-bit products": plan.fp8,
        "latent attention": latent_of(config) is not None,
        "ZeRO over fewer than all replicas": plan.shard not in (0, plan.replicas),
        "recomputation of modules, or of every n-th block": bool(plan.recompute_modules) or plan.recompute_nth > 1,
    }
    return [name for name, there in named.items() if there]


_FITTED = {"count": COUNT, "machines": ", ".join(MACHINES), "sequences": SEQUENCES, "widths": WIDTHS}
_FITTED |= {"most_ranks": RANKS, "least_share": NARROWEST, "most_times": MANY_RANGE[1]}
DOMAIN = fill_file("domain", _FITTED)[0]


def warnings(config: ModelConfig, plan: Plan, seq: int, system: System) -> list[str]:
    """One sentence for each way in which a prediction lies outside the domain; none inside it. Raises UserError for a
    plan that does not divide the model."""
    stage, parts = peak_bytes(config, plan, seq)
    need, room = sum(parts.values()), usable_memory(system)
    low, high = STACKS[plan.stack].bytes(need)
    memory = {"stage": stage if need > room else None, "need": need, "room": room, "low": low, "high": high}
    return _sentences(step_time(config, plan, seq, system), memory | {"lost": low > room})


def time_range(step: StepTime, notes: list[str] | None = None) -> tuple[float, float]:
    """Range into which four of five runs of the stack fell that were left out of the fit; wider outside the domain, of
    which `notes` are the remarks, `outside(step)`, where they are known."""
    if step.config.num_experts > MANY_EXPERTS:
        return MANY_RANGE[0] * step.total, MANY_RANGE[1] * step.total
    low, high = STACKS[step.plan.stack].range
    wider = WIDER if (outside(step) if notes is None else notes) else 1.0
    return low * step.total / wider, high * step.total * wider


def describe_range(step: StepTime) -> str:
    """The range in a sentence."""
    low, high = map(format_seconds, time_range(step))
    if step.config.num_experts > MANY_EXPERTS:
        return f"{low} to {high}: the range of four of five of six published runs with 128 experts"
    fell = f"the range of four of five {step.plan.stack} runs when they were left out of the fit"
    return f"{low} to {high}: {'a tenth wider on each side than ' if outside(step) else ''}{fell}"


def outside(step: StepTime) -> list[str]:
    """`warnings` of a finished prediction, except those about memory."""
    return _sentences(step, {"stage": None})


def _sentences(step: StepTime, memory: dict[str, Any]) -> list[str]:
    """Lines of `templates/warnings.txt`: one is left out if its first number is None, as the step is inside there."""
    config, plan, seq, system = step.config, step.plan, step.seq, step.system
    waits, d, experts = step.parts["host"] / step.total, config.d_model, config.num_experts
    figures = "measured by a probe" if system.measured else "of the data sheet"
    new = [name for name in features(config, plan) if name not in FEATURES]
    values = {
        "waits": waits if waits > WAITING else None,
        "unfitted": system.name if system.name not in MACHINES else None,
        "figures": "partly those given here" if system.name.endswith(", changed") else figures,
        "length": seq if not SEQUENCES[0] <= seq <= SEQUENCES[1] else None,
        "longer": seq > SEQUENCES[1],
        "width": d if not WIDTHS[0] <= d <= WIDTHS[1] else None,
        "narrow": d if WIDTHS[0] <= d <= WIDTHS[1] and d // plan.tp < NARROWEST else None,
        "share": d // plan.tp,
        "far": plan.tp if plan.local("tp", node=system.node) != plan.tp else None,
        "ranks": plan.ranks if plan.ranks > RANKS else None,
        "many": experts if experts > MANY_EXPERTS else None,
        "balanced": "" if experts else None,
        "new": " and ".join(filter(None, (", ".join(new[:-1]), *new[-1:]))) or None,
    }
    return fill_file("warnings", values | _FITTED | memory | {"plan": plan, "system": system})
