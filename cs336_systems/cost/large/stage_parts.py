"""What a stage of a plan has: blocks, dense or with experts, counted layer by layer; at the ends embedding and head."""

from functools import lru_cache
from typing import Literal

from cs336_systems.cost.large.block_operators import block_operators
from cs336_systems.cost.large.end_operators import embedding_operators, head_operators
from cs336_systems.cost.large.operators import Operator, Rank
from cs336_systems.cost.large.plan import Plan
from cs336_systems.presets import ModelConfig

Group = Literal["dense", "sparse", "embedding", "head"]


def operators_of(rank: Rank, group: Group) -> tuple[Operator, ...]:
    """The operators of a block or of an end of the model."""
    if group in ("dense", "sparse"):
        return block_operators(rank, group == "sparse")
    return embedding_operators(rank) if group == "embedding" else head_operators(rank)


def stage_groups(config: ModelConfig, plan: Plan, stage: int) -> tuple[tuple[Group, int], ...]:
    """What a stage has, and how many of each."""
    return _groups(config.num_layers, expert_every(config), plan.pp, plan.chunks)[stage]


def stage_kinds(config: ModelConfig, plan: Plan) -> dict[int, int]:
    """The first stage of each kind, and how many are alike: stages that have the same."""
    found: dict[tuple[tuple[Group, int], ...], list[int]] = {}
    for stage, groups in enumerate(_groups(config.num_layers, expert_every(config), plan.pp, plan.chunks)):
        found.setdefault(groups, []).append(stage)
    return {stages[0]: len(stages) for stages in found.values()}


def expert_every(config: ModelConfig) -> int:
    """Every k-th layer has experts; 0: none has."""
    return config.expert_every if config.num_experts else 0


def sparse_layers(layers: range, every: int) -> int:
    """How many of some layers have experts: the k-th, the 2k-th and so on of the model; none for k = 0."""
    return layers.stop // every - layers.start // every if every else 0


@lru_cache(maxsize=1024)
def _groups(num_layers: int, every: int, pp: int, chunks: int) -> tuple[tuple[tuple[Group, int], ...], ...]:
    found = []
    for stage, owned in enumerate(Plan(pp=pp, chunks=chunks, global_batch=pp).stage_chunks(num_layers)):
        sparse = sum(sparse_layers(layers, every) for layers in owned)
        parts: list[tuple[Group, int]] = [("dense", sum(map(len, owned)) - sparse), ("sparse", sparse)]
        parts += [("embedding", int(stage == 0)), ("head", int(stage == pp - 1))]
        found.append(tuple((group, times) for group, times in parts if times))
    return tuple(found)
