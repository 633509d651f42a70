"""`search`: every layout of a model on so many accelerators; the best ten, and why the rest lose."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import click

from cs336_systems import console
from cs336_systems.console import options, setting
from cs336_systems.cost.commands.request import ConstantSettings, constants_for, tokens_option
from cs336_systems.cost.commands.search_page import Asked, print_search, recompute_word, word
from cs336_systems.cost.commands.warned import print_warnings
from cs336_systems.cost.large.candidate import Candidate
from cs336_systems.cost.large.plan import Overlap
from cs336_systems.cost.large.search import LIMIT, Search, search
from cs336_systems.cost.large.search_space import MOST_GPUS, Space
from cs336_systems.cost.large.settings import COUNT, ModelSettings, SystemSettings, take

SECONDS = 400e-6  # that a configuration takes, before the first ones tell


@dataclass(frozen=True)
class SearchedModel(ModelSettings):
    """A model, of which the search tries all kinds of recomputation."""

    recompute: Literal["none", "selective", "full"] | None = setting(
        None, "Only this: backward runs nothing again, attention's core, or blocks.  [default: all three are tried]"
    )


@dataclass(frozen=True)
class SearchSettings:
    """On what to search, and what to hold at one value."""

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
        """What is held at one value."""
        held = {axis: getattr(self, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "chunks", "zero")}
        held |= {"micro_batch": self.micro_batch_size, "sequence": self.sequence_parallel}
        return {axis: value for axis, value in held.items() if value is not None}


@click.command("search")
@options(SearchedModel)
@options(SearchSettings)
@options(SystemSettings)
@options(ConstantSettings)
@tokens_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(tokens: float | None, as_json: bool, **given: Any) -> None:
    """The fastest layouts of a model on so many accelerators, and why the rest lose."""
    model, asked, machines, file = (
        take(each, given) for each in (SearchedModel, SearchSettings, SystemSettings, ConstantSettings)
    )
    config, system = model.model_config(), machines.machine()
    constants = constants_for(system, file.constants)
    fixed = asked.fixed() | ({"recompute": config.recompute} if model.recompute else {})
    seq, width = config.context_length, 4 if asked.precision == "fp32" else 2
    layouts = len(Space(config, seq, asked.gpus, asked.batch_size, system.node, fixed=fixed).layouts())
    with console.progress("layouts", layouts, SECONDS * asked.limit, quiet=as_json) as advance:
        found = search(
            config, seq, system, asked.gpus, asked.batch_size, width=width, overlap=asked.overlap, fixed=fixed,
            limit=asked.limit, constants=constants, advance=advance,
        )  # fmt: skip
    words = Asked(model, asked.precision, machines, file, tokens)
    if as_json:
        click.echo(json.dumps(_record(found, words), indent=1, allow_nan=False))
    else:
        screen, first = console.console(), found.best[0].step
        print_search(screen, found, words)
        print_warnings(screen, first.config, first.plan, seq, system, constants)


def _record(found: Search, asked: Asked) -> dict[str, Any]:
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
            "recompute": recompute_word(nearest.config),
            "lacks_bytes": nearest.lacks,
        },
        "best": [_candidate(each, asked) for each in found.best],
        "losses": [
            {
                "choice": each.axis,
                "value": word(each.axis, each.value),
                "factor": each.factor if each.best else None,
                "net": each.net,
                "part": each.part,
                "more": each.more,
                "gain": each.gain,
                "less": each.less,
                "forced_by_memory": each.forced,
                "why": each.why,
                "best": each.best and _candidate(each.best, asked),
            }
            for each in found.losses
        ],
    }


def _candidate(each: Candidate, asked: Asked) -> dict[str, Any]:
    whole = asked.training(each)
    return {
        "seconds": each.step.total,
        "mfu": each.step.mfu,
        "tokens_per_second": each.rate,
        "memory_bytes": each.memory,
        "parts": each.step.parts,
        "recompute": recompute_word(each.step.config),
        "placement": each.placement,
        "plan": asdict(each.plan),
        "command": asked.command(each),
        **({"training": whole} if whole else {}),
        "alike": [{"recompute": recompute_word(other.step.config), "plan": asdict(other.plan)} for other in each.alike],
    }
