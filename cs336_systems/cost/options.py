"""Options that the commands of the cost model share: a model, a plan, a machine."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import click

from cs336_systems.cost.machines import (
    DEFAULT_SYSTEM,
    HERE,
    SECONDS,
    SYSTEMS,
    System,
    probe_here,
    read_machine,
    system_preset,
)
from cs336_systems.cost.plan import ORDER, Overlap, Plan
from cs336_systems.errors import UserError
from cs336_systems.host.console import setting
from cs336_systems.presets import COURSE_YEARS, DEFAULT_YEAR, Attention, FeedForwardKind, Kernels, ModelConfig, preset

COUNT = click.IntRange(1)

# Megatron-LM's names of recomputation, and this project's.
RECOMPUTE = {"none": "none", "selective": "attention", "full": "segments"}
# Options that have the same name in `ModelConfig`.
_SHAPE = (
    *("num_layers", "d_model", "num_heads", "vocab_size", "feed_forward", "attention", "dropout", "kernels"),
    *("num_experts", "expert_every"),
)


@dataclass(frozen=True)
class ModelOptions:
    """A model: a preset, perhaps with some sizes changed."""

    size: str = setting("gpt3-175b", "Model preset.", also=("--preset",))
    year: int = setting(
        DEFAULT_YEAR, f"Edition of the course that the size is from, {COURSE_YEARS[0]} to {COURSE_YEARS[-1]}."
    )
    num_layers: int | None = setting(None, "Blocks.  [default: the preset's]", type=COUNT)
    d_model: int | None = setting(None, "Width of the stream.  [default: the preset's]", type=COUNT)
    num_heads: int | None = setting(None, "Heads of attention.  [default: the preset's]", type=COUNT)
    num_kv_heads: int | None = setting(None, "Heads of keys and values.  [default: the preset's]", type=COUNT)
    d_ff: int | None = setting(
        None, "Width of the feed-forward.  [default: the preset's, or 4 x --d-model]", type=COUNT
    )
    vocab_size: int | None = setting(None, "Tokens.  [default: the preset's]", type=COUNT)
    context: int | None = setting(None, "Tokens in a sequence.  [default: the preset's]", type=COUNT)
    feed_forward: FeedForwardKind | None = setting(None, "Feed-forward, gated or not.  [default: the preset's]")
    attention: Attention = setting("sdpa", "naive: scores in memory; the others: none.")
    dropout: float | None = setting(None, "Probability of dropping an activation.  [default: the preset's]")
    kernels: Kernels = setting(
        "triton", "Element-wise work next to each other in one kernel, or (torch) each operation in one."
    )
    num_experts: int | None = setting(None, "Experts of a layer.  [default: the preset's]", type=COUNT)
    expert_every: int | None = setting(None, "Every k-th layer has experts.  [default: the preset's]", type=COUNT)
    recompute: Literal["none", "selective", "full"] | None = setting(
        None, "What backward runs again: nothing, attention's core, or blocks.  [default: none]"
    )

    def model_config(self) -> ModelConfig:
        """The model, its context the sequence. Raises UserError for what does not exist or divide."""
        found = preset(self.size, self.year).model
        d_ff = self.d_ff if self.d_ff or not self.d_model else 4 * self.d_model
        kv = self.num_kv_heads if self.num_kv_heads or not self.num_heads else 0
        recompute = RECOMPUTE[self.recompute] if self.recompute else None
        changes = {name: getattr(self, name) for name in _SHAPE}
        return found.override(**changes, d_ff=d_ff, num_kv_heads=kv, context_length=self.context, recompute=recompute)


@dataclass(frozen=True)
class PlanOptions:
    """Degrees of parallelism, the batch, and the choices that go with them."""

    tp: int = setting(1, "Tensor-parallel ranks.", type=COUNT)
    pp: int = setting(1, "Pipeline stages.", type=COUNT)
    dp: int = setting(1, "Data-parallel replicas.", type=COUNT)
    cp: int = setting(1, "Context-parallel ranks: each sequence is split over so many.", type=COUNT)
    ep: int = setting(1, "Expert-parallel ranks; with --dp they see different rows.", type=COUNT)
    chunks: int = setting(1, "Groups of blocks of a stage, interleaved.", type=COUNT)
    sequence_parallel: bool = setting(False, "Split the stream between layers along the sequence, over the tp ranks.")
    zero: int = setting(0, "ZeRO stage.", type=click.IntRange(0, 3))
    micro_batch_size: int = setting(1, "Sequences that pass through the model at once.", type=COUNT)
    batch_size: int | None = setting(
        None, "Sequences in a step.  [default: a microbatch a replica, or four a stage]", type=COUNT
    )
    overlap: Overlap | None = setting(
        None,
        "What travels while layers compute: nothing, what data parallelism sends, or also what goes from layer to "
        "layer.  [default: all on H100 and newer, whose frameworks do, else data]",
    )
    order: str = setting(" ".join(ORDER), "Axes from neighbours in a node to ranks far apart.")
    precision: Literal["bf16", "fp16", "fp32"] = setting("bf16", "Of activations and products.")

    def plan(self, system: System | None = None) -> Plan:
        """The plan on a machine, which may decide what overlaps. Raises UserError for what does not divide."""
        if self.sequence_parallel and self.tp == 1:
            raise UserError("--sequence-parallel splits the stream over the tp ranks, of which there is one: set --tp")
        together = self.micro_batch_size * self.dp * self.ep
        return Plan(
            **{name: getattr(self, name) for name in ("tp", "pp", "dp", "cp", "ep", "chunks", "zero")},
            sequence=self.sequence_parallel,
            micro_batch=self.micro_batch_size,
            global_batch=self.batch_size or together * (4 * self.pp if self.pp > 1 else 1),
            overlap=self.overlap or (system.overlap if system else "data"),
            order=tuple(self.order.replace(",", " ").split()),
            width=4 if self.precision == "fp32" else 2,
        )


@dataclass(frozen=True)
class MachineOptions:
    """The machine: a preset, this one, or a file."""

    system: str | None = setting(
        None,
        f"Machine: {', '.join(each.name for each in SYSTEMS.values())}, or {HERE}: this one, in {SECONDS:.0f} s.  "
        f"[default: {DEFAULT_SYSTEM}]",
    )
    machine_file: Path | None = setting(
        None, "A machine that `probe --out` measured, in place of --system.", type=click.Path(path_type=Path)
    )

    def machine(self) -> System:
        """Raises UserError for a machine that is not known, or a file that has none."""
        if self.machine_file and self.system:
            raise UserError(f"--machine-file {self.machine_file} and --system {self.system}: which of the two?")
        if self.machine_file:
            return read_machine(self.machine_file)
        name = self.system or DEFAULT_SYSTEM
        return probe_here() if name.lower() == HERE else system_preset(name)


def take(options: type, given: dict[str, Any]) -> Any:
    """Take the options of one class out of a command's arguments."""
    return options(**{each.name: given.pop(each.name) for each in fields(options)})
