"""Stacks: implementations of training, such as Megatron-LM or PyTorch's FSDP, whose time and memory differ for the
same plan and machine. Each has constants, factors of its memory, and a range that four of five runs fall into.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cs336_systems.cost.machines import CONSTANTS, Constants, System
from cs336_systems.cost.operators import operators_of
from cs336_systems.cost.plan import Plan, StackName
from cs336_systems.cost.rank import Group, Rank
from cs336_systems.cost.template import read_data
from cs336_systems.presets import ModelConfig

HOPPER = ("H100", "H200", "B200")


@dataclass(frozen=True)
class Stack:
    """An implementation: its own constants, factors of its memory, and the range of measured over predicted time that
    four of five of its runs fell into when they were left out of the fit."""

    name: str
    about: str
    range: tuple[float, float]
    memory_range: tuple[float, float]
    memory_basis: str
    constants: Mapping[str, float] = field(default_factory=dict)
    hopper: Mapping[str, float] = field(default_factory=dict)  # factors of constants on H100 and newer
    fitted: tuple[str, ...] = ()  # constants that its published runs determine
    kernels: Literal["torch", "triton"] | None = None
    gradient: int = 4  # bytes in which gradients travel
    balanced: bool = False  # stages have layers by FLOPs, not by number
    own_port: bool = False  # ZeRO 3 sends between nodes as if each accelerator received all through its own port
    state: float = 1.0  # factor of weights, gradients and optimizer state
    activations: float = 1.0  # factor of activations
    besides: float = 0.0  # GiB that the framework holds besides

    def own(self) -> Constants:
        return replace(CONSTANTS, **self.constants)

    def on(self, system: System, constants: Constants | None = None) -> System:
        """The machine with this stack's constants, or others, times the factors of newer accelerators."""
        used = constants or self.own()
        factors = self.hopper if any(word in system.name.upper() for word in HOPPER) else {}
        return replace(system, constants=replace(used, **{k: v * getattr(used, k) for k, v in factors.items()}))

    def shape(self, config: ModelConfig, plan: Plan) -> tuple[ModelConfig, Plan]:
        """Model and plan as this stack runs them: its kernels, and its way to spread layers over stages."""
        config = config.override(kernels=self.kernels) if self.kernels else config
        balanced = self.balanced and plan.pp > 1 and plan.chunks == 1 and not plan.layers
        layers = balanced_layers(config, plan) if balanced else plan.layers
        return config, plan.override(stack=self.name, layers=layers)

    def bytes(self, predicted: float) -> tuple[float, float]:
        """The range of predicted memory."""
        return predicted * self.memory_range[0], predicted * self.memory_range[1]


def _read() -> dict[str, Stack]:
    rows = read_data("data/stacks")
    found = {}
    for name, row in rows.items():
        if "like" in row:  # the constants of that stack: no run of this one was fitted
            row = rows[row["like"]] | {"fitted": ()} | {key: value for key, value in row.items() if key != "like"}
        row |= {key: tuple(row[key]) for key in ("range", "memory_range", "fitted") if key in row}
        found[name] = Stack(name, **row)
    return found


STACKS = _read()


def usual_stack(zero: int, kernels: str | None = None) -> StackName:
    """The stack that a run which names none is taken to have: "fsdp" for sharded weights."""
    return "fsdp" if zero == 3 else "other" if kernels == "torch" else "megatron"


def balanced_layers(config: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """Layers of each stage, balanced by FLOPs: the last has fewer, by as many as have the FLOPs of the head."""
    rank = Rank(config, plan.alone(), config.context_length)

    def flops(group: Group) -> float:
        return sum(kernel.flops for each in operators_of(rank, group) for kernel in each.forward)

    head, total = flops("head") / flops("dense"), config.num_layers
    last = min(max(0, round((total + head) / plan.pp - head)), total)
    each, rest = divmod(total - last, plan.pp - 1)
    return (*(each + (stage < rest) for stage in range(plan.pp - 1)), last)
