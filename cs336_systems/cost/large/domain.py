"""Where predictions of time are to be trusted, and one sentence for each way in which a request lies outside.

The constants of `efficiency.py` come from published runs, those of `data/published_runs.json` that are marked as
fitted. What these have in common is the domain, and it is read from them, so that it cannot say more than they do.
Outside it the same formulas are used, and nothing says how far they are off.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce
from operator import add

from cs336_systems.console import format_bytes, format_seconds
from cs336_systems.cost.large.efficiency import Constants
from cs336_systems.cost.large.operator_time import Passed, model_groups, timed_group
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.plan_memory import peak_bytes, room
from cs336_systems.cost.large.runs import PUBLISHED, Run, read_run
from cs336_systems.cost.large.step_time import CONSTANTS, step_time
from cs336_systems.cost.large.systems import System
from cs336_systems.presets import ModelConfig

# Seconds of a kernel of the model, on average over a block's forward: no fitted run is quicker. Of BERT-345M on
# ThetaGPU the model says 0.03 to 0.04 ms, and its logs say 0.07 on one A100 and 0.09 to 0.19 on more: there the host,
# which gives out kernels, decides, and computing does not matter.
QUICK_KERNEL = 1e-4
WAITING = 0.01  # of a step for the host: no fitted run has more


@dataclass(frozen=True)
class Fitted:
    """What the fitted runs have in common: from the least to the most, or all that there are."""

    count: int
    machines: tuple[str, ...]
    sequences: tuple[int, int]
    widths: tuple[int, int]  # d_model
    narrowest: int  # d_model / tp
    ranks: int
    features: frozenset[str]
    far: bool  # whether tp ever left a node


@cache
def fitted() -> Fitted:
    """The fitted runs in short."""
    runs = [read_run(row) for row in json.loads(PUBLISHED.read_text()) if row["fitted"]]
    return Fitted(
        count=len(runs),
        machines=tuple(sorted({run.system.name for run in runs})),
        sequences=_ends(run.seq for run in runs),
        widths=_ends(run.config.d_model for run in runs),
        narrowest=min(run.config.d_model // run.plan.tp for run in runs),
        ranks=max(run.plan.ranks for run in runs),
        features=frozenset(name for run in runs for name in features(run.config, run.plan)),
        far=any(_leaves_node(run) for run in runs),
    )


def _ends(numbers: Iterable[int]) -> tuple[int, int]:
    listed = list(numbers)
    return min(listed), max(listed)


def _leaves_node(run: Run) -> bool:
    return run.plan.local("tp", node=run.system.node) < run.plan.tp


def features(config: ModelConfig, plan: Plan) -> list[str]:
    """What sets a run apart from a plain GPT of 2020 on a plan of tp, pp and dp, experts aside."""
    named = {
        "context parallelism": plan.cp > 1,
        f"ZeRO stage {plan.zero}": plan.zero > 0,
        "a gated feed-forward": config.feed_forward == "swiglu",
        "grouped-query attention": config.kv_heads != config.num_heads,
        "fused attention": config.attention != "naive",
        "experts": bool(config.num_experts),
        "32-bit products": plan.width == 4,
    }
    return [name for name, there in named.items() if there]


def domain() -> str:
    """The stated domain, a few sentences."""
    found = fitted()
    return (
        f"Predictions of time hold for what they were fitted to: {found.count} published runs of transformers on "
        f"{', '.join(found.machines)}, d_model {found.widths[0]} to {found.widths[1]}, {found.narrowest} of it or more "
        f"on a tensor-parallel rank, sequences of {found.sequences[0]} to {found.sequences[1]} tokens, up to "
        f"{found.ranks} accelerators. They are of a steady step on a quiet network: no data loading, evaluation, "
        "checkpoints, stragglers or failures. Outside, a warning says what is new."
    )


DOMAIN = domain()


def warnings(config: ModelConfig, plan: Plan, seq: int, system: System, constants: Constants = CONSTANTS) -> list[str]:
    """One sentence for each way in which a prediction lies outside the domain; none inside it.

    Raises UserError for a plan that does not divide the model.
    """
    plan.check(config, seq)
    found = [
        _too_large(config, plan, seq, system),
        _host(config, plan, seq, system, constants),
        _machine(system),
        _sequence(seq),
        _width(config, plan),
        _far(plan, system),
        _many(plan),
        _experts(config),
        _new(config, plan),
    ]
    return [each for each in found if each]


def _too_large(config: ModelConfig, plan: Plan, seq: int, system: System) -> str:
    stage, parts = peak_bytes(config, plan, seq)
    need, there = sum(parts.values()), room(system)
    if need <= there:
        return ""
    return (
        f"stage {stage} is predicted to need {format_bytes(need)} on a rank, and {system.name} has "
        f"{format_bytes(there)} to use: as it stands it would not run at all"
    )


def _host(config: ModelConfig, plan: Plan, seq: int, system: System, constants: Constants) -> str:
    step = step_time(config, plan, seq, system, constants)
    waits = step.parts["host"] / step.total
    quick = min(_kernel_seconds(config, plan, seq, system, constants))
    idle = 10 * constants.host < quick  # a host that is nowhere near, such as a CPU that computes itself
    if idle or (quick >= QUICK_KERNEL and waits <= WAITING):
        return ""
    return (
        f"a kernel of a block takes {format_seconds(quick)} on average: below {format_seconds(QUICK_KERNEL)} the host, "
        "which gives them out, can be the slower one (BERT-345M on A100s, with kernels of 0.03 to 0.05 ms, took 1.5 "
        "to 7.6 times as long a layer as computed)"
    )


def _kernel_seconds(config: ModelConfig, plan: Plan, seq: int, system: System, constants: Constants) -> list[float]:
    """Seconds of an average kernel of each kind of block, forward."""
    found = []
    for group, _ in model_groups(config):
        if group in ("dense", "sparse"):
            timed = timed_group(config, plan, seq, group, system, constants)
            total = reduce(add, (each.forward for each in timed), Passed())
            found.append(total.busy / total.kernels)
    return found


def _machine(system: System) -> str:
    if system.name in fitted().machines:
        return ""
    figures = "measured by a probe" if system.measured else "of the data sheet"
    return f"no run on {system.name} was fitted, only on {', '.join(fitted().machines)}: its figures are {figures}"


def _sequence(seq: int) -> str:
    least, most = fitted().sequences
    if least <= seq <= most:
        return ""
    return f"a sequence of {seq} tokens is {'longer' if seq > most else 'shorter'} than the fitted {least} to {most}"


def _width(config: ModelConfig, plan: Plan) -> str:
    d, (least, most), narrowest = config.d_model, fitted().widths, fitted().narrowest
    if not least <= d <= most:
        return f"d_model {d} lies outside the fitted {least} to {most}"
    if d // plan.tp < narrowest:
        return (
            f"d_model {d} over tp {plan.tp} leaves {d // plan.tp} on a rank, less than the {narrowest} of any fitted "
            "run: how fast such narrow products are is extrapolated"
        )
    return ""


def _far(plan: Plan, system: System) -> str:
    if fitted().far or plan.local("tp", node=system.node) == plan.tp:
        return ""
    return f"tp {plan.tp} does not stay within a node of {system.node}, as it did in every fitted run"


def _many(plan: Plan) -> str:
    if plan.ranks <= fitted().ranks:
        return ""
    return (
        f"{plan.ranks} accelerators are more than the {fitted().ranks} of any fitted run: stragglers are not modelled"
    )


def _experts(config: ModelConfig) -> str:
    if not config.num_experts:
        return ""
    return "experts are timed as if the router were balanced; one that is not waits for the fullest expert"


def _new(config: ModelConfig, plan: Plan) -> str:
    """What no fitted run has, in one sentence."""
    found = [name for name in features(config, plan) if name not in fitted().features]
    if not found:
        return ""
    listed = found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"
    return f"no fitted run has {listed}: computed from the same constants"
