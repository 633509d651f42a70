"""Memory that each rank of a plan needs at the fullest moment of a step, stage by stage.

Stages differ: the first holds the embedding and the most microbatches in flight, the last holds head and logits.
Weights, gradients and optimizer state are counted. Activations are the bytes that operators keep for backward, times
the microbatches that the schedule has in flight (`schedule/lists.py`, simulated). Workspace, which a kernel needs for
a moment, is estimated. Biases of linear layers, less than a thousandth, are left out.

The bytes that a block's operators keep are the five forms of Korthikanti et al. (arXiv:2205.05198, table 2).
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from cs336_systems.cost.machines import GIB, System
from cs336_systems.cost.operators import operators_of, repeated, vocabulary_rows
from cs336_systems.cost.plan import BLOCK, Plan
from cs336_systems.cost.rank import Group, Rank
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import GRADIENT, fullest_stages, group_weights, stage_groups, stage_weights
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import interleaved

_BLOCKS = ("dense", "sparse")
_MOMENTS, _MASTER = 8, 4  # bytes per weight: AdamW's two in 32 bits; the 32-bit weight, if products have 16


class Unit(NamedTuple):
    """One block, the embedding or the head, on a rank: bytes of one microbatch."""

    kept: float  # for backward, with recomputation
    again: float  # bytes that are not kept, as backward recomputes them
    inside: float  # workspace of backward: gradients and gathered tensors


def rank_bytes(config: ModelConfig, plan: Plan, seq: int, stage: int) -> dict[str, float]:
    """Bytes on a rank of a stage at its peak, by part. Raises UserError for a plan that does not divide the model, and
    for a stage that does not exist."""
    plan.check(config, seq)
    if not 0 <= stage < plan.pp:
        raise UserError(f"stage {stage} does not exist: the {plan.pp} stages are 0 to {plan.pp - 1}")
    shared, owned, _ = stage_weights(config, plan, seq, stage)
    # Memory in flight repeats after as many microbatches as there are stages, so a few times as many are enough.
    some = min(plan.microbatches, plan.pp if plan.chunks == 1 else 4 * plan.pp)
    working = plan.only(*BLOCK, "pp", "chunks", "layers", "recompute_nth", microbatches=some)
    activations, workspace = _working(config, working, seq, stage)
    stack = STACKS[plan.stack]
    found = {name: stack.state * nbytes for name, nbytes in _state(plan, shared, owned).items()}
    found["activations"] = stack.activations * activations
    found["workspace"] = workspace + _gathered(config, plan, seq, stage)
    return found | ({"framework": stack.besides * GIB} if stack.besides else {})


def peak_bytes(config: ModelConfig, plan: Plan, seq: int) -> tuple[int, dict[str, float]]:
    """(the stage that needs most, its `rank_bytes`). Raises UserError for a plan that does not divide the model."""
    plan.check(config, seq)
    each = {stage: rank_bytes(config, plan, seq, stage) for stage in fullest_stages(config, plan)}
    fullest = max(each, key=lambda stage: sum(each[stage].values()))
    return fullest, each[fullest]


def usable_memory(system: System) -> float:
    """Bytes of an accelerator's memory that a plan may fill."""
    return system.memory * (1 - system.reserve)


def fits(config: ModelConfig, plan: Plan, seq: int, system: System) -> bool:
    """True if the stage that needs most leaves the machine's reserve free. Raises as `peak_bytes` does."""
    return sum(peak_bytes(config, plan, seq)[1].values()) <= usable_memory(system)


