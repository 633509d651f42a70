"""What the proof of traffic is made of: records in the words of the closed forms, and a step of every strategy."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache

import torch
from torch import nn

from cs336_systems import gating
from cs336_systems.comm import Event, Mesh, record
from cs336_systems.cost.fsdp_traffic import fsdp_traffic
from cs336_systems.cost.layout import Layout
from cs336_systems.cost.layout_traffic import start_traffic, step_traffic, trainer_traffic
from cs336_systems.cost.transfer import Parameter, Traffic, Transfer
from cs336_systems.cost.wrapper_traffic import (
    clip_traffic,
    construction_traffic,
    ddp_traffic,
    optimizer_traffic,
    zero_traffic,
)
from cs336_systems.data import Batch
from cs336_systems.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.dropout import dropout_key
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.expert_zero import expert_zero
from cs336_systems.fsdp import FSDP
from cs336_systems.mixture import Mixture
from cs336_systems.model import TransformerLM
from cs336_systems.model_gradients import ModelGradients, tied_copy
from cs336_systems.optim import AdamW, decay_groups
from cs336_systems.pipeline import Pipeline, Stage
from cs336_systems.presets import ModelConfig
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.tensor_parallel import tensor_parallel
from cs336_systems.trainer import Trainer
from cs336_systems.zero import zero
from tests import expert_cases
from tests import layout_table as tables
from tests.parallel_cases import loss_of, make
from tests.parallel_models import combine

SEQ = 8
SMALL = ModelConfig(vocab_size=30, context_length=SEQ, d_model=16, d_ff=32, num_layers=2, num_heads=4)
BERT = {"norm": "layernorm", "bias": True, "bert_heads": True, "token_types": 2, "causal": False, "dropout": 0.1}
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
GPT = {"norm": "layernorm", "bias": True}


def batch_of(config: ModelConfig, rows: int) -> Batch:
    tokens = torch.randint(config.vocab_size, (rows, SEQ))
    if not config.bert_heads:
        return Batch(tokens, tokens, torch.arange(rows))
    real = torch.ones(rows, SEQ, dtype=torch.bool)
    return Batch(tokens, tokens, torch.arange(rows), torch.zeros_like(tokens), real, torch.arange(rows) % 2)


def purpose(event: Event) -> str:
    """What an event is for, without numbers and names."""
    what = event.label.split(" of microbatch")[0] if event.verb in ("send", "receive") else event.label
    what = next((kind for kind in ("bucket", "buffer", "replicated") if what.startswith(f"{kind} ")), what)
    if what.endswith(".weight"):
        what = "weight, gradient" if what.startswith("gradient of ") else "weight"
    return what


def transfer(event: Event, mesh: Mesh) -> Transfer:
    """An event in the words of the closed form: its axis is told by what it is for."""
    what = purpose(event)
    # Of experts that are split the wrapper is over dp, of all else over all data-parallel ranks.
    split = mesh.ep.size() > 1
    data = "data" if split and event.ranks == mesh.data.size() else "dp"
    every = ("bucket", "ballot", "updated parameters", "replicated", "weight", "weight, gradient", "balance")
    over = dict.fromkeys((*every, "initial value", "targets"), data) | {"tied embedding": "ends"}
    over |= dict.fromkeys(("gradient norm", "losses"), "world")
    if what == "balance" and event.dtype == torch.float64:  # the trainer's, for its log
        over[what] = "world"
    for way in ("dispatch", "combine"):
        over |= {way: "ep", f"{way}, gradient": "ep", "expert counts": "ep"}
    axis = "pp" if event.verb in ("send", "receive") else over.get(what, "tp")
    sizes = {"world": mesh.world.size(), "ends": 2, "pp": 2} | {"tp": mesh.tp.size(), "dp": mesh.dp.size()}
    assert event.ranks == (sizes | {"ep": mesh.ep.size(), "data": mesh.data.size()})[axis], event
    return Transfer(event.verb, axis, what, event.numel, event.dtype.itemsize)


def in_turn(logits: torch.Tensor, *rest: object) -> torch.Tensor:
    """What a balanced router chooses: (top_k tokens)."""
    tokens, experts = logits.shape
    top_k = next(each.top_k for each in rest if isinstance(each, Mixture))
    return (torch.arange(tokens) + torch.arange(top_k)[:, None]) % experts


@cache
def mesh_of(tp: int, pp: int, ep: int) -> Mesh:
    """Of this process; one for all layouts of these degrees, since groups take long to make."""
    return Mesh(tp, pp, ep)


def counted(events: list[Event], mesh: Mesh) -> Counter[Transfer]:
    """What a record lists; what a group of one is asked to do moves nothing."""
    return Counter(transfer(event, mesh) for event in events if event.ranks > 1)


def layout_case(group, steps):
    """Where a recorded step of a layout, or its start, differs from the closed form: (settings, too many, missing)."""
    wrong, gating.choose = [], in_turn  # in the process of this case only
    for changes, settings in steps:
        changes = dict(changes)
        mixture = Mixture(**changes.pop("mixture", {}))
        config, layout = replace(SMALL, mixture=mixture, **changes), Layout(**settings)
        mesh = mesh_of(layout.tp, layout.pp, layout.ep)
        stage = Stage(TransformerLM(config), mesh.pp.rank(), layout.pp, layout.chunks)
        plan = tensor_parallel(stage.model, mesh.tp, layout.sequence, layout.vocabulary_multiple)
        experts = expert_parallel(stage.model, mesh.ep, mesh.data)
        groups = lambda module: decay_groups(module, 0.1)  # noqa: E731
        with record() as started:
            wrapper, optimizer = expert_zero(stage, experts, AdamW, layout.zero, mesh, groups, tied_copy(stage))
        parts = layout.tp if layout.sequence else 1
        pipeline = Pipeline(stage, wrapper, mesh, layout.schedule, parts)
        batches = batch_of(config, layout.microbatches * layout.micro_batch).split(layout.micro_batch)
        keys = [dropout_key(1, 2, each.rows) for each in batches]
        gradients = ModelGradients(wrapper, stage, plan, experts.names, mesh)
        with record() as events:
            pipeline.run(batches, combine, keys, wrapper.no_sync)
            wrapper.finish_gradient_synchronization()
            gradients.add_partial()
            gradients.add_tied()
            gradients.norm()
            optimizer.step()
        for got, want in (
            (started, start_traffic(config, layout, mesh.pp.rank())),
            (events, step_traffic(config, layout, SEQ, mesh.pp.rank(), "fp32", mesh.data.rank())),
        ):
            found = counted(got, mesh)
            if found != want:
                wrong.append([str(settings), str(changes), str(mixture), str(found - want), str(want - found)])
    return wrong


def settings(ranks: int, **changes) -> dict:
    """A layout of so many ranks, dp what the others leave, with rows for every microbatch: two if it matters."""
    tp, pp, ep, chunks = (changes.get(name, 1) for name in ("tp", "pp", "ep", "chunks"))
    dp, micro = ranks // (tp * pp * ep), 2
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


# What a forward of it does: the shared layer twice, the unused one never; the head has the embedding's weight.
LAYERS = [f"{name}.weight" for name in ("embedding", "first", "shared", "unused", "last", "embedding")]
CALLS = [0, 1, 2, 2, 4, 5]


def described(module: nn.Module) -> tuple[list[Parameter], list[Parameter]]:
    """A module's parameters and buffers, as the closed forms know them."""
    parameters = [Parameter(name, tuple(p.shape), p.itemsize, p.requires_grad) for name, p in module.named_parameters()]
    return parameters, [Parameter(name, tuple(b.shape), b.itemsize) for name, b in module.named_buffers()]


