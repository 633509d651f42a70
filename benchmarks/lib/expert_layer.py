"""One expert layer over several ranks: ways to dispatch its tokens, their predicted cost, and the gate."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.collective import room
from benchmarks.gate import UNIT_ROUNDOFF
from benchmarks.harness import WrongResultError, require_close
from benchmarks.lib.options import COUNT, RecordOptions
from cs336_systems.comm import Group, agree
from cs336_systems.comm.startup import TIMEOUT
from cs336_systems.cost import Hardware
from cs336_systems.cost import experts as cost
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.host.console import PATIENCE, format_bytes, setting
from cs336_systems.layout import MAPPED
from cs336_systems.model.moe import MoELayer
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import Mixture, ModelConfig

DEVICE = torch.device("cpu")  # CPU time is measured
ITEM = torch.float32.itemsize
EXPERT_LAUNCHES = 63  # operators of a sorted layer: router, sort, gather, experts and the way back; a test counts them
# Of tensors of tokens x experts x slots: a rank holds four at once at most (one and a quarter are `combine` and what it
# is compared to, the others are made on the way to them), writes or reads twelve, going through `one_hot.py` line by
# line, and makes so many, one after another, which a CPU gives new memory each time; booleans are a quarter.
ONE_HOT_TENSORS, ONE_HOT_PASSES, ONE_HOT_MADE = 4, 12, 5.25
ONE_HOT_LIMIT = 1e9  # bytes of such a tensor, above which only the sort is timed
GATE_BYTES = 2**24  # of such a tensor where the gate looks at a part of the tokens
STAGES = 16  # roundings that follow one another in an output: the weights of choices, two layers, GELU, the sum


@dataclass(frozen=True)
class LayerSettings(RecordOptions):
    """Options that all benchmarks of one expert layer have: its size, and how it is run."""

    tokens: int = setting(2048, "Tokens of each rank.", type=COUNT)
    d_model: int = setting(64, "Width of a token.", type=COUNT)
    d_ff: int = setting(256, "Hidden width of an expert.", type=COUNT)
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
    rounds: int = setting(5, "Turns of each candidate.", type=COUNT)
    steps: int = setting(1, "Timed passes per turn.", type=COUNT)

    def way(self, name: str, experts: int, mixture: Mixture, training: bool = False) -> "Way":
        """A layer with biases, as fairseq's have. Raises UserError for one that cannot be."""
        shape = (1, self.tokens, self.d_model, self.d_ff, 1, 1)
        config = ModelConfig(*shape, bias=True, num_experts=experts, expert_every=1, mixture=mixture)
        return Way(name, config, training)


