"""Recomputation: operators of a block that backward runs again, so that forward need not keep their activations.

They are whole blocks (Chen et al., arXiv:1604.06174), attention's core (Korthikanti et al., arXiv:2205.05198,
section 5), or modules by Megatron-LM's names.
"""

from functools import lru_cache
from typing import NamedTuple

from cs336_systems.cost.operators import operators_of
from cs336_systems.cost.plan import MODULES
from cs336_systems.cost.rank import Collective, Group, Operator, Rank


class Repeated(NamedTuple):
    """Operators of a block that backward runs again, the bytes that are then not kept, and collectives sent again."""

    operators: tuple[Operator, ...] = ()
    dropped: float = 0.0
    sent: tuple[Collective, ...] = ()


@lru_cache(maxsize=16384)
def repeated(rank: Rank, group: Group, recompute: str) -> Repeated:
    """Recomputation in a block: from its input on ("nested" counts as "segments", an upper bound), or of modules.

    Attention's core starts from queries, keys and values (arXiv:2205.05198, section 5); feed-forward and experts start
    from their input, and send again; a norm, and an expert's activation, run again for the operator that they feed,
    which then does not keep its input.
    """
    operators = operators_of(rank, group)
    if recompute == "none" or group in ("embedding", "head"):
        return Repeated()
    if recompute != "attention":
        sent = tuple(one for each in operators for one in each.sent)
        return Repeated(operators, sum(each.kept for each in operators) - rank.resting, sent)
    modules = set(rank.plan.recompute_modules or ("core_attn",))
    modules -= {"moe_act"} if "moe" in modules else set()  # which it is part of
    found = [_module(rank, operators, module) for module in MODULES if module in modules]
    return Repeated(
        tuple(one for each in found for one in each.operators),
        sum(each.dropped for each in found),
        tuple(one for each in found for one in each.sent),
    )


def _module(rank: Rank, operators: tuple[Operator, ...], module: str) -> Repeated:
    """Recomputation of one of `plan.MODULES`; of nothing if the block does not have it."""
    named = {each.name: each for each in operators}
    if module == "core_attn":
        core = tuple(each for each in operators if each.core)
        return Repeated(core, sum(each.kept for each in core) - rank.bytes_of(sum(rank.widths)))
    if module == "layernorm":
        norms = tuple(named[name] for name in ("attention norm", "feed-forward norm"))
        return Repeated(norms, len(norms) * rank.resting / (rank.plan.width if rank.plan.fp8 else 1))
    if module == "moe_act":
        acts = tuple(each for each in operators if each.name.startswith("experts' ") and not each.weights)
        return Repeated(acts, sum(named["experts' down"].kept for _ in acts))
    first, last = ("router", "feed-forward dropout, sum") if module == "moe" else ("up", "feed-forward dropout, sum")
    if first not in named:
        return Repeated()
    names = [each.name for each in operators]
    inside = operators[names.index(first) : names.index(last)]
    sent = tuple(one for each in (*inside, named[last]) for one in each.sent)
    return Repeated(inside, sum(each.kept for each in inside) - inside[0].kept, sent)