def passes_of(turns: str) -> list[str]:
    return [{"F": "forward", "B": "backward"}[kind] for kind in turns]


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


LADDER = {  # what wraps a module, and the size of its buckets
    "naive": (NaiveDDP, 0.0),
    "flat": (FlatDDP, None),
    "overlapped": (OverlappedDDP, 0.0),
    "bucketed": (BucketedDDP, 25.0),
    "bucketed-small": (lambda module: BucketedDDP(module, 0.0005), 0.0005),
    "bucketed-one": (lambda module: BucketedDDP(module, None), None),
}


def ddp_case(group, name: str, turns: str) -> Traffic:
    """A step of one of the four wrappers, and what is predicted for it."""
    wrap, size = LADDER[name]
    module, ranks = awkward(), group.size()
    parameters, buffers = described(module)
    model = wrap(module)
    run_turns(model, turns, group)
    model.clip_grad_norm(1.0)
    step = ddp_traffic(parameters, ranks, size, buffers) + clip_traffic(ranks)
    return construction_traffic(parameters, ranks, buffers) + step


def groups_of(parameters: list) -> list[list]:
    """Two groups that an optimizer might have."""
    return [parameters[:4], parameters[4:]]


def zero_case(group, stage: int, turns: str) -> Traffic:
    """As `ddp_case`, for a stage of ZeRO with two groups of parameters."""
    module, ranks = awkward(), group.size()
    parameters, buffers = described(module)
    alone = ["first.weight"] if stage < 3 else []
    apart = [module.get_parameter(name) for name in alone]
    groups = lambda wrapped: [{"params": each} for each in groups_of(list(wrapped.parameters()))]  # noqa: E731
    model, optimizer = zero(module, torch.optim.AdamW, stage, None, groups, apart, lr=0.1)
    run_turns(model, turns, group)
    optimizer.step()
    split = groups_of(parameters)
    step = zero_traffic(parameters, ranks, stage, split, buffers, alone, passes_of(turns), LAYERS, CALLS)
    return construction_traffic(parameters, ranks, buffers) + step


