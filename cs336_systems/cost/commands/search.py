"""`search`: every layout of a model on so many accelerators; the best ten, and why the rest lose."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import click

from cs336_systems.cost.commands.output import json_option, print_json, print_warnings
from cs336_systems.cost.commands.request import (
    COUNT,
    MachineOptions,
    ModelOptions,
    as_options,
    plan_options,
    take,
    tokens_option,
    training,
)
from cs336_systems.cost.commands.search_page import choice_text, print_search
from cs336_systems.cost.domain import warnings
from cs336_systems.cost.plan import RECOMPUTE_NAMES, Overlap
from cs336_systems.cost.search import LIMIT, Candidate, Search, search
from cs336_systems.cost.search_space import MOST_GPUS, Space
from cs336_systems.host import console
from cs336_systems.host.console import options, setting

SECONDS = 400e-6  # that a configuration takes, before the first ones tell


@dataclass(frozen=True)
class SearchedModelOptions(ModelOptions):
    """A model, of which the search tries all kinds of recomputation."""

    recompute: Literal["none", "selective", "full"] | None = setting(
        None, "Only this: backward runs nothing again, attention's core, or blocks.  [default: all three are tried]"
    )


@dataclass(frozen=True)
class SearchOptions:
    """Options of `search`: accelerators, batch, and choices held at one value."""

    gpus: int = setting(64, "Accelerators, all of which a layout uses.", type=click.IntRange(1, MOST_GPUS))
    batch_size: int = setting(512, "Sequences in a step.", type=COUNT)
    precision: Literal["bf16", "fp16", "fp32"] = setting("bf16", "Of activations and products.")
    overlap: Overlap | None = setting(
        None, "What travels while layers compute, as of `step`.  [default: all on H100 and newer, else data]"
    )
    tp: int | None = setting(None, "Only layouts with so many tensor-parallel ranks.", type=COUNT)
    pp: int | None = setting(None, "Only layouts with so many stages.", type=COUNT)
    dp: int | None = setting(None, "Only layouts with so many replicas.", type=COUNT)
    cp: int | None = setting(None, "Only layouts with so many context-parallel ranks.", type=COUNT)
    ep: int | None = setting(None, "Only layouts with so many expert-parallel ranks.", type=COUNT)
    chunks: int | None = setting(None, "Only so many chunks of a stage.", type=COUNT)
    micro_batch_size: int | None = setting(None, "Only microbatches of so many sequences.", type=COUNT)
    sequence_parallel: bool | None = setting(
        None, "Only layouts with it, or without.  [default: both are tried]", off="--no-sequence-parallel"
    )
    zero: int | None = setting(None, "Only this ZeRO stage.", type=click.IntRange(0, 3))
    limit: int = setting(LIMIT, "Configurations; a larger space is cut, and the answer says by what.", type=COUNT)

    def fixed(self) -> dict[str, Any]:
        """Choices held at one value."""
        held = {axis: getattr(self, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "chunks", "zero")}
        held |= {"micro_batch": self.micro_batch_size, "sequence": self.sequence_parallel}
        return {axis: value for axis, value in held.items() if value is not None}


@click.command("search")
@options(SearchedModelOptions)
@options(SearchOptions)
@options(MachineOptions)
@tokens_option
@json_option
def command(tokens: float | None, as_json: bool, **given: Any) -> None:
    """The fastest layouts of a model on so many accelerators, and why the rest lose."""
    model, asked, machine = (take(each, given) for each in (SearchedModelOptions, SearchOptions, MachineOptions))
    config, system = model.model_config(), machine.machine()
    constants = machine.constants_for(system)
    fixed = asked.fixed() | ({"recompute": config.recompute} if model.recompute else {})
    seq, width = config.context_length, 4 if asked.precision == "fp32" else 2
    layouts = len(Space(config, seq, asked.gpus, asked.batch_size, system.node, fixed=fixed).layouts())
    with console.progress("layouts", layouts, SECONDS * asked.limit, quiet=as_json) as advance:
        found = search(
            config, seq, system, asked.gpus, asked.batch_size, width=width, overlap=asked.overlap, fixed=fixed,
            limit=asked.limit, constants=constants, advance=advance,
        )  # fmt: skip

    request = SearchRequest(model, machine, asked.precision, tokens)
    if as_json:
        print_json(_record(found, request))
    else:
        screen, best = console.console(), found.best[0]
        print_search(screen, found, model.title, request.command(best), request.training(best))
        print_warnings(screen, warnings(best.step.config, best.plan, seq, system, constants))


@dataclass(frozen=True)
class SearchRequest:
    """Options of the command line that the answer needs besides the search itself."""

    model: ModelOptions
    machine: MachineOptions
    precision: str
    tokens: float | None

    def command(self, each: Candidate) -> str:
        """The command line that predicts a configuration again."""
        recompute = RECOMPUTE_NAMES[each.step.config.recompute]
        model = replace(self.model, recompute=None if recompute == "none" else recompute)
        settings = (model, self.machine, plan_options(each.plan, each.step.system, self.precision))
        given = [one for some in settings for one in as_options(some)]
        size = [] if "--size" in given else ["--size", self.model.size]
        return " ".join(["python -m cs336_systems.cost step", *size, *given])

    def training(self, each: Candidate) -> dict[str, float] | None:
        """Time of a training on --tokens, if that was given."""
        return training(self.tokens, each.rate, each.plan.ranks) if self.tokens else None

    def record(self, each: Candidate) -> dict[str, Any]:
        """A configuration for a program."""
        whole, alike = self.training(each), [(other.step.config.recompute, other.plan) for other in each.alike]
        return {
            "seconds": each.step.total,
            "mfu": each.step.mfu,
            "tokens_per_second": each.rate,
            "memory_bytes": each.memory,
            "parts": each.step.parts,
            "recompute": RECOMPUTE_NAMES[each.step.config.recompute],
            "placement": each.placement,
            "plan": asdict(each.plan),
            "command": self.command(each),
            **({"training": whole} if whole else {}),
            "alike": [{"recompute": RECOMPUTE_NAMES[name], "plan": asdict(plan)} for name, plan in alike],
        }


def _record(found: Search, asked: SearchRequest) -> dict[str, Any]:
    nearest = found.nearest
    return {
        "tried": found.tried,
        "running": found.running,
        "too_large": found.too_large,
        "indivisible": dict(found.indivisible.most_common()),
        "left_out": found.left_out,
        "nearest_miss": nearest
        and {
            "plan": asdict(nearest.plan),
            "recompute": RECOMPUTE_NAMES[nearest.config.recompute],
            "lacks_bytes": nearest.lacks,
        },
        "best": [asked.record(each) for each in found.best],
        "losses": [
            {
                "choice": each.axis,
                "value": choice_text(each.axis, each.value),
                "factor": each.factor if each.best else None,
                "net": each.net,
                "part": each.part,
                "more": each.more,
                "gain": each.gain,
                "less": each.less,
                "forced_by_memory": each.forced,
                "why": each.why,
                "best": each.best and asked.record(each.best),
            }
            for each in found.losses
        ],
    }
