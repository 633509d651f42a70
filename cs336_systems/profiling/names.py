"""What the names of spans say: steps, collectives, layers. `comm.Event.annotate` and `Capture` write them."""

import re
from dataclasses import dataclass

STEP = re.compile(r"(?:step |ProfilerStep#)(\d+)$")
COLLECTIVE = re.compile(r"(launch|wait) ([\w-]+) (\S*)#(\d+)(?: (.*))?$")
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
FRAME = "python_function"  # the category of a Python function's spans


@dataclass(frozen=True)
class Collective:
    """`wait all-reduce 0#47 bucket 0`: what was done with the 47th collective of a group, and what that is for."""

    what: str  # launch or wait
    verb: str
    group: str
    number: int
    label: str

    @property
    def key(self) -> str:
        """What the collective is called on every rank."""
        return f"{self.verb} {self.group}#{self.number} {self.label}".rstrip()


def step_number(name: str) -> int | None:
    """The number of a step, ours or torch.profiler's, if the name is one."""
    match = STEP.match(name)
    return int(match[1]) if match else None


def parse_collective(name: str) -> Collective | None:
    """The collective that one of our annotations is about, if it is one."""
    match = COLLECTIVE.match(name)
    return Collective(match[1], match[2], match[3], int(match[4]), match[5] or "") if match else None


def without_layer_numbers(path: str) -> str:
    """`blocks.3.attention` -> `blocks.*.attention`; numbers inside a layer, `blocks.3.mlp.0`, tell its parts apart."""
    return LAYER.sub("*", path, count=1)