def sharded_case(group, layout: str) -> Traffic:
    """As `ddp_case`, for the sharded optimizer by itself."""
    module = awkward()
    parameters, _ = described(module)
    groups = [{"params": each} for each in groups_of(list(module.parameters()))]
    optimizer = ShardedOptimizer(groups, torch.optim.AdamW, layout=layout)
    loss_of(module, 0).backward()
    optimizer.step()
    return optimizer_traffic(groups_of(parameters), group.size(), layout)


def fsdp_case(group, turns: str) -> Traffic:
    """As `ddp_case`, for FSDP whose weights are gathered in half precision."""
    module, ranks = awkward(torch.float32), group.size()
    parameters, buffers = described(module)
    model = FSDP(module, compute_dtype=torch.bfloat16)
    run_turns(model, turns, group)
    model.clip_grad_norm(1.0)
    step = fsdp_traffic(parameters, ranks, passes_of(turns), LAYERS, CALLS, buffers, 2) + clip_traffic(ranks)
    return construction_traffic(parameters, ranks, buffers) + step


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


def wrapper_case(group, steps):
    """As `layout_case`, for wrappers and optimizers of a module that is no transformer."""
    wrong = []
    for name in steps:
        case, *arguments = WRAPPERS[name]
        with record() as events:
            want = case(group, *arguments)
        found = Counter(Transfer(e.verb, "dp", purpose(e), e.numel, e.dtype.itemsize) for e in events if e.ranks > 1)
        if found != want:
            wrong.append([name, str(found - want), str(want - found)])
    return wrong


def trainer_case(group, steps, folder):
    """As `layout_case`, for a step of the trainer and what it says of it."""
    wrong, gating.choose = [], in_turn
    for module, precision, settings in steps:
        layout = {"layout": tables.Layout, "experts": expert_cases.Layout}[module](**settings)
        trainer = Trainer(layout.recipe(folder, precision=precision))
        trainer.step(0)
        with record() as events:
            losses = [trainer.step(1)]
            trainer.mean_losses(losses)
            trainer.routing()
        mesh, config, plan = trainer.mesh, trainer.config, trainer.recipe.layout(group.size())
        want = step_traffic(config, plan, trainer.seq, mesh.pp.rank(), precision, mesh.data.rank())
        want += trainer_traffic(config, plan)
        found = counted(events, mesh)
        if found != want:
            wrong.append([str(layout), str(found - want), str(want - found)])
    return wrong


def strategies_case(group, layouts, wrappers, trainers, folder):
    """What differs, of all strategies in one set of processes."""
    return layout_case(group, layouts) + wrapper_case(group, wrappers) + trainer_case(group, trainers, folder)
