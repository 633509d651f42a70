"""Names of spans in a trace: steps, phases, collectives, layers. `comm.Event.annotate` and `Capture` write them."""

import re
from dataclasses import dataclass

PHASES = ("forward", "backward", "synchronise", "optimizer")  # annotations that divide a step
ENGINE = "autograd::engine::evaluate_function: "  # before the name of an autograd node
STEP = re.compile(r"(?:step |ProfilerStep#)(\d+)$")
COLLECTIVE = re.compile(r"(launch|wait) ([\w-]+) (\S*)#(\d+)(?: (.*))?$")
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Collective:
    """The parts of `wait all-reduce 0#47 bucket 0`: action, verb, group, number in the group, and label."""

    action: str  # launch or wait
    verb: str
    group: str
    number: int
    label: str

    @property
    def key(self) -> str:
        """The collective's name, the same on every rank."""
        return f"{self.verb} {self.group}#{self.number} {self.label}".rstrip()


def step_number(name: str) -> int | None:
    """The number in the name of a step, ours or torch.profiler's; None for any other name."""
    match = STEP.match(name)
    return int(match[1]) if match else None


def parse_collective(name: str) -> Collective | None:
    """The collective that an annotation of ours launches or waits for; None for any other name."""
    match = COLLECTIVE.match(name)
    return Collective(match[1], match[2], match[3], int(match[4]), match[5] or "") if match else None


def without_layer_numbers(path: str) -> str:
    """`blocks.3.attention` -> `blocks.*.attention`; only the first number goes, as `blocks.3.mlp.0` names a part."""
    return LAYER.sub("*", path, count=1)