@lru_cache(maxsize=4096)
def live_passes(stage: int, stages: int, microbatches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Microbatches in flight in each chunk of a stage, at every moment when their total is largest.

    1F1B has min(p - r, m), on stage r of p with m microbatches. Interleaved, with v chunks, it runs w = 2 (p - 1 - r)
    + (v - 1) p forwards first (all if m = p), then one before each backward: w + 1 passes of a chunk are in flight. On
    stage 0 they keep 1 + (p - 1) / (p v) times as much as p microbatches. Their chunks change from moment to moment.
    """
    held, moments = [0] * chunks, list[tuple[int, ...]]()
    for action in interleaved(stage, stages, microbatches, chunks):
        held[action.chunk] += 1 if action.kind == "forward" else -1
        moments.append(tuple(held))
    most = max(map(sum, moments))
    return tuple({moment: None for moment in moments if sum(moment) == most})


@lru_cache(maxsize=16384)
def unit(config: ModelConfig, alone: Plan, seq: int, group: Group) -> Unit:
    """Memory of one block ("dense", "sparse") or end of the model ("embedding", "head"); `alone` is `Plan.alone()`."""
    rank = Rank(config, alone, seq)
    operators = operators_of(rank, group)
    kept = sum(each.kept for each in operators)
    largest = max(each.kept for each in operators if each.name != "loss") + rank.stream
    gathered = rank.stream if alone.sequence and alone.tp > 1 else 0.0
    again = 0.0
    if group in _BLOCKS:
        if alone.cp > 1:  # all keys and values, and their gradients
            gathered += 2.0 * alone.width * alone.micro_batch * seq * sum(rank.widths[1:])
        again = repeated(rank, group, config.recompute).dropped
        kept -= again
    elif group == "head" and alone.width < 4:
        gathered += operators[-1].kept / 4 * alone.width  # the loss keeps 32-bit logits, GEMMs take 16-bit ones
    return Unit(kept, again, largest + gathered)


@lru_cache(maxsize=16384)
def _working(config: ModelConfig, plan: Plan, seq: int, stage: int) -> tuple[float, float]:
    """Bytes of (activations, workspace of backward) on a stage. ZeRO, replicas and placement do not matter."""
    alone = plan.alone()
    head = unit(config, alone, seq, "head") if stage == plan.pp - 1 else Unit(0, 0, 0)
    embedding = unit(config, alone, seq, "embedding").kept if stage == 0 else 0.0
    plain = config if config.recompute == "none" else config.override(recompute="none")
    stages = plan.stage_chunks(config.num_layers)
    longest = max(len(layers) for chunks_of in stages for layers in chunks_of)
    every = min(config.recompute_every, longest) if config.recompute == "segments" else 1  # blocks recomputed together
    kept = []
    for chunk, owned in enumerate(stages[stage]):
        sparse = sum(map(config.has_experts, owned))
        # A segment keeps only the input of its first block.
        share = ceil(len(owned) / every) / max(1, len(owned))
        blocks_of: list[tuple[Group, int]] = [("dense", len(owned) - sparse), ("sparse", sparse)]
        found = sum(
            share * n * unit(plain if recompute == "none" else config, alone, seq, group).kept
            for group, count in blocks_of
            for recompute, n in plan.recomputed(config, group, count)
        )
        kept.append(found + (embedding if chunk == 0 else 0.0) + (head.kept if chunk == plan.chunks - 1 else 0.0))
    live = live_passes(stage, plan.pp, plan.microbatches, plan.chunks)
    activations = max(sum(n * each for n, each in zip(moment, kept, strict=True)) for moment in live)
    groups = stage_groups(config, plan, stage)
    blocks = [unit(config, alone, seq, group) for group, _ in groups if group in _BLOCKS]
    inside = max(every * each.again + (every - 1) * each.kept + each.inside for each in blocks) if blocks else 0.0
    # Backward frees what the head kept of this microbatch before it comes to the blocks.
    return activations, max(head.inside, inside - head.kept, 0.0)


def _state(plan: Plan, shared: float, owned: float) -> dict[str, float]:
    """Bytes of weights, gradients and AdamW's state (Rajbhandari et al., arXiv:1910.02054, section 3.1, with gradients
    in 32 bits): 18 per weight, or 16 if products have 32 bits as well. FP8 keeps each weight in two 8-bit layouts.

    ZeRO splits the state from stage 1 on, gradients from stage 2 and weights in stage 3, over the ranks that share a
    weight. With several microbatches stage 2 adds up whole gradients, as it scatters them once a step.
    """
    whole, split = shared + owned, shared / plan.shards[0] + owned / plan.shards[1]
    passes = plan.microbatches * plan.chunks
    return {
        "weights": plan.width * (split if plan.zero == 3 else whole),
        "gradients": GRADIENT * (split if plan.zero == 3 or (plan.zero == 2 and passes == 1) else whole),
        "optimizer": (_MOMENTS + (_MASTER if plan.width < 4 else 0)) * (split if plan.zero else whole),
    }


def _gathered(config: ModelConfig, plan: Plan, seq: int, stage: int) -> float:
    """Bytes that ZeRO holds whole for a moment: in stage 3 the weights of two blocks, one in use and one prefetched,
    and in stages 2 and 3 the gradients of one block before they are scattered."""
    if plan.zero < 2 or plan.shards[0] == 1 or (plan.zero == 2 and plan.microbatches * plan.chunks > 1):
        return 0.0
    rank, sizes = Rank(config, plan.alone(), seq), []
    for group, times in stage_groups(config, plan, stage):
        shared, owned, _ = group_weights(rank, group)
        tied = vocabulary_rows(rank) * config.d_model if group == "head" and config.tied_head and plan.pp == 1 else 0
        sizes += [shared - tied + (owned if plan.cp * plan.dp > 1 else 0.0)] * min(times, 2)
    sizes.sort(reverse=True)
    return (plan.width * sum(sizes[:2]) if plan.zero == 3 else 0.0) + GRADIENT * sizes[0]
