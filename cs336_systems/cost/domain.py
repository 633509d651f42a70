"""The domain of predictions of time, and one warning for each way in which a request lies outside.

The constants in `machines.py` are fitted to published runs, those of `data/published_runs.json` that are marked as
fitted. What these have in common is the domain; it is read from them, so that it cannot claim more than they show.
Outside it the same formulas are used, with an unknown error.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cs336_systems.cost.machines import CONSTANTS, Constants, System
from cs336_systems.cost.operator_time import model_groups, timed_part
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.runs import PUBLISHED, read_run
from cs336_systems.cost.step_time import step_time
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.presets import ModelConfig

# Seconds of a kernel of the model, on average over a block's forward: no fitted run is quicker. Of BERT-345M on
# ThetaGPU the model says 0.03 to 0.04 ms, and its logs say 0.07 on one A100 and 0.09 to 0.19 on more: there the host,
# which launches kernels, decides, and computing does not matter.
QUICK_KERNEL = 1e-4
WAITING = 0.01  # of a step for the host: no fitted run has more


@dataclass(frozen=True)
class Fitted:
    """Ranges of the fitted runs, from the least to the most, and all features among them."""

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
    """Ranges of the runs that constants were fitted to."""
    runs = [read_run(row) for row in json.loads(PUBLISHED.read_text()) if row["fitted"]]
    sequences, widths = [run.seq for run in runs], [run.config.d_model for run in runs]
    return Fitted(
        count=len(runs),
        machines=tuple(sorted({run.system.name for run in runs})),
        sequences=(min(sequences), max(sequences)),
        widths=(min(widths), max(widths)),
        narrowest=min(run.config.d_model // run.plan.tp for run in runs),
        ranks=max(run.plan.ranks for run in runs),
        features=frozenset(name for run in runs for name in features(run.config, run.plan)),
        far=any(run.plan.local("tp", node=run.system.node) < run.plan.tp for run in runs),
    )


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
    """One sentence for each way in which a prediction lies outside the domain; none inside it. Raises UserError for a
    plan that does not divide the model."""
    plan.check(config, seq)
    return [*_of_machine(config, plan, seq, system, constants), *_of_model(config, plan, seq, system)]


def _of_machine(config: ModelConfig, plan: Plan, seq: int, system: System, constants: Constants) -> Iterator[str]:
    """Memory, the host, and machines without a fitted run."""
    stage, parts = peak_bytes(config, plan, seq)
    need, there = sum(parts.values()), usable_memory(system)
    if need > there:
        yield (
            f"stage {stage} is predicted to need {format_bytes(need)} on a rank, and {system.name} has "
            f"{format_bytes(there)} to use: as it stands it would not run at all"
        )
    step = step_time(config, plan, seq, system, constants)
    blocks = [group for group, _ in model_groups(config) if group in ("dense", "sparse")]
    ahead = [timed_part(config, plan, seq, group, system, constants).forward for group in blocks]
    quick = min(each.busy / each.kernels for each in ahead)
    slow_host = 10 * constants.host >= quick  # unlike that of a CPU that computes itself
    if slow_host and (quick < QUICK_KERNEL or step.parts["host"] / step.total > WAITING):
        yield (
            f"a kernel of a block takes {format_seconds(quick)} on average: below {format_seconds(QUICK_KERNEL)} the "
            "host, which gives them out, can be the slower one (BERT-345M on A100s, with kernels of 0.03 to 0.05 ms, "
            "took 1.5 to 7.6 times as long a layer as computed)"
        )
    if system.name not in fitted().machines:
        figures = "measured by a probe" if system.measured else "of the data sheet"
        yield f"no run on {system.name} was fitted, only on {', '.join(fitted().machines)}: its figures are {figures}"


def _of_model(config: ModelConfig, plan: Plan, seq: int, system: System) -> Iterator[str]:
    """Sequences, widths and numbers of accelerators beyond the fitted ones, experts, and features of no fitted run."""
    found, d, ranks = fitted(), config.d_model, plan.ranks
    least, most = found.sequences
    if not least <= seq <= most:
        yield f"a sequence of {seq} tokens is {'longer' if seq > most else 'shorter'} than the fitted {least} to {most}"
    least, most = found.widths
    if not least <= d <= most:
        yield f"d_model {d} lies outside the fitted {least} to {most}"
    elif d // plan.tp < found.narrowest:
        yield (
            f"d_model {d} over tp {plan.tp} leaves {d // plan.tp} on a rank, less than the {found.narrowest} of any "
            "fitted run: how fast such narrow products are is extrapolated"
        )
    if not found.far and plan.local("tp", node=system.node) != plan.tp:
        yield f"tp {plan.tp} does not stay within a node of {system.node}, as it did in every fitted run"
    if ranks > found.ranks:
        yield f"{ranks} accelerators are more than the {found.ranks} of any fitted run: stragglers are not modelled"
    if config.num_experts:
        yield "experts are timed as if the router were balanced; one that is not waits for the fullest expert"
    new = [name for name in features(config, plan) if name not in fitted().features]
    if new:
        listed = new[0] if len(new) == 1 else f"{', '.join(new[:-1])} and {new[-1]}"
        yield f"no fitted run has {listed}: computed from the same constants"
