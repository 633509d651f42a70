"""One expert layer over several ranks, the ways to dispatch its tokens, the predicted cost of each, and the gate."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.collective import room
from benchmarks.gate import UNIT_ROUNDOFF
from benchmarks.harness import WrongResultError, require_close
from benchmarks.lib.options import COUNT, RecordOptions
from benchmarks.rank_times import gather_times
from cs336_systems.comm import Group, agree
from cs336_systems.comm.startup import TIMEOUT
from cs336_systems.cost import Hardware
from cs336_systems.cost import experts as cost
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.host.console import PATIENCE, format_bytes, setting
from cs336_systems.host.machine import device_name
from cs336_systems.layout import MAPPED
from cs336_systems.model.feed_forward import GroupedLinear
from cs336_systems.model.moe import MoELayer
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import Mixture, ModelConfig

DEVICE = torch.device("cpu")  # CPU time is measured
ITEM = torch.float32.itemsize
# Operators of a sorted layer, forward and backward: router, sort, gather, experts and the way back. A test counts them.
EXPERT_LAUNCHES = (63, 41)
# Tensors of tokens x experts x slots that a rank holds at once, at most: one and a quarter are `combine` and what it is
# compared to, the others are made on the way to them; backward has gradients of some.
ONE_HOT_TENSORS = {False: 4, True: 5}
# How often such a tensor is written or read, going through `one_hot.py` line by line.
ONE_HOT_PASSES = {False: 12, True: 30}
# How many such tensors are made, one after another, which a CPU gives new memory each time; booleans are a quarter.
ONE_HOT_MADE = {False: 5.25, True: 6.25}
GATE_BYTES = 2**24  # of such a tensor where the gate looks at a part of the tokens
# Roundings that follow one another in two answers: the weights of choices, two layers with GELU between, the sum.
STAGES = {False: 16, True: 32}


@dataclass(frozen=True)
class LayerSettings(RecordOptions):
    """Options that all benchmarks of one expert layer have: its size, and how it is run."""

    tokens: int = setting(2048, "Tokens of each rank.", type=COUNT)
    d_model: int = setting(64, "Width of a token.", type=COUNT)
    d_ff: int = setting(256, "Hidden width of an expert.", type=COUNT)
    threads: int = setting(1, "Threads of each rank; idle ones would spin and add to CPU time.", type=COUNT)
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)


@dataclass(frozen=True)
class Way:
    """A way to send tokens to experts: by sort or one-hot, and an expert's capacity, in training or evaluation."""

    name: str
    config: ModelConfig
    training: bool = False

    @property
    def one_hot(self) -> bool:
        """True for the one-hot formulation."""
        return self.config.mixture.dispatch == "einsum"

    def slots(self, tokens: int) -> int:
        """Slots of an expert; one per token without a capacity limit."""
        return cost.slots(self.config, tokens, self.training)

    def changed(self, name: str, **mixture: Any) -> "Way":
        """Copy with other values of some fields of the mixture."""
        return replace(self, name=name, config=replace(self.config, mixture=replace(self.config.mixture, **mixture)))


def shape(experts: int, tokens: int, d_model: int, d_ff: int, mixture: Mixture) -> ModelConfig:
    """A model whose only layer has experts, with biases as fairseq's have. Raises UserError for what cannot be."""
    return ModelConfig(
        1, tokens, d_model, d_ff, 1, 1, bias=True, num_experts=experts, expert_every=1, mixture=mixture
    )  # fmt: skip


def check_ranks(experts: int, ranks: int) -> None:
    """Raises UserError for experts that do not divide over the ranks."""
    if experts % ranks:
        raise UserError(f"{experts} experts do not divide over {ranks} ranks: choose ranks that divide {experts}")


def one_hot_bytes(way: Way, tokens: int) -> int:
    """Bytes of a float32 tensor of tokens x experts x slots."""
    return ITEM * tokens * cost.padded_rows(way.config, tokens, way.training)


def predict(way: Way, tokens: int, ranks: int, hardware: Hardware, backward: bool) -> dict[str, Any]:
    """Counted, for one rank: rows and bytes of an all-to-all, FLOPs of a layer, and the milliseconds that these,
    reading what is large, starting operators and the first touch of large tensors would take on a device.

    Without a capacity that drops tokens, and with one-hot always, the bytes are exact; otherwise they are the most.
    """
    config = way.config
    rows = cost.computed_rows(config, tokens, way.training)
    forward = cost.router_flops(config, tokens) + cost.expert_flops(config, rows)
    added = cost.one_hot_flops(config, tokens, way.training) if way.one_hot else (0, 0)
    flops = forward + added[0] + ((2 * forward + added[1]) if backward else 0)
    weights = 2 * ITEM * config.d_model * config.expert_d_ff * config.num_experts // ranks
    moved = weights * (3 if backward else 1)
    if way.one_hot:
        moved += ONE_HOT_PASSES[backward] * one_hot_bytes(way, tokens)
    sent = cost.row_bytes(config, rows, ITEM) if ranks > 1 else 0
    seconds = flops / hardware.matmul_flops + moved / hardware.bandwidth
    # A CPU starts a product of each expert.
    started = sum(EXPERT_LAUNCHES[: 1 + backward]) + 2 * (3 if backward else 1) * config.num_experts // ranks
    seconds += hardware.waiting(started, seconds)
    if way.one_hot and one_hot_bytes(way, tokens) >= MAPPED:
        seconds += hardware.first_touch * ONE_HOT_MADE[backward] * one_hot_bytes(way, tokens)
    return {"rows": rows, "all_to_all_bytes": sent, "flops": flops, "mean_ms": 1e3 * seconds}


