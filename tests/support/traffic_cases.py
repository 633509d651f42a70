"""A step of every strategy, on real ranks and as one rank observes it alone."""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache

import torch
from torch import nn

from cs336_systems.comm import Mesh, record
from cs336_systems.ddp import BucketedDDP
from cs336_systems.fsdp import FSDP
from cs336_systems.host.observe import Observer
from cs336_systems.layout import Layout, Transfer
from cs336_systems.model import routing as gating
from cs336_systems.presets import Mixture, ModelConfig
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.train.assembly import Assembly
from cs336_systems.train.observation import RankStep, observe_traffic
from cs336_systems.train.recipe import Recipe
from cs336_systems.zero import WRAPPERS, zero
from tests.support.parallel_cases import loss_of, make

SEQ = 8
SMALL = ModelConfig(vocab_size=30, context_length=SEQ, d_model=16, d_ff=32, num_layers=2, num_heads=4)
BERT = {"norm": "layernorm", "bias": True, "bert_heads": True, "token_types": 2, "causal": False, "dropout": 0.1}
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
GPT = {"norm": "layernorm", "bias": True}


def in_turn(logits: torch.Tensor, *rest: object) -> torch.Tensor:
    """Choices of a balanced router: (top_k tokens)."""
    tokens, experts = logits.shape
    top_k = next(each.top_k for each in rest if isinstance(each, Mixture))
    return (torch.arange(tokens) + torch.arange(top_k)[:, None]) % experts


@cache
def mesh_of(tp: int, pp: int, ep: int, cp: int) -> Mesh:
    """Of this process; one for all layouts of these degrees, since groups take long to make."""
    return Mesh(tp, pp, ep, cp)


def config_of(changes: dict) -> ModelConfig:
    """The small model with changes, those of its mixture in a dictionary."""
    changes = dict(changes)
    return replace(SMALL, mixture=Mixture(**changes.pop("mixture", {})), **changes)


def layout_case(group, steps) -> list:
    """Traffic of a rank in a recorded step of each layout: items of transfers and their counts."""
    gating.choose = in_turn  # in the process of this case only
    found = []
    for changes, degrees in steps:
        config, layout = config_of(changes), Layout(**degrees)
        mesh = mesh_of(layout.tp, layout.pp, layout.ep, layout.cp)
        step = RankStep(Assembly(Recipe(), config, layout, mesh, torch.device("cpu")), Observer(), SEQ // layout.cp)
        found.append(items(step.run(layout.microbatches)))
    return found


def observed(changes, degrees, rank: int) -> list:
    """The same, observed without the other ranks."""
    return items(observe_traffic(Recipe.of(context=SEQ), config_of(changes), Layout(**degrees), rank))


def items(traffic: Counter[Transfer]) -> list:
    """Transfers and their counts, in order."""
    return sorted([*transfer, times] for transfer, times in traffic.items())


def settings(ranks: int, **changes) -> dict:
    """A layout of so many ranks, dp what the others leave, with rows for every microbatch: two if it matters."""
    tp, pp, ep, cp, chunks = (changes.get(name, 1) for name in ("tp", "pp", "ep", "cp", "chunks"))
    dp, micro = ranks // (tp * pp * ep * cp), 2
    m = changes.pop("m", 1 if tp == ranks else 2)
    kind = {} if "schedule" in changes else {"schedule": "interleaved" if chunks > 1 else "1f1b"}
    sizes = {"dp": dp, "micro_batch": micro, "global_batch": micro * dp * ep * m, "vocabulary_multiple": 8}
    return asdict(Layout(**sizes, **kind, **changes))


def awkward(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The module with every awkward kind of parameter; an unused layer of another dtype, and buffers."""
    module = make(dtype=dtype)
    module.unused.double() if dtype == torch.float32 else module.unused.float()
    module.register_buffer("mean", torch.zeros(3))
    module.register_buffer("count", torch.zeros((), dtype=torch.int64))
    return module


def run_turns(model: nn.Module, turns: str, group) -> None:
    """Forwards (F) and backwards (B) of microbatches, which accumulate until the last; then the synchronisation."""
    losses = []
    for number, kind in enumerate(turns):
        if kind == "F":
            losses.append(loss_of(model, len(losses), group.rank(), group.size()))
        else:
            with nullcontext() if number == len(turns) - 1 else model.no_sync():
                losses.pop().backward()
    model.finish_gradient_synchronization()


LADDER = {
    **WRAPPERS,
    "bucketed-small": lambda module: BucketedDDP(module, 0.0005),
    "bucketed-one": lambda module: BucketedDDP(module, None),
}


def ddp_case(group, name: str, turns: str) -> None:
    """A step of one of the four wrappers."""
    model = LADDER[name](awkward())
    run_turns(model, turns, group)
    model.clip_grad_norm(1.0)


def groups_of(parameters: list) -> list[list]:
    """Two groups that an optimizer might have."""
    return [parameters[:4], parameters[4:]]


def zero_case(group, stage: int, turns: str) -> None:
    """A step of a stage of ZeRO with two groups of parameters."""
    module = awkward()
    apart = [module.get_parameter("first.weight")] if stage < 3 else []
    groups = lambda wrapped: [{"params": each} for each in groups_of(list(wrapped.parameters()))]  # noqa: E731
    model, optimizer = zero(module, torch.optim.AdamW, stage, None, groups, apart, lr=0.1)
    run_turns(model, turns, group)
    optimizer.step()


def sharded_case(group, layout: str) -> None:
    """A step of the sharded optimizer by itself."""
    module = awkward()
    groups = [{"params": each} for each in groups_of(list(module.parameters()))]
    optimizer = ShardedOptimizer(groups, torch.optim.AdamW, layout=layout)
    loss_of(module, 0).backward()
    optimizer.step()


def fsdp_case(group, turns: str) -> None:
    """A step of FSDP whose weights are gathered in half precision."""
    model = FSDP(awkward(torch.float32), compute_dtype=torch.bfloat16)
    run_turns(model, turns, group)
    model.clip_grad_norm(1.0)


WRAPPERS = {
    **{f"{name} {turns}": (ddp_case, name, turns) for name in LADDER for turns in ("FB", "FBFBFB")},
    **{
        f"zero {stage} {turns}": (zero_case, stage, turns)
        for stage in (0, 1, 2, 3)
        for turns in ("FB", "FBFBFB", *(("FFBFBB", "FFFBBB") if stage == 3 else ()))
    },
    **{f"sharded {layout}": (sharded_case, layout) for layout in ("flat", "whole")},
    **{f"fsdp {turns}": (fsdp_case, turns) for turns in ("FB", "FFBFBB")},
}


def wrapper_case(group, steps) -> list:
    """Traffic of a rank when each wrapper or optimizer is made, and in a step of it."""
    found = []
    for name in steps:
        case, *arguments = WRAPPERS[name]
        with record() as events:
            case(group, *arguments)
        labels = [re.sub(r" of (wrapper|optimizer) \d+$", "", e.label) for e in events]
        found.append([[e.verb, label, e.numel, str(e.dtype), e.ranks] for e, label in zip(events, labels, strict=True)])
    return found


def strategies_case(group, layouts, wrappers) -> list:
    """All strategies in one set of processes."""
    return [layout_case(group, layouts), wrapper_case(group, wrappers)]
