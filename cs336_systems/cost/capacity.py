"""Will it fit, and if not, what would?"""

from collections.abc import Iterator

from cs336_systems.console import format_bytes
from cs336_systems.cost.layout import Layout
from cs336_systems.cost.layout_memory import layout_memory
from cs336_systems.cost.memory import MODES, Mode, Precision
from cs336_systems.cost.peak import memory
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig


def describe_parts(parts: dict[str, int]) -> str:
    """`parameters 9.6 GiB, optimizer state 19.1 GiB`: the parts that are not zero."""
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)


def alternatives(
    config: ModelConfig, batch: int, seq: int, mode: Mode, precision: Precision, usable: int, modes: tuple[Mode, ...]
) -> list[str]:
    """The nearest things that fit where (config, batch, seq, mode) does not, as command-line options."""

    def fits(mode: Mode, rows: int = batch, length: int = seq) -> bool:
        shape = config.override(context_length=min(length, config.context_length))
        return sum(memory(shape, rows, length, mode, precision).values()) <= usable

    found = [f"--mode {other}" for other in modes if other != mode and fits(other)]
    if rows := next((rows for rows in halvings(batch) if fits(mode, rows=rows)), None):
        return [*found, f"--batch-size {rows}"]
    if length := next((length for length in halvings(seq) if fits(mode, length=length)), None):
        return [*found, f"--context {length}"]
    return found


def halvings(count: int) -> Iterator[int]:
    """Half, a quarter and so on, down to one."""
    while count > 1:
        count //= 2
        yield count


def require_fit(
    name: str,
    config: ModelConfig,
    batch: int,
    seq: int,
    mode: Mode,
    precision: Precision,
    usable: int,
    modes: tuple[Mode, ...] = MODES,
) -> None:
    """Raises UserError, saying what the run needs and what would fit, unless it fits the usable bytes.

    `modes` are those that the command line can choose instead.
    """
    parts = memory(config, batch, seq, mode, precision)
    if sum(parts.values()) <= usable:
        return
    instead = alternatives(config, batch, seq, mode, precision, usable, modes)
    advice = f"what fits here: {' or '.join(instead)}" if instead else "use a smaller --size"
    advice += one_hot_advice(config)
    raise UserError(
        f"{name} with batch {batch} x {seq} needs {format_bytes(sum(parts.values()))} for a {mode} "
        f"({describe_parts(parts)}), but {format_bytes(usable)} are usable; {advice}"
    )


def require_layout_fits(
    name: str, config: ModelConfig, layout: Layout, seq: int, precision: Precision, usable: int
) -> None:
    """Raises UserError, saying what it needs and what helps, unless each rank's part of a step fits `usable` bytes."""
    parts = layout_memory(config, layout, seq, precision)
    if sum(parts.values()) <= usable:
        return
    degrees, raised = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}", "--tp, --pp or --zero"
    if config.num_experts:
        degrees, raised = f"{degrees} x ep {layout.ep}", "--ep, --tp, --pp or --zero"
    raise UserError(
        f"{name} with microbatches of {layout.micro_batch} x {seq} at {degrees} needs "
        f"{format_bytes(sum(parts.values()))} on a rank ({describe_parts(parts)}), but {format_bytes(usable)} are "
        f"usable; raise {raised}, use --recompute segments, or lower --micro-batch-size{one_hot_advice(config)}"
    )


def one_hot_advice(config: ModelConfig) -> str:
    """What else helps a model whose experts are reached through tensors of tokens x experts x slots."""
    one_hot = config.num_experts and config.mixture.dispatch == "einsum"
    return "; --moe sort needs no one-hot tensors" if one_hot else ""
