"""Options of the command line that name a model, a plan and a machine."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from cs336_systems.cost import machines
from cs336_systems.cost.machines import DEFAULT_SYSTEM, HERE, SECONDS, SYSTEMS, System
from cs336_systems.cost.plan import MODULES, OPTIONS, ORDER, RECOMPUTE, Overlap, Plan, StackName
from cs336_systems.cost.search import LIMIT
from cs336_systems.cost.search_space import AXES, MOST_GPUS
from cs336_systems.cost.shape import MOST_CHOICES, read_shape, wider
from cs336_systems.cost.stacks import STACKS, usual_stack
from cs336_systems.errors import UserError
from cs336_systems.host.console import setting
from cs336_systems.presets import COURSE_YEARS, DEFAULT_YEAR, Attention, FeedForwardKind, Kernels, ModelConfig, preset

Precision = Literal["bf16", "fp16", "fp32", "fp8"]

COUNT, FILE, POSITIVE = click.IntRange(1), click.Path(path_type=Path), click.FloatRange(0, min_open=True)
PRECISION_HELP = "Type of activations and products; fp8: in linear layers of blocks only, the rest in bf16."
OVERLAP_HELP = "Transfers that overlap with computing: data parallelism's, or all.  [default: all from H100 on]"
STACK_HELP = "Implementation.  [default: fsdp with --zero 3, other with --kernels torch, else megatron]"
# Options that a plan takes unchanged, by their names in a plan.
SAME = ("tp", "pp", "dp", "cp", "ep", "chunks", "zero", "sequence", "micro_batch", "shard", "recompute_nth")
_RUN = ("attention", "kernels", "recompute", "dropout", "context_length")  # how a model runs, not its shape


def count(help: str, default: int | None = None, least: int = 1, most: int | None = None) -> Any:
    """An option that is a whole number."""
    return setting(default, help, type=click.IntRange(least, most))


@dataclass(frozen=True)
class ModelOptions:
    """A model: a preset, perhaps with some sizes changed."""

    size: str = setting("gpt3-175b", "Model preset, or the path of a Hugging Face config.json.", also=("--preset",))
    year: int = setting(DEFAULT_YEAR, f"Edition of the course with the size, {COURSE_YEARS[0]} to {COURSE_YEARS[-1]}.")
    num_layers: int | None = count("Blocks.  [default: the preset's]")
    d_model: int | None = count("Width of the residual stream.  [default: the preset's]")
    num_heads: int | None = count("Heads of attention.  [default: the preset's]")
    num_kv_heads: int | None = count("Heads of keys and values.  [default: the preset's]")
    d_ff: int | None = count("Width of the feed-forward.  [default: the preset's, or 4 x --d-model]")
    vocab_size: int | None = count("Tokens of the vocabulary.  [default: the preset's]")
    context: int | None = count("Tokens in a sequence.  [default: the preset's]")
    feed_forward: FeedForwardKind | None = setting(None, "Feed-forward, gated or not.  [default: the preset's]")
    attention: Attention = setting("sdpa", "naive writes scores to memory; the others do not.")
    dropout: float | None = setting(None, "Probability of dropping an activation.  [default: the preset's]")
    kernels: Kernels | None = setting(None, "Element-wise work fused (triton), or not (torch).  [default: the stack's]")
    num_experts: int | None = count("Experts per layer.  [default: the preset's]")
    expert_every: int | None = count("Every k-th layer has experts.  [default: the preset's]")
    dense_layers: int | None = count("Number of first layers without experts.  [default: 0]")
    expert_d_ff: int | None = count("Width of an expert.  [default: that of the feed-forward]")
    shared_d_ff: int | None = count("Width of a shared expert, for all tokens.  [default: none]")
    top_k: int | None = count("Experts that a token is sent to.  [default: the preset's, 2]", most=MOST_CHOICES)
    head_dim: int | None = count("Width of a head.  [default: --d-model / --num-heads]")
    recompute: Literal["none", "selective", "full"] | None = setting(
        None, "What backward runs again: nothing, attention's core, or blocks.  [default: none; of `search`: all three]"
    )

    def model_config(self) -> ModelConfig:
        """The model, with the sequence as its context length. Raises UserError for what does not exist or divide."""
        changes = asdict(self) | {
            "d_ff": self.d_ff if self.d_ff or not self.d_model else 4 * self.d_model,
            "num_kv_heads": self.num_kv_heads if self.num_kv_heads or not self.num_heads else 0,
            "context_length": self.context,
            "recompute": RECOMPUTE[self.recompute] if self.recompute else None,
            "head_width": self.head_dim,
            "kernels": self.kernels or "triton",
            "shared_expert": True if self.shared_d_ff else None,
        }
        own = ("size", "year", "context", "head_dim")  # names that the model does not have
        config = wider(self._began(), **{name: value for name, value in changes.items() if name not in own})
        if self.expert_every and not config.num_experts:
            raise UserError("expert_every: the model has no experts: give their number with --num-experts")
        return config

    def _began(self) -> ModelConfig:
        """The model before any change."""
        if self.size.lower().endswith(".json"):
            return read_shape(Path(self.size))
        return preset(self.size, self.year).model

    def stack(self, chosen: StackName | None, zero: int) -> StackName:
        """The chosen stack, or the usual one. Raises UserError for one that runs other kernels than was asked."""
        name = chosen or usual_stack(zero, self.kernels)
        if self.kernels == "triton" and STACKS[name].kernels == "torch":
            raise UserError(
                f"--kernels triton: stack {name}{' (of --zero 3)' * (not chosen)} is plain PyTorch and has none; leave "
                "--kernels out, or add --stack megatron"
            )
        return name

    @property
    def title(self) -> str:
        """The preset's name, with a note if the model's shape was changed."""
        began, now = asdict(self._began()), asdict(self.model_config())
        changed = any(began.get(name) != value for name, value in now.items() if name not in _RUN)
        return f"{self.size}, changed" if changed else self.size


@dataclass(frozen=True)
class PlanOptions:
    """Degrees of parallelism, the batch, and the choices that go with them."""

    tp: int = count("Tensor-parallel ranks.", 1)
    pp: int = count("Pipeline stages.", 1)
    dp: int = count("Data-parallel replicas.", 1)
    cp: int = count("Context-parallel ranks: each sequence is split over so many.", 1)
    ep: int = count("Expert-parallel ranks; --ep x --dp see different rows.", 1)
    chunks: int = count("Chunks of blocks per stage, interleaved.", 1)
    sequence_parallel: bool = setting(False, "Split activations between layers along the sequence, over tp.")
    zero: int = count("ZeRO stage.", 0, least=0, most=3)
    micro_batch_size: int = count("Sequences of a microbatch.", 1)
    batch_size: int | None = count("Sequences in a step.  [default: a microbatch per replica, or four per stage]")
    overlap: Overlap | None = setting(None, OVERLAP_HELP)
    order: str = setting(" ".join(ORDER), "Axes, from neighbours in a node to ranks far apart.")
    precision: Precision = setting("bf16", PRECISION_HELP)
    shard: int = count("Nearest replicas over which ZeRO shards; fewer than all: HSDP.  [default: all]", 0, least=0)
    recompute_modules: str = setting(
        "", f"Parts of a block that --recompute selective runs again, of {','.join(MODULES)}.  [default: core_attn]"
    )
    recompute_nth: int = count("Recompute only every n-th block.", 1)
    stage_layers: str = setting("", "Blocks of each stage, such as 9,9,8,6.  [default: split evenly]")
    stack: StackName | None = setting(None, STACK_HELP)

    def plan(self, system: System | None = None) -> Plan:
        """The plan on a machine, which may decide what overlaps. Raises UserError for what does not divide."""
        if self.sequence_parallel and self.tp == 1:
            raise UserError("--sequence-parallel splits the stream over the tp ranks, of which there is one: set --tp")
        layers = self.stage_layers.replace(",", " ").split()
        if bad := next((word for word in layers if not word.isdecimal()), ""):
            raise UserError(f"--stage-layers has {bad!r}, which is no number of blocks: write 9,9,8,6 for four stages")
        together = self.micro_batch_size * self.dp * self.ep
        return Plan(
            **{name: getattr(self, OPTIONS.get(name, name)) for name in SAME},
            global_batch=self.batch_size or together * (4 * self.pp if self.pp > 1 else 1),
            overlap=self.overlap or (system.overlap if system else "data"),
            order=tuple(self.order.replace(",", " ").split()),
            width=4 if self.precision == "fp32" else 2,
            layers=tuple(map(int, layers)),
            stack=self.stack or usual_stack(self.zero, "triton"),
            fp8=self.precision == "fp8",
            recompute_modules=tuple(self.recompute_modules.replace(",", " ").split()),
        )


@dataclass(frozen=True)
class SearchOptions:
    """Options of `search`: accelerators, batch, and choices held at one value."""

    gpus: int = count("Number of accelerators; every layout uses all.", 64, most=MOST_GPUS)
    batch_size: int = count("Sequences in a step.", 512)
    precision: Precision = setting("bf16", PRECISION_HELP)
    overlap: Overlap | None = setting(None, OVERLAP_HELP)
    stack: StackName | None = setting(None, f"{STACK_HELP} All layouts are timed with it.")
    tp: int | None = count("Only layouts with so many tensor-parallel ranks.")
    pp: int | None = count("Only layouts with so many stages.")
    dp: int | None = count("Only layouts with so many replicas.")
    cp: int | None = count("Only layouts with so many context-parallel ranks.")
    ep: int | None = count("Only layouts with so many expert-parallel ranks.")
    chunks: int | None = count("Only layouts with so many chunks per stage.")
    micro_batch_size: int | None = count("Only microbatches of so many sequences.")
    sequence_parallel: bool | None = setting(
        None, "Only with sequence parallelism, or only without.  [default: both]", off="--no-sequence-parallel"
    )
    zero: int | None = count("Only this ZeRO stage.", least=0, most=3)
    limit: int = count("Most configurations to try; the answer lists what is left out.", LIMIT)

    def fixed(self) -> dict[str, Any]:
        held = {axis: getattr(self, OPTIONS.get(axis, axis), None) for axis in AXES}
        return {axis: value for axis, value in held.items() if value is not None}


@dataclass(frozen=True)
class MachineOptions:
    """The machine: a preset, this one, or a file; and the constants of the cost model."""

    system: str | None = setting(
        None,
        f"Machine: {', '.join(each.name for each in SYSTEMS.values())}, or {HERE}: measure this, in {SECONDS:.0f} s.  "
        f"[default: {DEFAULT_SYSTEM}]",
    )
    machine_file: Path | None = setting(None, "File of a machine from `probe --out`, instead of --system.", type=FILE)
    constants: Path | None = setting(None, "File of constants from `fit`.  [default: this project's]", type=FILE)
    peak: float | None = setting(None, "TFLOP/s of 16-bit GEMMs, instead of the machine's.", type=POSITIVE)
    bandwidth: float | None = setting(None, "GB/s of its memory, instead of its own.", type=POSITIVE)
    memory: float | None = setting(None, "GiB of memory, instead of its own.", type=POSITIVE)
    power: float | None = setting(None, "Watts that it may draw, less than its own: GEMMs slow down.", type=POSITIVE)
    node: int | None = count("Accelerators of a node, instead of its own.")
    link: float | None = setting(None, "GB/s out of an accelerator within a node, instead of its own.", type=POSITIVE)
    network: float | None = setting(None, "GB/s of an accelerator to other nodes, instead of its own.", type=POSITIVE)
    reserve: float | None = setting(
        None, "Share of memory for context and fragmentation.  [default: 0.06]", type=click.FloatRange(0, 0.9)
    )

    def machine(self, stack: str = "megatron") -> System:
        """The machine, with the constants of the file or else the stack, except those measured on the machine itself.
        Raises UserError for a machine that is not known, or a file that has none."""
        name = DEFAULT_SYSTEM if self.system is None else self.system
        if self.machine_file and self.system:
            raise UserError(f"--machine-file {self.machine_file} and --system {self.system}: which of the two?")
        if self.machine_file:
            found = machines.read_machine(self.machine_file)
        elif name.lower() == HERE:
            from cs336_systems.cost.probe import probe_here  # torch, which no other machine needs

            found = probe_here()
        else:
            found = machines.system_preset(name)
        found = machines.changed(found, **{name: getattr(self, name) for name in machines.CHANGES})
        if self.constants:
            return STACKS[stack].on(found, machines.load_constants(self.constants))
        found = STACKS[stack].on(found)
        return replace(found, constants=replace(found.constants, **found.measured))
