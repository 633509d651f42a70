"""Names of spans in a trace: steps, phases, modules, collectives. `Capture` and `comm.Event.annotate` write them."""

import re
from functools import lru_cache
from typing import NamedTuple

PHASES = ("forward", "backward", "synchronise", "optimizer")  # annotations that divide a step
ENGINE = "autograd::engine::evaluate_function: "  # before the name of an autograd node
LINE_UP = "line up"  # name and category of the annotation in which all ranks meet before the first step
UNNAMED = ROOT, WRAPPER = "model", "wrapper"  # names of modules without information
STEP = re.compile(r"(?:step |ProfilerStep#)(\d{1,18})$")
TAG = re.compile(r"^([^\s()]+) \((\w+)\)$")
COLLECTIVE = re.compile(r"(launch|wait) ([\w-]+) (\S*)#(\d{1,18})(?: (.*))?$")
COMMUNICATION = re.compile(r"^(gloo|nccl|mpi|ucc):")
ON_HOST = re.compile(r"^(gloo|mpi|ucc):")  # NCCL's spans say only when a kernel was enqueued
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# The part of a model that a class belongs to, by a word in its name; the first that fits counts.
KINDS = {
    "moe": re.compile("MoE|Expert"),
    "attention": re.compile("Attention"),
    "norm": re.compile("Norm"),
    "feed-forward": re.compile("FeedForward|MLP|SwiGLU"),
    "embedding": re.compile("Embedding"),
    "block": re.compile("Block|Layer$"),
    "linear": re.compile("Linear"),
}
Modules = tuple[tuple[str, str], ...]  # (qualified name, class) from the outermost inwards


class Collective(NamedTuple):
    """The parts of `wait all-reduce 0#47 bucket 0`: launch or wait, verb, group, number in the group, and label."""

    action: str
    verb: str
    group: str
    number: int
    label: str

    @property
    def key(self) -> str:
        """The collective's name, the same on every rank."""
        return f"{self.verb} {self.group}#{self.number} {self.label}".rstrip()

    @property
    def title(self) -> str:
        """The annotation without its number: `wait all-reduce bucket 0`."""
        return f"{self.action} {self.verb} {self.label}".rstrip()


@lru_cache(maxsize=100_000)
def step_number(name: str) -> int | None:
    """The number in the name of a step, ours or torch.profiler's; None for any other name."""
    return int(found[1]) if (found := STEP.match(name)) else None


@lru_cache(maxsize=100_000)
def parse_tag(name: str) -> tuple[str, str] | None:
    """(qualified name, class) of the module whose forward a span is; None for any other name."""
    return (found[1], found[2]) if (found := TAG.match(name)) else None


def is_division(name: str) -> bool:
    """True for a step, a phase and a module, which divide the time of what is inside."""
    return name in PHASES or step_number(name) is not None or parse_tag(name) is not None


@lru_cache(maxsize=100_000)
def parse_collective(name: str) -> Collective | None:
    """The collective that an annotation of ours launches or waits for; None for any other name."""
    match = COLLECTIVE.match(name)
    return Collective(match[1], match[2], match[3], int(match[4]), match[5] or "") if match else None


@lru_cache(maxsize=100_000)
def is_collective(name: str) -> bool:
    """True for a span that launches, waits for or is a collective: ours, torch's or the backend's."""
    return name.startswith("c10d::") or bool(COMMUNICATION.match(name)) or parse_collective(name) is not None


def without_layer_numbers(path: str) -> str:
    """`blocks.3.attention` -> `blocks.*.attention`; only the first number goes, as `blocks.3.mlp.0` names a part."""
    return LAYER.sub("*", path, count=1)


def around(modules: Modules, path: str) -> Modules:
    """Those of some modules that contain the module of a qualified name."""
    return tuple(each for each in modules if each[0] in UNNAMED or path.startswith(f"{each[0]}."))


@lru_cache(maxsize=10_000)
def kind_of(class_name: str) -> str:
    """attention, norm, feed-forward, moe, embedding, block, linear or other."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(class_name)), "other")


@lru_cache(maxsize=10_000)
def kinds_of(modules: Modules) -> tuple[str, ...]:
    """The part of a model that each module is, from the outermost inwards."""
    return tuple(kind_of(class_name) for _, class_name in modules)