@dataclass(frozen=True)
class Way:
    """A way to send tokens to experts: by sort or one-hot, and an expert's capacity, in training or evaluation."""

    name: str
    config: ModelConfig
    training: bool = False

    def slots(self, tokens: int) -> int | None:
        """Slots of an expert; None without a capacity limit."""
        return self.config.mixture.capacity(tokens, self.config.num_experts, self.training)

    def changed(self, name: str, **mixture: Any) -> "Way":
        """Copy with other values of some fields of the mixture."""
        return replace(self, name=name, config=replace(self.config, mixture=replace(self.config.mixture, **mixture)))

    def one_hot_bytes(self, tokens: int) -> int:
        """Bytes of a float32 tensor of tokens x experts x slots."""
        return ITEM * tokens * cost.padded_rows(self.config, tokens, self.training)

    def predict(self, tokens: int, ranks: int, hardware: Hardware) -> dict[str, Any]:
        """Counted, for one rank: rows and bytes of an all-to-all, FLOPs of a layer, and the milliseconds that these,
        reading what is large, starting operators and the first touch of large tensors would take on a device.

        Without a capacity that drops tokens, and with one-hot always, the bytes are exact; else they are the most.
        """
        config, one_hot, large = self.config, self.config.mixture.dispatch == "einsum", self.one_hot_bytes(tokens)
        rows = cost.computed_rows(config, tokens, self.training)
        flops = cost.router_flops(config, tokens) + cost.expert_flops(config, rows)
        moved: float = 2 * ITEM * config.d_model * config.expert_d_ff * config.num_experts // ranks  # weights
        if one_hot:
            flops += cost.one_hot_flops(config, tokens, self.training)[0]
            moved += ONE_HOT_PASSES * large
        seconds = flops / hardware.matmul_flops + moved / hardware.bandwidth
        # A CPU starts a product of each expert.
        seconds += hardware.waiting(EXPERT_LAUNCHES + 2 * config.num_experts // ranks, seconds)
        if one_hot and large >= MAPPED:
            seconds += hardware.first_touch * ONE_HOT_MADE * large
        sent = cost.row_bytes(config, rows, ITEM) if ranks > 1 else 0
        return {"rows": rows, "all_to_all_bytes": sent, "flops": flops, "mean_ms": 1e3 * seconds}

    def too_large(self, tokens: int, group: Group) -> str:
        """Reason why one-hot tensors for these slots are too large, the same on every rank; empty if they are not."""
        nbytes, have = self.one_hot_bytes(tokens), room(group, DEVICE)
        need = ONE_HOT_TENSORS * nbytes
        shape = f"{tokens} tokens x {self.config.num_experts} experts x {self.slots(tokens)} slots"
        if nbytes > ONE_HOT_LIMIT:
            return f"a one-hot tensor of {shape} has {format_bytes(nbytes)}, more than {format_bytes(ONE_HOT_LIMIT)}"
        return (need > have) * (
            f"one-hot tensors of {shape} need {format_bytes(need)} on each of {group.size()} ranks, where "
            f"{format_bytes(have)} are usable"
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
    return layer


class Bench:
    """A layer and a rank's tokens (1 tokens d_model), on which ways to dispatch are tried.

    `skew` is how much tokens have in common, beside what is each one's own: the experts that this favours are the same
    for all tokens of all ranks, as after training. 0 is a router that is nearly balanced, as an untrained one is for
    random tokens; at 1 experts' mean scores differ as much as one expert's scores of different tokens.
    """

    def __init__(self, config: ModelConfig, skew: float, group: Group) -> None:
        self.group, self.skew, self.tokens = group, skew, config.context_length
        # Weights, tokens in three copies, the router's scores, and a sorted pass's rows before and after each product.
        weights, rows = 2 * config.expert_d_ff * config.num_experts // group.size(), config.mixture.top_k * self.tokens
        need = (weights + 3 * self.tokens + 2 * rows) * config.d_model + self.tokens * config.num_experts
        need, have = ITEM * (need + 2 * rows * config.expert_d_ff), room(group, DEVICE)
        if need > have:
            raise UserError(
                f"{self.tokens} tokens and {config.num_experts} experts need {format_bytes(need)} on each of "
                f"{group.size()} ranks, where {format_bytes(have)} are usable: choose fewer --tokens or --experts"
            )
        self.layer = build_layer(config, group)
        common = torch.randn(config.d_model, generator=torch.Generator().manual_seed(0))
        own = torch.Generator().manual_seed(1 + group.rank())
        self.x = (torch.randn(1, self.tokens, config.d_model, generator=own) + skew * common) / (1 + skew**2) ** 0.5

    @torch.no_grad()
    def run(self, way: Way, tokens: int | None = None) -> Tensor:
        """One forward pass of the first `tokens`: (1 tokens d_model)."""
        self.layer.mixture = way.config.mixture
        self.layer.train(way.training)
        return self.layer(self.x[:, :tokens])

    def fewer(self, way: Way) -> int:
        """Number of tokens whose one-hot tensors are small."""
        tokens = self.tokens
        while tokens > 1 and way.one_hot_bytes(tokens) > GATE_BYTES:
            tokens //= 2
        return tokens

    def check(self, way: Way, tokens: int | None = None) -> None:
        """The gate: a way against the one-hot formulation with the same slots, over the first `tokens` (default: few
        enough). Raises WrongResultError on all ranks.

        To first order each of STAGES roundings adds one unit roundoff, and a float32 sum of n terms about sqrt(n) of
        its own (Higham, Accuracy and Stability of Numerical Algorithms, sections 2.6 and 3.1).
        """
        tokens = tokens or self.fewer(way)
        longest = max(way.config.d_model, way.config.expert_d_ff)
        tolerance = STAGES * (1 + longest**0.5) * UNIT_ROUNDOFF["fp32"]
        want, got = (self.run(each, tokens) for each in (way.changed("einsum", dispatch="einsum"), way))
        wrong = ""
        try:
            require_close(f"{way.name}'s output", got, want, tolerance)
        except WrongResultError as refused:
            wrong = str(refused)
        if found := [each for each in agree("gate", wrong, self.group) if each]:
            raise WrongResultError(found[0])
