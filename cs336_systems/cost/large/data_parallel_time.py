"""What replicas cost a step: sums of gradients, ZeRO's gathers, and AdamW over the weights that a rank steps.

Gradients travel behind the last microbatch's backward, all but the last bucket, and from ZeRO stage 1 on weights behind
the first's forward. Stage 3 gathers weights for every forward and backward, layer by layer, and scatters every
microbatch's gradients (Rajbhandari et al., arXiv:1910.02054, section 7).
"""

from functools import lru_cache
from math import ceil

from cs336_systems.cost.large.efficiency import Constants, group_seconds
from cs336_systems.cost.large.end_operators import words
from cs336_systems.cost.large.operators import Rank
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.stage_parts import Group, operators_of, stage_groups
from cs336_systems.cost.large.stage_time import Seconds
from cs336_systems.cost.large.systems import System
from cs336_systems.presets import ModelConfig

GRADIENT = 4  # bytes: gradients add up in 32 bits
# AdamW in one kernel: the gradient is read for its norm, and with master weight and two moments for the step, which
# writes these three; then it is set to zero. In half precision the weight is written besides.
OPTIMIZER_BYTES = 4 + 16 + 12 + 4


def bucket_size(ranks: int) -> float:
    """Gradients of a bucket: more where more ranks make each call slower, as Megatron-LM's default has it."""
    return max(40e6, 1e6 * ranks)


@lru_cache(maxsize=8192)
def group_weights(rank: Rank, group: Group) -> tuple[int, int, int]:
    """(weights that all replicas share, those of a rank's experts, matrices) of a block or an end of the model."""
    operators = operators_of(rank, group)
    owned = sum(each.weights for each in operators if each.expert)
    matrices = sum(any(work.inner for work in each.forward) for each in operators if each.weights)
    return sum(each.weights for each in operators) - owned, owned, matrices


def stage_weights(config: ModelConfig, plan: Plan, seq: int, stage: int) -> tuple[float, float, float]:
    """`group_weights` of a rank of a stage. Biases of linear layers, less than a thousandth, are left out."""
    rank, found = Rank(config, plan.alone(), seq), (0.0, 0.0, 0.0)
    for group, times in stage_groups(config, plan, stage):
        counts = group_weights(rank, group)
        found = found[0] + times * counts[0], found[1] + times * counts[1], found[2] + times * counts[2]
    # A head that is the embedding's adds none where it is on the same stage.
    again = words(rank) * config.d_model if config.tied_head and plan.pp == 1 else 0
    return found[0] - again, found[1], found[2]


def data_parallel_seconds(
    config: ModelConfig, plan: Plan, seq: int, stage: int, spent: Seconds, system: System, constants: Constants
) -> float:
    """Seconds that a step is longer because gradients, and from ZeRO stage 1 on weights, travel between replicas."""
    shared, owned, matrices = stage_weights(config, plan, seq, stage)

    def send(verb: str, width: int) -> float:
        """Everything once: of dense weights between all replicas, of experts between those that have the same."""
        total = 0.0
        for weights, ranks, axes in (
            (shared, plan.replicas, ("cp", "ep", "dp")),
            (owned, plan.cp * plan.dp, ("cp", "dp")),
        ):
            if weights and ranks > 1:
                calls = ceil(matrices) if plan.zero == 3 else ceil(weights / bucket_size(ranks))
                local = plan.local(*axes, node=system.node)
                total += group_seconds(verb, width * weights, ranks, local, system, constants, calls)
        return total

    def beside(seconds: float, computing: float) -> float:
        """Of a transfer beside computing: what sticks out, and what it takes from the processors."""
        if plan.overlap == "none":
            return seconds
        last = min(1.0, bucket_size(plan.replicas) / max(1.0, shared + owned))
        seen = max(seconds - computing, last * seconds)
        return seen + constants.hidden * (seconds - seen)

    ahead, back = spent.forward, spent.backward + spent.recompute
    if plan.zero == 0:
        total = beside(send("all-reduce", GRADIENT), back)
    else:
        gather, scatter = send("all-gather", plan.width), send("reduce-scatter", GRADIENT)
        total = beside(scatter, back) + beside(gather, ahead)
        if plan.zero == 3:
            total = plan.microbatches * (beside(gather, ahead) + beside(gather + scatter, back))
    return total + _tied_seconds(config, plan, seq, system, constants)


def _tied_seconds(config: ModelConfig, plan: Plan, seq: int, system: System, constants: Constants) -> float:
    """The first and the last stage add up the gradients of the embedding that both have."""
    if plan.pp == 1 or not config.tied_head:
        return 0.0
    nbytes = GRADIENT * words(Rank(config, plan, seq)) * config.d_model
    return group_seconds(
        "all-reduce", nbytes, 2, 1 + (plan.local("pp", node=system.node) == plan.pp), system, constants
    )


def optimizer_seconds(
    config: ModelConfig, plan: Plan, seq: int, stage: int, system: System, constants: Constants
) -> float:
    """Seconds of AdamW over the weights that a rank steps: from ZeRO stage 1 on its share of them."""
    shared, owned, _ = stage_weights(config, plan, seq, stage)
    if plan.zero:
        shared, owned = shared / plan.replicas, owned / (plan.cp * plan.dp)
    return optimizer_bytes(plan) * (shared + owned) / (system.bandwidth * constants.memory)


def optimizer_bytes(plan: Plan) -> int:
    """Bytes a weight that a step of AdamW moves."""
    return OPTIMIZER_BYTES + (2 if plan.width == 2 else 0)