def ceilings(group: Group, budget: float) -> Hardware:
    """Rates that the slowest rank reaches while all run, each with its threads; a probe takes `budget` seconds."""
    name = device_name(DEVICE)
    here = probe(DEVICE, "fp32", name, budget)
    found = gather_times([here.matmul_flops, here.bandwidth, here.launch, here.first_touch], group, DEVICE)
    least, most = found.amin(dim=0).tolist(), found.amax(dim=0).tolist()
    return Hardware(name, least[0], least[1], here.source, launch=most[2], first_touch=most[3])


def too_large(way: Way, tokens: int, backward: bool, group: Group) -> str:
    """Reason why the one-hot tensors do not fit, the same on every rank; empty if they do."""
    need, have = ONE_HOT_TENSORS[backward] * one_hot_bytes(way, tokens), room(group, DEVICE)
    if need <= have:
        return ""
    return (
        f"one-hot tensors of {tokens} tokens x {way.config.num_experts} experts x {way.slots(tokens)} slots need "
        f"{format_bytes(need)} on each of {group.size()} ranks, where {format_bytes(have)} are usable"
    )


def build_layer(config: ModelConfig, group: Group) -> MoELayer:
    """An expert layer with this rank's experts; each has the same weights on however many ranks."""
    model = TransformerLM(config, "meta")
    (layer,) = expert_parallel(model, group).layers()
    layer.to_empty(device=DEVICE)
    for name, parameter in layer.named_parameters():
        # Biases are drawn like weights: one that was forgotten would be seen only if it is not zero.
        full = f"blocks.0.feed_forward.{name}".replace("bias", "offset")
        parameter.data.copy_(model.initial_weight(full, parameter.shape, 0, DEVICE))
    for linear in layer.experts.children():
        assert isinstance(linear, GroupedLinear)
        linear.gradient_scale = 1.0  # gradients here are sums over ranks; training's are means
    return layer


class Bench:
    """A layer and a rank's tokens (1 tokens d_model), on which ways to dispatch are tried.

    `skew` is how much tokens have in common, beside what is each one's own: the experts that this favours are the same
    for all tokens of all ranks, as after training. 0 is a router that is nearly balanced, as an untrained one is for
    random tokens; at 1 experts' mean scores differ as much as one expert's scores of different tokens.
    """

    def __init__(self, config: ModelConfig, skew: float, group: Group, backward: bool = False) -> None:
        self.group, self.backward, self.skew, self.tokens = group, backward, skew, config.context_length
        self.layer = build_layer(config, group)
        common = torch.randn(config.d_model, generator=torch.Generator().manual_seed(0))
        own = torch.Generator().manual_seed(1 + group.rank())
        drawn = torch.randn(2, 1, self.tokens, config.d_model, generator=own)
        self.x = (drawn[0] + skew * common) / (1 + skew**2) ** 0.5
        self.upstream = drawn[1]  # the gradient of what the layer returns

    def run(self, way: Way, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """(input, output) of one pass of the first `tokens`; backward leaves gradients in input and parameters."""
        self.layer.mixture = way.config.mixture
        self.layer.train(way.training)
        x = self.x[:, :tokens].detach().requires_grad_(self.backward)
        with torch.set_grad_enabled(self.backward):
            y = self.layer(x)
        if self.backward:
            self.layer.zero_grad()
            y.backward(self.upstream[:, :tokens])
        return x, y

    def answers(self, way: Way, tokens: int) -> dict[str, Tensor]:
        """Results of a pass; its gradients as one vector, of which a part may be rounding alone."""
        x, y = self.run(way, tokens)
        found = {"output": y.detach()}
        if self.backward:
            leaves = [leaf.grad for leaf in (x, *self.layer.parameters())]
            found["gradients"] = torch.cat([gradient.flatten() for gradient in leaves if gradient is not None])
        return found

    def fewer(self, way: Way) -> int:
        """Number of tokens whose one-hot tensors are small."""
        tokens = self.tokens
        while tokens > 1 and one_hot_bytes(way, tokens) > GATE_BYTES:
            tokens //= 2
        return tokens

    def check(self, way: Way, tokens: int | None = None) -> float:
        """The gate: a way against the one-hot formulation with the same slots, over the first `tokens` (default: few
        enough): the largest relative error. Raises WrongResultError on all ranks.

        To first order each of STAGES roundings adds one unit roundoff, and a float32 sum of n terms about sqrt(n) of
        its own (Higham, Accuracy and Stability of Numerical Algorithms, sections 2.6 and 3.1).
        """
        tokens, config = tokens or self.fewer(way), way.config
        longest = max(config.d_model, config.expert_d_ff)
        if self.backward:  # a weight's gradient is a sum over tokens, a token's one over experts
            longest = max(longest, tokens * self.group.size(), config.num_experts)
        tolerance = STAGES[self.backward] * (1 + longest**0.5) * UNIT_ROUNDOFF["fp32"]
        want, got = (self.answers(each, tokens) for each in (way.changed("einsum", dispatch="einsum"), way))
        error, wrong = 0.0, ""
        try:
            for name, reference in want.items():
                error = max(error, require_close(f"{way.name}'s {name}", got[name], reference, tolerance))
        except WrongResultError as refused:
            wrong = str(refused)
        if found := [each for each in agree("gate", wrong, self.group) if each]:
            raise WrongResultError(found[0])
        return error
